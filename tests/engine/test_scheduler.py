"""Many sequences over fakes: everybody gets plain's tokens, whoever joins and leaves when."""

from __future__ import annotations

import collections.abc as abc
import itertools
from typing import cast

import numpy as np
import pytest

from edgespec.core.costs import Costs, Curves, Overlap
from edgespec.core.policy import Fixed, Plan
from edgespec.core.sequence import Draft, SamplingParams, Sequence
from edgespec.core.track import Track
from edgespec.drafters.base import DraftRequest
from edgespec.engine.draft_thread import DraftThread
from edgespec.engine.loops import plain
from edgespec.engine.rounds import Guide
from edgespec.engine.scheduler import CHUNK, Event, Job, Mode, Scheduler
from edgespec.errors import BackendError, EdgespecError
from edgespec.verifiers.base import Rows, ScoreRequest
from tests.fakes import FakeDrafter, FakeVerifier, random_logits

MODES: list[Mode] = ["plain", "sequential", "overlapped"]
# Work that costs by its amount, on both sides: what two cohorts are good for.
LINEAR = Curves((1, 64), (0,), ((0.01, 0.64),), (1, 32), (0.01, 0.32), Overlap())
# Work that costs the same however much it is: one cohort.
CONSTANT = Curves((1, 64), (0,), ((0.01, 0.01),), (1, 32), (0.01, 0.01), Overlap())


class Bench:
    """A scheduler over fakes, and everything that came out of it."""

    def __init__(
        self,
        num_slots: int = 4,
        curves: Curves = LINEAR,
        verifier: FakeVerifier | None = None,
        drafter: FakeDrafter | None = None,
        num_ctx: int = 64,
    ) -> None:
        self.verifier = verifier or FakeVerifier(num_ctx=num_ctx, num_slots=num_slots)
        self.drafter = drafter or FakeDrafter(num_slots=num_slots)
        self.thread = DraftThread(self.drafter)
        self.costs = Costs(curves)
        self.scheduler = Scheduler(self.verifier, self.thread, self.costs)
        self.events: list[Event] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.close()

    def add(
        self,
        seed: int,
        mode: Mode = "overlapped",
        length: int = 3,
        max_tokens: int = 20,
        prompt: abc.Sequence[int] | None = None,
        cancelled: abc.Callable[[], bool] = lambda: False,
    ) -> Job:
        one = make(seed, max_tokens, prompt, self.verifier.num_ctx)
        job = Job(one, mode, None if mode == "plain" else Guide(Fixed(length), self.costs), cancelled)
        self.scheduler.add(job)
        return job

    def run(self, steps: int = 1000) -> None:
        for _ in range(steps):
            if self.scheduler.is_idle:
                return
            self.events += self.scheduler.step()
        assert steps < 1000

    def widths(self) -> list[int]:
        return [len(call) for call in self.verifier.requests]


def make(seed: int, max_tokens: int = 20, prompt: abc.Sequence[int] | None = None, num_ctx: int = 64) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=seed)
    return Sequence([3, 1, 4, seed % 20] if prompt is None else list(prompt), params, num_ctx)


def reference(one: Sequence) -> list[int]:
    alone = Sequence(one.tokens[: one.num_prompt], one.params, one.num_ctx, one.end_tokens)
    list(plain(alone, FakeVerifier(num_ctx=one.num_ctx)))
    return alone.tokens


@pytest.mark.parametrize("curves", [LINEAR, CONSTANT], ids=["two cohorts", "one"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_jobs", [1, 2, 3, 7])
@pytest.mark.parametrize("draft_seed", [0, 1], ids=["good draft", "bad draft"])
def test_everybody_gets_the_tokens_of_plain(mode: Mode, num_jobs: int, curves: Curves, draft_seed: int) -> None:
    drafter = FakeDrafter(num_slots=4, logits=random_logits(32, draft_seed))
    with Bench(curves=curves, drafter=drafter) as bench:
        jobs = [bench.add(seed, mode, length=seed % 5, max_tokens=5 + 3 * seed) for seed in range(num_jobs)]
        bench.run()
    for job in jobs:
        assert job.sequence.tokens == reference(job.sequence)
        assert job.sequence.finish_reason == "length"
        rounds = [event.round for event in bench.events if event.job is job and event.round is not None]
        assert [token for r in rounds for token in r.tokens] == job.sequence.tokens[job.sequence.num_prompt :]


@pytest.mark.parametrize("seed", range(10))
def test_joining_and_leaving_at_any_round(seed: int) -> None:
    """Jobs of every mode come at random, are cut or cancelled at random, and share the slots."""
    rng = np.random.default_rng(seed)
    left: set[int] = set()
    with Bench(num_slots=3) as bench:
        jobs: list[Job] = []
        for number in range(12):
            jobs.append(
                bench.add(number, MODES[rng.integers(3)], int(rng.integers(5)), int(rng.integers(1, 25)),
                          cancelled=lambda number=number: number in left)
            )  # fmt: skip
            for _ in range(int(rng.integers(4))):
                bench.events += bench.scheduler.step()
            if rng.random() < 0.2:
                left.add(int(rng.integers(number + 1)))
        bench.run()
    for number, job in enumerate(jobs):
        expected = reference(job.sequence)
        assert job.sequence.tokens == expected[: len(job.sequence.tokens)]
        assert (job.sequence.finish_reason == "cancelled") <= (number in left)
        assert job.sequence.finish_reason == "cancelled" or job.sequence.tokens == expected


def test_one_batch_a_verification_and_cohorts_take_turns() -> None:
    with Bench(num_slots=6) as bench:
        for seed in range(6):
            bench.add(seed)
        bench.run(steps=8)
        assert bench.widths() == [3] * 8
        slots = [{request.slot for request in call} for call in bench.verifier.requests]
    assert all(first.isdisjoint(second) for first, second in itertools.pairwise(slots))


def test_one_cohort_where_splitting_saves_nothing() -> None:
    with Bench(num_slots=6, curves=CONSTANT) as bench:
        for seed in range(6):
            bench.add(seed)
        bench.run(steps=4)
        assert bench.widths() == [6] * 4


def test_each_sequence_has_its_own_draft_length() -> None:
    with Bench(curves=CONSTANT) as bench:
        for seed in range(4):
            bench.add(seed, length=seed)
        bench.run(steps=2)
        assert [request.num_rows for request in bench.verifier.requests[1]] == [1, 2, 3, 4]


def test_a_policy_that_cannot_be_hashed_serves_several() -> None:
    class Own:
        __hash__ = None  # type: ignore[assignment]  # as a dataclass that is not frozen has it

        def plans(self, tracks: abc.Sequence[Track], costs: Costs, *, overlapped: bool = False) -> list[Plan]:
            return [Plan(2)] * len(tracks)

    with Bench(curves=CONSTANT) as bench:
        for seed in range(2):
            bench.scheduler.add(Job(make(seed), "sequential", Guide(Own(), bench.costs)))
        bench.run(steps=2)
        assert [request.num_rows for request in bench.verifier.requests[1]] == [3, 3]


def test_more_jobs_than_slots_are_served_in_order() -> None:
    with Bench(num_slots=2) as bench:
        jobs = [bench.add(seed, max_tokens=6) for seed in range(6)]
        assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 4)
        bench.run()
        first = [next(i for i, event in enumerate(bench.events) if event.job is job) for job in jobs]
    assert first == sorted(first)


def test_cancelled_within_a_round() -> None:
    stop = [False]
    with Bench() as bench:
        job = bench.add(1, max_tokens=50, cancelled=lambda: stop[0])
        other = bench.add(2, max_tokens=10)
        bench.run(steps=4)
        stop[0] = True
        (last,) = [event for event in bench.scheduler.step() if event.job is job]
        bench.run()
    assert last == Event(job)
    assert job.sequence.finish_reason == "cancelled"
    assert other.sequence.tokens == reference(other.sequence)


def test_a_waiting_job_can_be_cancelled() -> None:
    with Bench(num_slots=1) as bench:
        bench.add(1, max_tokens=50)
        job = bench.add(2, cancelled=lambda: True)
        assert Event(job) in bench.scheduler.step()
        assert bench.scheduler.num_waiting == 0


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    """It is read CHUNK tokens at a time, beside the others' rounds; nobody waits for more than that."""
    prompt = [i % 31 for i in range(3 * CHUNK)]
    with Bench(num_ctx=4 * CHUNK) as bench:
        short = bench.add(1, "sequential", max_tokens=30)
        bench.run(steps=2)
        long = bench.add(2, "sequential", prompt=prompt, max_tokens=5)
        events = [bench.scheduler.step() for _ in range(2)]
        assert all([event.job for event in step] == [short] for step in events)
        reads = [request for call in bench.verifier.requests for request in call if request.slot == long.sequence.slot]
        assert [len(request.tokens) for request in reads] == [CHUNK, 2 * CHUNK]
        bench.run()
    for job in (short, long):
        assert job.sequence.tokens == reference(job.sequence)


def test_a_new_text_is_given_to_the_drafter_in_pieces() -> None:
    prompt = [i % 31 for i in range(2 * CHUNK + 10)]
    with Bench(num_ctx=4 * CHUNK) as bench:
        bench.add(1, "sequential", max_tokens=30)
        long = bench.add(2, "sequential", prompt=prompt, max_tokens=5)
        bench.run()
        asked = [r for call in bench.drafter.requests for r in call if r.slot == long.sequence.slot]
    lengths = [0, *(len(request.tokens) for request in asked)]
    assert all(second - first <= CHUNK for first, second in itertools.pairwise(lengths))
    assert lengths[-1] > len(prompt)


def test_a_job_gets_the_slot_that_holds_its_beginning() -> None:
    prompt = [5, 6, 7, 8, 9, 10]
    with Bench(num_slots=3) as bench:
        jobs = [bench.add(seed, prompt=[seed, *prompt], max_tokens=4) for seed in range(3)]
        bench.run()
        again = bench.add(9, prompt=[1, *prompt], max_tokens=4)
    assert again.sequence.slot == jobs[1].sequence.slot


class Broken(FakeVerifier):
    """Fails every call that has one of these slots in it."""

    def __init__(self, slots: abc.Collection[int], error: EdgespecError) -> None:
        super().__init__(num_slots=4)
        self._slots, self._error = slots, error

    def score(
        self, requests: abc.Sequence[ScoreRequest], cancelled: abc.Callable[[], bool] = lambda: False
    ) -> list[Rows]:
        if any(request.slot in self._slots for request in requests):
            raise self._error
        return super().score(requests, cancelled)


@pytest.mark.parametrize("num_jobs", [1, 3])
def test_a_failed_verification_ends_its_jobs_with_the_error_and_the_scheduler_goes_on(num_jobs: int) -> None:
    error = BackendError("the GPU is gone")
    broken = Broken({0}, error)
    with Bench(verifier=broken) as bench:
        jobs = [bench.add(seed) for seed in range(num_jobs)]
        bench.run()
        assert [event.error for event in bench.events if event.job is jobs[0]] == [error]
        broken._slots = ()
        job = bench.add(7)
        bench.run()
    assert job.sequence.tokens == reference(job.sequence)


def test_one_broken_row_ends_one_job() -> None:
    """NaN in one sequence's rows is no reason to end the others."""
    good = random_logits(32)
    verifier = FakeVerifier(num_slots=4, logits=lambda tokens: good(tokens) * (np.nan if tokens[0] == 9 else 1.0))
    with Bench(verifier=verifier) as bench:
        jobs = [bench.add(1), bench.add(2, prompt=[9, 9]), bench.add(3)]
        bench.run()
        errors = {event.job: event.error for event in bench.events if event.error is not None}
    assert list(errors) == [jobs[1]]
    assert isinstance(errors[jobs[1]], BackendError)
    assert all(jobs[i].sequence.tokens == reference(jobs[i].sequence) for i in (0, 2))


def test_a_drafter_that_fails_among_several_jobs() -> None:
    class Dying(FakeDrafter):
        def propose(
            self, requests: abc.Sequence[DraftRequest], cancelled: abc.Callable[[], bool] = lambda: False
        ) -> list[Draft]:
            if len(self.requests) == 5:
                raise BackendError("gone")
            return super().propose(requests, cancelled)

    with Bench(drafter=Dying(num_slots=4)) as bench:
        jobs = [bench.add(seed) for seed in range(5)]
        bench.run()
        assert bench.thread.is_lost
    assert all(job.sequence.tokens == reference(job.sequence) for job in jobs)


def test_rounds_say_what_they_shared() -> None:
    with Bench(curves=CONSTANT) as bench:
        for seed in range(3):
            bench.add(seed, length=2)
        bench.run(steps=3)
    rounds = [event.round for event in bench.events if event.round is not None]
    assert {round_.width for round_ in rounds[3:]} == {9}
    assert len({round_.verify_s for round_ in rounds[3:6]}) == 1


def test_what_the_drafter_has_read_is_remembered_through_plain_decoding() -> None:
    verifier, drafter = FakeVerifier(num_ctx=200), FakeDrafter()
    scheduler = Scheduler(verifier, thread := DraftThread(drafter), Costs())
    try:
        prompt = [1, 2, 3, 4, 5]
        for mode in ("sequential", "plain", "sequential"):
            guide = None if mode == "plain" else Guide(Fixed(3))
            job = Job(Sequence([*prompt], SamplingParams(temperature=0.0, max_tokens=8), 200), cast(Mode, mode), guide)
            scheduler.add(job)
            while job.sequence.finish_reason is None:
                scheduler.step()
            known = job.num_drafter_held
            assert known >= len(prompt)
    finally:
        thread.close()
