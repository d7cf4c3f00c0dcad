"""The verifier seam: what the engine needs of the big model."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Score one sequence: the logits that follow each of its last ``num_rows`` tokens.

    slot      which KV cache place holds this sequence, 0 <= slot < num_slots
    tokens    the whole token list, prompt and draft included, at least ``num_rows`` long
    num_rows  how many rows are wanted, 1 or more; row i belongs to tokens[len(tokens) - num_rows + i]
    """

    slot: int
    tokens: abc.Sequence[int]
    num_rows: int


class Verifier(Protocol):
    """One thread may call it, always the same one.

    num_vocab  width of a logits row
    num_ctx    most tokens one slot can hold
    num_slots  how many sequences can be held at once
    """

    @property
    def num_vocab(self) -> int: ...
    @property
    def num_ctx(self) -> int: ...
    @property
    def num_slots(self) -> int: ...

    def score(self, requests: abc.Sequence[ScoreRequest]) -> list[Rows]:
        """Logits for each request: float32 views of shape (num_rows, num_vocab), valid until the next call.

        Compares each token list with what its slot's cache holds, drops what differs and evaluates the rest, all
        requests in one batch where they fit. Callers never rewind. Slots must differ between requests of one call.
        Raises ParameterError for a request outside the bounds, BackendError when evaluation fails (the cache of the
        slots concerned is then empty and the next call starts afresh).
        """
        ...

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        ...
