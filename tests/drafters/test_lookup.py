from __future__ import annotations

import random

import pytest

from edgespec.core.sequence import Candidate, Draft, SamplingParams
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.lookup import LookupDrafter, SuffixIndex
from edgespec.errors import ClosedError, ParameterError

GREEDY = SamplingParams(temperature=0.0)


def ask(drafter: LookupDrafter, tokens: list[int], num_draft: int = 4, slot: int = 0) -> tuple[int, ...]:
    (draft,) = drafter.propose([DraftRequest(slot, tokens, 1, num_draft, GREEDY)])
    assert draft.start == len(tokens)
    assert draft.distributions is None
    return draft.tokens


def naive(tokens: list[int], num_draft: int, min_ngram: int = 2, max_ngram: int = 8) -> tuple[int, ...]:
    """Scan for the longest suffix, longest first and latest first."""
    for size in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                known = list(tokens)
                for i in range(num_draft):
                    known.append(known[end + i])
                return tuple(known[len(tokens) :])
    return ()


def test_copies_what_followed_the_match() -> None:
    assert ask(LookupDrafter(), [1, 2, 3, 4, 5, 6, 7, 2, 3]) == (4, 5, 6, 7)


def test_the_longest_match_wins_over_a_later_one() -> None:
    assert ask(LookupDrafter(), [9, 1, 2, 3, 40, 8, 2, 3, 50, 9, 1, 2, 3], 1) == (40,)


def test_the_latest_of_equal_matches_wins() -> None:
    assert ask(LookupDrafter(), [1, 2, 30, 1, 2, 40, 1, 2], 1) == (40,)


def test_a_match_longer_than_max_ngram_counts_as_max_ngram() -> None:
    tokens = [9, 1, 2, 30, 8, 1, 2, 40, 9, 1, 2]
    assert ask(LookupDrafter(max_ngram=2), tokens, 1) == (40,)
    assert ask(LookupDrafter(max_ngram=3), tokens, 1) == (30,)


def test_a_match_that_reaches_the_end_repeats_periodically() -> None:
    assert ask(LookupDrafter(), [5, 1, 2, 3, 1, 2, 3, 1, 2], 7) == (3, 1, 2, 3, 1, 2, 3)


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4], [1, 2, 3, 9, 2]])
def test_no_match_is_no_draft(tokens: list[int]) -> None:
    assert ask(LookupDrafter(), tokens) == ()


def test_a_single_token_matches_only_when_allowed() -> None:
    assert ask(LookupDrafter(min_ngram=1), [1, 2, 3, 9, 2], 2) == (3, 9)


@pytest.mark.parametrize("min_ngram", [1, 2, 3])
def test_equals_a_scan_whatever_was_asked_before(min_ngram: int) -> None:
    random_ = random.Random(min_ngram)
    drafter, tokens, num_drafts = LookupDrafter(min_ngram=min_ngram), [0], 0
    for _ in range(1500):
        if random_.random() < 0.2:
            tokens = tokens[: random_.randint(1, len(tokens))]
        tokens = tokens + random_.choices(range(4), k=random_.randint(1, 3))
        if len(tokens) > 200:
            tokens = tokens[-20:]
        expected = naive(tokens, 5, min_ngram)
        num_drafts += bool(expected)
        assert ask(drafter, tokens, 5) == expected
    assert num_drafts > 200


def test_only_new_tokens_are_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[int] = []
    add = SuffixIndex._add
    monkeypatch.setattr(SuffixIndex, "_add", lambda self, token: (added.append(token), add(self, token)))
    drafter, tokens = LookupDrafter(), list(range(500))
    ask(drafter, tokens)
    added.clear()
    ask(drafter, [*tokens[:-2], 7, 8, 9])
    assert added == [7, 8, 9]


def test_dropped_tokens_leave_nothing_behind() -> None:
    index = SuffixIndex(2, 8)
    index.sync([1, 2, 3, 1, 2, 4])
    index.sync([1, 2, 3])
    assert index._last == {(1, 2): 2, (2, 3): 3}
    index.sync([])
    assert index._last == {}


def test_slots_do_not_see_each_other() -> None:
    drafter = LookupDrafter(num_slots=2)
    assert ask(drafter, [1, 2, 3, 1, 2], 1, slot=0) == (3,)
    assert ask(drafter, [7, 1, 2], 1, slot=1) == ()


def test_refuses_what_is_out_of_bounds() -> None:
    with pytest.raises(ParameterError, match="slot: got 1; allowed: 0 to 0"):
        ask(LookupDrafter(), [1, 2], slot=1)
    with pytest.raises(ParameterError, match="num_slots: got 0"):
        LookupDrafter(num_slots=0)
    with pytest.raises(ParameterError, match="got 4 and 3"):
        LookupDrafter(min_ngram=4, max_ngram=3)


def test_tuples_are_token_lists_too() -> None:
    drafter = LookupDrafter()
    request = DraftRequest(0, (1, 2, 3, 1, 2), 1, 1, GREEDY)
    assert drafter.propose([request]) == drafter.propose([request]) == [Draft(5, (3,), None, (2.0,))]


def test_close_twice_and_use_after_close() -> None:
    drafter = LookupDrafter()
    drafter.close()
    drafter.close()
    with pytest.raises(ClosedError):
        ask(drafter, [1, 2, 1, 2])


@pytest.mark.parametrize("size", range(2, 12))
def test_it_is_as_sure_as_many_tokens_matched(size: int) -> None:
    tokens = [50, *range(size), 40, 41, 60, *range(size)]
    (draft,) = LookupDrafter().propose([DraftRequest(0, tokens, 1, 2, GREEDY)])
    assert draft.tokens == (40, 41)
    assert draft.confidences == (min(size, 8),) * 2
    assert draft.held_back is None


def test_a_match_that_is_too_short_is_held_back() -> None:
    tokens = [50, 1, 2, 3, 40, 41, 60, 1, 2, 3]
    for wanted, drafts in ((2.5, True), (3.0, True), (3.5, False), (100.0, False)):
        (draft,) = LookupDrafter().propose([DraftRequest(0, tokens, 1, 2, GREEDY, frozenset(), wanted)])
        assert bool(draft.tokens) is drafts
        assert draft.held_back == (None if drafts else Candidate(40, 3.0))
    (nothing,) = LookupDrafter().propose([DraftRequest(0, [1, 2, 3], 1, 2, GREEDY, frozenset(), 4.0)])
    assert nothing == Draft(3)
