"""What foreseen tokens come to: by hand, by brute force, and as the engine's own loop has it."""

from __future__ import annotations

import collections.abc as abc
import random
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.agreement.answers import Answer, Prompt, answer, foreseen
from edgespec.agreement.matches import LENGTHS, Matches, Rounds
from edgespec.core.costs import Costs, Curves
from edgespec.core.policy import Fixed
from edgespec.core.sequence import SamplingParams, Sequence
from edgespec.errors import BackendError
from edgespec.verifiers.base import Rows
from tests.engine.running import sequential
from tests.fakes import FakeDrafter, FakeVerifier, random_logits

NUM_VOCAB, MAX_TOKENS = 32, 30
PARAMS = [SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=7) for temperature in (0.0, 0.8)]
PROMPTS = [Prompt("qa", [1, 2, 3]), Prompt("rag", [4, 5, 6, 7, 8]), Prompt("qa", [9])]


def noisy(tokens: abc.Sequence[int]) -> NDArray[np.float32]:
    """A model that agrees with the verifier's in part."""
    return random_logits(NUM_VOCAB)(tokens) + 0.6 * random_logits(NUM_VOCAB, seed=5)(tokens)


def answered(num_slots: int = 2, end_tokens: frozenset[int] = frozenset()) -> list[list[Answer]]:
    return answer(FakeVerifier(NUM_VOCAB, 64, num_slots), PROMPTS, PARAMS, end_tokens, lambda done: None)


# By hand


def test_a_few_answers_by_hand() -> None:
    matches = Matches(((True, True, False, True), (False,), (True, True)))
    assert matches.num_positions == 7
    assert matches.agreement == 5 / 7
    assert [matches.reaching(depth) for depth in (1, 2, 3, 4, 5)] == [5 / 7, 2 / 4, 0.0, 0.0, 0.0]
    # length 2: [TTF] [T] | [F] | [T, own]: the last token of an answer needs no draft
    assert matches.rounds(2) == Rounds(7, 3, {2: 1, 0: 2, 1: 1})
    assert matches.rounds(2).acceptance == 1.0
    assert matches.rounds(2).num_rounds == 4
    assert matches.rounds(1).lengths == {1: 3, 0: 2}


@pytest.mark.parametrize("matches", [Matches(()), Matches(((),)), Matches(((False,),))])
def test_nothing_foreseen_is_plain_decoding(matches: Matches) -> None:
    assert (matches.agreement, matches.reaching(1), matches.rounds(3).acceptance) == (0.0, 0.0, 0.0)
    assert matches.rounds(3).speedup(Costs()) == 1.0


def test_the_speedup_is_tokens_over_what_the_rounds_take() -> None:
    curves = Curves((1, 4), (0,), ((1.0, 2.5),), (1,), (0.25,))
    rounds = Rounds(num_tokens=12, num_accepted=8, lengths={3: 2, 0: 2})
    assert rounds.speedup(Costs(curves)) == 12 / (2 * (2.5 + 3 * 0.25) + 2 * 1.0)


def test_a_width_measured_at_a_busy_moment_promises_nothing() -> None:
    curves = Curves((1, 2), (0,), ((50.0, 1.0),), (1,), (0.5,))
    assert Rounds(2, 1, {1: 1}).speedup(Costs(curves)) == 2 / 1.5


# By brute force


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.95, 1.0])
def test_random_answers_as_counted_one_by_one(share: float) -> None:
    source = random.Random(share)
    matches = Matches(tuple(tuple(source.random() < share for _ in range(source.randrange(40))) for _ in range(50)))
    for depth in LENGTHS:
        places = [one[i : i + depth] for one in matches.answers for i in range(len(one)) if i + depth <= len(one)]
        assert matches.reaching(depth) == pytest.approx(sum(map(all, places)) / len(places))
        assert matches.rounds(depth).num_tokens == matches.num_positions
        rounds = matches.rounds(depth)
        assert rounds.num_accepted + rounds.num_rounds - rounds.num_tokens in range(len(matches.answers) + 1)
    assert Matches.of_all([matches, matches]).agreement == matches.agreement
    assert matches.reaching(1) == pytest.approx(matches.agreement)


# As the engine decodes


@pytest.mark.parametrize("length", [1, 2, 3, 8])
def test_the_engine_accepts_what_was_predicted(length: int) -> None:
    for number, group in enumerate(answered()):
        for params, one in zip(PARAMS, group, strict=True):
            own = replace(params, seed=7 + number)
            sequence = Sequence(list(PROMPTS[number].tokens), own, 64)
            found = list(sequential(sequence, FakeDrafter(logits=noisy), FakeVerifier(num_ctx=64), Fixed(length)))
            predicted = Matches((foreseen(FakeDrafter(logits=noisy), one),)).rounds(length)
            assert sequence.tokens == one.tokens
            assert sum(round_.accepted for round_ in found) == predicted.num_accepted
            assert len(found) == predicted.num_rounds
            assert {n: [r.drafted for r in found].count(n) for n in predicted.lengths} == predicted.lengths


def test_some_but_not_all_is_foreseen_by_another_model() -> None:
    matches = Matches(tuple(foreseen(FakeDrafter(logits=noisy), one) for group in answered() for one in group))
    assert 0.2 < matches.agreement < 0.9


def test_the_model_itself_foresees_all() -> None:
    assert all(all(foreseen(FakeDrafter(), one)) for group in answered() for one in group)


# The answers


@pytest.mark.parametrize("num_slots", [1, 2, 8])
def test_answers_do_not_depend_on_who_is_answered_beside(num_slots: int) -> None:
    groups = answered(num_slots)
    assert groups == answered(1)
    assert [[one.category for one in group] for group in groups] == [["qa"] * 2, ["rag"] * 2, ["qa"] * 2]
    assert all(one.tokens[: one.num_prompt] == PROMPTS[i].tokens for i, group in enumerate(groups) for one in group)
    assert all(len(one.tokens) - one.num_prompt == MAX_TOKENS for group in groups for one in group)
    assert [group[1].params.seed for group in groups] == [7, 8, 9]
    assert groups[0][0].tokens != groups[0][1].tokens


def test_the_same_prompts_are_read_once_for_all_temperatures() -> None:
    verifier = FakeVerifier(NUM_VOCAB, 64, 3)
    answer(verifier, PROMPTS, PARAMS, frozenset(), lambda done: None)
    firsts = [{r.slot: len(r.tokens) for r in batch} for batch in verifier.requests if len(batch) == 3]
    again = [sizes for sizes in firsts if sorted(sizes.values()) == [1, 3, 5]]
    assert len(again) == 2
    assert again[0] == again[1]  # each prompt in the slot that held it


def test_an_answer_ends_with_an_end_token() -> None:
    ends = frozenset(range(0, NUM_VOCAB, 2))
    for group in answered(end_tokens=ends):
        for one in group:
            said = one.tokens[one.num_prompt :]
            assert len(said) == MAX_TOKENS or said[-1] in ends
            assert not ends & set(said[:-1])


def test_progress_comes_to_all() -> None:
    told: list[float] = []
    answer(FakeVerifier(NUM_VOCAB, 64, 2), PROMPTS, PARAMS, frozenset(), told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert len(told) == 4


def test_a_verifier_that_fails_is_not_waited_for() -> None:
    class Broken(FakeVerifier):
        def score(self, *_: object, **__: object) -> list[Rows]:
            raise BackendError("broken")

    with pytest.raises(BackendError, match="broken"):
        answer(Broken(NUM_VOCAB, 64, 2), PROMPTS, PARAMS, frozenset(), lambda done: None)
