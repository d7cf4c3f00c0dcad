"""The overlapped loop over fakes: plain's tokens whatever either side's speed, and what becomes of a look-ahead."""

from __future__ import annotations

import collections.abc as abc
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from edgespec.core.policy import Fixed
from edgespec.core.sequence import Draft, Round, SamplingParams, Sequence
from edgespec.drafters.base import DraftRequest
from edgespec.verifiers.base import Rows, ScoreRequest
from tests.engine.running import overlapped
from tests.engine.test_loops import PROMPT, SETTINGS, counting, run_plain, sequence
from tests.fakes import FakeDrafter, FakeVerifier, random_logits

# who has to wait for whom, by the seconds of each drafted token and each verification
TIMINGS = {"both at once": (0.0, 0.0), "slow drafter": (0.001, 0.0), "slow verifier": (0.0, 0.001)}


class TimedDrafter(FakeDrafter):
    """Takes ``step_s`` a token."""

    def __init__(self, step_s: float, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._step_s = step_s

    def propose(
        self, requests: abc.Sequence[DraftRequest], cancelled: abc.Callable[[], bool] = lambda: False
    ) -> list[Draft]:
        def paced() -> bool:
            time.sleep(self._step_s)
            return cancelled()

        return super().propose(requests, paced)


class TimedVerifier(FakeVerifier):
    """Takes ``verify_s`` a call."""

    def __init__(self, verify_s: float, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._verify_s = verify_s

    def score(
        self, requests: abc.Sequence[ScoreRequest], cancelled: abc.Callable[[], bool] = lambda: False
    ) -> list[Rows]:
        time.sleep(self._verify_s)
        return super().score(requests, cancelled)


class GatedVerifier(FakeVerifier):
    """Answers once the drafter is as far as the test wants: no clock decides."""

    def __init__(self, gate: abc.Callable[[], object], **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._gate = gate

    def score(
        self, requests: abc.Sequence[ScoreRequest], cancelled: abc.Callable[[], bool] = lambda: False
    ) -> list[Rows]:
        self._gate()
        return super().score(requests, cancelled)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("length", range(9))
@pytest.mark.parametrize("draft_seed", [0, 1], ids=["good draft", "bad draft"])
def test_overlapped_gives_the_tokens_of_plain(timing: str, setting: str, length: int, draft_seed: int) -> None:
    step_s, verify_s = TIMINGS[timing]
    params = SETTINGS[setting]
    one = sequence(params)
    drafter = TimedDrafter(step_s, logits=random_logits(32, draft_seed))
    rounds = list(overlapped(one, drafter, TimedVerifier(verify_s), Fixed(length)))
    reference = run_plain(params)
    assert one.tokens == reference.tokens
    assert one.finish_reason == reference.finish_reason == "length"
    assert [token for r in rounds for token in r.tokens] == one.tokens[len(PROMPT) :]


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_speeds_gives_the_tokens_of_plain(seed: int) -> None:
    """Either side takes another time at every call, both ends of the race included."""
    rng = np.random.default_rng(seed)
    drafter, verifier = TimedDrafter(0.0, logits=half_right()), TimedVerifier(0.0)
    params = SETTINGS["sampled"]
    one = sequence(params)
    for _ in overlapped(one, drafter, verifier, Fixed(int(rng.integers(1, 9)))):
        drafter._step_s, verifier._verify_s = rng.choice([0.0, 0.0002, 0.001], 2)
    assert one.tokens == run_plain(params).tokens


def half_right() -> abc.Callable[[abc.Sequence[int]], np.ndarray]:
    """The verifier's rows after an even last token, others after an odd one."""
    right, wrong = random_logits(32, 0), random_logits(32, 1)
    return lambda tokens: (right if tokens[-1] % 2 == 0 else wrong)(tokens)


class Script:
    """A drafter that knows the text to come, ``8`` letters in turn, and errs where it is told to.

    errs  positions at which it proposes a wrong token
    """

    name, num_slots = "script", 1

    def __init__(self, errs: abc.Collection[int] = ()) -> None:
        self._errs = errs
        self.drafted: list[list[int]] = []
        self.is_ahead = threading.Event()

    def propose(self, requests: abc.Sequence[DraftRequest], cancelled: abc.Callable[[], bool]) -> list[Draft]:
        (request,) = requests
        tokens = list(request.tokens)
        while len(tokens) < len(request.tokens) + request.num_draft and not cancelled():
            tokens.append((tokens[-1] + 1) % 8 if len(tokens) not in self._errs else 20)
        self.drafted.append(tokens[len(request.tokens) :])
        if len(self.drafted) >= 3:  # a draft, a guess, and what comes after it
            self.is_ahead.set()
        return [Draft(len(request.tokens), tuple(tokens[len(request.tokens) :]))]

    def close(self) -> None: ...


def first_rounds(errs: abc.Collection[int], num_rounds: int = 2) -> tuple[Script, list[Round], Sequence]:
    """Rounds over the letters 0 1 2 3 ..., three drafted each; the look-ahead is done before the first verdict."""
    drafter = Script(errs)
    verifier = GatedVerifier(lambda: drafter.is_ahead.wait(10), logits=counting())
    one = Sequence([0], SamplingParams(max_tokens=30, temperature=0.0), 64)
    rounds = []
    for round_ in overlapped(one, drafter, verifier, Fixed(3)):
        rounds.append(round_)
        if len(rounds) == num_rounds:
            break
    assert one.tokens == [i % 8 for i in range(len(one.tokens))]
    return drafter, rounds, one


def test_full_acceptance_and_the_right_guess() -> None:
    """The rest of the look-ahead is the next draft: nothing is drafted twice."""
    drafter, (first, second), _ = first_rounds(errs=())
    assert first.ahead == "kept"
    assert drafter.drafted[:3] == [[1, 2, 3], [4], [5, 6, 7]]
    assert second.draft == Draft(5, (5, 6, 7))
    assert 0 < second.hidden_s <= second.draft_s


def test_full_acceptance_and_the_wrong_guess() -> None:
    """The guess at position 4 is wrong: what came after it is thrown away, and drafting starts afresh."""
    drafter, (first, second), _ = first_rounds(errs=(4,))
    assert (first.accepted, first.drafted, first.ahead) == (3, 3, "wrong guess")
    assert drafter.drafted[1] == [20]
    assert second.draft == Draft(5, (5, 6, 7))
    assert second.hidden_s == 0.0


def test_a_rejection_inside_the_draft() -> None:
    """The token at position 2 is refused: the look-ahead went on from a text that never came to be."""
    _, (first, second), _ = first_rounds(errs=(2,))
    assert (first.accepted, first.drafted, first.ahead) == (1, 3, "rejected")
    assert second.draft == Draft(3, (3, 4, 5))
    assert second.hidden_s == 0.0


@pytest.mark.parametrize("max_ahead", [1, 2, 4, 8])
def test_a_look_ahead_is_bounded(max_ahead: int) -> None:
    one = sequence(SETTINGS["sampled"])
    rounds = list(overlapped(one, FakeDrafter(), FakeVerifier(), Fixed(6), max_ahead=max_ahead))
    kept = [second.drafted for first, second in pairwise(rounds) if first.ahead == "kept"]
    assert bool(kept) == (max_ahead > 1)
    assert all(drafted <= max_ahead - 1 for drafted in kept)
    assert one.tokens == run_plain(SETTINGS["sampled"]).tokens


def test_a_look_ahead_stops_within_a_token_of_the_verdict() -> None:
    """The drafter is in the middle of a token when the verdict refutes it: that token is its last."""
    stopped, drawn = threading.Event(), []

    class Endless(Script):
        """After the first draft, which is wrong, it drafts until it is told to stop."""

        def propose(self, requests: abc.Sequence[DraftRequest], cancelled: abc.Callable[[], bool]) -> list[Draft]:
            if len(self.drafted) != 2:
                return super().propose(requests, cancelled)
            self.is_ahead.set()
            self.drafted.append([])
            while not cancelled():
                drawn.append(stopped.is_set())
                time.sleep(0.0005)
            return [Draft(len(requests[0].tokens))]

    drafter = Endless(errs=(2,))
    verifier = GatedVerifier(lambda: drafter.is_ahead.wait(10), logits=counting())
    one = Sequence([0], SamplingParams(max_tokens=8, temperature=0.0), 64)
    for _ in overlapped(one, drafter, verifier, Fixed(3)):
        stopped.set()
    assert one.tokens == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert sum(drawn) <= 1


@pytest.mark.parametrize("end", [1, 2, 4, 6])
def test_nothing_is_drafted_beyond_an_end_token_or_the_room(end: int) -> None:
    drafter = Script()
    one = Sequence([0], SamplingParams(max_tokens=6, temperature=0.0), 64, frozenset({end}))
    list(overlapped(one, drafter, FakeVerifier(logits=counting()), Fixed(3)))
    assert one.tokens[-1] == end
    assert one.finish_reason == "stop" or one.num_output == 6


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_a_look_ahead_never_reaches_beyond_max_tokens(max_tokens: int) -> None:
    drafter = FakeDrafter()
    one = Sequence(list(PROMPT), SamplingParams(max_tokens=max_tokens, temperature=0.0), 64)
    list(overlapped(one, drafter, FakeVerifier(), Fixed(4)))
    assert one.num_output == max_tokens
    for (request,) in drafter.requests:
        assert len(request.tokens) + request.num_draft < len(PROMPT) + max_tokens


def test_cancelled_while_it_looks_ahead() -> None:
    rounds: list[Round] = []
    one = sequence(SETTINGS["greedy"])
    for round_ in overlapped(one, FakeDrafter(), FakeVerifier(), Fixed(2), lambda: len(rounds) == 3):
        rounds.append(round_)
    assert len(rounds) == 3
    assert one.finish_reason == "cancelled"
    assert one.tokens == run_plain(SETTINGS["greedy"]).tokens[: len(one.tokens)]


def test_the_consumer_may_cut_the_sequence_while_it_looks_ahead() -> None:
    one = sequence(SETTINGS["greedy"])
    for round_ in overlapped(one, FakeDrafter(), FakeVerifier(), Fixed(4)):
        assert len(round_.tokens) == 5
        one.cut(3)
    assert one.finish_reason == "stop"
    assert one.num_output == 2


def test_rejection_draws_from_the_same_q_it_reports() -> None:
    """Under rule rejection a kept draft carries a distribution for each of its tokens."""
    outcomes = []
    for seed in range(10):
        params = SamplingParams(max_tokens=40, temperature=0.9, seed=seed, rule="rejection")
        one = sequence(params)
        rounds = list(overlapped(one, FakeDrafter(), FakeVerifier(), Fixed(3)))
        assert one.num_output == 40
        assert all(len(r.draft.distributions or ()) == r.drafted for r in rounds)
        outcomes += [r.ahead for r in rounds]
    assert {"kept", "wrong guess"} <= set(outcomes)
