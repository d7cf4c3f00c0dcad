"""Held to a device's times: by a clock that only moves when somebody sleeps or works."""

from __future__ import annotations

import collections.abc as abc

import numpy as np
import pytest

from edgespec.bench import simulate
from edgespec.bench.device_curves import DEVICES, WIDTHS, SimulatedDevice, simulated_device
from edgespec.bench.simulate import Meter, Pace, SimulatedDrafter, SimulatedVerifier, paces
from edgespec.core.costs import Costs
from edgespec.core.sequence import SamplingParams
from edgespec.devices.profile import profile_names
from edgespec.drafters.base import DraftRequest
from edgespec.errors import ParameterError
from edgespec.verifiers.base import Rows, ScoreRequest
from tests.fakes import FakeDrafter, FakeVerifier

GREEDY = SamplingParams(temperature=0.0)
CARD = DEVICES["workstation-24gb"]


class Clock:
    """Stands in for the module time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.sleeps.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(simulate, "time", made)
    return made


def pace(slowdown: float = 1.0, dilation: float = 2.0, other: Meter | None = None) -> Pace:
    return Pace(Meter(), other or Meter(), slowdown, dilation)


# The devices


def test_every_shipped_profile_has_a_device_of_its_own() -> None:
    assert sorted(DEVICES) == profile_names()
    assert all(name == device.profile for name, device in DEVICES.items())


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_a_wider_verification_costs_no_less_and_a_draft_token_less_than_one(device: SimulatedDevice) -> None:
    times = [device.verify_s(width) for width in WIDTHS]
    assert times == sorted(times)
    assert 0 < device.step_s < times[0]
    assert device.slowdown >= 1
    assert all(device.sources)


@pytest.mark.parametrize("name", ["workstation-24gb", "workstation-8gb", "dual-gpu"])
def test_a_card_verifies_sixteen_rows_for_the_price_of_one(name: str) -> None:
    assert DEVICES[name].verify_s(16) == DEVICES[name].verify_s(1) < DEVICES[name].verify_s(128)


def test_a_processor_does_not() -> None:
    assert DEVICES["raspberry-pi-5"].verify_s(8) > 1.5 * DEVICES["raspberry-pi-5"].verify_s(1)


def test_who_shares_memory_slows_down_and_who_shares_the_processor_halves() -> None:
    assert DEVICES["workstation-8gb"].slowdown == 1.0
    assert 1.0 < DEVICES["jetson-orin-nano-8gb"].slowdown < 2.0
    assert DEVICES["cpu-small"].slowdown == 2.0


def test_curves_are_dilated_and_say_where_both_sides_cannot_work_at_once() -> None:
    costs = Costs(CARD.curves(10))
    assert costs.verify_s(8) == pytest.approx(10 * CARD.verify_s(8))
    assert costs.draft_s(3) == pytest.approx(30 * CARD.step_s)
    assert DEVICES["cpu-small"].curves().overlap is None
    overlap = DEVICES["jetson-orin-nano-8gb"].curves().overlap
    assert overlap is not None
    assert overlap.verify == overlap.draft == DEVICES["jetson-orin-nano-8gb"].slowdown


def test_a_profile_without_a_device_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"got 'toaster'; allowed: auto, .*workstation-8gb, all"):
        simulated_device("toaster")


# Pace


def test_work_takes_the_devices_time_times_the_dilation(clock: Clock) -> None:
    held = pace(dilation=2.0)
    held.begin()
    clock.now += 0.5  # the real work
    held.wait(3.0)
    assert clock.now == pytest.approx(100 + 6)
    clock.now += 1.0
    held.wait(1.0)  # from the end of the first
    assert clock.now == pytest.approx(100 + 6 + 2)
    assert (held.num_passes, held.num_late, held.late_s) == (2, 0, 0.0)


def test_work_that_comes_too_late_is_counted_and_not_made_up_for(clock: Clock) -> None:
    held = pace(dilation=2.0)
    held.begin()
    clock.now += 8.0
    held.wait(3.0)
    held.wait(3.0)
    assert clock.now == pytest.approx(100 + 8 + 6)
    assert (held.num_passes, held.num_late) == (2, 1)
    assert held.late_s == pytest.approx(1.0)
    assert held.paced_s == pytest.approx(6.0)


def test_late_work_that_does_not_count_is_not_counted(clock: Clock) -> None:
    held = pace()
    held.begin()
    clock.now += 50
    held.wait(1.0, counts=False)
    assert (held.num_passes, held.num_late, held.late_s, held.paced_s) == (0, 0, 0.0, 0.0)


def test_both_at_work_slow_each_other_down(clock: Clock) -> None:
    other = Meter()
    held = pace(slowdown=2.0, dilation=1.0, other=other)
    held.begin()
    other.start(clock.now)
    clock.now += 4.0
    other.stop(clock.now)  # 4 seconds of both: 2 of work
    held.wait(5.0)
    assert clock.now == pytest.approx(100 + 4 + 3, rel=1e-4)


def test_the_other_sides_work_before_does_not_matter(clock: Clock) -> None:
    other = Meter()
    other.start(clock.now - 50)
    other.stop(clock.now)
    held = pace(slowdown=2.0, dilation=1.0, other=other)
    held.begin()
    held.wait(5.0)
    assert clock.now == pytest.approx(105, rel=1e-4)


def test_a_meter_adds_up() -> None:
    meter = Meter()
    assert meter.busy_s(5.0) == 0.0
    meter.start(5.0)
    assert meter.busy_s(7.0) == 2.0
    meter.stop(8.0)
    meter.start(10.0)
    assert meter.busy_s(11.0) == 4.0


# The two sides


def test_a_verification_takes_the_time_of_its_rows_and_gives_the_rows(clock: Clock) -> None:
    held, _ = paces(CARD, 10.0)
    verifier = SimulatedVerifier(FakeVerifier(num_slots=2), CARD, held)
    assert (verifier.num_vocab, verifier.num_ctx, verifier.num_slots) == (32, 64, 2)
    requests = [ScoreRequest(0, [1, 2, 3], 2), ScoreRequest(1, [4, 5], 1)]
    rows = [rows.copy() for rows in verifier.score(requests)]
    assert clock.now == pytest.approx(100 + 10 * CARD.verify_s(3))
    assert all(np.array_equal(a, b) for a, b in zip(rows, FakeVerifier(num_slots=2).score(requests), strict=True))


class Slow(FakeVerifier):
    """Takes a long time for everything."""

    clock: Clock

    def score(self, requests: abc.Sequence[ScoreRequest], *rest: object) -> list[Rows]:
        self.clock.now += 1000.0
        return super().score(requests)


def test_a_prompt_may_take_longer_a_round_may_not(clock: Clock) -> None:
    held, _ = paces(CARD, 10.0)
    inner = Slow()
    inner.clock = clock
    verifier = SimulatedVerifier(inner, CARD, held)
    verifier.score([ScoreRequest(0, [1] * 20, 1)])
    assert (held.num_passes, held.num_late) == (0, 0)
    verifier.score([ScoreRequest(0, [1] * 22, 2)])
    assert (held.num_passes, held.num_late) == (1, 1)


def request(num_draft: int, num_tokens: int = 3) -> DraftRequest:
    return DraftRequest(0, [1] * num_tokens, 3, num_draft, GREEDY)


def test_a_draft_takes_a_step_for_every_token(clock: Clock) -> None:
    _, held = paces(CARD, 10.0)
    drafter = SimulatedDrafter(FakeDrafter(), CARD.step_s, held)
    (draft,) = drafter.propose([request(5)])
    assert draft == FakeDrafter().propose([request(5)])[0]
    # FakeDrafter asks once more than it draws only where it is cancelled
    assert clock.now == pytest.approx(100 + 10 * 5 * CARD.step_s)
    assert held.num_passes == 5


def test_a_cancelled_draft_stops_after_the_token_in_work(clock: Clock) -> None:
    _, held = paces(CARD, 10.0)
    drafter = SimulatedDrafter(FakeDrafter(), CARD.step_s, held)
    stop = 100 + 10 * 2.5 * CARD.step_s
    (draft,) = drafter.propose([request(5)], lambda: clock.now > stop)
    assert len(draft.tokens) == 3
    assert clock.now == pytest.approx(100 + 10 * 3 * CARD.step_s)


class Reader(FakeDrafter):
    """Takes a long time for the first token of a draft: it reads what it missed."""

    clock: Clock

    def _propose(self, request: DraftRequest, cancelled: abc.Callable[[], bool]) -> object:  # type: ignore[override]
        cancelled()
        self.clock.now += 1000.0
        return super()._propose(request, cancelled)


def test_a_drafter_that_reads_a_prompt_is_not_late(clock: Clock) -> None:
    _, held = paces(CARD, 10.0)
    inner = Reader()
    inner.clock = clock
    drafter = SimulatedDrafter(inner, CARD.step_s, held)
    drafter.propose([request(2, 40)])
    assert (held.num_passes, held.num_late) == (2, 0)
    drafter.propose([request(2, 41)])
    assert (held.num_passes, held.num_late) == (5, 1)


def test_closing_goes_through() -> None:
    held, other = paces(CARD, 1.0)
    verifier, drafter = FakeVerifier(), FakeDrafter()
    SimulatedVerifier(verifier, CARD, held).close()
    SimulatedDrafter(drafter, CARD.step_s, other).close()
    assert verifier._closed
    assert drafter._closed
