"""What a build leaves on disk: a described folder, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import quantize.onnx_builder
from edgespec.errors import FileAccessError, MissingDependencyError, ParameterError
from quantize import build_draft
from tests.tiny import TinyConfig, token_strings, write_gguf

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOOLKIT = ("gguf", "onnx", "onnx_ir", "onnxruntime", "llama_cpp")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "source.gguf")


def manifest(folder: Path) -> dict[str, object]:
    return tomllib.loads((folder / "draft.toml").read_text(encoding="utf-8"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_manifest_describes_the_folder(source: Path, tmp_path: Path) -> None:
    folder = build_draft(source, tmp_path / "new" / "draft", bits=4, block_size=64, layers=[1], head=range(2, 300))
    assert names(folder) == ["d2t.npy", "draft.toml", "model.onnx", "model.onnx.data", "tokens.json"]
    got = manifest(folder)
    assert json.loads((folder / "tokens.json").read_bytes()) == token_strings(320)
    sizes = {
        "num_layers": 1,
        "num_kv_heads": 2,
        "head_size": 16,
        "num_ctx": 256,
        "num_vocab": 320,
        "num_head_vocab": 298,
    }
    sizes |= {"format": 1, "bits": 4, "block_size": 64}
    texts = {"kind": "draft", "architecture": "llama", "source": "source.gguf", "d2t": "d2t.npy"}
    texts |= {"tokens": "tokens.json", "source_sha256": hashlib.sha256(source.read_bytes()).hexdigest()}
    assert got.items() >= (sizes | texts).items()
    others = set(names(folder)) - {"draft.toml"}
    assert got["sha256"] == {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in others}
    assert np.load(folder / "d2t.npy").tolist() == list(range(2, 300))
    onnx.load(folder / str(got["model"]))


def test_a_whole_head_has_no_map(source: Path, tmp_path: Path) -> None:
    folder = build_draft(source, tmp_path / "draft")
    assert names(folder) == ["draft.toml", "model.onnx", "model.onnx.data", "tokens.json"]
    assert "d2t" not in manifest(folder)
    assert manifest(folder)["num_head_vocab"] == 320


def test_names_of_any_kind_survive_the_manifest(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / 'a "quoted"\\ \x7f näme\n🙂.gguf')
    assert manifest(build_draft(source, tmp_path / "draft"))["source"] == source.name


def test_the_same_source_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    first, second = (build_draft(source, tmp_path / name) for name in ("first", "second"))
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names(first))


def test_a_long_context_is_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize.onnx_builder, "MAX_CTX", 100)
    folder = build_draft(write_gguf(tmp_path / "source.gguf", TinyConfig(num_ctx=1000)), tmp_path / "draft")
    assert manifest(folder)["num_ctx"] == 100
    cos = next(value for value in onnx.load(folder / "model.onnx").graph.initializer if value.name == "rotary.0.cos")
    assert list(cos.dims) == [100, 8]


def test_progress_goes_from_nothing_to_done(source: Path, tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    build_draft(source, tmp_path / "draft", progress=lambda stage, fraction: told.append((stage, fraction)))
    fractions = [fraction for _, fraction in told]
    assert (told[0], told[-1]) == (("reading", 0.0), ("done", 1.0))
    assert fractions == sorted(fractions)
    assert len(set(fractions)) > 4


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"bits": 3}, "bits: got 3; allowed: 4, 8, 32"),
        ({"block_size": 48}, "block_size: got 48; allowed: 16, 32, 64, 128"),
        ({"layers": []}, "layers"),
        ({"layers": [0, 2]}, "one or more of 0 to 1"),
        ({"layers": [-1]}, "layers"),
        ({"layers": [1, 1]}, "each once"),
        ({"head": []}, "head"),
        ({"head": [320]}, "one or more of 0 to 319"),
        ({"head": [-1, 4]}, "head"),
        ({"head": [1.5]}, "head"),
    ],
)
def test_recipes_that_do_not_fit(recipe: dict[str, object], message: str, source: Path) -> None:
    with pytest.raises(ParameterError, match=message):
        build_draft(source, source.parent / "draft", **recipe)  # type: ignore[arg-type]
    assert names(source.parent) == ["source.gguf"]


def test_an_existing_folder_is_kept_unless_forced(source: Path, tmp_path: Path) -> None:
    folder = build_draft(source, tmp_path / "draft", bits=8)
    with pytest.raises(FileAccessError, match="exists"):
        build_draft(source, folder, bits=4)
    assert manifest(folder)["bits"] == 8
    build_draft(source, folder, bits=4, force=True)
    assert manifest(folder)["bits"] == 4
    assert names(tmp_path) == ["draft", "source.gguf"]


def test_force_replaces_nothing_but_drafts(source: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("", encoding="utf-8")
    (tmp_path / "letter").write_text("", encoding="utf-8")
    for name in ("photos", "letter"):
        with pytest.raises(FileAccessError, match=r"has no draft.toml, so it is not replaced"):
            build_draft(source, tmp_path / name, force=True)
    assert names(tmp_path) == ["letter", "photos", "source.gguf"]
    assert names(tmp_path / "photos") == ["cat.jpg"]


def test_an_interrupted_build_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def interrupt(stage: str, fraction: float) -> None:
        if fraction > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_draft(source, tmp_path / "draft", progress=interrupt)
    assert names(tmp_path) == ["source.gguf"]


def test_an_unwritable_place_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(FileAccessError, match="cannot be written"):
        build_draft(source, tmp_path / "file" / "draft")


def run_build(source: Path, before: str = "", hook: str = "pass") -> subprocess.CompletedProcess[str]:
    """Build beside the source in a process of its own; ``hook`` runs at every step of progress."""
    code = f"""
import os, resource, signal, sys
from pathlib import Path
from quantize import build_draft
def hook(stage, fraction): {hook}
{before}
source = Path(sys.argv[1])
try:
    build_draft(source, source.parent / "draft", progress=hook)
except Exception as error:
    print(type(error).__name__, error)
"""
    return subprocess.run([sys.executable, "-c", code, str(source)], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
@pytest.mark.parametrize("stage", ["quantizing", "writing"])
def test_a_killed_build_leaves_no_draft_and_the_next_one_cleans_up(stage: str, source: Path, tmp_path: Path) -> None:
    ended = run_build(source, hook=f"os.kill(os.getpid(), signal.SIGKILL) if stage == {stage!r} else None")
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "draft").exists()
    assert len(names(tmp_path)) == 2
    build_draft(source, tmp_path / "draft")
    assert names(tmp_path) == ["draft", "source.gguf"]


def test_what_a_living_process_is_writing_is_left_alone(source: Path, tmp_path: Path) -> None:
    alive = tmp_path / "alive"

    def look(stage: str, fraction: float) -> None:
        if stage == "quantizing" and not alive.exists():
            alive.mkdir()
            build_draft(source, tmp_path / "draft", bits=8)

    build_draft(source, tmp_path / "draft", bits=8, progress=look)
    assert names(tmp_path) == ["alive", "draft", "source.gguf"]


@pytest.mark.skipif(os.name != "posix", reason="needs a file size limit")
def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path) -> None:
    ended = run_build(source, before="resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))")
    assert ended.stdout.startswith("FileAccessError"), ended.stderr
    assert names(tmp_path) == ["source.gguf"]


@pytest.mark.parametrize(
    ("ours", "force", "kept"), [(8, False, 8), (4, True, 4), (4, False, None)], ids=["same", "forced", "different"]
)
def test_another_process_may_finish_first(
    ours: int, force: bool, kept: int | None, source: Path, tmp_path: Path
) -> None:
    def race(stage: str, fraction: float) -> None:
        if stage == "writing":
            build_draft(source, tmp_path / "draft", bits=8)

    if kept is None:
        with pytest.raises(FileAccessError, match="exists"):
            build_draft(source, tmp_path / "draft", bits=ours, progress=race)
    else:
        build_draft(source, tmp_path / "draft", bits=ours, force=force, progress=race)
    assert manifest(tmp_path / "draft")["bits"] == (kept or 8)
    assert names(tmp_path) == ["draft", "source.gguf"]


@pytest.mark.parametrize("package", ["gguf", "onnx", "onnx_ir"])
def test_a_missing_package_is_named_with_the_command_that_brings_it(
    package: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf"needs {package}; get it with: pip install 'edgespec\["):
        build_draft(source, source.parent / "draft")


def test_importing_the_package_loads_no_toolkit() -> None:
    code = f"import sys, quantize; print([name for name in {TOOLKIT} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
