"""What every drafter owes its callers."""

from __future__ import annotations

import collections.abc as abc
from pathlib import Path

import numpy as np
import pytest

from edgespec.core.sequence import Draft, SamplingParams
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.lookup import LookupDrafter
from edgespec.drafters.onnx import OnnxDrafter
from edgespec.errors import ClosedError, ParameterError
from tests.drafters.conftest import TINY
from tests.fakes import FakeDrafter

NUM_CTX = 200
GREEDY = SamplingParams(temperature=0.0)
PARAMS = {
    "greedy": GREEDY,
    "greedy penalised": SamplingParams(temperature=0.0, repeat_penalty=1.5, frequency_penalty=0.5),
    "coupled": SamplingParams(seed=11),
    "rejection": SamplingParams(seed=11, rule="rejection", presence_penalty=0.3),
    "unfiltered": SamplingParams(seed=3, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, rule="rejection"),
}
LONG = np.random.default_rng(0).integers(3, 270, 160).tolist()
PROMPT = [1, 50, 60, 70, 80, 50, 60]

Open = abc.Callable[[int], Drafter]


@pytest.fixture(params=["fake", "lookup", "own", "trimmed", "usual"])
def open_drafter(request: pytest.FixtureRequest) -> abc.Iterator[Open]:
    """Makes drafters with a given number of slots, and closes them in the end."""
    opened: list[Drafter] = []

    def make(num_slots: int = 1) -> Drafter:
        opened.append(_make(request, num_slots))
        return opened[-1]

    yield make
    for drafter in opened:
        drafter.close()


def _make(request: pytest.FixtureRequest, num_slots: int) -> Drafter:
    if request.param == "fake":
        return FakeDrafter(TINY.num_vocab, num_slots)
    if request.param == "lookup":
        return LookupDrafter(num_slots)
    path: Path = request.getfixturevalue(f"{request.param}_folder")
    return OnnxDrafter.open(path, num_ctx=NUM_CTX, num_threads=1, num_slots=num_slots, num_vocab=300)


def ask(
    drafter: Drafter,
    tokens: abc.Sequence[int],
    num_draft: int = 6,
    params: SamplingParams = GREEDY,
    slot: int = 0,
) -> Draft:
    (draft,) = drafter.propose([DraftRequest(slot, tokens, 2, num_draft, params)])
    return draft


def same(left: Draft, right: Draft) -> bool:
    """Equal tokens, drawn from equal distributions but for rounding."""
    if left.tokens != right.tokens or left.start != right.start:
        return False
    if len(left.confidences) != len(right.confidences) or not np.allclose(
        left.confidences, right.confidences, atol=1e-3
    ):
        return False
    pairs = zip(left.distributions or (), right.distributions or (), strict=True)
    return all(np.array_equal(a.ids, b.ids) and np.allclose(a.probs, b.probs, atol=1e-4) for a, b in pairs)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_a_draft_does_not_depend_on_what_was_asked_before(open_drafter: Open, params: SamplingParams) -> None:
    drafter = open_drafter(1)
    tokens = list(PROMPT)
    first = ask(drafter, tokens, params=params)
    histories = [
        tokens,  # the same again
        [*tokens, *first.tokens],  # all accepted
        [*tokens, *first.tokens, 5],  # and a bonus token
        [*tokens, *first.tokens[:2], 9],  # two accepted, then another token
        tokens[:3],  # cut
        [1, 51, *tokens[2:]],  # another token near the start
        LONG,
        LONG[:140] + PROMPT,
        [*LONG[:140], *PROMPT, 50],
        PROMPT,
    ]
    for history in histories:
        assert same(ask(drafter, history, params=params), ask(open_drafter(1), history, params=params)), history


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_several_at_once_draft_what_each_drafts_alone(open_drafter: Open, params: SamplingParams) -> None:
    together = open_drafter(4)
    for round_ in range(4):  # prefixes grow unevenly, slots come and go, in changing order
        lists = {0: PROMPT[: 3 + round_], 1: LONG[: 20 * round_ + 5], 3: [2, *PROMPT, *LONG[: round_ // 2]]}
        if round_ == 2:
            del lists[1]
        order = sorted(lists, reverse=bool(round_ % 2))
        requests = [DraftRequest(slot, lists[slot], 2, 2 + slot + round_, params) for slot in order]
        drafts = together.propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            assert same(draft, ask(open_drafter(1), request.tokens, request.num_draft, params))


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_a_shorter_draft_is_the_start_of_a_longer_one(open_drafter: Open, params: SamplingParams) -> None:
    drafter = open_drafter(1)
    full = ask(drafter, PROMPT, 6, params).tokens
    assert full
    for num_draft in (0, 1, 3):
        assert ask(drafter, PROMPT, num_draft, params).tokens == full[:num_draft]


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_drafting_on_from_a_draft_draws_the_same_tokens(open_drafter: Open, params: SamplingParams) -> None:
    full = ask(open_drafter(1), PROMPT, 6, params).tokens
    drafter = open_drafter(1)
    grown = list(PROMPT)
    while len(grown) < len(PROMPT) + len(full):
        grown += ask(drafter, grown, 2, params).tokens[:1]
    assert tuple(grown[len(PROMPT) :]) == full


@pytest.mark.parametrize("num_calls", range(6))
def test_cancelled_drafts_are_starts_of_the_draft(open_drafter: Open, num_calls: int) -> None:
    drafter, calls = open_drafter(2), 0

    def cancelled() -> bool:
        nonlocal calls
        calls += 1
        return calls > num_calls

    requests = [DraftRequest(0, PROMPT, 2, 6, GREEDY), DraftRequest(1, LONG + PROMPT, 2, 6, GREEDY)]
    drafts = drafter.propose(requests, cancelled)
    full = [ask(open_drafter(1), request.tokens) for request in requests]
    for draft, whole in zip(drafts, full, strict=True):
        assert draft.start == whole.start
        assert draft.tokens == whole.tokens[: len(draft.tokens)]
    if num_calls == 0:
        assert [draft.tokens for draft in drafts] == [(), ()]
    assert all(map(same, drafter.propose(requests), full))


def test_nothing_asked_is_nothing_drafted(open_drafter: Open) -> None:
    drafter = open_drafter(1)
    assert drafter.propose([]) == []
    assert ask(drafter, PROMPT, 0) == Draft(len(PROMPT))
    assert ask(drafter, [7], 0) == Draft(1)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_distributions_come_with_the_rule_that_needs_them(open_drafter: Open, params: SamplingParams) -> None:
    drafter = open_drafter(1)
    draft = ask(drafter, PROMPT, 5, params)
    if drafter.name == "lookup" or params.greedy or params.rule == "coupled":
        assert draft.distributions is None
        return
    assert draft.distributions is not None
    assert len(draft.distributions) == len(draft.tokens) == 5
    for token, dist in zip(draft.tokens, draft.distributions, strict=True):
        assert token in dist.ids
        assert (np.diff(dist.ids) > 0).all()
        assert dist.probs.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("min_confidence", [0.0, 0.5, 3.0, 1000.0])
def test_confidences_come_for_all_tokens_or_none(
    open_drafter: Open, params: SamplingParams, min_confidence: float
) -> None:
    drafter = open_drafter(1)
    whole = ask(drafter, PROMPT, 6, params)
    drawn = params.rule == "rejection" and not params.greedy
    (draft,) = drafter.propose([DraftRequest(0, PROMPT, 2, 6, params, frozenset(), 0.0 if drawn else min_confidence)])
    assert draft.tokens == whole.tokens[: len(draft.tokens)]
    assert len(draft.confidences) in (0, len(draft.tokens))
    if draft.held_back is not None:
        assert draft.held_back.token == whole.tokens[len(draft.tokens)]
        assert draft.held_back.confidence < min_confidence
    if draft.confidences:
        assert min(draft.confidences) >= (0.0 if drawn else min_confidence)


def test_tuples_are_token_lists_too(open_drafter: Open) -> None:
    drafter = open_drafter(1)
    first = ask(drafter, tuple(PROMPT))
    assert same(first, ask(drafter, PROMPT))
    assert same(first, ask(drafter, tuple(PROMPT)))


def test_callers_lists_stay_as_they_were(open_drafter: Open) -> None:
    tokens = list(PROMPT)
    ask(open_drafter(1), tokens)
    assert tokens == PROMPT


@pytest.mark.parametrize("slot", [-1, 2])
def test_slots_outside_the_bounds_are_refused(open_drafter: Open, slot: int) -> None:
    with pytest.raises(ParameterError, match="allowed"):
        ask(open_drafter(2), PROMPT, slot=slot)


def test_close_twice_and_use_after_close(open_drafter: Open) -> None:
    drafter = open_drafter(1)
    ask(drafter, PROMPT)
    drafter.close()
    drafter.close()
    with pytest.raises(ClosedError):
        ask(drafter, PROMPT)
