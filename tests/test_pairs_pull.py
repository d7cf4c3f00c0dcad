"""Pulling a pair: from a hub on this machine to a pair that answers, whatever happens on the way."""

from __future__ import annotations

import collections.abc as abc
import functools
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest

from edgespec import hub
from edgespec.cli.pair_check import check_vocabulary
from edgespec.core.policy import Fixed
from edgespec.core.sequence import SamplingParams
from edgespec.errors import (
    DownloadError,
    EdgespecError,
    FileAccessError,
    ModelFormatError,
    UnknownPairError,
    VocabularyMismatchError,
)
from edgespec.loading import load
from edgespec.pairs import known, load_pair, load_recipe
from edgespec.pairs.pull import pull
from edgespec.pairs.sources import FileDraft, FileVerifier
from edgespec.paths import pairs_dir
from tests import tiny
from tests.hub_stub import COMMIT, HubStub, environment, in_use
from tests.tiny import TinyConfig, write_gguf

RECIPE = """
format = 1
name = "small"
description = "a small pair"
license = "Apache-2.0"
profiles = ["cpu-small"]
pulled = "never"

[verifier]
hub = "owner/big-GGUF"
file = "big*.gguf"

[draft]
build_from = "hub"
hub = "owner/draft-GGUF"
file = "*f16.gguf"
bits = 8
block_size = 32
"""
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def ggufs(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """A verifier and a draft model of less layers, and with less padding in its list of tokens."""
    folder = tmp_path_factory.mktemp("ggufs")
    verifier = write_gguf(folder / "big.gguf", TinyConfig(num_vocab=352, num_layers=3))
    draft = write_gguf(folder / "draft.gguf", TinyConfig(noise=0.3))
    return verifier.read_bytes(), draft.read_bytes()


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ggufs: tuple[bytes, bytes]) -> abc.Iterator[HubStub]:
    """A hub with the pair's two repositories, and an edgespec that ships its manifest."""
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(known, "data_dir", lambda name: tmp_path / name)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.toml").write_text(RECIPE, encoding="utf-8")
    with in_use(monkeypatch, tmp_path / "home") as server:
        server.add("owner/big-GGUF", {"big-q4.gguf": ggufs[0], "other.gguf": b"GGUF", "README.md": b""})
        server.add("owner/draft-GGUF", {"draft-f16.gguf": ggufs[1], "draft-q8.gguf": b"GGUF"})
        yield server


def get(name: str = "small", **options: Any) -> Path:
    return pull(load_recipe(name), check_vocabulary, **options)


def refused(error: type[EdgespecError], **options: Any) -> str:
    with pytest.raises(error) as caught:
        get(**options)
    assert "\n" not in str(caught.value)
    assert list(pairs_dir().glob("[!.]*")) == []
    return str(caught.value)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_pulled_pair_answers(stub: HubStub, ggufs: tuple[bytes, bytes]) -> None:
    told: list[tuple[str, float]] = []
    folder = get(progress=lambda *step: told.append(step))
    assert folder == pairs_dir() / "small"
    assert names(folder) == ["big-q4.gguf", "draft", "pair.toml"]
    pair = load_pair("small")
    assert isinstance(pair.verifier, FileVerifier)
    assert isinstance(pair.draft, FileDraft)
    assert pair.verifier.sha256 == hashlib.sha256(ggufs[0]).hexdigest()
    assert pair.verifier.size_bytes == len(ggufs[0])
    assert (pair.verifier.origin, pair.draft.origin) == (f"owner/big-GGUF@{COMMIT}", f"owner/draft-GGUF@{COMMIT}")
    assert date.fromisoformat(pair.pulled) <= date.today()
    assert (pair.description, pair.profiles) == ("a small pair", ("cpu-small",))
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert 0.99 < fractions[-1] <= 1.0
    assert names(folder.parents[1] / "downloads") == ["small.lock"]
    with load("small", num_threads=1, mode="sequential", policy=Fixed(7)) as runtime:
        assert (runtime.verifier_name, runtime.draft_name) == ("big-q4.gguf", "draft")
        assert runtime.generate("the", SamplingParams(max_tokens=8, temperature=0.0)).stats.drafted > 0


def test_a_split_verifier_is_pulled_whole(stub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp's own tool splits it: the first file leads to the others."""
    (tmp_path / "split").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", functools.partial(gguf.GGUFWriter, split_max_tensors=12))
        write_gguf(tmp_path / "split" / "big.gguf", TinyConfig(num_vocab=352, num_layers=3))
    parts = {path.name: path.read_bytes() for path in (tmp_path / "split").iterdir()}
    assert sorted(parts) == [f"big-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    stub.repositories["owner/big-GGUF"].files = parts
    assert names(get()) == [*sorted(parts), "draft", "pair.toml"]
    pair = load_pair("small")
    pair.verifier.check(pair.verifier.find())
    with load("small", num_threads=1, mode="sequential", policy=Fixed(7)) as runtime:
        assert runtime.generate("the", SamplingParams(max_tokens=8, temperature=0.0)).stats.drafted > 0


def test_a_draft_may_be_built_from_the_verifier(stub: HubStub, tmp_path: Path) -> None:
    text = RECIPE[: RECIPE.index("[draft]")] + '[draft]\nbuild_from = "verifier"\nbits = 4\nblock_size = 32\n'
    (tmp_path / "models" / "small.toml").write_text(text, encoding="utf-8")
    get()
    pair = load_pair("small")
    assert pair.draft.find() == pairs_dir() / "small" / "draft"  # type: ignore[union-attr]
    assert {request.path.split("/")[-1] for request in stub.requests} == {"main", "big-q4.gguf"}


def test_a_manifest_of_ones_own_is_pulled_by_its_path(stub: HubStub, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(RECIPE.replace('"small"', '"own"'), encoding="utf-8")
    assert get(str(path)) == pairs_dir() / "own"


def test_what_is_there_is_replaced_only_with_force(stub: HubStub) -> None:
    folder = get()
    (folder / "mark").touch()
    with pytest.raises(FileAccessError, match="--force"):
        get()
    assert (folder / "mark").exists()
    assert get(force=True) == folder
    assert names(folder) == ["big-q4.gguf", "draft", "pair.toml"]


@pytest.mark.parametrize("force", [True, False])
def test_what_is_no_pair_is_never_replaced_and_nothing_is_fetched_for_it(stub: HubStub, force: bool) -> None:
    folder = pairs_dir() / "small"
    folder.mkdir(parents=True)
    (folder / "thesis.txt").touch()
    with pytest.raises(FileAccessError, match=r"has no pair\.toml, so it is not replaced; move it away"):
        get(force=force)
    assert names(folder) == ["thesis.txt"]
    assert stub.requests == []


def test_a_failed_pull_with_force_leaves_the_old_pair(stub: HubStub) -> None:
    folder = get()
    stub.repositories["owner/big-GGUF"].sent["big-q4.gguf"] = b"GGUF"
    with pytest.raises(DownloadError):
        get(force=True)
    assert names(folder) == ["big-q4.gguf", "draft", "pair.toml"]


def test_only_pairs_of_the_hub_can_be_pulled(stub: HubStub, tmp_path: Path) -> None:
    folder = get()
    with pytest.raises(UnknownPairError, match="does not come from the hub"):
        get(str(folder))


# What goes wrong before anything is fetched


def test_nothing_is_fetched_where_one_side_cannot_be(stub: HubStub) -> None:
    stub.repositories["owner/big-GGUF"].gated = 403
    assert "hf auth login" in refused(DownloadError)
    stub.repositories["owner/big-GGUF"].gated = 0
    stub.repositories["owner/draft-GGUF"].files.clear()
    assert "matches '*f16.gguf'" in refused(DownloadError)
    del stub.repositories["owner/draft-GGUF"]
    assert "owner/draft-GGUF" in refused(DownloadError)
    assert stub.ranges() == []


def test_a_disk_that_is_too_small_is_named_first(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "EDGESPEC_DATA_DIR" in refused(FileAccessError)
    assert stub.ranges() == []


def test_a_split_draft_is_refused(stub: HubStub, ggufs: tuple[bytes, bytes]) -> None:
    files = {f"m-0000{i}-of-00002-f16.gguf": ggufs[1] for i in (1, 2)}
    stub.repositories["owner/draft-GGUF"].files = files
    assert "matches 2 models" in refused(DownloadError)


def test_one_pull_of_a_pair_at_a_time(stub: HubStub) -> None:
    with hub.only_one(pairs_dir().parent / "downloads" / "small.lock"):
        assert "another process" in refused(FileAccessError)


# What goes wrong on the way


def test_a_pull_goes_on_where_it_broke_off(stub: HubStub, ggufs: tuple[bytes, bytes]) -> None:
    """The draft is neither fetched nor built again."""
    stub.failures = [200, ("break", 100_000), *([502] * hub.NUM_TRIES)]
    stub.failures[0] = ("break", len(ggufs[1]))
    assert "100000 of" in refused(DownloadError)
    stub.requests.clear()
    stages: set[str] = set()
    get(progress=lambda stage, fraction: stages.add(stage))
    assert stub.ranges() == ["bytes=100000-"]
    assert not any("building" in stage for stage in stages)


def test_another_recipe_builds_another_draft_from_what_is_there(stub: HubStub, tmp_path: Path) -> None:
    stub.failures = [("break", 10**9), *([502] * hub.NUM_TRIES)]
    refused(DownloadError)
    (tmp_path / "models" / "small.toml").write_text(RECIPE.replace("bits = 8", "bits = 4"), encoding="utf-8")
    folder = get()
    assert "bits = 4" in (folder / "draft" / "draft.toml").read_text(encoding="utf-8")


def test_wrong_content_is_not_built_from(stub: HubStub, ggufs: tuple[bytes, bytes]) -> None:
    stub.repositories["owner/draft-GGUF"].sent["draft-f16.gguf"] = ggufs[1][:-1] + b"!"
    assert "SHA-256" in refused(DownloadError)


def test_a_draft_that_is_no_gguf_is_named(stub: HubStub) -> None:
    stub.repositories["owner/draft-GGUF"].files["draft-f16.gguf"] = b"not a GGUF at all"
    assert "draft-f16.gguf" in refused(ModelFormatError)


def test_sides_with_different_vocabularies_are_no_pair(stub: HubStub, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tiny, "MERGES", ("a b", *tiny.MERGES[1:]))
    other = write_gguf(tmp_path / "other.gguf", TinyConfig()).read_bytes()
    stub.repositories["owner/draft-GGUF"].files["draft-f16.gguf"] = other
    assert "token 259" in refused(VocabularyMismatchError)


PULL = """
from pathlib import Path
from edgespec.cli.pair_check import check_vocabulary
from edgespec.pairs import load_recipe
from edgespec.pairs.pull import pull
pull(load_recipe({path!r}), check_vocabulary, force=True, progress=lambda *step: print(*step, flush=True))
"""


@pytest.mark.parametrize("stage", ["asking", "downloading draft", "quantizing", "downloading big"])
def test_a_kill_leaves_nothing_half_done_and_costs_nothing(
    stub: HubStub, tmp_path: Path, stage: str, ggufs: tuple[bytes, bytes]
) -> None:
    command = [sys.executable, "-c", PULL.format(path=str(tmp_path / "models" / "small.toml"))]
    chosen = environment(stub, str(tmp_path / "home"))
    child = subprocess.Popen(command, cwd=ROOT, env=chosen, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        assert any(stage in line for line in child.stdout)
        child.send_signal(signal.SIGKILL)
    assert child.wait() in (-signal.SIGKILL, 0)
    assert not list(pairs_dir().glob("[!.]*")) or child.returncode == 0
    folder = get(force=True)
    assert names(folder) == ["big-q4.gguf", "draft", "pair.toml"]
    assert names(pairs_dir()) == ["small"]
    pair = load_pair("small")
    pair.verifier.check(pair.verifier.find())


def test_the_folder_may_lie_on_a_disk_without_links(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    pair = load_pair(str(get()))
    pair.verifier.check(pair.verifier.find())
