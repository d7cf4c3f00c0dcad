"""Who may import whom: the architecture, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("edgespec", "quantize")
    for path in (ROOT / package).rglob("*.py")
}
# what a part of the project may import from the project, by the longest prefix that fits
ALLOWED = {
    "edgespec.errors": set(),
    "edgespec.owner": set(),
    "edgespec.degraded": set(),
    "edgespec.paths": set(),
    "edgespec.hub": {"edgespec.errors", "edgespec.hub", "edgespec.paths"},
    "edgespec.pairs": {
        "edgespec.pairs",
        "edgespec.errors",
        "edgespec.hub",
        "edgespec.paths",
        "edgespec.drafters.onnx_manifest",
        "quantize",
    },
    "edgespec.agreement": {
        "edgespec.agreement",
        "edgespec.core",
        "edgespec.devices",
        "edgespec.drafters",
        "edgespec.engine",
        "edgespec.errors",
        "edgespec.paths",
        "edgespec.text",
        "edgespec.verifiers",
        "quantize",
    },
    "edgespec.core": {"edgespec.core", "edgespec.errors"},
    "edgespec.drafters": {"edgespec.drafters", "edgespec.core", "edgespec.errors"},
    "edgespec.verifiers": {"edgespec.verifiers", "edgespec.core", "edgespec.degraded", "edgespec.errors"},
    "edgespec.text": {"edgespec.text", "edgespec.errors"},
    "edgespec.devices": {"edgespec.devices", "edgespec.errors", "edgespec.paths"},
    "edgespec.engine": {
        "edgespec.engine",
        "edgespec.core",
        "edgespec.degraded",
        "edgespec.errors",
        "edgespec.owner",
        "edgespec.drafters.base",
        "edgespec.verifiers.base",
    },
    "edgespec.runtime": {
        "edgespec.core",
        "edgespec.degraded",
        "edgespec.drafters.base",
        "edgespec.engine",
        "edgespec.errors",
        "edgespec.owner",
        "edgespec.service",
        "edgespec.text",
        "edgespec.verifiers.base",
    },
    "edgespec.service": {
        "edgespec.core",
        "edgespec.engine",
        "edgespec.errors",
        "edgespec.owner",
        "edgespec.text",
        "edgespec.verifiers.base",
    },
    "edgespec.survey": {
        "edgespec.devices",
        "edgespec.drafters.onnx_manifest",
        "edgespec.drafters.onnx_providers",
        "edgespec.errors",
        "edgespec.verifiers",
    },
    "edgespec.doctor": {
        "edgespec.doctor",
        "edgespec.calibration",
        "edgespec.devices",
        "edgespec.drafters",
        "edgespec.errors",
        "edgespec.loading",
        "edgespec.pairs",
        "edgespec.paths",
        "edgespec.survey",
        "edgespec.text",
        "edgespec.verifiers",
    },
    "edgespec.calibration": {
        "edgespec.calibration",
        "edgespec.core",
        "edgespec.devices",
        "edgespec.drafters.base",
        "edgespec.engine",
        "edgespec.errors",
        "edgespec.paths",
        "edgespec.text",
        "edgespec.verifiers",
    },
    "edgespec.bench": {
        "edgespec.bench",
        "edgespec.core",
        "edgespec.degraded",
        "edgespec.devices",
        "edgespec.drafters",
        "edgespec.engine",
        "edgespec.errors",
        "edgespec.loading",
        "edgespec.opening",
        "edgespec.owner",
        "edgespec.paths",
        "edgespec.runtime",
        "edgespec.text",
        "edgespec.verifiers",
    },
    "quantize": {"quantize", "edgespec.devices", "edgespec.errors"},
    # Choosing a head needs text, and text needs the runtime's drafter and tokenizer.
    "quantize.head": {
        "quantize",
        "edgespec.core",
        "edgespec.devices",
        "edgespec.drafters",
        "edgespec.errors",
        "edgespec.text",
        "edgespec.verifiers",
    },
}
# packages and the only parts of the project that may import them
ONLY = {
    "onnxruntime": ("edgespec.drafters.onnx", "quantize"),
    "llama_cpp": ("edgespec.verifiers.llama", "edgespec.text.tokenizer", "quantize.verifier"),
    "quantize": ("quantize", "edgespec.pairs", "edgespec.agreement", "edgespec.cli"),
    "huggingface_hub": ("edgespec.hub",),
    "tokenizers": ("quantize",),
    "click": ("edgespec.cli",),
    "jinja2": ("edgespec.text.chat",),
    "matplotlib": ("edgespec.agreement.plots",),
    "torch": ("quantize.distill",),
}


def imports(path: Path) -> set[str]:
    """Every module a file imports anywhere, inside functions too; TYPE_CHECKING blocks included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return found


def within(module: str, prefixes: set[str] | tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith((prefix + ".", prefix + "_")) for prefix in prefixes)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_stay_inside_the_architecture(module: str) -> None:
    own = {name for name in imports(MODULES[module]) if name in MODULES}
    part = max((prefix for prefix in ALLOWED if within(module, (prefix,))), key=len, default=None)
    if part is not None:
        assert {name for name in own if not within(name, ALLOWED[part])} <= {"edgespec"}


@pytest.mark.parametrize("library", ONLY)
def test_each_backend_has_one_home(library: str) -> None:
    users = {module for module, path in MODULES.items() if within(library, {n.split(".")[0] for n in imports(path)})}
    assert users
    assert {module for module in users if not within(module, ONLY[library])} == set()


@pytest.mark.parametrize("module", sorted(name for name in MODULES if within(name, ("edgespec.core",))))
def test_the_core_is_pure(module: str) -> None:
    outside = {name.split(".")[0] for name in imports(MODULES[module])} - {"edgespec", "numpy"}
    assert outside <= set(sys.stdlib_module_names)
    assert not outside & {"os", "io", "pathlib", "threading", "socket", "subprocess", "time", "random", "secrets"}


def test_nothing_but_the_command_knows_the_command_line() -> None:
    users = {name for name, path in MODULES.items() if any(within(used, ("edgespec.cli",)) for used in imports(path))}
    assert {name for name in users if not within(name, ("edgespec.cli",))} == {"edgespec.__main__"}


def loaded_by(module: str) -> set[str]:
    """What an import of ``module`` brings into a new process."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "pairs", "runtime", "opening", "loading", "survey", "doctor", "calibration", "bench", "verifiers.canary",
        "verifiers.llama", "cli.run",
    ],
)  # fmt: skip
def test_an_import_loads_neither_backend_nor_the_toolkit(module: str) -> None:
    loaded = loaded_by(f"edgespec.{module}")
    assert f"edgespec.{module}" in loaded
    assert loaded & {"onnxruntime", "llama_cpp", "quantize", "onnx", "gguf"} == set()


def test_the_package_alone_loads_nothing_of_itself() -> None:
    assert {name for name in loaded_by("edgespec") if name.startswith("edgespec")} == {"edgespec"}


def test_help_loads_neither_backend() -> None:
    script = (
        "import sys; sys.argv = ['edgespec', '--help']\n"
        "from edgespec.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('numpy', 'onnxruntime', 'llama_cpp', 'quantize') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "Commands" in output
    assert output.endswith("[]\n")
