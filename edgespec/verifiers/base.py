"""The verifier seam: what the engine needs of the big model."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.core.check import check_int
from edgespec.core.sequence import Cancelled, never
from edgespec.errors import ParameterError

Rows = NDArray[np.float32]


class Interrupted(Exception):  # noqa: N818 (not an error)
    """A score was given up because ``cancelled`` said so. Not an error: the engine ends the sequence."""


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

    def score(self, requests: abc.Sequence[ScoreRequest], cancelled: Cancelled = never) -> list[Rows]:
        """Logits for each request: float32 views of shape (num_rows, num_vocab), valid until the next call.

        Compares each token list with what its slot's cache holds, drops what differs and evaluates the rest, all
        requests in one batch where they fit. Callers never rewind. Slots must differ between requests of one call.
        ``cancelled`` is asked while a long prompt is evaluated; once true, Interrupted is raised and what was evaluated
        stays cached. Raises ParameterError for a request outside the bounds, ClosedError after ``close``, BackendError
        when evaluation fails (the cache of the slots concerned is then empty and the next call starts afresh).
        """
        ...

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        ...


def check_requests(verifier: Verifier, requests: abc.Sequence[ScoreRequest]) -> None:
    """Raise ParameterError unless every request is within the verifier's bounds and no two share a slot."""
    for request in requests:
        check_int("slot", request.slot, 0, verifier.num_slots - 1)
        check_int("number of tokens", len(request.tokens), 1, verifier.num_ctx)
        check_int("num_rows", request.num_rows, 1, len(request.tokens))
    slots = [request.slot for request in requests]
    if not slots or len(set(slots)) < len(slots):
        raise ParameterError(f"slots of one call: got {slots}; allowed: one or more, each once")


def check_tokens(tokens: abc.Sequence[int], num_vocab: int) -> None:
    """Raise ParameterError for a token id outside the vocabulary."""
    check_int("token id", min(tokens), 0, num_vocab - 1)
    check_int("token id", max(tokens), 0, num_vocab - 1)
