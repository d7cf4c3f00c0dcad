"""What a round costs, measured over sides whose cost is known, by a clock that only they move."""

from __future__ import annotations

import collections.abc as abc
import itertools
import math
import threading

import pytest

from edgespec.core.costs import Curves
from edgespec.core.sequence import Cancelled, Draft, never
from edgespec.drafters.base import DraftRequest
from edgespec.engine import calibrate
from edgespec.engine.calibrate import FULL, QUICK, Scope, measure, measure_step
from edgespec.errors import BackendError
from edgespec.owner import Owner
from edgespec.verifiers.base import Interrupted
from tests.engine.timed import DraftOwner, ScriptedClock, TimedDrafter, TimedVerifier
from tests.fakes import FakeDrafter, FakeVerifier


def cost(num_rows: int, depth: int) -> float:
    """Not monotonic, and dearer the deeper."""
    return {3: 0.017}.get(num_rows, 0.01 + 0.001 * num_rows) * (1 + depth / 4096)


@pytest.fixture
def owner() -> abc.Iterator[DraftOwner]:
    owner = DraftOwner()
    yield owner
    owner.stop(wait=True)


@pytest.fixture
def clock() -> ScriptedClock:
    return ScriptedClock()


def curve(curves: Curves, depth: int) -> dict[int, float]:
    return dict(zip(curves.widths, curves.verify_s[curves.depths.index(depth)], strict=True))


def test_the_whole_curve_is_recovered_at_three_depths(clock: ScriptedClock) -> None:
    verifier = TimedVerifier(clock, cost)
    curves = measure(verifier, None, budget_s=50.0, clock=clock)
    assert curves.widths == (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
    assert curves.depths == (64, 512, 2048)
    for depth in curves.depths:
        assert curve(curves, depth) == pytest.approx({width: cost(width, depth) for width in curves.widths})
    assert (curves.batches, curves.step_s, curves.overlap, curves.read_s) == ((), (), None, None)


def test_drafting_is_recovered_for_all_batches_and_on_one_thread(clock: ScriptedClock, owner: DraftOwner) -> None:
    drafter = TimedDrafter(clock, lambda size: 0.002 + 0.001 * size, num_slots=6, read_s=0.0005)
    curves = measure(TimedVerifier(clock, cost), drafter, budget_s=50.0, run_draft=owner.submit, clock=clock)
    assert curves.batches == (1, 2, 4)
    assert curves.step_s == pytest.approx((0.003, 0.004, 0.006))
    assert curves.read_s == pytest.approx(0.0005)
    assert drafter.threads == {"drafts"}


def test_both_sides_slow_down_while_the_other_works(clock: ScriptedClock, owner: DraftOwner) -> None:
    drafter = owner.drafter = TimedDrafter(clock, lambda _: 0.002, slowdown=1.25)
    verifier = TimedVerifier(clock, cost, drafting=drafter.drafting, slowdown=1.5)
    curves = measure(verifier, drafter, budget_s=50.0, run_draft=owner.submit, clock=clock)
    assert curves.overlap is not None
    assert curves.overlap.verify == pytest.approx(1.5)
    assert curves.overlap.draft == pytest.approx(1.25)


def test_a_side_that_seems_faster_beside_the_other_is_not(clock: ScriptedClock, owner: DraftOwner) -> None:
    drafter = owner.drafter = TimedDrafter(clock, lambda _: 0.002, slowdown=0.9)
    verifier = TimedVerifier(clock, cost, drafting=drafter.drafting, slowdown=0.9)
    curves = measure(verifier, drafter, budget_s=50.0, run_draft=owner.submit, clock=clock)
    assert curves.overlap is not None
    assert (curves.overlap.verify, curves.overlap.draft) == (1.0, 1.0)


def test_overlap_is_not_measured_where_nobody_wants_it(clock: ScriptedClock, owner: DraftOwner) -> None:
    drafter = TimedDrafter(clock, lambda _: 0.002)
    verifier = TimedVerifier(clock, cost)
    for run_draft, wanted in ((owner.submit, False), (None, True)):
        curves = measure(
            verifier, drafter, budget_s=50.0, run_draft=run_draft, with_overlap=wanted, clock=clock, scope=QUICK
        )
        assert curves.overlap is None
        assert curves.step_s == pytest.approx((0.002,))


def test_a_drafter_that_drafts_nothing_was_not_measured(clock: ScriptedClock, owner: DraftOwner) -> None:
    drafter = TimedDrafter(clock, lambda _: 0.002, reach=4)
    curves = measure(TimedVerifier(clock, cost), drafter, budget_s=50.0, run_draft=owner.submit, clock=clock)
    assert (curves.batches, curves.step_s, curves.overlap, curves.read_s) == ((), (), None, None)
    assert len(curves.widths) == 11


# The budget


@pytest.mark.parametrize("budget_s", [3.0, 5.0, 10.0, 30.0])
@pytest.mark.parametrize("speed", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("scope", [FULL, QUICK])
def test_the_budget_is_kept(
    clock: ScriptedClock, owner: DraftOwner, budget_s: float, speed: float, scope: Scope
) -> None:
    drafter = TimedDrafter(clock, lambda size: 0.005 * speed * size, num_slots=4, read_s=0.0005)
    verifier = TimedVerifier(clock, lambda *point: speed * cost(*point), prefill_s=0.002 * speed)
    curves = measure(verifier, drafter, budget_s=budget_s, scope=scope, run_draft=owner.submit, clock=clock)
    assert clock.now - 1000.0 == pytest.approx(verifier.spent_s)
    assert verifier.spent_s <= budget_s + 0.1  # the first touch, and the look-ahead beside a verification
    assert {1, 4, 8} <= set(curves.widths)
    assert curves.step_s
    assert curves.overlap is not None


def test_more_budget_gives_more_of_the_curve(clock: ScriptedClock) -> None:
    def widths(budget_s: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        verifier = TimedVerifier(clock, lambda *point: 10 * cost(*point), prefill_s=0.01)
        curves = measure(verifier, None, budget_s=budget_s, clock=clock)
        return curves.widths, curves.depths

    found = [widths(budget_s) for budget_s in (0.1, 2.5, 4.0, 30.0, 60.0, 120.0)]
    assert found[0] == ((1, 4, 8), (16,))
    assert {1, 2, 4, 8} <= {*found[1][0]} < {*FULL.widths}
    assert all({*less[0]} <= {*more[0]} and len(less[1]) <= len(more[1]) for less, more in itertools.pairwise(found))
    assert found[-1] == (tuple(sorted(FULL.widths)), (64, 512, 2048))


def test_a_slow_model_is_measured_at_least_at_three_widths(clock: ScriptedClock, owner: DraftOwner) -> None:
    drafter = TimedDrafter(clock, lambda _: 1.0)
    verifier = TimedVerifier(clock, lambda width, _: 5.0 + width, prefill_s=0.5)
    curves = measure(verifier, drafter, budget_s=3.0, scope=QUICK, run_draft=owner.submit, clock=clock)
    assert curve(curves, 16) == {1: 6.0, 4: 9.0, 8: 13.0}
    assert curves.step_s == (1.0,)
    assert curves.overlap is not None
    assert [width for width, _ in verifier.timed].count(8) == 1


def test_a_fast_model_is_measured_where_conversations_are(clock: ScriptedClock) -> None:
    for prefill_s, depth in ((0.0001, 256), (0.005, 64), (0.02, 16), (5.0, 16)):
        verifier = TimedVerifier(clock, lambda *_: 0.01, prefill_s=prefill_s)
        assert measure(verifier, None, budget_s=3.0, scope=QUICK, clock=clock).depths == (depth,)


def test_depths_that_cost_too_much_to_reach_are_left_out(clock: ScriptedClock) -> None:
    verifier = TimedVerifier(clock, cost, prefill_s=0.01)
    assert measure(verifier, None, budget_s=15.0, clock=clock).depths == (64, 512)
    assert max(depth for _, depth in verifier.timed) == 512


@pytest.mark.parametrize("num_ctx", [1, 2, 3, 5, 8, 17, 40, 64, 200, 512, 2048, 2060])
def test_a_small_context_is_never_exceeded(clock: ScriptedClock, owner: DraftOwner, num_ctx: int) -> None:
    verifier = TimedVerifier(clock, cost, num_ctx=num_ctx)  # refuses what is too long
    drafter = TimedDrafter(clock, lambda _: 0.002)
    for scope in (FULL, QUICK):
        curves = measure(verifier, drafter, budget_s=50.0, scope=scope, run_draft=owner.submit, clock=clock)
        assert curves.widths[0] == 1
        assert curves.depths[-1] + curves.widths[-1] <= max(2, num_ctx)
        assert curves.widths[-1] == max(width for width in scope.widths if width < max(2, num_ctx))


# A clock that jumps


class JumpingClock(ScriptedClock):
    """Adds a jump to every so many readings."""

    def __init__(self, jumps: abc.Iterable[tuple[int, float]]) -> None:
        super().__init__()
        self._jumps, self._num_read = dict(jumps), 0

    def __call__(self) -> float:
        self._num_read += 1
        self.now += self._jumps.get(self._num_read, 0.0)
        return self.now


@pytest.mark.parametrize("jump_s", [-1e6, -3.0, 1e4, 1e9])
def test_a_jump_costs_a_sample_and_nothing_else(jump_s: float) -> None:
    for every in (2, 3, 5, 7):
        clock = JumpingClock((n, jump_s) for n in range(every, 40, 10 * every))
        verifier = TimedVerifier(clock, lambda width, _: 0.01 * width)
        curves = measure(verifier, None, budget_s=20.0, scope=QUICK, clock=clock)
        found = dict(zip(curves.widths, curves.verify_s[0], strict=True))
        assert found == pytest.approx({width: 0.01 * width for width in QUICK.widths})


@pytest.mark.parametrize("reading", [0.0, math.nan, math.inf])
def test_a_clock_that_stands_still_is_an_error_and_no_endless_loop(reading: float) -> None:
    verifier = FakeVerifier(num_ctx=64)
    with pytest.raises(BackendError, match="clock jumps"):
        measure(verifier, None, budget_s=1.0, scope=QUICK, clock=lambda: reading)
    assert len(verifier.requests) < 100


def test_a_clock_that_always_jumps_ends_too() -> None:
    readings = iter(range(0, 10**9, 1000))
    with pytest.raises(BackendError, match="clock jumps"):
        measure(FakeVerifier(num_ctx=64), None, budget_s=1.0, scope=QUICK, clock=lambda: float(next(readings)))


def test_overlap_by_an_unusable_clock_is_left_out(clock: ScriptedClock, owner: DraftOwner) -> None:
    drafter = TimedDrafter(clock, lambda _: 100.0)
    curves = measure(TimedVerifier(clock, cost), drafter, budget_s=3.0, run_draft=owner.submit, clock=clock)
    assert (curves.step_s, curves.overlap) == ((), None)


# Ends and failures


def test_cancelling_interrupts(owner: DraftOwner) -> None:
    verifier = FakeVerifier(num_vocab=50, num_ctx=512)
    asked = [0]

    def cancelled() -> bool:
        asked[0] += 1
        return len(verifier.requests) > 12

    with pytest.raises(Interrupted):
        measure(verifier, FakeDrafter(50), budget_s=50.0, run_draft=owner.submit, cancelled=cancelled)
    assert len(verifier.requests) <= 14
    assert asked[0] > 5


class BrokenDrafter(FakeDrafter):
    """Fails from its so many'th call on."""

    def __init__(self, num_calls: int) -> None:
        super().__init__(50)
        self._num_calls = num_calls

    def propose(self, requests: abc.Sequence[DraftRequest], cancelled: Cancelled = never) -> list[Draft]:
        if len(self.requests) >= self._num_calls:
            raise BackendError("the draft model broke")
        return super().propose(requests, cancelled)


@pytest.mark.parametrize("num_calls", [0, 1, 7, 10, 11, 12])
def test_a_drafter_that_fails_fails_the_measurement_at_any_time(owner: DraftOwner, num_calls: int) -> None:
    with pytest.raises(BackendError, match="broke"):
        measure(
            FakeVerifier(50, num_ctx=300), BrokenDrafter(num_calls), budget_s=5.0, scope=QUICK, run_draft=owner.submit
        )


@pytest.mark.parametrize("num_calls", [0, 10, 12])
def test_a_drafter_that_hangs_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch, num_calls: int) -> None:
    monkeypatch.setattr(calibrate, "PATIENCE_S", 0.2)
    release = threading.Event()

    class HangingDrafter(FakeDrafter):
        def propose(self, requests: abc.Sequence[DraftRequest], cancelled: Cancelled = never) -> list[Draft]:
            if len(self.requests) >= num_calls:
                release.wait(30)
            return super().propose(requests, cancelled)

    owner = Owner("drafts")
    with pytest.raises(BackendError, match="no answer"):
        measure(FakeVerifier(50, num_ctx=300), HangingDrafter(50), budget_s=5.0, scope=QUICK, run_draft=owner.submit)
    release.set()
    owner.stop(wait=True)


def test_progress_only_grows_and_reaches_the_end(clock: ScriptedClock, owner: DraftOwner) -> None:
    shown: list[tuple[str, float]] = []
    verifier = TimedVerifier(clock, cost, prefill_s=0.001)
    drafter = TimedDrafter(clock, lambda _: 0.002, num_slots=2)
    measure(
        verifier,
        drafter,
        budget_s=20.0,
        run_draft=owner.submit,
        clock=clock,
        progress=lambda *item: shown.append(item),
    )
    fractions = [fraction for _, fraction in shown]
    assert fractions == sorted(fractions)
    assert shown[-1] == ("done", 1.0)
    stages = ["verify", "draft", "both at once", "more widths", "larger batches"]
    stages += ["512 tokens deep", "2048 tokens deep", "done"]
    assert list(dict.fromkeys(stage for stage, _ in shown)) == stages


def test_a_step_alone(clock: ScriptedClock, owner: DraftOwner) -> None:
    drafter = TimedDrafter(clock, lambda _: 0.25, read_s=0.1)
    assert measure_step(drafter, 50, budget_s=3.0, run_draft=owner.submit, clock=clock) == pytest.approx(0.25)
    nothing = TimedDrafter(clock, lambda _: 0.25, reach=4)
    assert measure_step(nothing, 50, budget_s=3.0, run_draft=owner.submit, clock=clock) is None
