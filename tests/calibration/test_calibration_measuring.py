"""Measuring a pair: over sides whose cost is known, and over tiny real models."""

from __future__ import annotations

import collections.abc as abc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.calibration import Calibration, Key, Usual, calibrate, load, measuring, quick
from edgespec.core.costs import Curves, Overlap
from edgespec.devices.threads import Threads, split, splits
from edgespec.drafters.base import Drafter
from edgespec.drafters.lookup import LookupDrafter
from edgespec.drafters.onnx import OnnxDrafter
from edgespec.engine import calibrate as engine
from edgespec.engine.advice import advise
from edgespec.engine.samples import Sampler
from edgespec.errors import BackendError
from edgespec.pairs import load_pair
from edgespec.verifiers.base import Interrupted
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from tests.engine.test_calibrate import BrokenDrafter
from tests.engine.timed import DraftOwner, ScriptedClock, TimedDrafter, TimedVerifier
from tests.fakes import FakeVerifier

KEY = Key("v 1", "d 2", ("CPU: A CPU",), 2, "build", "onnxruntime 1", "none 0", "num_slots=1", None)
BUDGETS = measuring.STEP_S, measuring.TURNS_S, measuring.TRY_S, measuring.TOGETHER_S, measuring.RECEIVE_S
IN_TURN, AT_ONCE = Threads(2, 2), Threads(1, 1, spin=False, together=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, and a quiet box."""
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "busy_cpus", lambda: 0.0)


@pytest.fixture
def owner() -> abc.Iterator[DraftOwner]:
    owner = DraftOwner()
    yield owner
    owner.stop(wait=True)


def test_the_quick_version_is_kept_and_takes_three_seconds(owner: DraftOwner) -> None:
    clock = ScriptedClock()
    verifier = TimedVerifier(clock, lambda width, _: 0.1 + 0.01 * width, prefill_s=0.01)
    drafter = owner.drafter = TimedDrafter(clock, lambda _: 0.02, slowdown=1.1)
    found = quick(verifier, drafter, owner.submit, KEY, AT_ONCE, clock=clock)
    assert load(KEY) == found
    assert (found.mode, found.threads, found.is_quick, found.budget_s) == ("overlapped", AT_ONCE, True, 3.0)
    assert found.curves.widths == (1, 2, 4, 8)
    assert found.curves.overlap is not None
    assert found.curves.overlap.draft == pytest.approx(1.1)
    assert found.plain_s == pytest.approx(0.11)
    assert verifier.spent_s < 3.3


def test_how_drafts_are_received_is_seen_and_kept(owner: DraftOwner) -> None:
    clock = ScriptedClock()
    verifier = TimedVerifier(clock, lambda width, _: 0.01 + 0.001 * width, prefill_s=0.001)
    usual = Usual(([1, 2, 3], [4, 5, 6]))
    found = quick(verifier, TimedDrafter(clock, lambda _: 0.002), owner.submit, KEY, IN_TURN, usual=usual, clock=clock)
    assert load(KEY) == found
    assert found.received
    assert verifier.spent_s < 3.3
    assert (
        quick(verifier, LookupDrafter(), owner.submit, replace(KEY, draft="lookup"), IN_TURN, usual=usual).received
        == ()
    )


def test_what_is_received_badly_does_not_pay_at_once() -> None:
    """Both at once has to pay at the acceptance that was found, not at one that is usual."""
    curves = Curves((1, 2, 4, 8), (64,), ((0.1, 0.1, 0.1, 0.1),), (1,), (0.04,), Overlap(1.05, 1.0))
    assert advise(curves, curves, acceptance=0.98).mode == "overlapped"
    assert advise(curves, curves, acceptance=0.1).mode == "sequential"


def test_sides_that_take_turns_are_not_measured_together(owner: DraftOwner) -> None:
    clock = ScriptedClock()
    verifier = TimedVerifier(clock, lambda width, _: 0.1 + 0.01 * width)
    found = quick(verifier, TimedDrafter(clock, lambda _: 0.02), owner.submit, KEY, IN_TURN, clock=clock)
    assert (found.mode, found.curves.overlap) == ("sequential", None)


def test_lookup_is_not_measured_and_costs_nothing(owner: DraftOwner) -> None:
    clock = ScriptedClock()
    verifier = TimedVerifier(clock, lambda width, _: 0.1 + 0.01 * width)
    key = replace(KEY, draft="lookup")
    found = quick(verifier, LookupDrafter(), owner.submit, key, AT_ONCE, clock=clock)
    assert (found.mode, found.curves.batches) == ("sequential", ())
    assert found.gain > 2


def test_without_a_draft_the_mode_is_plain(owner: DraftOwner) -> None:
    clock = ScriptedClock()
    verifier = TimedVerifier(clock, lambda width, _: 0.1)
    assert quick(verifier, None, owner.submit, replace(KEY, draft="none"), IN_TURN, clock=clock).mode == "plain"


def test_a_draft_model_that_breaks_leaves_plain_and_nothing_is_kept(owner: DraftOwner) -> None:
    found = quick(FakeVerifier(50, num_ctx=300), BrokenDrafter(5), owner.submit, KEY, IN_TURN)
    assert (found.mode, found.reason) == ("plain", "the draft model broke")
    assert found.curves.widths[0] == 1
    assert load(KEY) is None


def test_a_verifier_that_cannot_be_measured_is_an_error(owner: DraftOwner) -> None:
    with pytest.raises(BackendError, match="clock jumps"):
        quick(FakeVerifier(50, num_ctx=300), None, owner.submit, KEY, IN_TURN, clock=lambda: 1.0)
    assert load(KEY) is None


# The whole way, over sides whose threads tell what they cost


class Box:
    """A verifier and a draft model on so many CPUs: more threads are faster, up to a limit; together they disturb each
    other.

    opened  the threads of every draft model that was opened
    """

    def __init__(
        self,
        owner: DraftOwner,
        num_cpus: int,
        *,
        row_s: float = 0.001,
        draft_s: float = 0.02,
        most_draft: int = 64,
        disturbed: float = 1.0,
        on_gpu: bool = False,
        prefill_s: float = 0.0,
    ) -> None:
        self.clock, self.owner, self.num_cpus, self.on_gpu = ScriptedClock(), owner, num_cpus, on_gpu
        self.opened: list[Threads] = []
        self.num_open = 0
        self._draft_s, self._most_draft, self._disturbed = draft_s, most_draft, disturbed
        self._row_s, self._num_threads = row_s, 1
        self.verifier = TimedVerifier(
            self.clock, self._verify_s, prefill_s=prefill_s, drafting=threading.Event(), slowdown=disturbed
        )
        self.verifier.set_threads = self._set_threads  # type: ignore[method-assign]

    def _set_threads(self, num_threads: int, num_threads_batch: int | None = None) -> None:
        self._num_threads = num_threads

    def _verify_s(self, num_rows: int, depth: int) -> float:
        return (0.1 + self._row_s * num_rows) / (1 if self.on_gpu else self._num_threads)

    def open_drafter(self, threads: Threads) -> Drafter:
        assert threading.current_thread().name == "drafts"
        self.opened.append(threads)
        step_s = self._draft_s / min(threads.draft, self._most_draft)
        drafter = TimedDrafter(self.clock, lambda _: step_s, slowdown=self._disturbed)
        drafter.drafting = self.verifier.drafting
        drafter.close = self._close  # type: ignore[method-assign]
        self.owner.drafter = drafter
        self.num_open += 1
        return drafter

    def _close(self) -> None:
        self.num_open -= 1

    def calibrate(self, **options: Any) -> Calibration:
        side = {"verifier_on_gpu": self.on_gpu}
        return calibrate(
            self.verifier,
            options.pop("open_drafter", self.open_drafter),
            self.owner.submit,
            KEY,
            split(self.num_cpus, **side),
            splits(self.num_cpus, **side),
            clock=self.clock,
            **options,
        )


def test_a_verifier_on_the_gpu_works_beside_the_draft_model(owner: DraftOwner) -> None:
    box = Box(owner, 8, on_gpu=True, draft_s=0.14, disturbed=1.02)
    found = box.calibrate()
    assert (found.mode, found.is_quick) == ("overlapped", False)
    assert found.threads == Threads(1, 7, spin=True, together=True)
    assert found.curves.depths == (64, 512)
    assert found.curves.step_s == pytest.approx((0.02,))
    assert found.curves.overlap is not None
    assert found.curves.overlap.verify == pytest.approx(1.02)
    assert found.plain_s == pytest.approx(0.101)
    assert load(KEY) == found


def test_on_shared_cpus_sides_that_take_turns_are_faster(owner: DraftOwner) -> None:
    box = Box(owner, 8, draft_s=0.04, disturbed=1.5)
    found = box.calibrate()
    assert (found.mode, found.threads) == ("sequential", Threads(8, 8))
    assert found.curves.step_s == pytest.approx((0.04 / 8,))
    assert found.plain_s == pytest.approx(0.101 / 8)
    tried = [(threads.verifier, threads.draft) for threads in box.opened if threads.together]
    assert tried == [(7, 1), (6, 2), (4, 4)]


def test_a_draft_model_that_does_not_pay_leaves_plain(owner: DraftOwner) -> None:
    found = Box(owner, 2, row_s=0.05, draft_s=0.2).calibrate()
    assert found.mode == "plain"
    assert found.threads == Threads(2, 2)


def test_a_small_draft_model_gets_one_thread_where_more_are_no_faster(owner: DraftOwner) -> None:
    found = Box(owner, 8, draft_s=0.01, most_draft=1, disturbed=3.0).calibrate()
    assert (found.mode, found.threads.draft, found.threads.verifier) == ("sequential", 1, 8)


def test_one_cpu_takes_turns(owner: DraftOwner) -> None:
    box = Box(owner, 1)
    found = box.calibrate()
    assert found.threads == Threads(1, 1)
    assert found.curves.overlap is None
    assert len(box.opened) == 1


@pytest.mark.parametrize(("is_free", "mode"), [(True, "sequential"), (False, "plain")])
def test_a_verifier_alone(owner: DraftOwner, is_free: bool, mode: str) -> None:
    found = Box(owner, 4).calibrate(open_drafter=None, is_free=is_free)
    assert (found.mode, found.curves.batches, found.threads.together) == (mode, (), False)


@pytest.mark.parametrize("speed", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_whole_way_stays_under_a_minute(owner: DraftOwner, speed: float, on_gpu: bool) -> None:
    box = Box(owner, 8, on_gpu=on_gpu, row_s=0.05 * speed, draft_s=0.1 * speed, prefill_s=0.05 * speed)
    box.calibrate()
    assert 5 < box.verifier.spent_s < 60
    assert sum(BUDGETS) <= 52


def test_every_draft_model_is_closed_again(owner: DraftOwner) -> None:
    box = Box(owner, 8)
    box.calibrate()
    assert (len(box.opened) >= 5, box.num_open) == (True, 0)
    asked = iter(range(100))
    with pytest.raises(Interrupted):
        box.calibrate(cancelled=lambda: next(asked) > 40)
    assert box.num_open == 0


def test_a_draft_model_that_does_not_load_is_an_error(owner: DraftOwner) -> None:
    def fail(_: Threads) -> Drafter:
        raise BackendError("it does not load")

    with pytest.raises(BackendError, match="does not load"):
        Box(owner, 4).calibrate(open_drafter=fail)
    assert load(KEY) is None


@pytest.mark.parametrize("on_gpu", [False, True])
def test_progress_grows_to_the_end(owner: DraftOwner, on_gpu: bool) -> None:
    shown: list[tuple[str, float]] = []
    Box(owner, 8, on_gpu=on_gpu).calibrate(progress=lambda *item: shown.append(item))
    fractions = [fraction for _, fraction in shown]
    assert fractions == sorted(fractions)
    assert shown[-1] == ("done", 1.0)
    assert {"draft threads", "in turn: verify", "at once: both at once"} <= {stage for stage, _ in shown}


def test_a_busy_box_is_mentioned(
    owner: DraftOwner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Box(owner, 2).calibrate(open_drafter=None)
    assert caplog.messages == []
    monkeypatch.setattr(measuring, "busy_cpus", lambda: 1.7)
    Box(owner, 2).calibrate(open_drafter=None)
    assert len(caplog.messages) == 1
    assert "1.7 CPUs busy" in caplog.messages[0]


# Real models


def run(gguf: Path, draft: Path, owner: DraftOwner, num_cpus: int, num_slots: int = 1) -> Calibration:
    verifier = LlamaVerifier(LlamaOptions(gguf, num_threads=1, num_slots=num_slots, num_gpu_layers=0))

    def open_drafter(threads: Threads) -> Drafter:
        return OnnxDrafter.open(
            draft, num_ctx=verifier.num_ctx, num_threads=threads.draft, num_slots=num_slots, spin=threads.spin
        )

    try:
        return calibrate(verifier, open_drafter, owner.submit, KEY, split(num_cpus), splits(num_cpus))
    finally:
        verifier.close()


@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_tiny_pair(
    tiny_gguf: Path, own_folder: Path, owner: DraftOwner, monkeypatch: pytest.MonkeyPatch, num_slots: int
) -> None:
    for name in ("STEP_S", "TURNS_S", "TRY_S", "TOGETHER_S"):
        monkeypatch.setattr(measuring, name, 0.2)
    found = run(tiny_gguf, own_folder, owner, 2, num_slots)
    assert load(KEY) == found
    assert found.curves.widths[0] == 1
    assert found.curves.batches == (1, 2)[: len(found.curves.batches)]
    assert len(found.curves.batches) >= 1
    assert found.threads.together == (found.mode == "overlapped")
    assert f"{found.gain:.2f} x plain" in found.reason


@pytest.mark.model
@pytest.mark.slow
def test_the_starter_pair_keeps_its_budgets(
    starter_draft: Path, owner: DraftOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the measurement counts itself: on a busy box a sample may take longer than those before let expect."""
    samplers: list[Sampler] = []

    class Spy(Sampler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            samplers.append(self)

    monkeypatch.setattr(engine, "Sampler", Spy)
    for name, budget_s in zip(("STEP_S", "TURNS_S", "TRY_S", "TOGETHER_S", "RECEIVE_S"), BUDGETS, strict=True):
        monkeypatch.setattr(measuring, name, budget_s / 4)
    found = run(load_pair("starter").verifier.find(), starter_draft, owner, 2)
    assert {1, 4, 8} <= {*found.curves.widths}
    assert found.curves.batches == (1,)
    assert len(samplers) >= 2
    assert all(sampler.spent_s <= 1.25 * sampler.budget_s + 1.0 for sampler in samplers)
    assert sum(sampler.budget_s for sampler in samplers) <= sum(BUDGETS) / 4 + 0.01
