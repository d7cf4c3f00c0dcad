"""Samples of what something costs, taken in turn within a budget, by a clock that may jump."""

from __future__ import annotations

import collections.abc as abc

from edgespec.core.sequence import Cancelled
from edgespec.verifiers.base import Interrupted

Progress = abc.Callable[[str, float], None]
Clock = abc.Callable[[], float]
Samples = dict[int, list[float]]  # seconds by point: rows, or sequences drafted together

MAX_SAMPLE_S = 60.0  # longer than a calibration may take: the clock jumped, or the box slept


class Sampler:
    """Takes samples and adds up what they cost. One thread.

    clock     seconds
    budget_s  what may be spent in all
    repeats   samples of each point
    """

    def __init__(
        self, clock: Clock, budget_s: float, repeats: int, progress: Progress | None, cancelled: Cancelled
    ) -> None:
        self.clock, self.budget_s, self.repeats = clock, budget_s, repeats
        self.spent_s = 0.0
        self._progress, self._cancelled = progress, cancelled

    def timed(self, call: abc.Callable[[], object]) -> float | None:
        """Seconds the call took; None: no usable sample."""
        began = self.clock()
        call()
        return self.spend(self.clock() - began)

    def spend(self, seconds: float) -> float | None:
        """Count what was measured; None, and not counted, where the clock must have jumped."""
        if not 0.0 < seconds < MAX_SAMPLE_S:
            return None
        self.spent_s += seconds
        return seconds

    def sweep(
        self,
        stage: str,
        points: abc.Sequence[int],
        sample: abc.Callable[[int], float | None],
        share: float,
        *,
        must: int = 0,
        known: abc.Mapping[int, list[float]] | None = None,
    ) -> Samples:
        """Samples of the points that got one: all in turn, again and again, so that a busy moment falls on all alike.

        share  of the budget, at which this ends, except for the first ``must`` points: they are due until they have a
               sample
        known  samples of other points, which say what these may cost

        Raises Interrupted.
        """
        samples: Samples = {point: [] for point in points}
        for _ in range(self.repeats):
            for index, point in enumerate(points):
                is_due = index < must and not samples[point]
                if is_due or self._is_affordable(point, {**(known or {}), **samples}, share):
                    self._take(stage, samples[point], lambda point=point: sample(point))  # type: ignore[misc]
        return {point: found for point, found in samples.items() if found}

    def _take(self, stage: str, found: list[float], sample: abc.Callable[[], float | None]) -> None:
        if self._cancelled():
            raise Interrupted
        self.report(stage)
        seconds = sample()
        found += [] if seconds is None else [seconds]

    def _is_affordable(self, point: int, samples: Samples, share: float) -> bool:
        """By the points that were measured: more costs more, but no more than in proportion."""
        expected = min((found[-1] * max(1.0, point / other) for other, found in samples.items() if found), default=0.0)
        return self.spent_s + expected <= share * self.budget_s

    def report(self, stage: str, fraction: float | None = None) -> None:
        if self._progress is not None:
            self._progress(stage, min(1.0, self.spent_s / self.budget_s) if fraction is None else fraction)


def typical(samples: abc.Mapping[int, list[float]]) -> dict[int, float]:
    """Seconds by point, ascending: the lower quartile, since what else a box does only ever adds time. A median would
    need more than half of the samples to be undisturbed.
    """
    return {point: sorted(samples[point])[len(samples[point]) // 4] for point in sorted(samples)}
