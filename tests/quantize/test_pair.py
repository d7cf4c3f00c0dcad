"""Pairs for a device: what is made, what is kept, what is refused before any work."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.devices.profile import GIB, Device, Draft, Profile, Serving, Verifier
from edgespec.devices.sizes import Budget
from edgespec.drafters import vocabulary
from edgespec.errors import (
    EdgespecError,
    FileAccessError,
    MemoryBudgetError,
    ModelFormatError,
    ModelNotFoundError,
    ParameterError,
    ProfileError,
    VocabularyMismatchError,
)
from edgespec.loading import load
from edgespec.pairs import load_pair
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from quantize.gguf_shape import read_gguf
from quantize.pair import PairOptions, PairResult, build_pair
from quantize.verifier import quantize_verifier
from tests.gguf_tools import copy_gguf, split_gguf
from tests.tiny import TinyConfig, write_gguf
from tests.tiny_hf import write_checkpoint

BIG = TinyConfig(width=256, num_layers=3, num_heads=8, num_hidden=512, seed=5)
PROFILE = Profile("a-device", draft=Draft(bits=4, block_size=64), serving=Serving(context=128))


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("big") / "big.gguf", BIG)


def build(verifier: Path, draft: Path, out: Path, **options: Any) -> PairResult:
    chosen: dict[str, Any] = {"budget": Budget(8 * GIB), "check_tokens": vocabulary.check, "profile": PROFILE} | options
    return build_pair(verifier, draft, out=out, **chosen)


def content(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_pair_is_a_folder_that_loads(big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    before = sha256(big), sha256(tiny_gguf)
    out = tmp_path / "my pair"
    result = build(big, tiny_gguf, out)
    assert (result.path, result.verifier_type, result.kept) == (out, "Q4_K_M", False)
    assert {"pair.toml", "verifier.gguf", "draft", "draft/draft.toml", "draft/model.onnx"} < content(out)
    pair = load_pair(str(out))
    assert (pair.name, pair.profile, pair.license) == ("my-pair", "a-device", "unknown")
    assert "Q4_K_M" in pair.description
    path = pair.verifier.find()
    pair.verifier.check(path)
    assert path.stat().st_size == result.verifier_bytes < big.stat().st_size / 3
    assert pair.ensure_draft() == out / "draft"
    assert "bits = 4\nblock_size = 64\n" in (out / "draft" / "draft.toml").read_text()
    assert (sha256(big), sha256(tiny_gguf)) == before
    assert content(tmp_path) & {".my pair"} == set()
    assert [path.name for path in tmp_path.iterdir()] == ["my pair"]


def test_a_pair_runs(big: Path, tmp_path: Path) -> None:
    """A verifier that drafts for itself, so that drafts are accepted."""
    build(big, big, tmp_path / "pair", options=PairOptions(kind="F32"), profile=replace(PROFILE, draft=Draft()))
    with load(str(tmp_path / "pair"), profile=PROFILE) as runtime:
        chunks = list(runtime.stream("in the", raw=True))
    assert chunks[-1].stats is not None
    assert chunks[-1].stats.accepted > 0


def test_progress_only_grows_and_names_the_parts(big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    build(big, tiny_gguf, tmp_path / "pair", progress=lambda *report: seen.append(report))
    fractions = [fraction for _, fraction in seen]
    assert fractions == sorted(fractions)
    assert (fractions[0], seen[-1]) == (0.0, ("done", 1.0))
    assert {stage.partition(":")[0] for stage, _ in seen} == {"reading", "draft", "verifier", "done"}


# --------------------------------------------------------------------------------------------- what is kept as it is


@pytest.fixture(scope="module")
def quantized(big: Path) -> Path:
    return quantize_verifier(big, big.with_name("big-q8_0.gguf"), "Q8_0")


def test_a_verifier_of_the_type_wanted_or_smaller_is_copied(quantized: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    larger = replace(PROFILE, verifier=Verifier(gguf_type="F16"))
    for name, options in {"same": {"options": PairOptions("q8_0")}, "larger": {"profile": larger}}.items():
        result = build(quantized, tiny_gguf, tmp_path / name, **options)
        assert (result.kept, result.verifier_type) == (True, "Q8_0")
        assert sha256(tmp_path / name / "verifier.gguf") == sha256(quantized)
        load_pair(str(tmp_path / name)).verifier.check(tmp_path / name / "verifier.gguf")


def test_a_larger_type_that_was_asked_for_is_not_ignored(quantized: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"Q8_0 already"):
        build(quantized, tiny_gguf, tmp_path / "pair", options=PairOptions("F16"))
    made = build(quantized, tiny_gguf, tmp_path / "pair", options=PairOptions("F16", requantize=True))
    assert (made.kept, made.verifier_type) == (False, "F16")


def test_an_unquantized_verifier_of_the_type_wanted_is_copied(big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    assert build(big, tiny_gguf, tmp_path / "pair", options=PairOptions("F32")).kept


def test_a_larger_one_is_quantized_again_only_if_asked(quantized: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"Q8_0 already .* costs? quality twice.*--type Q8_0"):
        build(quantized, tiny_gguf, tmp_path / "pair")
    assert list(tmp_path.iterdir()) == []
    result = build(quantized, tiny_gguf, tmp_path / "pair", options=PairOptions(requantize=True))
    assert (result.kept, result.verifier_type) == (False, "Q4_K_M")
    assert result.verifier_bytes < quantized.stat().st_size


@pytest.mark.parametrize("kind", ["F32", "Q4_K_M"])
def test_a_split_verifier_is_kept_in_its_parts_or_becomes_one_file(
    kind: str, big: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    first, second = split_gguf(big, tmp_path)
    result = build(first, tiny_gguf, tmp_path / "pair", options=PairOptions(kind))
    ggufs = sorted(path.name for path in (tmp_path / "pair").glob("*.gguf"))
    kept = ["verifier-00001-of-00002.gguf", "verifier-00002-of-00002.gguf"]
    assert ggufs == (kept if kind == "F32" else ["verifier.gguf"])
    pair = load_pair(str(tmp_path / "pair"))
    path = pair.verifier.find()
    pair.verifier.check(path)
    LlamaVerifier(LlamaOptions(path, 1, num_ctx=64)).close()
    if kind == "F32":
        assert result.verifier_bytes == first.stat().st_size + second.stat().st_size


# ------------------------------------------------------------------------------------------------------------ the head


def test_a_head_is_counted_on_a_corpus(big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "text.txt"
    corpus.write_text("the king and the ring\n" * 5000, encoding="utf-8")
    result = build(big, tiny_gguf, tmp_path / "pair", options=PairOptions(head_vocab=64, corpus=(corpus,)))
    assert result.head is not None
    assert len(result.head.ids) == 64
    assert result.head.coverage > 0.99
    assert result.as_dict()["draft"]["head_vocab"] == 64
    assert "num_head_vocab = 64\n" in (tmp_path / "pair" / "draft" / "draft.toml").read_text()


@pytest.mark.parametrize(("profiled", "asked"), [(5000, None), (0, None), (64, 0)])
def test_a_whole_head_stays_whole(profiled: int, asked: int | None, big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    """Also where a profile, which does not know the model, wants more than there is."""
    profile = replace(PROFILE, draft=Draft(head_vocab=profiled))
    result = build(big, tiny_gguf, tmp_path / "pair", profile=profile, options=PairOptions(head_vocab=asked))
    assert result.head is None
    assert "d2t" not in (tmp_path / "pair" / "draft" / "draft.toml").read_text()


# ------------------------------------------------------------------------------------------------------------ manifest


@pytest.mark.parametrize(
    ("verifier", "draft", "expected"),
    [
        ("apache-2.0", "apache-2.0", "apache-2.0"),
        ("llama3.2", "mit", "llama3.2 (verifier), mit (draft)"),
        ("mit", "", "mit (verifier), unknown (draft)"),
        ('"quoted" \x7f é', '"quoted" \x7f é', '"quoted" \x7f é'),
    ],
)
def test_licences_come_from_the_files(
    verifier: str, draft: str, expected: str, big: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    large = copy_gguf(big, tmp_path / "large.gguf", general__license=verifier)
    small = copy_gguf(tiny_gguf, tmp_path / "small.gguf", general__license=draft)
    build(large, small, tmp_path / "pair")
    assert load_pair(str(tmp_path / "pair")).license == expected


def test_a_checkpoint_is_called_by_its_whole_name(big: Path, tmp_path: Path) -> None:
    build(big, write_checkpoint(tmp_path / "Small-0.5B"), tmp_path / "pair")
    assert load_pair(str(tmp_path / "pair")).description == "tiny as Q4_K_M, drafted by Small-0.5B at 4 bits"


@pytest.mark.parametrize(("folder", "name"), [("a b/ü", "pair"), ("..x", "x"), ("ä-1.5B", "1.5B"), ("ok_1", "ok_1")])
def test_any_folder_name_makes_a_valid_pair(folder: str, name: str, big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    build(big, tiny_gguf, tmp_path / folder, options=PairOptions("F32"))
    assert load_pair(str(tmp_path / folder)).name == name


# ------------------------------------------------------------------------------------------- what is refused, and when


def refused(
    error: type[EdgespecError], match: str, folder: Path, verifier: Path, draft: Path, **options: Any
) -> EdgespecError:
    """Nothing is written, not even for a moment that a crash could keep."""
    before = content(folder)
    seen: list[str] = []
    with pytest.raises(error, match=match) as caught:
        build(verifier, draft, folder / "pair", progress=lambda stage, _: seen.append(stage), **options)
    assert "\n" not in str(caught.value)
    assert content(folder) == before
    assert set(seen) <= {"reading"}
    return caught.value


def test_another_vocabulary_is_refused(big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny_gguf.read_bytes().replace(b"<|endoftext|>", b"<|endOfText|>"))
    refused(VocabularyMismatchError, "token 0 is", tmp_path, big, other)


def test_padding_makes_no_other_vocabulary(big: Path, tmp_path: Path) -> None:
    for num_vocab in (288, 352):
        draft = write_gguf(tmp_path / f"{num_vocab}.gguf", TinyConfig(num_vocab=num_vocab))
        assert build(big, draft, tmp_path / str(num_vocab)).path.is_dir()


def test_a_pair_that_does_not_fit_is_refused_with_its_plan(big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    large = write_gguf(tmp_path / "large.gguf", replace(BIG, num_layers=4, num_hidden=4096))
    profile, budget = replace(PROFILE, verifier=Verifier(gguf_type="F16")), Budget(155 * 2**20)
    error = refused(MemoryBudgetError, "would fit: ", tmp_path, large, tiny_gguf, profile=profile, budget=budget)
    assert isinstance(error, MemoryBudgetError)
    text = "\n".join(error.plan)
    assert re.search(r"verifier weights F16 +2\d MiB  main", text)
    assert "verifier KV cache, 1 x 128 tokens, f16/f16" in text
    assert "draft KV cache" in text
    assert "would fit: type Q8_0" in text
    fitting = replace(profile, verifier=Verifier(gguf_type="Q8_0"))
    assert build(large, tiny_gguf, tmp_path / "fits", profile=fitting, budget=budget).plan.fits


def test_the_budget_is_the_profiles(big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    device = Device(memory_budget_gib=0.125)
    budget = Budget.of(device, 64 * GIB)
    profile = replace(PROFILE, device=device)
    refused(MemoryBudgetError, "128 MiB may be taken", tmp_path, big, tiny_gguf, profile=profile, budget=budget)


def test_a_cache_whose_blocks_do_not_divide_the_heads_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    """llama.cpp would refuse it, and say nothing."""
    assert read_gguf(tiny_gguf).shape.head_size_k == 16
    profile = replace(PROFILE, verifier=Verifier(kv_type_k="q8_0"))
    refused(ProfileError, "heads of 16", tmp_path, tiny_gguf, tiny_gguf, profile=profile)


def test_a_folder_is_no_verifier(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    refused(ModelFormatError, "convert_hf_to_gguf", tmp_path, tmp_path / "checkpoint", tiny_gguf)


def test_an_architecture_that_cannot_draft_is_named(big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    strange = tmp_path / "strange.gguf"
    strange.write_bytes(tiny_gguf.read_bytes().replace(b"llama", b"bloom"))
    refused(ModelFormatError, "bloom; supported: llama, qwen2, qwen3, gemma3", tmp_path, big, strange)


def test_broken_files_are_refused(big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(tiny_gguf.read_bytes()[:-5000])
    refused(ModelFormatError, "short.gguf", tmp_path, short, tiny_gguf)
    refused(ModelFormatError, "short.gguf", tmp_path, big, short)
    refused(ModelNotFoundError, "nowhere", tmp_path, tmp_path / "nowhere.gguf", tiny_gguf)
    refused(ModelNotFoundError, "nowhere", tmp_path, big, tmp_path / "nowhere.gguf")
    refused(ParameterError, "Q4_K_M", tmp_path, big, tiny_gguf, options=PairOptions("Q4_K"))


def test_what_exists_needs_force(big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "pair"
    build(big, tiny_gguf, out, options=PairOptions("F32"))
    before = sha256(out / "verifier.gguf")
    with pytest.raises(FileAccessError, match="exists"):
        build(big, tiny_gguf, out)
    assert sha256(out / "verifier.gguf") == before
    build(big, tiny_gguf, out, force=True)
    assert sha256(out / "verifier.gguf") != before
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]


def test_force_replaces_pairs_only_and_never_a_source(big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").touch()
    with pytest.raises(FileAccessError, match=r"no pair\.toml"):
        build(big, tiny_gguf, tmp_path / "photos", force=True)
    out = tmp_path / "pair"
    build(big, tiny_gguf, out, options=PairOptions("F32"))
    with pytest.raises(FileAccessError, match="source"):
        build(out / "verifier.gguf", tiny_gguf, out, force=True)
    assert (out / "verifier.gguf").is_file()
    assert (tmp_path / "photos" / "one.jpg").is_file()


def test_an_importance_matrix_for_a_verifier_that_is_kept_is_refused(
    big: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    options = PairOptions(kind="F32", imatrix=tmp_path / "matrix.gguf")
    with pytest.raises(ParameterError, match=r"imatrix: .* is F32 already and is kept as it is; leave it out"):
        build(big, tiny_gguf, tmp_path / "pair", options=options)
