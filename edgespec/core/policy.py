"""How many tokens to draft next."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.core.check import check_float, check_int
from edgespec.core.costs import Costs
from edgespec.core.track import EDGES, MAX_CANDIDATES, MAX_DEPTH, MIN_CANDIDATES, Outlook, Track

Floats = NDArray[np.float64]

MAX_DRAFT_LENGTH = MAX_DEPTH
_WORTHWHILE = 1.02  # a smaller gain is not worth the risk
_PROBES = 0.01  # of the time may go into finding out whether speculation pays again
_MAX_FOLLOW_UP = 8
_ALIKE = 0.05


class Plan(NamedTuple):
    """What to draft next for one sequence.

    length          0 or more; whoever drafts clamps it to the room that is left
    min_confidence  see DraftRequest
    """

    length: int
    min_confidence: float = 0.0


class Policy(Protocol):
    def plans(self, tracks: abc.Sequence[Track], costs: Costs, *, overlapped: bool = False) -> list[Plan]:
        """A plan for each of the sequences that are verified together, in order. Changes nothing; any thread.

        overlapped  the draft is made while the verifier works
        """
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length (or less, with ``min_confidence``): for experiments."""

    length: int
    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        check_int("draft length", self.length, 0, MAX_DRAFT_LENGTH)
        check_float("min_confidence", self.min_confidence, 0.0)

    def plans(self, tracks: abc.Sequence[Track], costs: Costs, *, overlapped: bool = False) -> list[Plan]:
        return [Plan(self.length, self.min_confidence)] * len(tracks)


@dataclass(frozen=True, slots=True)
class Threshold:
    """After a round of which less than 60 % was accepted one candidate more, after one of more than 80 % one fewer.

    length  of the first draft, 3 to 8, as are all that follow
    """

    length: int = 5

    def __post_init__(self) -> None:
        check_int("draft length", self.length, MIN_CANDIDATES, MAX_CANDIDATES)

    def plans(self, tracks: abc.Sequence[Track], costs: Costs, *, overlapped: bool = False) -> list[Plan]:
        return [Plan(track.steps.length(self.length)) for track in tracks]


@dataclass(frozen=True, slots=True)
class Goodput:
    """The length, and the confidence to demand, that promise the most committed tokens per second; often none.

    Nothing is drafted for the first round, which gives the first token as soon as it can; nor where the gain over plain
    decoding is too small to be sure of; nor where the drafter would have to read more text than the rest of the answer
    can repay. Then a short draft is tried now and then, for 1 % of the time at most, and longer ones as long as they
    pay for themselves. Where even a perfect drafter could not win, nothing is tried.

    max_length  of a draft
    """

    max_length: int = 16

    def __post_init__(self) -> None:
        check_int("max_length", self.max_length, 1, MAX_DRAFT_LENGTH)

    def plans(self, tracks: abc.Sequence[Track], costs: Costs, *, overlapped: bool = False) -> list[Plan]:
        if len(tracks) == 1:
            return [_plan(tracks[0], costs, self.max_length, overlapped)]
        return _spread(tracks, costs, self.max_length, overlapped) if tracks else []


DEFAULT_POLICY = Goodput()


# One sequence


class _Forecast:
    """Tokens and seconds of the next round, by confidence demanded and by length: (E, L + 1) each."""

    def __init__(self, outlook: Outlook, costs: Costs, depth: int, overlapped: bool) -> None:
        drafted, kept = outlook.drafted, outlook.kept
        self.thresholds, self.drafted = outlook.thresholds, drafted
        by_width = costs.verify_many(np.arange(1.0, drafted.shape[1] + 1), depth)
        # No box takes longer for one row than for more: where it seems to, one of the two was measured badly.
        by_width = np.maximum(by_width, by_width[0])
        verify_s = by_width[0] + _sums(drafted[:, 1:] * np.diff(by_width))
        num_steps, step_s = _sums(drafted[:, :-1]), costs.draft_s(1)  # the refused token is a step too
        self.tokens: Floats = np.cumsum(outlook.accepted, axis=1)
        if overlapped:
            verify_s[:, 1:] *= costs.overlap.verify
            together = np.maximum(verify_s, costs.overlap.draft * step_s * (num_steps + 1))
            seconds = kept * together + (1 - kept) * (verify_s + step_s * num_steps)
            seconds[:, 0] = by_width[0]
        else:
            seconds = verify_s + step_s * num_steps
        self.seconds: Floats = seconds + costs.overhead_s
        self.plain_s = float(self.seconds[0, 0])
        self.gains: Floats = self.tokens * self.plain_s / self.seconds

    @property
    def best_gain(self) -> float:
        return float(self.gains.max())

    def best(self, first: int) -> tuple[int, int]:
        """The threshold's index and the length, ``first`` or more, that gain the most."""
        gains = self.gains[:, first:]
        row, column = divmod(int(gains.argmax()), gains.shape[1])
        return row, column + first


def _sums(values: Floats) -> Floats:
    """Sums of the first 0, 1, … columns."""
    sums = np.zeros((values.shape[0], values.shape[1] + 1))
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums


def _plan(track: Track, costs: Costs, max_length: int, overlapped: bool) -> Plan:
    if track.num_rounds == 0:
        return Plan(0)
    forecast = _Forecast(track.outlook(max_length), costs, track.num_tokens, overlapped)
    row, length = forecast.best(1)
    gained = float(forecast.gains[row, length])
    read_s = costs.read_s(track.num_tokens - track.num_read)
    if gained < _WORTHWHILE:
        row, length = _probe(track, costs, forecast, row, read_s, overlapped)
    elif read_s > (1 - 1 / gained) * forecast.plain_s * track.horizon or costs.wants_baseline(gained):
        length = 0
    return Plan(length, _demanded(track, forecast.thresholds[row])) if length else Plan(0)


def _probe(
    track: Track, costs: Costs, forecast: _Forecast, row: int, read_s: float, overlapped: bool
) -> tuple[int, int]:
    """A threshold's index and a length to try although they promise nothing; length 0 for none.

    What a try loses if all of it is refused has to be saved up for. One that paid for itself is followed by a longer
    one, for what it won.
    """
    max_length = forecast.gains.shape[1] - 1
    perfect = _Forecast(Outlook.constant(1.0, max_length), costs, track.num_tokens, overlapped)
    if perfect.best_gain < _WORTHWHILE:
        return row, 0
    num_drafted, num_accepted = track.last
    if num_accepted and (num_accepted + 1) * forecast.plain_s >= costs.round_s(
        num_drafted + 1, num_drafted, 1, track.num_tokens, overlapped=overlapped
    ):
        return row, min(2 * num_accepted, _MAX_FOLLOW_UP, max_length)
    # No shorter than what could pay: a token alone may cost more than it is worth where more of them do not. And not
    # only what is all but certain: that would say nothing about the rest.
    length = int((perfect.gains[0] >= _WORTHWHILE).argmax())
    row = min(row, _frequent(forecast.drafted[:, 1]))
    loss_s = float(forecast.seconds[row, length]) - forecast.plain_s + read_s
    return row, length if _PROBES * track.quiet * forecast.plain_s >= loss_s else 0


def _frequent(drafted: Floats) -> int:
    """The index of the highest threshold that at least half of the tokens pass, whose chances ``drafted`` has."""
    return max(0, int((drafted >= 0.5).sum()) - 1)


def _demanded(track: Track, threshold: float) -> float:
    return 0.0 if track.says is False else threshold


# Many sequences


class _Spread(NamedTuple):
    lengths: list[int]
    row: int
    gain: float
    width: float


def _spread(tracks: abc.Sequence[Track], costs: Costs, max_length: int, overlapped: bool) -> list[Plan]:
    """Spread the rows of one verification where they promise most; among equals another one is first every round."""
    first = tracks[0].num_rounds % len(tracks)
    turned = [*tracks[first:], *tracks[:first]]
    plans = _spread_turned(turned, costs, max_length, overlapped)
    return [*plans[len(plans) - first :], *plans[: len(plans) - first]]


def _spread_turned(tracks: abc.Sequence[Track], costs: Costs, max_length: int, overlapped: bool) -> list[Plan]:
    table = _Table(tracks, costs, max_length, overlapped)
    ready = np.array([track.num_rounds > 0 for track in tracks])
    if table.perfect_gain() < _WORTHWHILE:
        return [Plan(0)] * len(tracks)
    best = table.spread(ready)
    saved_s = (1 - 1 / best.gain) * table.plain_s / len(tracks)  # for each token of a sequence, everybody's time
    reads_s = [costs.read_s(track.num_tokens - track.num_read) for track in tracks]
    worth = np.array([read <= saved_s * track.horizon for read, track in zip(reads_s, tracks, strict=True)])
    if best.gain >= _WORTHWHILE and not worth[ready].all():
        best = table.spread(ready & worth)
    if best.gain < _WORTHWHILE:
        best = _Spread([0] * len(tracks), best.row, 1.0, len(tracks))
    plans = [Plan(length, EDGES[best.row]) if length else Plan(0) for length in best.lengths]
    has_tried = False  # one at a time: what is found out about one says something of all
    for i, track in enumerate(tracks):
        if ready[i] and not plans[i].length:
            plans[i] = table.follow_up(track, i, best)
            if not plans[i].length and not has_tried:
                plans[i] = table.probe(track, i, best, reads_s[i])
                has_tried = plans[i].length > 0
    return [plan._replace(min_confidence=_demanded(track, plan[1])) for plan, track in zip(plans, tracks, strict=True)]


class _Table:
    """What each further row of a verification promises: (E, L, N) for every confidence demanded, depth and sequence."""

    def __init__(self, tracks: abc.Sequence[Track], costs: Costs, max_length: int, overlapped: bool) -> None:
        outlooks = [track.outlook(max_length) for track in tracks]
        shape = (len(EDGES), max_length)
        self._drafted = np.stack([np.broadcast_to(one.drafted[:, 1:], shape) for one in outlooks], axis=2)
        self._accepted = np.stack([np.broadcast_to(one.accepted[:, 1:], shape) for one in outlooks], axis=2)
        self._costs, self._overlapped, self._num = costs, overlapped, len(tracks)
        self._depth = sum(track.num_tokens for track in tracks) / len(tracks)
        self.plain_s = costs.plain_s(self._depth, len(tracks))

    def spread(self, ready: NDArray[np.bool_]) -> _Spread:
        """Give rows to the sequences that are ``ready``, the likeliest to be accepted first, while that pays.

        Every number of rows is looked at, not only the next: times do not grow evenly with the width.
        """
        num, flat = self._num, (len(EDGES), -1)
        chance = np.where(ready, self._accepted / self._drafted, -1.0).reshape(flat)
        # Who is drafted less is known less well: what differs by a few percent is equal.
        order = np.argsort(-np.round(chance / _ALIKE), axis=1, kind="stable")
        rows = np.take_along_axis((self._drafted * ready).reshape(flat), order, axis=1)
        tokens = np.take_along_axis((self._accepted * ready).reshape(flat), order, axis=1)
        depth = order // num + 1
        widths = num + np.cumsum(rows, axis=1)
        seconds = self._seconds(widths, np.maximum.accumulate(depth, axis=1), np.cumsum(depth == 1, axis=1))
        gains = (num + np.cumsum(tokens, axis=1)) * self.plain_s / (num * seconds)
        row, place = divmod(int(gains.argmax()), gains.shape[1])
        lengths = np.bincount(order[row, : place + 1] % num, minlength=num) * ready
        return _Spread([int(length) for length in lengths], row, float(gains[row, place]), float(widths[row, place]))

    def perfect_gain(self) -> float:
        """What could be won if all drafts were right: of all sequences, or of one alone."""
        lengths = np.arange(1.0, self._drafted.shape[1] + 1)
        gains = []
        for drafting in (self._num, 1):
            widths = self._num + drafting * lengths
            seconds = self._seconds(widths[None], lengths[None], np.full((1, len(lengths)), drafting))[0]
            gains.append(float((widths * self.plain_s / (self._num * seconds)).max()))
        return max(gains)

    def follow_up(self, track: Track, place: int, best: _Spread) -> Plan:
        """Of a draft that paid for itself, as in ``_probe``: a token of one is worth its share of the time of all."""
        num_drafted, num_accepted = track.last
        if not num_accepted or num_accepted * self._share_s < self._extra_s(best, num_drafted, num_drafted):
            return Plan(0)
        length = min(2 * num_accepted, _MAX_FOLLOW_UP, int(self._drafted.shape[1]))
        return Plan(length, EDGES[_frequent(self._drafted[:, 0, place])])

    def probe(self, track: Track, place: int, best: _Spread, read_s: float) -> Plan:
        """A token to try although it promises nothing, as in ``_probe``."""
        drafted = self._drafted[:, 0, place]
        row = _frequent(drafted)
        loss_s = self._extra_s(best, float(drafted[row]), 1) + read_s
        return Plan(1, EDGES[row]) if _PROBES * track.quiet * self._share_s >= loss_s else Plan(0)

    @property
    def _share_s(self) -> float:
        return self.plain_s / self._num

    def _extra_s(self, best: _Spread, num_rows: float, num_steps: int) -> float:
        """Seconds that a draft of one more sequence adds to a round."""
        before, after = self._costs.verify_many(np.array([best.width, best.width + num_rows]), self._depth)
        return float(after - before) + self._costs.draft_s(max(0, num_steps - max(best.lengths)))

    def _seconds(self, widths: Floats, num_steps: Floats, num_drafting: Floats) -> Floats:
        costs, shape = self._costs, widths.shape
        verify_s = costs.verify_many(widths.ravel(), self._depth).reshape(shape)
        draft_s = num_steps * costs.step_many(num_drafting.ravel()).reshape(shape)
        if self._overlapped:
            both = np.maximum(verify_s * costs.overlap.verify, draft_s * costs.overlap.draft)
            return np.asarray(both + costs.overhead_s)
        return np.asarray(verify_s + draft_s + costs.overhead_s)
