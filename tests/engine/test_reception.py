"""How drafts are received, found out before anybody asks: over sides that agree, disagree, fail, or are slow."""

from __future__ import annotations

import collections.abc as abc
import json

import pytest

from edgespec.core.sequence import Cancelled, Draft, never
from edgespec.core.track import Received, Track
from edgespec.drafters.base import DraftRequest
from edgespec.engine.reception import LENGTH, MAX_CONFIDENCE, MIN_JUDGED, acceptance, receive
from edgespec.errors import BackendError
from edgespec.verifiers.base import Interrupted
from tests.engine.timed import DraftOwner, ScriptedClock, TimedDrafter, TimedVerifier
from tests.fakes import FakeDrafter, FakeVerifier, random_logits

PROMPTS = ([1, 2, 3], [4, 5])


@pytest.fixture
def owner() -> abc.Iterator[DraftOwner]:
    owner = DraftOwner()
    yield owner
    owner.stop(wait=True)


class SureDrafter(FakeDrafter):
    def propose(self, requests: abc.Sequence[DraftRequest], cancelled: Cancelled = never) -> list[Draft]:
        drafts = super().propose(requests, cancelled)
        return [Draft(d.start, d.tokens, None, tuple(float("inf") for _ in d.tokens)) for d in drafts]


def test_one_that_agrees_is_accepted_always_and_one_that_does_not_hardly_ever(owner: DraftOwner) -> None:
    alike = receive(FakeVerifier(), FakeDrafter(), owner.submit, PROMPTS, budget_s=30.0, num_tokens=20)
    assert acceptance(alike) == 1.0
    other = FakeDrafter(logits=random_logits(32, seed=1))
    unlike = receive(FakeVerifier(), other, owner.submit, PROMPTS, budget_s=30.0, num_tokens=20)
    found = acceptance(unlike)
    assert found is not None
    assert found < 0.3
    assert all(one.num_judged == one.num_accepted + 1 for one in unlike if one.num_accepted < LENGTH - 1)


def test_answers_end_where_they_are_told_to(owner: DraftOwner) -> None:
    verifier = FakeVerifier()
    receive(verifier, FakeDrafter(), owner.submit, PROMPTS, budget_s=30.0, num_tokens=12)
    lengths = [len(request.tokens) for (request,) in verifier.requests]
    assert max(lengths) <= len(PROMPTS[0]) + 12
    ends = frozenset(range(32))
    assert receive(FakeVerifier(), FakeDrafter(), owner.submit, PROMPTS, budget_s=30.0, num_tokens=12, end_tokens=ends)


def test_a_prompt_that_leaves_no_room_is_left_out(owner: DraftOwner) -> None:
    verifier = FakeVerifier(num_ctx=16)
    assert receive(verifier, FakeDrafter(), owner.submit, [[1] * 10], budget_s=30.0, num_tokens=8) == ()
    assert verifier.requests == []


def test_the_budget_ends_it_and_reading_the_prompt_does_not_count(owner: DraftOwner) -> None:
    clock = ScriptedClock()
    verifier = TimedVerifier(clock, lambda width, _: 0.1, prefill_s=5.0)
    drafter = TimedDrafter(clock, lambda _: 0.01)
    received = receive(
        verifier, drafter, owner.submit, [[1, 2, 3, 4]], budget_s=0.55, num_tokens=100, clock=clock
    )  # one round, then whatever fits
    assert 2 <= len(verifier.timed) <= 7
    assert received


def test_cancelled_and_broken_sides_end_it(owner: DraftOwner) -> None:
    asked = iter([False] * 5 + [True] * 1000)
    verifier = FakeVerifier()
    with pytest.raises(Interrupted):
        receive(
            verifier,
            FakeDrafter(),
            owner.submit,
            PROMPTS,
            budget_s=30.0,
            num_tokens=50,
            cancelled=lambda: next(asked),
        )
    assert len(verifier.requests) <= 2

    class Broken(FakeDrafter):
        def propose(self, requests: abc.Sequence[DraftRequest], cancelled: Cancelled = never) -> list[Draft]:
            raise BackendError("gone")

    with pytest.raises(BackendError, match="gone"):
        receive(FakeVerifier(), Broken(), owner.submit, PROMPTS, budget_s=9.0, num_tokens=9)


def test_a_token_without_a_rival_can_be_kept_in_a_file(owner: DraftOwner) -> None:
    received = receive(FakeVerifier(), SureDrafter(), owner.submit, PROMPTS, budget_s=9.0, num_tokens=9)
    assert {value for one in received for value in one.confidences} == {MAX_CONFIDENCE}
    json.dumps(received, allow_nan=False)


def test_too_few_tokens_are_no_rate() -> None:
    assert acceptance([Received(4, 4)] * (MIN_JUDGED // 4 - 1)) is None
    assert acceptance([Received(3, 4)] * (MIN_JUDGED // 4)) == 0.75


def test_a_track_that_starts_from_them_expects_the_like_and_has_not_begun() -> None:
    good, bad = (Track(received=[Received(n, min(n + 1, 4), (3.0, 1.0, 2.5, 0.4))] * 20) for n in (4, 0))
    fresh = Track()
    assert good.outlook(4).accepted[0, 3] > 0.9 > fresh.outlook(4).accepted[0, 3] > bad.outlook(4).accepted[0, 1]
    for track in (good, bad):
        assert (track.num_rounds, track.num_tokens, track.quiet, track.last) == (0, 0, fresh.quiet, (0, 0))
        assert track.says is True
    assert Track(good).outlook(4).accepted[0, 3] > 0.9
