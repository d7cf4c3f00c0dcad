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
    "edgespec.core": {"edgespec.core", "edgespec.errors"},
    "edgespec.drafters": {"edgespec.drafters", "edgespec.core", "edgespec.errors"},
    "edgespec.verifiers": {"edgespec.verifiers", "edgespec.core", "edgespec.errors"},
    "edgespec.text": {"edgespec.text", "edgespec.errors"},
    "edgespec.devices": {"edgespec.devices", "edgespec.errors"},
    "edgespec.engine": {
        "edgespec.engine",
        "edgespec.core",
        "edgespec.errors",
        "edgespec.drafters.base",
        "edgespec.verifiers.base",
    },
    "quantize": {"quantize", "edgespec.devices", "edgespec.errors"},
}
ONLY = {
    "onnxruntime": ("edgespec.drafters.onnx", "quantize"),
    "llama_cpp": ("edgespec.verifiers.llama", "edgespec.verifiers.canary", "edgespec.text"),
    "quantize": ("quantize", "edgespec.pairs", "edgespec.cli"),
    "click": ("edgespec.cli",),
}


def imports(path: Path) -> set[str]:
    """Every module a file imports anywhere, inside functions too; TYPE_CHECKING blocks included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
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
