"""A pair's folder around a draft that was made in it."""

from __future__ import annotations

import collections.abc as abc
import os
import shutil
from pathlib import Path

import pytest

from edgespec.core.policy import Fixed
from edgespec.core.sequence import SamplingParams
from edgespec.errors import FileAccessError, ModelFormatError, ModelNotFoundError
from edgespec.loading import load
from edgespec.pairs import load_pair, what_is_missing
from edgespec.pairs.made import write_pair
from edgespec.pairs.sources import FileVerifier
from tests.gguf_tools import split_gguf
from tests.tiny import TinyConfig, write_gguf


@pytest.fixture
def folder(own_folder: Path, tmp_path: Path) -> Path:
    """What a distillation leaves."""
    shutil.copytree(own_folder, tmp_path / "my pair" / "draft-int8")
    return tmp_path / "my pair"


@pytest.fixture
def verifier(tiny_gguf: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_gguf, tmp_path / "mine.gguf"))


def test_it_runs(folder: Path, verifier: Path) -> None:
    manifest = write_pair(folder, verifier, "draft-int8", description="tiny, distilled")
    pair = load_pair(str(folder))
    assert (manifest, pair.name, pair.description) == (folder / "pair.toml", "my-pair", "tiny, distilled")
    assert what_is_missing(pair) == ""
    pair.verifier.check(pair.verifier.find())
    params = SamplingParams(max_tokens=8, temperature=0.0)
    with load(str(folder), num_threads=1, mode="sequential", policy=Fixed(3)) as runtime:
        found = runtime.generate("the cat", params)
    assert found.stats.accepted == found.stats.drafted > 0
    assert (folder / "verifier.gguf").samefile(verifier)


def test_a_moved_pair_still_runs(folder: Path, verifier: Path, tmp_path: Path) -> None:
    write_pair(folder, verifier, "draft-int8", description="tiny")
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    shutil.rmtree(folder)
    verifier.unlink()
    pair = load_pair(str(moved))
    assert pair.verifier.find() == moved / "verifier.gguf"
    assert what_is_missing(pair) == ""


@pytest.mark.parametrize("refused", [("hardlink_to",), ("hardlink_to", "symlink_to")])
def test_without_links_it_is_the_same_pair(
    refused: tuple[str, ...], folder: Path, verifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    for name in refused:
        monkeypatch.setattr(Path, name, refuse)
    write_pair(folder, verifier, "draft-int8", description="tiny")
    placed = folder / "verifier.gguf"
    assert placed.is_symlink() == (len(refused) == 1)
    assert placed.read_bytes() == verifier.read_bytes()
    assert what_is_missing(load_pair(str(folder))) == ""


def test_a_verifier_by_a_symbolic_link_is_linked_itself(folder: Path, verifier: Path, tmp_path: Path) -> None:
    (tmp_path / "latest.gguf").symlink_to("mine.gguf")
    write_pair(folder, tmp_path / "latest.gguf", "draft-int8", description="tiny")
    assert not (folder / "verifier.gguf").is_symlink()
    assert (folder / "verifier.gguf").samefile(verifier)


def test_again_and_with_another_verifier(folder: Path, verifier: Path, tmp_path: Path) -> None:
    first = write_pair(folder, verifier, "draft-int8", description="tiny").read_text(encoding="utf-8")
    assert write_pair(folder, verifier, "draft-int8", description="tiny").read_text(encoding="utf-8") == first
    other = write_gguf(tmp_path / "other.gguf", TinyConfig(seed=3))
    write_pair(folder, other, "draft-int8", description="tiny")
    assert (folder / "verifier.gguf").samefile(other)
    assert what_is_missing(load_pair(str(folder))) == ""
    assert verifier.exists()
    assert {path.name for path in folder.iterdir()} == {"draft-int8", "pair.toml", "verifier.gguf"}


def test_a_verifier_in_the_folder_stays(folder: Path, verifier: Path) -> None:
    placed = verifier.rename(folder / "verifier.gguf")
    write_pair(folder, placed, "draft-int8", description="tiny")
    assert what_is_missing(load_pair(str(folder))) == ""


def test_all_parts_of_a_split_verifier(folder: Path, verifier: Path, tmp_path: Path) -> None:
    first, _ = split_gguf(verifier, tmp_path)
    write_pair(folder, first, "draft-int8", description="tiny")
    pair = load_pair(str(folder))
    assert isinstance(pair.verifier, FileVerifier)
    assert [part.path for part in pair.verifier.files] == [f"verifier-0000{i}-of-00002.gguf" for i in (1, 2)]
    pair.verifier.check(pair.verifier.find())
    with load(str(folder), num_threads=1, mode="plain") as runtime:
        assert len(runtime.generate("the cat", SamplingParams(max_tokens=2, temperature=0.0)).tokens) == 2


def test_what_is_not_there(folder: Path, verifier: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        write_pair(folder, tmp_path / "nowhere.gguf", "draft-int8", description="tiny")
    with pytest.raises(ModelNotFoundError, match=r"draft-int4.*draft\.toml"):
        write_pair(folder, verifier, "draft-int4", description="tiny")
    with pytest.raises(ModelFormatError, match=r"draft\.toml"):
        write_pair(folder, folder / "draft-int8" / "draft.toml", "draft-int8", description="tiny")
    assert not (folder / "pair.toml").exists()


def test_a_full_disk(folder: Path, verifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> abc.Callable[..., None]:
        raise OSError(28, "No space left on device")

    for name in ("hardlink_to", "symlink_to"):
        monkeypatch.setattr(Path, name, full)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(FileAccessError, match=r"verifier\.gguf cannot be made: No space left on device"):
        write_pair(folder, verifier, "draft-int8", description="tiny")
    assert {path.name for path in folder.iterdir()} == {"draft-int8"}
    assert os.path.exists(verifier)  # noqa: PTH110 (the test replaces methods of Path)
