"""The loops over fakes: same tokens, same ends, whatever is drafted."""

from __future__ import annotations

import collections.abc as abc
from typing import Any, cast

import numpy as np
import pytest

from edgespec.core.policy import MAX_DRAFT_LENGTH, Fixed, Plan
from edgespec.core.sequence import Draft, Round, SamplingParams, Sequence
from edgespec.drafters.base import DraftRequest
from edgespec.engine.loops import plain
from edgespec.engine.rounds import request
from edgespec.errors import ParameterError
from tests.engine.running import sequential
from tests.fakes import FakeDrafter, FakeVerifier, random_logits

PROMPT = [3, 1, 4, 1, 5]
SETTINGS = {
    "greedy": SamplingParams(max_tokens=40, temperature=0.0),
    "sampled": SamplingParams(max_tokens=40, temperature=0.8, seed=7),
    "hot": SamplingParams(max_tokens=40, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=8),
    "penalised": SamplingParams(
        max_tokens=40, temperature=0.7, repeat_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2,
        logit_bias=((2, 3.0), (9, -100.0)), seed=9,
    ),
}  # fmt: skip


class Scripted:
    """A drafter that proposes what it is told, cut to what was asked for."""

    name, num_slots = "scripted", 1

    def __init__(self, propose: abc.Callable[[abc.Sequence[int]], abc.Sequence[int]]) -> None:
        self._tokens = propose
        self.asked: list[int] = []

    def propose(self, requests: abc.Sequence[DraftRequest], cancelled: abc.Callable[[], bool]) -> list[Draft]:
        (request,) = requests
        self.asked.append(request.num_draft)
        return [Draft(len(request.tokens), tuple(self._tokens(request.tokens))[: request.num_draft])]

    def close(self) -> None: ...


def counting(num_vocab: int = 32, width: int = 8) -> abc.Callable[[abc.Sequence[int]], np.ndarray]:
    """The likeliest next token is the last one plus one, modulo ``width``."""

    def logits(tokens: abc.Sequence[int]) -> np.ndarray:
        row = np.zeros(num_vocab, np.float32)
        row[(tokens[-1] + 1) % width] = 5.0
        return row

    return logits


def sequence(params: SamplingParams, num_ctx: int = 64, end: frozenset[int] = frozenset()) -> Sequence:
    return Sequence(list(PROMPT), params, num_ctx, end)


def run_plain(params: SamplingParams, num_ctx: int = 64, end: frozenset[int] = frozenset()) -> Sequence:
    one = sequence(params, num_ctx, end)
    list(plain(one, FakeVerifier(num_ctx=num_ctx)))
    return one


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("length", range(9))
@pytest.mark.parametrize("draft_seed", [0, 1], ids=["good draft", "bad draft"])
def test_sequential_gives_the_tokens_of_plain(setting: str, length: int, draft_seed: int) -> None:
    params = SETTINGS[setting]
    one = sequence(params)
    rounds = list(sequential(one, FakeDrafter(logits=random_logits(32, draft_seed)), FakeVerifier(), Fixed(length)))
    reference = run_plain(params)
    assert one.tokens == reference.tokens
    assert one.finish_reason == reference.finish_reason == "length"
    assert [token for r in rounds for token in r.tokens] == one.tokens[len(PROMPT) :]


def test_a_draft_that_is_the_verifier_is_accepted_whole() -> None:
    one = sequence(SETTINGS["sampled"])
    rounds = list(sequential(one, FakeDrafter(), FakeVerifier(), Fixed(4)))
    assert sum(r.accepted for r in rounds) == sum(r.drafted for r in rounds) == 32
    assert [len(r.tokens) for r in rounds] == [5] * 8


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_one_batch_per_round_and_only_the_rows_that_are_needed(rule: str) -> None:
    verifier = FakeVerifier()
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=1, rule=rule)
    rounds = list(sequential(sequence(params), FakeDrafter(), verifier, Fixed(3)))
    assert [[request.num_rows for request in call] for call in verifier.requests] == [[r.drafted + 1] for r in rounds]


@pytest.mark.parametrize("length", [0, 1, 3, 7])
def test_nothing_is_kept_after_an_end_token_inside_an_accepted_run(length: int) -> None:
    params = SamplingParams(max_tokens=50, temperature=0.0)
    one = Sequence([0], params, 64, frozenset({4}))
    drafter = Scripted(lambda tokens: [(tokens[-1] + 1 + i) % 8 for i in range(8)])
    rounds = list(sequential(one, drafter, FakeVerifier(logits=counting()), Fixed(length)))
    assert one.tokens == [0, 1, 2, 3, 4]
    assert one.finish_reason == "stop"
    assert all(r.accepted <= len(r.tokens) for r in rounds)


@pytest.mark.parametrize("length", [0, 1, 5, 20])
@pytest.mark.parametrize("max_tokens", [1, 2, 6])
def test_max_tokens_in_the_middle_of_an_accepted_run(length: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    one, drafter = Sequence([0], params, 64), Scripted(lambda tokens: [(tokens[-1] + 1 + i) % 8 for i in range(20)])
    list(sequential(one, drafter, FakeVerifier(logits=counting()), Fixed(length)))
    assert one.num_output == max_tokens
    assert one.finish_reason == "length"
    assert all(asked < max_tokens for asked in drafter.asked)


@pytest.mark.parametrize("length", [0, 1, 5, 20])
@pytest.mark.parametrize("num_ctx", [6, 7, 12])
def test_the_context_end_is_filled_exactly(length: int, num_ctx: int) -> None:
    params = SamplingParams(max_tokens=None, temperature=0.0)
    one, verifier = Sequence(list(PROMPT), params, num_ctx), FakeVerifier(num_ctx=num_ctx)
    list(sequential(one, FakeDrafter(), verifier, Fixed(length)))
    assert len(one.tokens) == num_ctx
    assert one.finish_reason == "length"
    assert max(len(request.tokens) for call in verifier.requests for request in call) < num_ctx


def test_a_finished_sequence_is_left_alone() -> None:
    one = Sequence(list(PROMPT), SETTINGS["greedy"], len(PROMPT))
    assert list(plain(one, FakeVerifier(num_ctx=8))) == []
    assert one.finish_reason == "length"


def test_cancelled_between_rounds() -> None:
    rounds: list[Round] = []
    one = sequence(SETTINGS["greedy"])
    for round_ in sequential(one, FakeDrafter(), FakeVerifier(), Fixed(2), lambda: len(rounds) == 3):
        rounds.append(round_)
    assert len(rounds) == 3
    assert one.finish_reason == "cancelled"
    assert one.tokens == run_plain(SETTINGS["greedy"]).tokens[: len(one.tokens)]


def test_interrupted_inside_a_verification() -> None:
    """``cancelled`` turns true after the loop looked and before the verifier does."""
    answers = iter([False, True])
    one = sequence(SETTINGS["greedy"])
    assert list(plain(one, FakeVerifier(), lambda: next(answers, True))) == []
    assert one.finish_reason == "cancelled"
    assert one.tokens == PROMPT


def test_the_consumer_may_cut_the_sequence_between_rounds() -> None:
    one = sequence(SETTINGS["greedy"])
    for round_ in sequential(one, FakeDrafter(), FakeVerifier(), Fixed(4)):
        assert len(round_.tokens) == 5
        one.cut(3)
    assert one.finish_reason == "stop"
    assert one.num_output == 2


@pytest.mark.parametrize("margin", [-0.1, float("inf"), float("nan"), None, True])
def test_a_min_confidence_outside_its_range_is_refused(margin: object) -> None:
    with pytest.raises(ParameterError, match="min_confidence"):
        Fixed(1, margin)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [-1, MAX_DRAFT_LENGTH + 1, 1.5, True, None])
def test_a_draft_length_outside_its_range_is_refused(length: object) -> None:
    with pytest.raises(ParameterError, match="draft length"):
        Fixed(length)  # type: ignore[arg-type]


def test_the_length_of_a_drawn_draft_tells_nothing_of_what_was_drawn() -> None:
    """Rule ``rejection`` draws anew, with the same noise, what follows a refused token."""
    for temperature, rule, ends in ((0.8, "rejection", False), (0.0, "rejection", True), (0.8, "coupled", True)):
        params = SamplingParams(temperature=temperature, rule=cast(Any, rule), seed=1)
        sequence = Sequence([1, 2], params, 64, frozenset({31}))
        wanted = request(sequence, sequence.tokens, Plan(4, 0.5))
        assert (bool(wanted.end_tokens), bool(wanted.min_confidence)) == (ends, ends)
