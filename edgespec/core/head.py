"""The output vocabulary of a draft model whose head was trimmed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFormatError

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The output vocabulary of a draft model that can only say some of the verifier's tokens.

    d2t    (n,) int64, the verifier id that each logit stands for, in any order
    ids    (n,) int64, the same ids ascending
    order  (n,) int64, which logit belongs to each of ``ids``; None when ``d2t`` ascends already
    t2d    (largest id + 2,) int64, where in ``ids`` a verifier id is; -1 for those the draft model cannot say, and last

    Raises ModelFormatError unless ``d2t`` is a list of distinct ids of 0 or more.
    """

    d2t: Ids
    ids: Ids = field(init=False, repr=False)
    order: Ids | None = field(init=False, repr=False)
    t2d: Ids = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_d2t(self.d2t)
        order = np.argsort(self.d2t)
        ids = self.d2t[order].astype(np.int64)
        t2d = np.full(int(ids[-1]) + 2, -1, dtype=np.int64)
        t2d[ids] = np.arange(len(ids))
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "order", None if np.array_equal(self.d2t, ids) else order)
        object.__setattr__(self, "t2d", t2d)


def _check_d2t(d2t: Ids) -> None:
    if d2t.ndim != 1 or d2t.dtype.kind not in "iu" or not len(d2t) or d2t.min() < 0:
        raise ModelFormatError(
            f"d2t: got {d2t.dtype} of shape {d2t.shape}; allowed: a list of token ids of 0 or more; rebuild the draft"
        )
    if (repeats := len(d2t) - len(np.unique(d2t))) > 0:
        raise ModelFormatError(f"d2t: {repeats} of {len(d2t)} ids are repeated; each may occur once; rebuild the draft")
