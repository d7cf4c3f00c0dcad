"""Prompt lookup where the text repeats itself, the model elsewhere; and what is learned of both."""

from __future__ import annotations

import collections.abc as abc
import math
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.core.costs import Costs, Curves
from edgespec.core.policy import Fixed
from edgespec.core.sequence import RULES, Cancelled, Candidate, Draft, Round, Rule, SamplingParams, never
from edgespec.core.track import EDGES
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.combined import CombinedDrafter
from edgespec.drafters.lookup import LookupDrafter
from edgespec.drafters.onnx import OnnxDrafter
from edgespec.errors import BackendError, ClosedError, ParameterError
from tests.drafters.conftest import TINY
from tests.drafters.test_contract import (
    GREEDY,
    LONG,
    NUM_CTX,
    PROMPT,
    Open,
    ask,
    same,
    test_callers_lists_stay_as_they_were,
    test_cancelled_drafts_are_starts_of_the_draft,
    test_close_twice_and_use_after_close,
    test_confidences_come_for_all_tokens_or_none,
    test_nothing_asked_is_nothing_drafted,
    test_slots_outside_the_bounds_are_refused,
    test_tuples_are_token_lists_too,
)
from tests.engine.running import overlapped, sequential
from tests.engine.test_loops import SETTINGS, run_plain, sequence
from tests.fakes import FakeDrafter, FakeVerifier

__all__ = [  # of the contract: what holds for a drafter that learns
    "test_callers_lists_stay_as_they_were",
    "test_cancelled_drafts_are_starts_of_the_draft",
    "test_close_twice_and_use_after_close",
    "test_confidences_come_for_all_tokens_or_none",
    "test_nothing_asked_is_nothing_drafted",
    "test_slots_outside_the_bounds_are_refused",
    "test_tuples_are_token_lists_too",
]

PHRASE = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
REPEATING = [*PHRASE, 3, *PHRASE[:8]]  # 19 comes next, and a match of eight tokens says so
FRESH = [1, 2, 3, 4, 5]
REJECTION = SamplingParams(seed=11, rule="rejection")


@pytest.fixture(params=["fake", "own"])
def open_drafter(request: pytest.FixtureRequest) -> abc.Iterator[Open]:
    opened: list[Drafter] = []

    def make(num_slots: int = 1) -> Drafter:
        opened.append(CombinedDrafter(_model(request, num_slots), LookupDrafter(num_slots)))
        return opened[-1]

    yield make
    for drafter in opened:
        drafter.close()


def _model(request: pytest.FixtureRequest, num_slots: int) -> Drafter:
    if request.param == "fake":
        return FakeDrafter(TINY.num_vocab, num_slots)
    path: Path = request.getfixturevalue("own_folder")
    return OnnxDrafter.open(path, num_ctx=NUM_CTX, num_threads=1, num_slots=num_slots, num_vocab=300)


class Saying:
    """A model that always proposes the same token, surely or not so surely, and notes what it was asked."""

    name = "saying"

    def __init__(self, token: int = 7, confidence: float = 2.5, num_slots: int = 1) -> None:
        self.token, self.confidence, self.num_slots = token, confidence, num_slots
        self.requests: list[DraftRequest] = []

    def propose(self, requests: abc.Sequence[DraftRequest], cancelled: Cancelled = never) -> list[Draft]:
        self.requests += requests
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft:
        start, num = len(request.tokens), request.num_draft
        if self.confidence < request.min_confidence:
            return Draft(start, held_back=Candidate(self.token, self.confidence))
        return Draft(start, (self.token,) * num, None, (self.confidence,) * num)

    def close(self) -> None: ...


def combined(model: Drafter, num_slots: int = 1) -> CombinedDrafter:
    return CombinedDrafter(model, LookupDrafter(num_slots))


# Who drafts


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1), REJECTION])
def test_a_long_match_is_copied_and_the_model_is_not_made_to_read(params: SamplingParams) -> None:
    model = Saying()
    draft = ask(combined(model), REPEATING, 4, params)
    assert (draft.start, draft.tokens) == (len(REPEATING), (19, 20, 3, 11))
    assert draft.is_free
    assert draft.distributions is None
    assert model.requests == []


@pytest.mark.parametrize("tokens", [FRESH, [5, 6, 1, 2, 5, 6]])
def test_without_a_match_or_with_a_short_one_the_model_drafts(tokens: list[int]) -> None:
    assert ask(combined(Saying()), tokens, 4) == ask(Saying(), tokens, 4)


def test_the_models_distributions_come_along() -> None:
    draft = ask(combined(FakeDrafter(64)), FRESH, 3, REJECTION)
    assert same(draft, ask(FakeDrafter(64), FRESH, 3, REJECTION))
    assert draft.distributions is not None


def test_confidences_are_in_the_models_unit_and_grow_with_the_match() -> None:
    longer = ask(combined(Saying()), REPEATING, 8)
    shorter = ask(combined(Saying()), REPEATING[3:], 8)  # five tokens match
    assert EDGES[-4] <= shorter.confidences[0] < longer.confidences[0] < 2 * EDGES[-1]
    assert list(longer.confidences) == sorted(set(longer.confidences))


def test_the_model_is_asked_where_lookup_is_not_sure_enough_and_may_hold_back_too() -> None:
    drafter = combined(Saying(confidence=9.0))
    (draft,) = drafter.propose([DraftRequest(0, REPEATING, 2, 3, GREEDY, frozenset(), 8.5)])
    assert draft.tokens == (7, 7, 7)
    drafter = combined(Saying(confidence=8.0))
    (draft,) = drafter.propose([DraftRequest(0, REPEATING, 2, 3, GREEDY, frozenset(), 8.5)])
    assert draft == Draft(len(REPEATING), held_back=Candidate(7, 8.0))


def test_a_copy_ends_with_the_text() -> None:
    (draft,) = combined(Saying()).propose([DraftRequest(0, REPEATING, 2, 8, GREEDY, frozenset({20}))])
    assert draft.tokens == (19, 20)


def test_several_slots_are_drafted_by_whoever_suits_each() -> None:
    model = Saying(num_slots=4)
    drafter = CombinedDrafter(model, LookupDrafter(3))
    assert drafter.num_slots == 3
    lists = {2: FRESH, 0: REPEATING, 1: FRESH[::-1]}
    drafts = drafter.propose([DraftRequest(slot, lists[slot], 2, 2, GREEDY) for slot in lists])
    assert [draft.tokens for draft in drafts] == [(7, 7), (19, 20), (7, 7)]
    assert [request.slot for request in model.requests] == [2, 1]
    with pytest.raises(ParameterError, match="allowed: different ones from 0 to 2"):
        ask(drafter, FRESH, slot=3)
    with pytest.raises(ParameterError, match="allowed: different ones"):
        drafter.propose([DraftRequest(1, FRESH, 2, 2, GREEDY)] * 2)
    with pytest.raises(ParameterError, match="an empty list"):
        ask(drafter, [])


@pytest.mark.parametrize("history", [[LONG], [REPEATING, LONG[:140] + PROMPT, [9]], [PROMPT, PROMPT[:3]]])
def test_the_models_cache_follows_texts_that_lookup_went_on_with(open_drafter: Open, history: list[list[int]]) -> None:
    used = open_drafter(1)
    for tokens in history:
        ask(used, tokens)
    assert same(ask(used, FRESH), ask(open_drafter(1), FRESH))


# What it learns


def commit(
    drafter: Drafter, tokens: list[int], after: abc.Callable[[list[int]], int], num_rounds: int
) -> list[tuple[bool, int]]:
    """Rounds of sequential decoding of a text: whether each draft was free, and how many tokens of it were right.
    ``tokens`` grow."""
    found = []
    for _ in range(num_rounds):
        draft, start = ask(drafter, list(tokens), 4), len(tokens)
        for drafted in (*draft.tokens, None):
            tokens.append(after(tokens))
            if tokens[-1] != drafted:
                break
        found.append((draft.is_free, len(tokens) - start - 1))
    return found


def periodic(tokens: abc.Sequence[int]) -> int:
    return PHRASE[len(tokens) % 10]


def test_lookup_that_is_wrong_leaves_it_to_the_model_and_comes_back_when_it_is_right() -> None:
    def misleading(tokens: abc.Sequence[int]) -> int:  # six tokens come again and again, then one never seen before
        return PHRASE[len(tokens) % 7] if len(tokens) % 7 < 6 else 1000 + len(tokens)

    class Knowing(Saying):
        after: abc.Callable[[abc.Sequence[int]], int] = staticmethod(misleading)

        def _propose(self, request: DraftRequest) -> Draft:
            tokens = list(request.tokens)
            for _ in range(request.num_draft):
                tokens.append(self.after(tokens))
            return Draft(len(request.tokens), tuple(tokens[len(request.tokens) :]))

    drafter, tokens = combined(Knowing()), [11, 12, 13, 14, 15, 16, 1006]
    rounds = commit(drafter, tokens, misleading, 80)
    assert (True, 1) in rounds[:20]
    assert not {(True, 0), (True, 1)} & {*rounds[-20:]}
    Knowing.after = staticmethod(periodic)
    commit(drafter, tokens, periodic, 40)
    assert commit(drafter, tokens, periodic, 20) == [(True, 4)] * 20


def test_a_copy_that_is_always_right_stays() -> None:
    model = Saying()
    drafter, tokens = combined(model), [*PHRASE, *PHRASE]
    assert commit(drafter, tokens, periodic, 50) == [(True, 4)] * 50
    assert model.requests == []


def test_a_look_ahead_is_no_acceptance() -> None:
    """Drafts that a look-ahead goes on from before they are refused count as refused."""
    drafter, number, tokens = combined(Saying()), iter(range(1000, 9000)), list(REPEATING)
    for _ in range(40):
        draft = ask(drafter, tokens, 4)
        if not draft.is_free:
            break
        ahead = [*tokens, *draft.tokens]
        guess = ask(drafter, ahead, 1)
        ask(drafter, [*ahead, *guess.tokens], 4)
        tokens = [*tokens, next(number), *PHRASE[:8]]
    else:
        pytest.fail("lookup was refused forty times and still drafts")


def test_a_new_text_starts_from_what_all_texts_were_like() -> None:
    drafter, number, tokens = combined(Saying()), iter(range(1000, 9000)), list(REPEATING)
    commit(drafter, [*PHRASE, *PHRASE], periodic, 100)
    while ask(drafter, tokens, 4).is_free:
        tokens = [*tokens, next(number), *PHRASE[:8]]
    assert ask(drafter, [9, *REPEATING]).is_free


# In the loops


@pytest.mark.parametrize("loop", [sequential, overlapped])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_tokens_are_the_verifiers(loop: abc.Callable[..., abc.Iterator[Round]], rule: Rule, name: str) -> None:
    one = sequence(replace(SETTINGS[name], rule=rule))
    rounds = list(loop(one, combined(FakeDrafter()), FakeVerifier(), Fixed(4)))
    assert one.num_output == 40
    if rule == "coupled" or SETTINGS[name].greedy:
        assert one.tokens == run_plain(SETTINGS[name]).tokens
    assert sum(len(round_.tokens) for round_ in rounds) == 40


def test_a_free_draft_says_nothing_about_the_cost_of_drafting() -> None:
    costs = Costs(Curves((1, 8), (0,), ((0.01, 0.02),), (1,), (0.001,)))
    for start in range(10, 90, 4):
        draft = Draft(start, (1, 2, 3), is_free=True)
        costs.observe([Round((1, 2, 3, 4), draft, 3, draft_s=1e-6, verify_s=0.014, width=4)], start)
    assert costs.draft_s(1) == pytest.approx(0.001)


def test_a_model_that_fails_leaves_it_to_lookup_and_says_why_once() -> None:
    class Failing(Saying):
        num_asked, closed = 0, False

        def propose(self, requests: abc.Sequence[DraftRequest], cancelled: Cancelled = never) -> list[Draft]:
            self.num_asked += 1
            raise BackendError("out of memory")

        def close(self) -> None:
            self.closed = True

    model, lookup, reasons = Failing(), LookupDrafter(), list[str]()
    drafter = CombinedDrafter(model, lookup, reasons.append)
    assert drafter.name == "lookup + saying"
    assert ask(drafter, REPEATING).is_free
    for _ in range(2):
        assert ask(drafter, FRESH) == Draft(len(FRESH))
    assert ask(drafter, REPEATING).is_free
    assert (reasons, model.num_asked) == (["out of memory"], 1)
    drafter.close()
    assert model.closed
    with pytest.raises(ClosedError):
        ask(lookup, FRESH)


def test_a_text_that_is_only_to_be_read_reaches_the_model() -> None:
    model = Saying()
    found = combined(model).propose([DraftRequest(0, REPEATING, 1, 1, GREEDY, frozenset(), math.inf)])
    assert [request.tokens for request in model.requests] == [REPEATING]
    assert not found[0].tokens
