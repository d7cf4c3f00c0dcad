"""A pair whose verifier comes in a package, and whose draft is built from it on first use."""

from __future__ import annotations

import collections.abc as abc
import hashlib
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.core.policy import Fixed
from edgespec.core.sequence import SamplingParams
from edgespec.errors import FileAccessError, MissingDependencyError, ModelFormatError, ModelNotFoundError
from edgespec.loading import load
from edgespec.pairs import Pair, known, load_pair
from edgespec.pairs.sources import BuiltDraft, PackageVerifier
from tests.tiny import write_gguf

MANIFEST = """
format = 1
name = "tiny"
description = "a tiny pair"
license = "Apache-2.0"

[verifier]
package = "tiny_verifier"
file = "tiny.gguf"
size_bytes = {size_bytes}
sha256 = "{sha256}"
install = "pip install tiny-verifier"

[draft]
build_from = "verifier"
bits = 8
block_size = 32
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with a tiny verifier in it."""
    folder = tmp_path / "site" / "tiny_verifier"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    write_gguf(folder / "tiny.gguf")
    monkeypatch.syspath_prepend(folder.parent)
    return folder


@pytest.fixture
def tiny(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """The only pair there is, whose draft takes no time to build, and a cache that holds nothing yet."""
    monkeypatch.setattr(known, "data_dir", lambda name: tmp_path / name)
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "models").mkdir()
    content = (package / "tiny.gguf").read_bytes()
    text = MANIFEST.format(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (tmp_path / "models" / "tiny.toml").write_text(text, encoding="utf-8")
    return load_pair("tiny")


# The verifier


def test_the_verifier_is_found_in_its_package(tiny: Pair, package: Path) -> None:
    assert tiny.verifier.find() == package / "tiny.gguf"


@pytest.mark.parametrize("gone", ["tiny.gguf", "__init__.py", "everything"])
def test_a_missing_verifier_names_the_command_that_brings_it(tiny: Pair, package: Path, gone: str) -> None:
    if gone == "everything":
        package.rename(package.with_name("elsewhere"))
    else:
        (package / gone).unlink()
    with pytest.raises(ModelNotFoundError, match="pip install tiny-verifier") as caught:
        tiny.verifier.find()
    assert "\n" not in str(caught.value)


def test_a_verifier_of_another_size_is_refused(tiny: Pair, package: Path) -> None:
    with (package / "tiny.gguf").open("ab") as file:
        file.write(b"!")
    with pytest.raises(ModelFormatError, match="pip install tiny-verifier --force-reinstall") as caught:
        tiny.verifier.find()
    assert "\n" not in str(caught.value)


def test_no_draft_is_built_from_another_file_of_the_same_size(
    tiny: Pair, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (package / "tiny.gguf").read_bytes()
    (package / "tiny.gguf").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    monkeypatch.setattr("quantize.build_draft", never)
    with pytest.raises(ModelFormatError, match=r"SHA-256.*pip install tiny-verifier --force-reinstall") as caught:
        tiny.ensure_draft()
    assert "\n" not in str(caught.value)


@pytest.mark.model
def test_the_starter_verifier_is_the_file_its_manifest_describes(starter_gguf: Path) -> None:
    load_pair("starter").verifier.check(starter_gguf)


# The draft


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def never(*_: object, **__: object) -> Path:
    raise AssertionError("nothing is to be built")


def test_a_draft_is_built_once(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float]] = []
    folder = tiny.ensure_draft(lambda *step: told.append(step))
    assert folder == tiny.draft_path
    assert {"draft.toml", "model.onnx", "tokens.json"} <= set(names(folder))
    assert told[-1][1] == 1.0
    monkeypatch.setattr("quantize.build_draft", never)
    assert tiny.ensure_draft() == folder


def test_a_pair_loads_by_its_name_and_another_draft_replaces_its_own(tiny: Pair) -> None:
    with load("tiny", num_threads=1, mode="sequential", policy=Fixed(7)) as runtime:
        assert (runtime.verifier_name, runtime.draft_name) == ("tiny.gguf", tiny.draft_path.name)
        assert runtime.generate("the", SamplingParams(max_tokens=4, temperature=0.0)).stats.drafted > 0
    shutil.rmtree(tiny.draft_path)
    with load("tiny", draft="lookup", num_threads=1) as runtime:
        assert runtime.draft_name == "lookup"
    assert not tiny.draft_path.exists()


def test_two_at_once_both_get_the_whole_draft(tiny: Pair) -> None:
    """Both are held back until both have begun to build."""
    both = threading.Barrier(2, timeout=30)

    def progress(stage: str, fraction: float) -> None:
        if (stage, fraction) == ("reading", 0.0):
            both.wait()

    with ThreadPoolExecutor(2) as pool:
        folders = [future.result() for future in [pool.submit(tiny.ensure_draft, progress) for _ in range(2)]]
    assert folders == [tiny.draft_path] * 2
    assert names(tiny.draft_path.parent) == [tiny.draft_path.name]
    assert (tiny.draft_path / "draft.toml").is_file()


def test_a_draft_that_appears_meanwhile_is_taken(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that differs from ours in its bytes (another version of a library wrote it)."""

    def beaten(source: Path, out: Path, **_: object) -> Path:
        out.mkdir(parents=True)
        (out / "draft.toml").write_text("theirs", encoding="utf-8")
        raise FileAccessError(f"{out} exists")

    monkeypatch.setattr("quantize.build_draft", beaten)
    assert (tiny.ensure_draft() / "draft.toml").read_text(encoding="utf-8") == "theirs"


def broken_off(stage: str, fraction: float) -> None:
    if stage == "writing":
        raise KeyboardInterrupt


def refuse(stage: str, fraction: float) -> None:
    raise FileAccessError("the disk is full")


@pytest.mark.parametrize(("progress", "error"), [(broken_off, KeyboardInterrupt), (refuse, FileAccessError)])
def test_a_build_that_fails_leaves_nothing_and_the_next_one_succeeds(
    tiny: Pair, progress: abc.Callable[[str, float], None], error: type[BaseException]
) -> None:
    with pytest.raises(error):
        tiny.ensure_draft(progress)
    assert list(tiny.draft_path.parent.glob("*")) == []
    assert tiny.ensure_draft().is_dir()


def test_a_cache_that_cannot_be_written_is_named(tiny: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(FileAccessError, match="cannot be written") as caught:
        tiny.ensure_draft()
    assert "\n" not in str(caught.value)


def test_without_the_toolkit_the_error_says_what_to_install(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        tiny.ensure_draft()
    assert not tiny.draft_path.exists()


def test_another_recipe_or_verifier_is_another_draft(tiny: Pair) -> None:
    assert isinstance(tiny.draft, BuiltDraft)
    assert isinstance(tiny.verifier, PackageVerifier)
    other_bits = replace(tiny, draft=replace(tiny.draft, bits=4))
    other_blocks = replace(tiny, draft=replace(tiny.draft, block_size=64))
    other_file = replace(tiny, verifier=replace(tiny.verifier, sha256="0123456789abcdef" * 4))
    assert len({pair.draft_path for pair in (tiny, other_bits, other_blocks, other_file)}) == 4
