"""The manifests that ship, and what their README says of them."""

from __future__ import annotations

import re

import pytest

from edgespec import pairs
from edgespec.devices.profile import profile_names
from edgespec.pairs import Pair, load_pair, pair_names
from edgespec.pairs.sources import BuiltDraft, FileDraft, FileVerifier, HubDraft, HubVerifier, PackageVerifier, Part
from edgespec.pairs.table import keys
from edgespec.paths import data_dir


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
