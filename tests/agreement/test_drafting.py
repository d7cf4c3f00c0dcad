"""Drafts measured on the answers of real models, against an independent and slow way to do it."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.agreement.answers import encode
from edgespec.agreement.drafting import PROMPTS, Drafting, measure_drafts
from edgespec.agreement.drafting_result import TEMPERATURES
from edgespec.agreement.matches import LENGTHS, Matches
from edgespec.agreement.scorers import OnnxScorer
from edgespec.bench.suite import read_suite
from edgespec.core.sampling import gumbel
from edgespec.core.sequence import Cancelled, SamplingParams, never
from edgespec.drafters.onnx_open import open_model
from edgespec.errors import (
    BackendError,
    ModelFormatError,
    ModelNotFoundError,
    ParameterError,
    PromptError,
    VocabularyMismatchError,
)
from edgespec.loading import load
from edgespec.text.tokenizer import Tokenizer
from edgespec.verifiers.base import Rows, ScoreRequest
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from edgespec.verifiers.llama_vocabulary import open_vocabulary
from quantize import build_draft
from tests.core.reference import probabilities
from tests.tiny import TinyConfig, write_gguf

QUESTIONS = [("qa", "the cat"), ("rag", "in the ring and on the well " * 3), ("qa", "who"), ("writing", "a letter")]
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafting")


@pytest.fixture(scope="module")
def drafts(folder: Path) -> list[Path]:
    """One that agrees in part, and another that can say few tokens, in no order."""
    noisy = write_gguf(folder / "noisy.gguf", TinyConfig(noise=0.1))
    head = np.random.default_rng(5).permutation(200)[:120].tolist()
    return [
        build_draft(noisy, folder / "whole", bits=32),
        build_draft(noisy, folder / "trimmed", bits=32, head=head),
    ]


@pytest.fixture(scope="module")
def measured(tiny_gguf: Path, drafts: list[Path]) -> list[Drafting]:
    return measure_drafts(drafts, tiny_gguf, QUESTIONS, max_tokens=MAX_TOKENS, num_threads=1, num_slots=3)


# ------------------------------------------------------------------------------------------------- the slow way


def slow_draw(row: NDArray[np.float32], params: SamplingParams, position: int, ids: NDArray[np.int64]) -> int:
    """The id that the draft takes: all ids one by one, dense. ``ids`` says what the row's columns stand for."""
    dense = np.full(320, -1e30, dtype=np.float32)
    dense[ids] = row
    probs = probabilities(dense, params)
    if params.temperature == 0:
        return int(probs.argmax())
    assert params.seed is not None
    noise = gumbel(params.seed, position, np.arange(len(dense)))
    scores = [math.log(prob) + noise[i] if prob > 0 else -math.inf for i, prob in enumerate(probs)]
    return int(np.argmax(scores))


def slow_matches(draft: Path, verifier: Path, temperature: float, max_tokens: int) -> Matches:
    """Answers one after the other by the runtime; each prefix read by the draft from an empty cache, token by token."""
    found = []
    with load(None, verifier, "none", num_threads=1) as runtime:
        for number, (_, question) in enumerate(QUESTIONS):
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1 + number)
            chunks = runtime.stream(question, params)
            output = [token for chunk in chunks for token in chunk.tokens]
            prompt = runtime.encode(question)
            found.append(tuple(slow_match(draft, prompt + output[:i], output[i], params) for i in range(len(output))))
    return Matches(tuple(found))


def slow_match(draft: Path, prefix: list[int], token: int, params: SamplingParams) -> bool:
    opened = open_model(draft, num_ctx=256, num_threads=1)
    with contextlib.closing(opened.model):
        (row,) = OnnxScorer(opened, 0, None).score(prefix, 1)
        ids = np.arange(len(row)) if opened.head is None else opened.head.d2t
        return slow_draw(row, params, len(prefix), ids) == token


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("which", [0, 1])
def test_it_is_what_the_slow_way_finds(
    which: int, temperature: float, measured: list[Drafting], drafts: list[Path], tiny_gguf: Path
) -> None:
    slow = slow_matches(drafts[which], tiny_gguf, temperature, 12)
    categories = [category for category, _ in QUESTIONS]
    found = {name: list(matches.answers) for name, matches in measured[which].matches[temperature].items()}
    assert list(found) == ["qa", "rag", "writing"]
    for category, expected in zip(categories, slow.answers, strict=True):
        assert found[category].pop(0)[:12] == expected
    assert 0.02 < slow.agreement < 0.98


# ---------------------------------------------------------------------------------------------------- what it says


def test_a_draft_that_can_say_less_foresees_less(measured: list[Drafting]) -> None:
    for temperature in TEMPERATURES:
        whole, trimmed = (one.agreement(temperature) for one in measured)
        assert 0.95 > whole > trimmed > 0.05


def test_the_model_itself_foresees_all(tiny_gguf: Path, own_folder: Path) -> None:
    (one,) = measure_drafts([own_folder], tiny_gguf, QUESTIONS, max_tokens=20, num_threads=1)
    assert one.agreement() == 1.0
    assert one.agreement(0.8) > 0.9  # what is drawn may be what rounding decides
    assert one.accepted(3) == one.whole(0.0).rounds(3).num_accepted / one.whole(0.0).rounds(3).num_rounds


def test_what_is_known_of_a_draft(measured: list[Drafting], drafts: list[Path], tiny_gguf: Path) -> None:
    one = measured[0]
    assert (one.draft, one.verifier, one.num_prompts, one.num_left_out) == (drafts[0], tiny_gguf, 4, 0)
    assert one.size_bytes == sum(path.stat().st_size for path in drafts[0].iterdir())
    assert one.ms_per_token > 0
    assert set(one.curves.widths) <= set(range(1, 10))
    assert one.curves.verify_s == measured[1].curves.verify_s
    assert one.worth == pytest.approx(sum(one.speedup(one.best_length(t), t) for t in TEMPERATURES) / 2)
    assert all(one.speedup(one.best_length()) >= one.speedup(length) for length in LENGTHS)


def test_a_dict_of_it_is_json_without_paths(measured: list[Drafting], folder: Path) -> None:
    content = json.loads(json.dumps(measured[0].as_dict()))
    assert str(folder) not in json.dumps(content)
    cold, warm = (content["temperatures"][name] for name in ("0", "0.8"))
    assert cold["agreement"] == pytest.approx(measured[0].agreement())
    assert sum(one["num_positions"] for one in warm["by_category"].values()) == warm["num_positions"]
    assert list(cold["predicted_speedup"]) == list(cold["accepted"]) == [str(length) for length in LENGTHS]
    chances = list(cold["by_depth"].values())
    assert chances == sorted(chances, reverse=True)


def test_tables_have_a_row_a_category_and_a_row_a_length(measured: list[Drafting]) -> None:
    by_category, by_length = measured[0].category_lines(), measured[0].length_lines()
    assert by_category[0] == "| category | tokens | T=0 | T=0.8 |"
    assert [line.split(" |")[0] for line in by_category[2:]] == ["| qa", "| rag", "| writing", "| all"]
    assert [line.split(" |")[0] for line in by_length[2:]] == [f"| {length}" for length in range(9)]
    assert len({line.count("|") for line in by_length}) == 1


def test_progress_goes_from_nothing_to_done(tiny_gguf: Path, drafts: list[Path]) -> None:
    told: list[tuple[str, float]] = []
    measure_drafts(
        drafts, tiny_gguf, QUESTIONS[:2], max_tokens=2, num_threads=1, progress=lambda *step: told.append(step)
    )
    assert (told[0], told[-1]) == (("reading prompts", 0.0), ("done", 1.0))
    assert [fraction for _, fraction in told] == sorted(fraction for _, fraction in told)
    assert {"answering", "reading with whole", "reading with trimmed"} <= {stage for stage, _ in told}


# ---------------------------------------------------------------------------------------------------------- memory


def test_rows_are_looked_at_one_by_one(tiny_gguf: Path, drafts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No request for more rows than the timed widths have, whatever the answers' lengths."""
    asked: list[int] = []
    score = LlamaVerifier.score

    def noted(self: LlamaVerifier, requests: abc.Sequence[ScoreRequest], cancelled: Cancelled = never) -> list[Rows]:
        asked.append(sum(request.num_rows for request in requests))
        return score(self, requests, cancelled)

    monkeypatch.setattr(LlamaVerifier, "score", noted)
    measure_drafts(drafts[:1], tiny_gguf, QUESTIONS * 4, max_tokens=30, num_threads=1, num_slots=5)
    assert max(asked) == 9
    assert asked[-1] <= 5


def test_without_memory_for_many_caches_there_is_one(
    tiny_gguf: Path, drafts: list[Path], measured: list[Drafting], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = LlamaVerifier._make_context

    def refused(self: LlamaVerifier, options: LlamaOptions) -> None:
        if options.num_slots > 1:
            raise BackendError("no memory")
        make(self, options)

    monkeypatch.setattr(LlamaVerifier, "_make_context", refused)
    (one,) = measure_drafts(drafts[:1], tiny_gguf, QUESTIONS, max_tokens=MAX_TOKENS, num_threads=1, num_slots=3)
    assert one.matches[0.0] == measured[0].matches[0.0]


def test_a_model_with_a_short_context(tmp_path: Path) -> None:
    """Shorter than the cache at which times are taken."""
    short = write_gguf(tmp_path / "short.gguf", TinyConfig(num_ctx=64))
    draft = build_draft(short, tmp_path / "draft", bits=32)
    (one,) = measure_drafts([draft], short, [("qa", "who"), ("qa", "the cat " * 30)], max_tokens=10, num_threads=1)
    assert (one.num_prompts, one.num_left_out, one.agreement()) == (1, 1, 1.0)
    assert one.ms_per_token > 0


def test_a_base_model_goes_on_from_the_text_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "chat_template", None)
    with open_vocabulary(write_gguf(tmp_path / "base.gguf")) as model:
        prompts = encode(Tokenizer(model), [("qa", "the cat")])
        assert prompts == [("qa", Tokenizer(model).encode("the cat", add_special=True, parse_special=False))]


# ------------------------------------------------------------------------------------------------------- bad input


def test_prompts_that_are_too_long_are_left_out_and_counted(tiny_gguf: Path, drafts: list[Path]) -> None:
    longer = [*QUESTIONS, ("rag", "the cat " * 300)]  # the model has 256 places
    (one,) = measure_drafts(drafts[:1], tiny_gguf, longer, max_tokens=5, num_threads=1)
    assert (one.num_prompts, one.num_left_out) == (4, 1)
    with pytest.raises(PromptError, match="none of the 1 prompts to measure on has at most"):
        measure_drafts(drafts[:1], tiny_gguf, longer[-1:], max_tokens=5, num_threads=1)
    with pytest.raises(PromptError, match="none of the 0 prompts"):
        measure_drafts(drafts[:1], tiny_gguf, [], max_tokens=5, num_threads=1)


@pytest.mark.parametrize(
    "options", [{"max_tokens": 0}, {"max_tokens": 10**6}, {"num_slots": 0}, {"num_threads": 0}, {"seed": -1}]
)
def test_parameters_out_of_range(options: dict[str, Any], tiny_gguf: Path, drafts: list[Path]) -> None:
    with pytest.raises(ParameterError, match=next(iter(options))):
        measure_drafts(drafts[:1], tiny_gguf, QUESTIONS, **options)


def test_models_that_are_none(tiny_gguf: Path, drafts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        measure_drafts(drafts[:1], tmp_path / "nowhere.gguf", QUESTIONS, max_tokens=2)
    with pytest.raises(ModelFormatError, match=r"draft\.toml"):
        measure_drafts(drafts[:1], drafts[0] / "draft.toml", QUESTIONS, max_tokens=2)
    with pytest.raises(ModelNotFoundError, match="nothing"):
        measure_drafts([tmp_path / "nothing"], tiny_gguf, QUESTIONS, max_tokens=2, num_threads=1)


def test_a_draft_that_speaks_other_tokens(tiny_gguf: Path, drafts: list[Path], tmp_path: Path) -> None:
    other = shutil.copytree(drafts[0], tmp_path / "other")
    tokens = json.loads((other / "tokens.json").read_text(encoding="utf-8"))
    tokens[100] = "something else"
    (other / "tokens.json").write_text(json.dumps(tokens), encoding="utf-8")
    with pytest.raises(VocabularyMismatchError, match="token 100 is 'something else'"):
        measure_drafts([other], tiny_gguf, QUESTIONS, max_tokens=2, num_threads=1)


# --------------------------------------------------------------------------------------------------------- prompts


def test_the_shipped_prompts_are_of_every_kind() -> None:
    questions = read_suite(PROMPTS)
    kinds = dict.fromkeys(question.category for question in questions)
    assert list(kinds) == [
        "translation", "summarization", "qa", "math_reasoning", "rag", "writing", "coding", "extraction", "roleplay",
    ]  # fmt: skip
    assert all(sum(question.category == kind for question in questions) == 5 for kind in kinds)
    assert len({question.prompt for question in questions}) == len(questions)


# ------------------------------------------------------------------------------------------------------ real models


@pytest.mark.model
def test_the_starter_draft_foresees_nearly_all(starter_draft: Path, starter_gguf: Path) -> None:
    questions = read_suite(PROMPTS, every=15)
    (one,) = measure_drafts([starter_draft], starter_gguf, questions, max_tokens=24)
    assert 0.85 < one.agreement() <= 1.0
    assert 0.85 < one.agreement(0.8) <= 1.0
