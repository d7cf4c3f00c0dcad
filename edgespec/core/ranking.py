"""Which logits of a row are the largest. Pure functions: any thread may call them, nothing is mutated."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.core.head import Ids
from edgespec.errors import BackendError

Row = NDArray[np.float32]

LARGEST = float(np.finfo(np.float32).max)
_PART = 4096
_COLUMN = 64
_FOLDS = 8


def most_likely(row: Row) -> tuple[int, float]:
    """The index of the largest logit, the lowest one of equals, and that logit.

    row  (n,) float32. Raises BackendError for one with NaN, +inf or nothing finite
    """
    best = int(row.argmax())  # argmax stops at a NaN, so one look at its answer finds every kind of broken row
    top = float(row[best])
    if not math.isfinite(top):
        raise BackendError(
            f"the largest of {len(row)} logits is {top}; a row needs a finite one and no NaN; check the model file"
        )
    return best, top


def foremost(row: Row) -> tuple[int, float]:
    """``most_likely``'s index, and the ``lead`` of that logit, in one sweep. Raises as ``most_likely`` does."""
    maxima = np.maximum.reduceat(row, _starts(len(row)))  # NaN where a part has one, as in argmax
    part = int(maxima.argmax())
    top = maxima[part]
    if not math.isfinite(top):
        most_likely(row)
    start = part * _PART
    rest = row[start : start + _PART].copy()
    best = int(rest.argmax())
    rest[best] = -np.inf
    maxima[part] = rest[rest.argmax()]
    return start + best, float(top - maxima[maxima.argmax()])


@functools.lru_cache(maxsize=4)
def _starts(num: int) -> Ids:
    return np.arange(0, num, _PART)


def lead(values: NDArray[np.floating[Any]], best: int) -> float:
    """By how much ``values[best]``, the largest, exceeds the largest of the others; inf where there are none."""
    others = max(values[:best].max(initial=-np.inf), values[best + 1 :].max(initial=-np.inf))
    return float(values[best] - others)


def largest(row: Row, num: int) -> Ids:
    """Indices of the ``num`` largest finite logits, largest first, equal ones by index; all of them if there are fewer.

    Raises as ``most_likely`` does.
    """
    return ranked(row, num)[0]


def ranked(row: Row, num: int) -> tuple[Ids, Row]:
    """``largest``, and their logits."""
    ids = _above_bound(row, num)
    logits = row[ids]
    order = (-logits).argsort(kind="stable")[:num]
    return ids[order], logits[order]


def _above_bound(row: Row, num: int) -> Ids:
    """Ascending indices of a small superset of the ``num`` largest finite logits.

    Fold the row into columns. The num-th largest of the column maxima is at most the num-th largest logit, so only
    columns that reach it have to be looked at. Column maxima are contiguous reads, which is what makes this quick. Many
    columns are folded once more: a looser bound, for less work to find it.
    """
    width = len(row) // _COLUMN
    if num > width:
        most_likely(row)
        return np.flatnonzero(row >= _num_th_largest(row, num))
    body = width * _COLUMN
    folded = row[:body].reshape(_COLUMN, width)
    maxima = folded.max(axis=0)
    if body < len(row) or not math.isfinite(maxima[maxima.argmax()]):  # NaN if one of its logits is
        most_likely(row)
    bound = _num_th_largest(_folded_again(maxima, num), num)
    columns = (maxima >= bound).nonzero()[0]
    found = (folded.take(columns, axis=1) >= bound).ravel().nonzero()[0]
    lines, places = np.divmod(found, len(columns))
    ids: Ids = lines * width + columns[places]
    return ids if body == len(row) else np.concatenate([ids, body + np.flatnonzero(row[body:] >= bound)])


def _folded_again(maxima: Row, num: int) -> Row:
    """The maxima of _FOLDS of them each, if that leaves several times ``num``; what is left over is left out."""
    width = len(maxima) // _FOLDS
    if width < 4 * num:
        return maxima
    again: Row = maxima[: width * _FOLDS].reshape(_FOLDS, width).max(axis=0)
    return again


def _num_th_largest(values: Row, num: int) -> float:
    """The num-th largest, or the least finite number if that is -inf or there are fewer."""
    if num >= len(values):
        return -LARGEST
    values, place = values.copy(), len(values) - num
    values.partition(place)
    return max(float(values[place]), -LARGEST)
