"""Pairs: their manifests, how one is found, and pairs that lie in a folder."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.core.policy import Fixed
from edgespec.core.sequence import SamplingParams
from edgespec.errors import (
    EdgespecError,
    ModelFormatError,
    ModelNotFoundError,
    UnknownPairError,
)
from edgespec.loading import load
from edgespec.pairs import Pair, known, load_pair, load_recipe, pair_names, what_is_missing
from edgespec.pairs.pair import render
from edgespec.pairs.sources import FileDraft, FileVerifier, Part
from quantize import build_draft
from tests.tiny import write_gguf

SHA256 = "0123456789abcdef" * 4
HEAD = """
format = 1
name = "tiny"
description = "a tiny pair"
license = "Apache-2.0"
"""
IN_PACKAGE = """
[verifier]
package = "tiny_verifier"
file = "tiny.gguf"
size_bytes = {size_bytes}
sha256 = "{sha256}"
install = "pip install tiny-verifier"
"""
BUILT = """
[draft]
build_from = "verifier"
bits = 8
block_size = 32
"""
ON_HUB = """
[verifier]
hub = "owner/model"
file = "*.gguf"
"""
FROM_HUB = """
[draft]
build_from = "hub"
hub = "owner/small"
file = "s.gguf"
bits = 8
block_size = 32
"""
BESIDE = f"""
[verifier]
path = "verifier.gguf"
size_bytes = 9
sha256 = "{SHA256}"
"""
DRAFT_BESIDE = f"""
[draft]
path = "draft"
sha256 = "{SHA256}"
"""
MANIFEST = HEAD + IN_PACKAGE + BUILT


def never(*_: object, **__: object) -> Path:
    raise AssertionError("nothing is to be built")


def refused(name: str, error: type[EdgespecError]) -> str:
    with pytest.raises(error) as caught:
        load_pair(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of manifests of the test's own, and a user's data folder with nothing in it."""
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.setattr(known, "data_dir", lambda name: tmp_path / name)
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path / "data"))
    return folder


# Names and paths


def test_an_unknown_pair_names_the_near_one() -> None:
    assert "did you mean starter?" in refused("startre", UnknownPairError)
    far = refused("quite-another", UnknownPairError)
    assert "starter" in far
    assert "did you mean" not in far


@pytest.mark.parametrize("name", ["", ".", "/", "README", "../models/starter", "starter.toml", "x" * 300, "a\0b"])
def test_what_leads_to_no_manifest_is_no_pair(name: str) -> None:
    refused(name, UnknownPairError)


def test_without_any_manifest_the_error_says_so(models: Path) -> None:
    assert "known pairs: none" in refused("starter", UnknownPairError)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_path_comes_before_the_users_own_and_those_before_what_ships(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, here = tmp_path / "data" / "pairs" / "tiny" / "pair.toml", tmp_path / "here" / "tiny" / "pair.toml"
    shipped = write(models / "tiny.toml", HEAD + ON_HUB + FROM_HUB)
    assert load_pair("tiny").manifest == shipped
    write(ours, HEAD + BESIDE + DRAFT_BESIDE)
    assert load_pair("tiny").manifest == ours
    assert load_recipe("tiny").manifest == shipped
    assert pair_names() == ["tiny"]
    write(here, HEAD + BESIDE + BUILT)
    monkeypatch.chdir(here.parents[1])
    assert load_pair("tiny").manifest.resolve() == here
    assert load_pair(str(here.parent)).manifest == load_pair(str(here)).manifest == here


def test_a_folder_that_is_being_made_is_no_pair(models: Path, tmp_path: Path) -> None:
    write(tmp_path / "data" / "pairs" / ".tiny.host-1-abc" / "pair.toml", HEAD + BESIDE + DRAFT_BESIDE)
    assert pair_names() == []


# What may stand in a manifest


@pytest.mark.parametrize(
    "text", [MANIFEST.format(size_bytes=9, sha256=SHA256), HEAD + ON_HUB + FROM_HUB, HEAD + ON_HUB + BUILT,
             HEAD + BESIDE + DRAFT_BESIDE, HEAD + BESIDE + BUILT]
)  # fmt: skip
def test_a_manifest_is_written_as_it_was_read(models: Path, text: str) -> None:
    pair = load_pair(str(write(models / "tiny.toml", text)))
    rich = replace(pair, description='quoted "\\ \x7f\n", ünd so', profiles=("a", "b"), pulled="2025-12-31")
    if isinstance(rich.verifier, FileVerifier):
        verifier = replace(rich.verifier, parts=(Part("two.gguf", 2, SHA256), Part("three.gguf", 3, SHA256)))
        rich = replace(rich, verifier=replace(verifier, origin="owner/name@main"))
    again = load_pair(str(write(models / "again.toml", render(rich))))
    assert replace(again, manifest=rich.manifest, verifier=rich.verifier, draft=rich.draft) == rich
    assert render(again) == render(rich)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("format = 1", "format = 2", "format"),
        ("format = 1", "", "format"),
        ("bits = 8", "bitz = 8", "unknown key 'bitz'; allowed: bits"),
        ("[draft]", "[graft]", "draft"),
        ("bits = 8", "bits = 5", "bits is 5; allowed: 4, 8"),
        ("bits = 8", "", "bits is missing"),
        ("block_size = 32", "block_size = 33", "block_size"),
        ('license = "Apache-2.0"', "", "license is missing"),
        ('license = "Apache-2.0"', 'licence = "Apache-2.0"', "unknown key 'licence'; allowed: license"),
        ("size_bytes = 9", 'size_bytes = "9"', "size_bytes"),
        ("size_bytes = 9", "size_bytes = 0", "size_bytes"),
        ("bits = 8", "bits = 8.0", "bits"),
        ("bits = 8", "bits = true", "bits"),
        ('build_from = "verifier"', 'build_from = "hub"', "hub is missing"),
        ('build_from = "verifier"', 'build_from = "moon"', "build_from is 'moon'; allowed: 'verifier', 'hub'"),
        ('build_from = "verifier"', "build_from = []", "build_from"),
        ('build_from = "verifier"', 'path = "x"\nbuild_from = "verifier"', "allowed: one of build_from, path"),
        ('file = "tiny.gguf"', "file = 3", "file"),
        ('file = "tiny.gguf"', 'file = "../tiny.gguf"', "file"),
        ('name = "tiny"', "name = []", "name"),
        ('name = "tiny"', 'name = "../tiny"', "name"),
        ('package = "tiny_verifier"', 'package = "os.path"', "package"),
        ('package = "tiny_verifier"', 'pakage = "tiny_verifier"', "one of package, hub, path"),
        ('package = "tiny_verifier"', 'package = "tiny_verifier"\nhub = "a/b"', "one of package, hub, path"),
        (SHA256, SHA256.upper(), "sha256"),
        (SHA256, SHA256[1:], "sha256"),
        ("[draft]", "draft = 8\n[other]", "draft"),
        ("bits = 8", "bits = ", "TOML"),
        ("a tiny pair", "\udcff", "TOML"),
        ("format = 1", "format = 1\nprofiles = 'cpu-small'", "profiles is 'cpu-small'; allowed: a list of strings"),
        ("format = 1", "format = 1\nprofiles = [1]", "profiles"),
        ("format = 1", "format = 1\npulled = 'yesterday'", "pulled"),
        ("format = 1", "format = 1\npulled = 2025-12-31", "pulled"),
        ("format = 1", "format = 1\nmanifest = 'x'", "unknown key 'manifest'"),
        ("format = 1", f"format = 1\nprofiles = {'[' * 5000}", "TOML"),
    ],
)
def test_a_manifest_that_is_not_right_is_named(models: Path, old: str, new: str, says: str) -> None:
    text = MANIFEST.format(size_bytes=9, sha256=SHA256)
    (models / "tiny.toml").write_text(text, encoding="utf-8")
    load_pair("tiny")
    changed = text.replace(old, new, 1)
    assert changed != text
    (models / "tiny.toml").write_bytes(changed.encode("utf-8", "surrogateescape"))
    message = refused("tiny", ModelFormatError)
    assert says in message
    assert "tiny.toml" in message


def test_a_manifest_that_is_no_file_of_its_kind_is_named(models: Path) -> None:
    path = models / "tiny.toml"
    path.write_text("#" * 2**21, encoding="utf-8")
    assert "no manifest" in refused("tiny", ModelFormatError)
    path.unlink()
    os.mkfifo(path)  # to read it would wait for ever
    assert "is not a regular file" in refused("tiny", ModelFormatError)


def test_a_manifest_may_come_from_windows(models: Path) -> None:
    text = MANIFEST.format(size_bytes=9, sha256=SHA256).replace("\n", "\r\n")
    (models / "tiny.toml").write_bytes(text.encode("utf-8-sig"))
    assert load_pair("tiny").name == "tiny"


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../up.gguf",
        "a/../../b.gguf",
        "C:/x.gguf",
        "C:x",
        "a\\\\b",
        "\\\\\\\\host\\\\x",
        "",
        ".",
        "a\\u0000b",
    ],
)
def test_paths_stay_in_the_pairs_folder(models: Path, path: str) -> None:
    write(models / "tiny.toml", (HEAD + BESIDE + DRAFT_BESIDE).replace('"verifier.gguf"', f'"{path}"'))
    assert "path is" in refused("tiny", ModelFormatError)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD + ON_HUB + DRAFT_BESIDE, "path does not go with a verifier on the hub"),
        (HEAD + BESIDE + FROM_HUB, "hub goes with a verifier on the hub only"),
        (HEAD + ON_HUB.replace("owner/model", "model") + FROM_HUB, "owner/name"),
        (HEAD + ON_HUB.replace("owner/model", "a/b--c") + FROM_HUB, "owner/name"),
        (HEAD + BESIDE + "parts = 3" + BUILT, "parts"),
        (HEAD + BESIDE + "parts = [3]" + BUILT, "part 2: path is missing"),
        (HEAD + BESIDE + f"parts = [{{path = 'b/x', size_bytes = 1, sha256 = '{SHA256}'}}]" + BUILT, "several folders"),
        (HEAD + BUILT, "[verifier] is missing"),
        (HEAD + BESIDE, "[draft] is missing"),
    ],
)
def test_what_does_not_go_together_is_named(models: Path, text: str, says: str) -> None:
    write(models / "tiny.toml", text)
    assert says in refused("tiny", ModelFormatError)


# A pair on the hub


def test_a_pair_that_is_not_pulled_says_how_to_get_it(models: Path) -> None:
    write(models / "tiny.toml", HEAD + ON_HUB + FROM_HUB)
    pair = load_pair("tiny")
    for call in (pair.verifier.find, pair.ensure_draft, lambda: load("tiny")):
        with pytest.raises(ModelNotFoundError, match="edgespec models pull tiny"):
            call()
    assert "edgespec models pull tiny" in what_is_missing(pair)


# A pair in a folder of its own


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole pair: a split name does not matter to what is compared here."""
    out = tmp_path / "mine"
    out.mkdir()
    gguf = write_gguf(out / "verifier.gguf")
    draft = build_draft(gguf, out / "draft", bits=32)
    content = gguf.read_bytes()
    pair = Pair(
        "mine",
        "a pair",
        "MIT",
        FileVerifier(gguf.name, len(content), hashlib.sha256(content).hexdigest()),
        FileDraft("draft", hashlib.sha256((draft / "draft.toml").read_bytes()).hexdigest()),
    )
    write(out / "pair.toml", render(pair))
    return out


def test_a_pair_folder_loads_wherever_it_lies(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantize.build_draft", never)
    moved = folder.rename(tmp_path / "elsewhere")
    assert what_is_missing(load_pair(str(moved))) == ""
    load_pair(str(moved)).verifier.check(moved / "verifier.gguf")
    with load(str(moved), num_threads=1, mode="sequential", policy=Fixed(7)) as runtime:
        assert (runtime.verifier_name, runtime.draft_name) == ("verifier.gguf", "draft")
        assert runtime.generate("the", SamplingParams(max_tokens=4, temperature=0.0)).stats.drafted > 0
    monkeypatch.chdir(tmp_path)
    assert load_pair("elsewhere").verifier.find().is_file()


@pytest.mark.parametrize("gone", ["verifier.gguf", "draft", "draft/draft.toml"])
def test_a_pair_that_is_not_whole_is_named(folder: Path, gone: str) -> None:
    (folder / gone).rename(folder / "gone")
    assert "missing" in what_is_missing(load_pair(str(folder)))
    with pytest.raises(ModelNotFoundError, match="make the pair again"):
        load(str(folder))


@pytest.mark.parametrize("changed", ["verifier.gguf", "draft/draft.toml"])
def test_a_pair_whose_files_are_others_is_named(folder: Path, changed: str) -> None:
    with (folder / changed).open("ab") as stream:
        stream.write(b"\n")
    with pytest.raises(ModelFormatError, match=re.escape(Path(changed).name)):
        load(str(folder))


def test_a_changed_verifier_of_the_same_size_is_found_by_its_sha256(folder: Path) -> None:
    gguf = folder / "verifier.gguf"
    gguf.write_bytes(gguf.read_bytes()[:-1] + b"!")
    verifier = load_pair(str(folder)).verifier
    with pytest.raises(ModelFormatError, match="SHA-256"):
        verifier.check(verifier.find())


def test_all_parts_of_a_split_verifier_are_wanted(folder: Path) -> None:
    content = b"part two"
    part = Part("two.gguf", len(content), hashlib.sha256(content).hexdigest())
    pair = load_pair(str(folder))
    assert isinstance(pair.verifier, FileVerifier)
    write(folder / "pair.toml", render(replace(pair, verifier=replace(pair.verifier, parts=(part,)))))
    split = load_pair(str(folder)).verifier
    with pytest.raises(ModelNotFoundError, match=r"two\.gguf"):
        split.find()
    (folder / "two.gguf").write_bytes(content[:-1])
    with pytest.raises(ModelFormatError, match=r"two\.gguf has 7 bytes, 8 expected"):
        split.find()
    (folder / "two.gguf").write_bytes(content[:-1] + b"!")
    with pytest.raises(ModelFormatError, match=r"two\.gguf is not the file"):
        split.check(split.find())
    (folder / "two.gguf").write_bytes(content)
    split.check(split.find())
