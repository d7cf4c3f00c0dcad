"""What a round costs on this box: curves that were measured, and how today's times differ from them."""

from __future__ import annotations

import bisect
import collections.abc as abc
import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.core.sequence import Round

Floats = NDArray[np.float64]

MAX_S = 3600.0  # nothing here takes longer: what claims to is a clock that jumped
_MIN_S = 1e-9
_OVERHEAD_SHARE = 0.1  # how far one measurement moves the overhead
_MAX_READ = 512
# Reading text that is there already goes in chunks: a token of it costs this much of a drafted one.
_READ = 0.13


@dataclass(frozen=True, slots=True)
class Overlap:
    """By what factor either side slows down while the other works too; 1.0: not at all."""

    verify: float = 1.0
    draft: float = 1.0

    def __post_init__(self) -> None:
        _check_seconds("overlap", (self.verify, self.draft))


@dataclass(frozen=True, slots=True)
class Curves:
    """Measured seconds. Raises ValueError for what cannot have been measured.

    widths    (W,) ascending, the first is 1: rows of one verification
    depths    (D,) ascending: tokens the cache holds
    verify_s  (D, W)
    batches   (B,) ascending, the first is 1: sequences drafted together; empty: no draft model was measured
    step_s    (B,) one drafted token for each of so many sequences
    overlap   None: the two sides cannot usefully work at the same time, or it was not measured
    read_s    the drafter reading one token that is there already (a prompt's); None: not measured
    """

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    verify_s: tuple[tuple[float, ...], ...]
    batches: tuple[int, ...] = ()
    step_s: tuple[float, ...] = ()
    overlap: Overlap | None = None
    read_s: float | None = None

    def __post_init__(self) -> None:
        _check_ascending("widths", self.widths, 1)
        _check_ascending("depths", self.depths, None)
        if self.batches or self.step_s:
            _check_ascending("batches", self.batches, 1)
        _check_size("verify_s", self.verify_s, len(self.depths))
        for row in self.verify_s:
            _check_size("a row of verify_s", row, len(self.widths))
            _check_seconds("verify_s", row)
        _check_size("step_s", self.step_s, len(self.batches))
        _check_seconds("step_s", self.step_s)
        if self.read_s is not None:
            _check_seconds("read_s", (self.read_s,))
        if self.overlap is not None and not isinstance(self.overlap, Overlap):
            raise ValueError(f"overlap: got {self.overlap!r}; allowed: an Overlap, or None")

    def as_dict(self) -> dict[str, object]:
        """For JSON; ``from_dict`` makes the same curves of it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: object) -> Curves:
        """Curves from what ``as_dict`` gave, lists for tuples allowed. Raises ValueError for anything else."""
        known = set(cls.__dataclass_fields__)
        if not isinstance(values, dict) or set(values) != known:
            got = sorted(map(str, values)) if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"curves: got {got}; allowed: exactly {sorted(known)}")
        overlap = values["overlap"]
        if overlap is not None and (not isinstance(overlap, dict) or set(overlap) != {"verify", "draft"}):
            raise ValueError(f"overlap: got {overlap!r}; allowed: verify and draft, or None")
        fields: dict[str, Any] = {name: _as_tuple(value) for name, value in values.items() if name != "overlap"}
        return cls(**fields, overlap=None if overlap is None else Overlap(**overlap))


def _as_tuple(value: object) -> object:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, (list, tuple)) else value


def _check_ascending(name: str, values: object, first: int | None) -> None:
    whole = isinstance(values, tuple) and all(isinstance(value, int) and value >= 0 for value in values)
    if not isinstance(values, tuple) or not whole or not values or any(map(lambda a, b: a >= b, values, values[1:])):
        raise ValueError(f"{name}: got {values!r}; allowed: whole numbers of 0 or more, ascending, one or more")
    if first is not None and values[0] != first:
        raise ValueError(f"{name}: got {values[0]} first; allowed: {first}")


def _check_size(name: str, values: object, size: int) -> None:
    if not isinstance(values, tuple) or len(values) != size:
        raise ValueError(f"{name}: got {values!r}; allowed: {size} values")


def _check_seconds(name: str, values: abc.Iterable[object]) -> None:
    for value in values:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0.0 < value <= MAX_S:  # type: ignore[operator]
            raise ValueError(f"{name}: got {value!r}; allowed: numbers above 0 and at most {MAX_S:g}")


FLAT = Curves((1,), (0,), ((1.0,),), (1,), (0.1,), Overlap())


class Costs:
    """One thread: the engine's. ``curves`` are where it starts from; ``observe`` follows the box from there."""

    def __init__(self, curves: Curves = FLAT) -> None:
        self.curves = curves
        self.overhead_s = 0.0
        self._widths = np.array(curves.widths, dtype=np.float64)
        self._verify_s = np.array(curves.verify_s)
        self._batches = np.array(curves.batches, dtype=np.float64)
        self._verify = Drift(curves.widths)
        self._draft = Drift(curves.batches) if curves.batches else None
        self._num_baselines = self._age = 0
        self._read: deque[int] = deque(maxlen=_MAX_READ)

    @property
    def has_drafter(self) -> bool:
        """Whether drafting costs anything: False where no draft model was measured (lookup)."""
        return self._draft is not None

    @property
    def overlap(self) -> Overlap:
        return self.curves.overlap or Overlap()

    def wants_baseline(self, gain: float) -> bool:
        """Whether a round without a draft is due, lest nobody knows any more what plain decoding costs.

        gain  the speedup that depends on it. Half a percent of the time may go into it: where much is gained a round
              without a draft costs much, and an error matters little
        """
        early = 8 * gain * 4 ** min(self._num_baselines, 8)
        return bool(self._age >= min(early, max(8.0, 200 * (gain - 1))))

    def verify_s(self, width: float, depth: float = 0) -> float:
        """One verification of ``width`` rows, all sequences together, ``depth`` tokens in the cache."""
        return float(self.verify_many(np.array([width], dtype=np.float64), depth)[0])

    def verify_many(self, widths: Floats, depth: float = 0) -> Floats:
        """``verify_s`` of each of several widths.

        Linear between what was measured. Beyond the last width or depth it goes on as before it, but never falls.
        """
        curve = _interpolate(widths, self._widths, self._at_depth(depth))
        return np.asarray(curve * np.interp(widths, self._widths, self._verify.factors))

    def draft_s(self, num_tokens: float, num_sequences: float = 1) -> float:
        """Drafting so many tokens for each of so many sequences."""
        return max(0.0, num_tokens) * float(self.step_many(np.array([num_sequences], dtype=np.float64))[0])

    def step_many(self, num_sequences: Floats) -> Floats:
        """One drafted token for each of so many sequences, for several such numbers; none cost nothing."""
        if self._draft is None:
            return np.zeros(len(num_sequences))
        curve = _interpolate(num_sequences, self._batches, np.array(self.curves.step_s))
        curve *= np.interp(num_sequences, self._batches, self._draft.factors)
        return np.where(num_sequences > 0, curve, 0.0)

    def read_s(self, num_tokens: float) -> float:
        """The drafter reading so many tokens of one sequence that it has not seen."""
        if self._draft is None:
            return 0.0
        one = _READ * self.curves.step_s[0] if self.curves.read_s is None else self.curves.read_s
        return max(0.0, num_tokens) * one * float(self._draft.factors[0])

    def plain_s(self, depth: float = 0, num_sequences: int = 1) -> float:
        """A round of plain decoding, one token for each sequence: the live baseline that speedups are taken against."""
        return self.verify_s(max(1, num_sequences), depth) + self.overhead_s

    def round_s(
        self,
        width: float,
        num_drafted: float,
        num_sequences: float = 1,
        depth: float = 0,
        *,
        overlapped: bool = False,
    ) -> float:
        """A whole round: verify ``width`` rows, draft ``num_drafted`` tokens for each sequence, and the overhead.

        overlapped  the draft is made while the verifier works, and none of it is thrown away
        """
        verify_s, draft_s = self.verify_s(width, depth), self.draft_s(num_drafted, num_sequences)
        if overlapped and draft_s > 0.0:
            return max(verify_s * self.overlap.verify, draft_s * self.overlap.draft) + self.overhead_s
        return verify_s + draft_s + self.overhead_s

    def observe(self, rounds: abc.Sequence[Round], depth: float, overhead_s: float | None = None) -> None:
        """One verification and the rounds it made, ``depth`` the mean number of tokens before it.

        overhead_s  what passed outside both sides, where that was measured

        Not for a verification that read a prompt as well. Times no clock can have measured are ignored, single ones
        that are far from all others too.
        """
        if not rounds:
            return
        self._age += 1
        overlapped = any(round_.ahead is not None or round_.hidden_s > 0.0 for round_ in rounds)
        self._observe_verify(rounds[0], len(rounds), depth, overlapped)
        self._observe_draft([round_ for round_ in rounds if _num_steps(round_)], alone=len(rounds) == 1)
        if overhead_s is not None and 0.0 <= overhead_s < MAX_S:
            # Once in a while something else runs in between; that is no reason to expect it every time.
            likely = min(overhead_s, 4 * self.overhead_s + 1e-3)
            self.overhead_s += _OVERHEAD_SHARE * (likely - self.overhead_s)

    def _observe_verify(self, round_: Round, num_rounds: int, depth: float, overlapped: bool) -> None:
        if not _MIN_S < round_.verify_s < MAX_S or round_.width < 1:
            return
        expected = self.verify_s(round_.width, depth) * (self.overlap.verify if overlapped else 1.0)
        self._verify.observe(round_.width, round_.verify_s / expected)
        if round_.width == num_rounds:
            self._age, self._num_baselines = 0, self._num_baselines + 1

    def _observe_draft(self, drafted: list[Round], alone: bool) -> None:
        # A drafter that was not asked the round before has to read first, which takes it who knows how long.
        has_read = all(round_.draft.start in self._read for round_ in drafted)
        self._read.extend(round_.draft.start + len(round_.tokens) for round_ in drafted)
        draft_s = max((round_.draft_s for round_ in drafted), default=0.0)
        if self._draft is None or not has_read or not _MIN_S < draft_s < MAX_S:
            return
        hidden = max(0.0, min(1.0, max(round_.hidden_s for round_ in drafted) / draft_s))
        slower = 1.0 + hidden * (self.overlap.draft - 1.0)
        guess = alone and hidden > 0.0  # a look-ahead drafts the verifier's own token as well
        expected = self.draft_s(max(map(_num_steps, drafted)) + guess, len(drafted)) * slower
        self._draft.observe(len(drafted), draft_s / expected)

    def _at_depth(self, depth: float) -> Floats:
        depths, rows = self.curves.depths, self._verify_s
        if len(depths) == 1 or not depth > depths[0]:
            return np.asarray(rows[0])
        i = min(bisect.bisect_right(depths, depth), len(depths) - 1)
        share = (min(depth, 2.0**40) - depths[i - 1]) / (depths[i] - depths[i - 1])
        row = rows[i - 1] + share * (rows[i] - rows[i - 1])
        return np.asarray(np.maximum(row, rows[-1]) if share > 1.0 else row)


def _interpolate(values: Floats, points: Floats, row: Floats) -> Floats:
    """``row`` between its ``points``; beyond the last it goes on as before it, but never falls."""
    between: Floats = np.interp(values, points, row)
    if len(points) == 1 or values.max(initial=0.0) <= points[-1]:
        return between
    slope = max(0.0, float((row[-1] - row[-2]) / (points[-1] - points[-2])))
    return np.asarray(between + slope * np.maximum(values - points[-1], 0.0))


def _num_steps(round_: Round) -> int:
    """Tokens the drafter computed for this round."""
    return 0 if round_.draft.is_free else round_.drafted + (round_.draft.held_back is not None)


class Drift:
    """By what factor today's times at each measured point differ from the curve.

    A Kalman filter over logarithms: one common drift, which moves, and a constant error of the curve at every point. A
    time measured at one width is first put down to both; the next one elsewhere tells them apart. So an error of the
    curve at wide batches does not pass for a slow box, and a slow box is noticed at every width.

    points  (n,) ascending: the widths or batch sizes of the curve
    """

    _NOISE = 0.2**2
    _MOVES = np.array([0.03**2, 0.002**2])  # per observation: of the common drift, of a point's error
    _UNKNOWN = np.array([0.5**2, 0.3**2])  # before the first
    _STRANGE = math.log(3.0)
    _PATIENCE = 4

    def __init__(self, points: abc.Sequence[int]) -> None:
        kinds = np.array([0, *[1] * len(points)])
        self._points = points
        self._state = np.zeros(len(kinds))
        self._moves, self._unknown = np.diag(self._MOVES[kinds]), np.diag(self._UNKNOWN[kinds])
        self._covariance = self._unknown.copy()
        self._num_strange = 0
        self.factors: Floats = np.ones(len(points))

    def observe(self, point: float, ratio: float) -> None:
        """What was measured at ``point`` over what was expected there; both finite, above 0."""
        error = math.log(ratio)
        if abs(error) <= self._STRANGE:
            self._num_strange = 0
        elif not self._believe(error):
            return
        where = self._where(point)
        self._covariance += self._moves
        spread = self._covariance @ where
        gain = spread / (where @ spread + self._NOISE)
        self._state += gain * max(-6.0, min(6.0, error))
        self._covariance -= np.outer(gain, spread)
        self.factors = np.exp(np.clip(self._state[0] + self._state[1:], -12.0, 12.0))

    def _believe(self, error: float) -> bool:
        """Whether so many strange times came one after the other that the box must have changed, and all is open."""
        self._num_strange += 1
        if self._num_strange == self._PATIENCE:
            self._covariance = self._unknown * error**2
        return self._num_strange >= self._PATIENCE

    def _where(self, point: float) -> Floats:
        """How much of the common drift and of each point's error there is in a time measured at ``point``."""
        where = np.zeros(len(self._state))
        where[0] = 1.0
        i = bisect.bisect_right(self._points, point)
        if i == len(self._points):
            where[i] = 1.0
        else:
            low, high = self._points[i - 1], self._points[i]
            where[i + 1] = (point - low) / (high - low)
            where[i] = 1.0 - where[i + 1]
        return where
