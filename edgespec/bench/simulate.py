"""Real models at a named device's pace: a simulation of its times, of nothing else.

What is computed is real, and so are the text and what is accepted. A call returns when the device would have finished,
all times stretched by one factor, the dilation, so that this box has done the real work by then. Where it has not,
that is counted: a simulation that runs late says nothing. The time edgespec's own code takes is not stretched, so that
it weighs 1 / dilation of what it would; see tests/bench/overhead.py for that.
"""

from __future__ import annotations

import collections.abc as abc
import time

from edgespec.bench.device_curves import SimulatedDevice
from edgespec.core.prefix import num_common
from edgespec.core.sequence import Cancelled, Draft, never
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.verifiers.base import Rows, ScoreRequest, Verifier

SHORTEST_S = 1e-6  # not worth a sleep
CATCH_UP = 8  # a call that finds more tokens missing than this evaluates a prompt, which is not simulated


class Meter:
    """How long one side has worked so far. Its own thread starts and stops it, any thread may ask."""

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (0.0, None)  # replaced whole, so that a reader sees one or the other

    def start(self, now: float) -> None:
        self._state = (self._state[0], now)

    def stop(self, now: float) -> None:
        self._state = (self.busy_s(now), None)

    def busy_s(self, now: float) -> float:
        total, since = self._state
        return total + (now - since if since is not None else 0.0)


class Pace:
    """Holds one side's thread to the device's times.

    num_passes, num_late  how often it had to wait for the device, and how often the real work took longer
    late_s, paced_s       by how much, of how much in all; the device's seconds
    """

    def __init__(self, own: Meter, other: Meter, slowdown: float, dilation: float) -> None:
        self._own, self._other = own, other
        self._lost = 1 - 1 / slowdown  # of the time both work
        self._dilation = dilation
        self._began = self._other_s = 0.0
        self.num_passes = self.num_late = 0
        self.late_s = self.paced_s = 0.0

    def begin(self) -> None:
        """The device starts to work now."""
        self._mark(time.perf_counter())
        self._own.start(self._began)

    def wait(self, device_s: float, *, counts: bool = True) -> None:
        """Until the device has worked so long since the last mark; a mark. Late work counts unless told otherwise."""
        late_s = self._worked_s(time.perf_counter()) - device_s
        if counts:
            self.num_passes += 1
            self.num_late += late_s > 0
            self.late_s += max(late_s, 0.0)
            self.paced_s += device_s
        now = time.perf_counter()
        while (left_s := device_s - self._worked_s(now)) > SHORTEST_S:
            # Where they share something the other side may start or stop meanwhile: look again before the end.
            time.sleep(left_s * self._dilation * (0.1 if self._lost and left_s > 1e-4 else 1.0))
            now = time.perf_counter()
        self._mark(now)

    def end(self) -> None:
        self._own.stop(time.perf_counter())

    def _mark(self, now: float) -> None:
        self._began, self._other_s = now, self._other.busy_s(now)

    def _worked_s(self, now: float) -> float:
        """What the device has done since the mark: less while the other side works too, where they share something."""
        together = self._other.busy_s(now) - self._other_s
        return (now - self._began - self._lost * together) / self._dilation


def paces(device: SimulatedDevice, dilation: float) -> tuple[Pace, Pace]:
    """The verifier's and the drafter's."""
    verifier, drafter = Meter(), Meter()
    return (
        Pace(verifier, drafter, device.slowdown, dilation),
        Pace(drafter, verifier, device.slowdown, dilation),
    )


class SimulatedVerifier:
    """A verifier that takes the device's time for the rows of a call. Evaluating a prompt takes what it takes here."""

    def __init__(self, verifier: Verifier, device: SimulatedDevice, pace: Pace) -> None:
        self._inner, self._device, self._pace = verifier, device, pace
        self._held = _Held()

    @property
    def num_vocab(self) -> int:
        return self._inner.num_vocab

    @property
    def num_ctx(self) -> int:
        return self._inner.num_ctx

    @property
    def num_slots(self) -> int:
        return self._inner.num_slots

    def score(self, requests: abc.Sequence[ScoreRequest], cancelled: Cancelled = never) -> list[Rows]:
        width = sum(request.num_rows for request in requests)
        missing = sum(self._held.num_missing(request.slot, request.tokens) for request in requests)
        self._pace.begin()
        try:
            rows = self._inner.score(requests, cancelled)
            for request in requests:
                self._held.set(request.slot, request.tokens)
            self._pace.wait(self._device.verify_s(width), counts=missing <= width + CATCH_UP)
        finally:
            self._pace.end()
        return rows

    def close(self) -> None:
        self._inner.close()


class SimulatedDrafter:
    """A drafter that takes ``step_s`` of the device's time for every token.

    It has to ask ``cancelled`` once before each pass over its model, as OnnxDrafter does.
    """

    def __init__(self, drafter: Drafter, step_s: float, pace: Pace) -> None:
        self._inner, self._step_s, self._pace = drafter, step_s, pace
        self._held = _Held()

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def num_slots(self) -> int:
        return self._inner.num_slots

    def propose(self, requests: abc.Sequence[DraftRequest], cancelled: Cancelled = never) -> list[Draft]:
        missing = max((self._held.num_missing(request.slot, request.tokens) for request in requests), default=0)
        steps = _Steps(self._pace, self._step_s, cancelled, counts=missing <= CATCH_UP)
        self._pace.begin()
        try:
            drafts = self._inner.propose(requests, steps.cancelled)
            steps.finish()
        finally:
            self._pace.end()
        for request, draft in zip(requests, drafts, strict=True):
            if request.num_draft:
                self._held.set(request.slot, [*request.tokens, *draft.tokens])
        return drafts

    def close(self) -> None:
        self._inner.close()


class _Steps:
    """Ends every pass of a draft at its time: when the next one is about to begin, or the last is done."""

    def __init__(self, pace: Pace, step_s: float, cancelled: Cancelled, *, counts: bool) -> None:
        self._pace, self._step_s, self._asked = pace, step_s, cancelled
        self._counts = counts
        self._open = False

    def cancelled(self) -> bool:
        self.finish()
        self._open = not self._asked()
        return not self._open

    def finish(self) -> None:
        if self._open:
            self._pace.wait(self._step_s, counts=self._counts)
            self._open, self._counts = False, True


class _Held:
    """What the slots of a backend hold, as far as its calls tell."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}

    def num_missing(self, slot: int, tokens: abc.Sequence[int]) -> int:
        return len(tokens) - num_common(self._tokens.get(slot, []), list(tokens))

    def set(self, slot: int, tokens: abc.Sequence[int]) -> None:
        self._tokens[slot] = list(tokens)
