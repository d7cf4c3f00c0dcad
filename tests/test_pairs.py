"""Pairs: their manifests, the verifier that comes in a package or beside them, the draft that is built once."""

from __future__ import annotations

import collections.abc as abc
import hashlib
import re
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec import pairs
from edgespec.core.sequence import SamplingParams
from edgespec.devices.profile import profile_names
from edgespec.errors import (
    EdgespecError,
    FileAccessError,
    MissingDependencyError,
    ModelFormatError,
    ModelNotFoundError,
    UnknownPairError,
)
from edgespec.loading import load
from edgespec.pairs import Pair, known, load_pair, load_recipe, pair_names, what_is_missing
from edgespec.pairs.pair import render
from edgespec.pairs.sources import BuiltDraft, FileDraft, FileVerifier, HubDraft, HubVerifier, PackageVerifier, Part
from edgespec.pairs.table import keys
from edgespec.paths import data_dir
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
def tiny(models: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A real pair, whose draft takes no time to build, and a cache that holds nothing yet."""
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(models.parent / "cache"))
    content = (package / "tiny.gguf").read_bytes()
    text = MANIFEST.format(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (models / "tiny.toml").write_text(text, encoding="utf-8")
    return load_pair("tiny")


# Manifests that ship


@pytest.mark.parametrize("name", pair_names())
def test_every_manifest_that_ships_is_right(name: str) -> None:
    pair = load_pair(name)
    assert pair.name == name
    assert pair.license
    assert set(pair.profiles) <= set(profile_names())
    assert getattr(pair.draft, "bits", None) in (4, 8)
    if isinstance(pair.verifier, HubVerifier):
        assert pair.pulled == "never" or pair.pulled >= "2025"
        assert pair.profiles
        assert isinstance(pair.draft, HubDraft)


def test_the_well_known_pairs_ship() -> None:
    assert {pairs.DEFAULT_PAIR, "smollm2-1.7b", "qwen2.5-7b", "qwen3-8b", "llama-3.2-3b"} <= set(pair_names())


def readme() -> str:
    return (data_dir("models") / "README.md").read_text(encoding="utf-8")


def test_the_readme_explains_every_key_and_no_other() -> None:
    explained = {
        key
        for line in readme().splitlines()
        if re.match(r"\| `[a-z0-9_]+`[,` a-z0-9_]*\|", line)
        for key in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    kinds = (Pair, PackageVerifier, HubVerifier, FileVerifier, Part, BuiltDraft, HubDraft, FileDraft)
    known_keys = {key for kind in kinds for key in keys(kind)} - {"verifier", "draft"}
    assert explained == known_keys | {"format"}


@pytest.mark.parametrize("name", [name for name in pair_names() if name != pairs.DEFAULT_PAIR])
def test_the_readme_lists_every_pair_with_its_licence_and_whether_it_was_pulled(name: str) -> None:
    pair = load_pair(name)
    (line,) = (line for line in readme().splitlines() if line.startswith(f"| `{name}`"))
    assert line.endswith(f"| {pair.license} | {pair.pulled} |")


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
    with load(str(moved), num_threads=1) as runtime:
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
    with load("tiny", num_threads=1) as runtime:
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
    other_file = replace(tiny, verifier=replace(tiny.verifier, sha256=SHA256))
    assert len({pair.draft_path for pair in (tiny, other_bits, other_blocks, other_file)}) == 4
