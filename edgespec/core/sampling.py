"""From a logits row to a sparse distribution, and from a distribution to a token.

Everything here is a pure function: any thread may call it, nothing is mutated, and the randomness of a draw is computed
from (seed, stream, position) instead of being taken from a generator that has to be carried along.
"""

from __future__ import annotations

import collections.abc as abc
import math
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from edgespec.core.head import Head, Ids
from edgespec.core.ranking import LARGEST, Row, most_likely, ranked
from edgespec.core.sequence import Distribution, SamplingParams
from edgespec.errors import ParameterError

Floats = NDArray[np.float64]
Tokens = abc.Sequence[int] | Ids

_SMALLEST = 1e-300  # weights below it would vanish when they are normalised
# Any colder and a quotient overflows; from here on all but the very largest logits have weight 0 already.
_COLDEST = 1e-200
_CHUNK = 1 << 14
_NUCLEUS = 256


class Stream(IntEnum):
    """Independent sources of randomness. TARGET is the verifier's own draws: the residual and the bonus token."""

    DRAFT = 1
    ACCEPT = 2
    TARGET = 3
    GUMBEL = 4


def distribution(
    row: Row, params: SamplingParams, tokens: Tokens, num_prompt: int, head: Head | None = None
) -> Distribution:
    """What the next token is drawn from, given its logits.

    row         (n,) float32, not changed: one logit for each token id, or for each entry of ``head.d2t``
    tokens      all that stands before the token: prompt, output and drafted prefix; looked at only for penalties
    num_prompt  how many of ``tokens`` are the prompt
    head        for a draft model with a trimmed output vocabulary; penalties, bias and result stay in verifier ids

    The order of processing is that of SamplingParams. Equal logits rank by lowest id. A penalty or bias for an id that
    has no logit has no effect. Raises BackendError for a row with NaN, +inf or nothing finite.
    """
    if head is not None and head.order is not None:
        row = row[head.order]
    row = penalise(row, params, tokens, num_prompt, head)
    if params.greedy:
        best, _ = most_likely(row)
        return one_hot(best if head is None else int(head.ids[best]))
    ids, weights = _selected(row, params)
    return Distribution(ids if head is None else head.ids[ids], weights / weights.sum())


def one_hot(token: int) -> Distribution:
    return Distribution(np.array([token], dtype=np.int64), np.ones(1))


# Penalties and bias


def penalise(row: Row, params: SamplingParams, tokens: Tokens, num_prompt: int, head: Head | None = None) -> Row:
    """The row after penalties and bias: a changed copy, or the row itself where there is nothing to change.

    Arguments as for ``distribution``, but a row with a head is ordered as ``head.ids``.
    """
    if not params.penalised:
        return row
    row = row.copy()
    places = _places(np.asarray(tokens, dtype=np.int64), len(row), head)
    with np.errstate(over="ignore"):
        if params.repeat_penalty != 1.0:
            _repeat(row, places[places >= 0], params.repeat_penalty)
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            output = places[num_prompt:]
            _count(row, output[output >= 0], params)
        if params.logit_bias:
            _bias(row, params.logit_bias, head)
    return row


def _places(ids: Ids, width: int, head: Head | None) -> Ids:
    """Where in the row each verifier id has its logit; -1 where it has none."""
    places: Ids = np.where(ids < width, ids, -1) if head is None else head.t2d.take(ids, mode="clip")
    return places


def _repeat(row: Row, seen: Ids, penalty: float) -> None:
    logits = row[seen].astype(np.float64)
    _assign(row, seen, np.where(logits > 0, logits / penalty, logits * penalty))


def _count(row: Row, output: Ids, params: SamplingParams) -> None:
    counts = np.bincount(output)[output]
    _assign(row, output, row[output].astype(np.float64) - params.presence_penalty - params.frequency_penalty * counts)


def _bias(row: Row, logit_bias: tuple[tuple[int, float], ...], head: Head | None) -> None:
    ids, values = zip(*logit_bias, strict=True)
    places = _places(np.array(ids, dtype=np.int64), len(row), head)
    known = places >= 0
    places = places[known]
    totals = np.bincount(places, weights=np.array(values)[known])[places]
    _assign(row, places, row[places].astype(np.float64) + totals)


def _assign(row: Row, places: Ids, logits: Floats) -> None:
    """Set logits (a place may repeat), clamped to float32.

    Those that are not finite stay: no parameter lifts a ban or hides a broken row.
    """
    before = row[places]
    row[places] = np.where(np.isfinite(before), np.clip(logits, -LARGEST, LARGEST), before)


# Temperature and filters. A weight is a probability before normalising, exp((logit - top) / temperature), so the most
# likely token has weight 1 and min-p is a plain threshold.


def _selected(row: Row, params: SamplingParams) -> tuple[Ids, Floats]:
    """Indices (ascending) and weights of what the filters leave."""
    if params.top_p < 1.0 or 0 < params.top_k < len(row):
        return _head_of_ranking(row, params)
    if params.min_p > 0.0:
        _, top = most_likely(row)
        ids = _at_least(row, top, params)
        weights = _weights(row[ids], top, params)
    else:
        ids, weights = np.arange(len(row)), _weights(row, most_likely(row)[1], params)
    kept = weights >= _least(params)
    return (ids, weights) if kept.all() else (ids[kept], weights[kept])


def _least(params: SamplingParams) -> float:
    """The weight without which min-p, or normalising, drops a token."""
    return max(params.min_p, _SMALLEST)


def _head_of_ranking(row: Row, params: SamplingParams) -> tuple[Ids, Floats]:
    """Top-k and top-p, then min-p: all keep the beginning of the ranking by logit."""
    if 0 < params.top_k < len(row):
        ids, logits = ranked(row, params.top_k)
        weights = _weights(logits, float(logits[0]), params)
        total = float(weights.sum())
    else:
        ids, weights, total = _nucleus(row, most_likely(row)[1], params)
    if params.top_p < 1.0:
        num = int(weights.cumsum().searchsorted(params.top_p * total)) + 1
        ids, weights = ids[:num], weights[:num]
    if weights[-1] < _least(params):
        num = int(np.count_nonzero(weights >= _least(params)))
        ids, weights = ids[:num], weights[:num]
    if len(ids) == 1:
        return ids, weights
    order = ids.argsort()
    return ids[order], weights[order]


def _nucleus(row: Row, top: float, params: SamplingParams) -> tuple[Ids, Floats, float]:
    """Enough of the ranking to hold a mass of top_p (or all that min-p would keep), and the mass of the whole row.

    A nucleus is usually some tens of tokens, so guess and grow: sorting the row would cost a hundred times as much.
    """
    total = sum(float(_weights(row[start : start + _CHUNK], top, params).sum()) for start in range(0, len(row), _CHUNK))
    num = _NUCLEUS
    while True:
        ids, logits = ranked(row, num)
        weights = _weights(logits, top, params)
        if num >= len(row) or weights[-1] < params.min_p or weights.sum() >= params.top_p * total:
            return ids, weights, total
        num *= 8


def _weights(logits: Row, top: float, params: SamplingParams) -> Floats:
    weights = logits.astype(np.float64)
    weights -= top
    weights /= max(params.temperature, _COLDEST)
    return np.exp(weights, out=weights)


def _at_least(row: Row, top: float, params: SamplingParams) -> Ids:
    """All that min-p can keep: the threshold is a little too low, the weights decide."""
    threshold = top + 1.000001 * params.temperature * math.log(params.min_p)
    return np.flatnonzero(row >= max(threshold, -LARGEST))


# Randomness. Each value is the splitmix64 sequence (Steele, Lea, Flood 2014) of its own key: nothing has to be stored,
# and a position that is drafted again sees the same noise again.

_GOLDEN, _MIX1, _MIX2, _MASK = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 2**64 - 1
# The same for arrays: numpy would convert a Python number again in every operation.
_GOLDEN64, _MIX1_64, _MIX2_64 = np.uint64(_GOLDEN), np.uint64(_MIX1), np.uint64(_MIX2)
_12, _27, _30, _31 = np.uint64(12), np.uint64(27), np.uint64(30), np.uint64(31)
_UNIT = 2.0**-52  # 52 bits and a half: one more bit and the largest value would round to 1


def pick(dist: Distribution, params: SamplingParams, position: int, stream: Stream) -> int:
    """Draw a token.

    position  index in the sequence of the token that is drawn
    stream    who draws, for the rule ``rejection``; ``coupled`` has one noise for all, which is its point

    ``coupled`` takes argmax(log prob + Gumbel noise), a fair draw (Gumbel-max; coupling after Daliri, Musco, Suresh
    2408.07978); ``rejection`` inverts the cumulative distribution. Raises ParameterError without a seed, unless greedy.
    """
    if params.greedy:
        return int(dist.ids[dist.probs.argmax()])
    if len(dist.ids) == 1:
        seed_of(params)
        return int(dist.ids[0])
    if params.rule == "coupled":
        return int(dist.ids[scores(dist, params, position).argmax()])
    cumulative = dist.probs.cumsum()
    value = uniform(seed_of(params), stream, position) * cumulative[-1]
    place = int(cumulative.searchsorted(value, side="right"))
    return int(dist.ids[min(place, len(dist.ids) - 1)])


def scores(dist: Distribution, params: SamplingParams, position: int) -> Floats:
    """What the rule ``coupled`` takes the largest of, (n,): log probability + noise. Raises as ``pick`` does."""
    return np.log(dist.probs) + gumbel(seed_of(params), position, dist.ids)


def seed_of(params: SamplingParams) -> int:
    """The seed; raises ParameterError where there is none."""
    if params.seed is None:
        raise ParameterError("seed: got None; allowed: a whole number; draw one before sampling")
    return params.seed


def gumbel(seed: int, position: int, ids: Ids) -> Floats:
    """Standard Gumbel noise (n,) for each token id at one position."""
    bits = ids.astype(np.uint64)
    bits *= _GOLDEN64
    bits += np.uint64(_key(seed, Stream.GUMBEL, position))
    bits ^= bits >> _30
    bits *= _MIX1_64
    bits ^= bits >> _27
    bits *= _MIX2_64
    bits ^= bits >> _31
    noise: Floats = -np.log(-np.log(((bits >> _12) + 0.5) * _UNIT))
    return noise


def uniform(seed: int, stream: Stream, position: int) -> float:
    """One value in the open interval (0, 1)."""
    return ((_key(seed, stream, position) >> 12) + 0.5) * _UNIT


def _key(seed: int, stream: Stream, position: int) -> int:
    return _mix(_mix(_mix(seed) + stream * _GOLDEN) + position * _GOLDEN)


def _mix(bits: int) -> int:
    bits &= _MASK
    bits = (bits ^ (bits >> 30)) * _MIX1 & _MASK
    bits = (bits ^ (bits >> 27)) * _MIX2 & _MASK
    return bits ^ (bits >> 31)
