"""How many tokens to draft next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edgespec.core.check import check_float, check_int

MAX_DRAFT_LENGTH = 32


class Policy(Protocol):
    """min_margin  how near a tie a draft may come, in logits; see DraftRequest"""

    @property
    def min_margin(self) -> float: ...

    def next(self) -> int:
        """The next round's draft length, 0 or more; the loop clamps it to the room that is left."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length (or less, with ``min_margin``): for where nothing was measured yet, and experiments."""

    length: int
    min_margin: float = 0.0

    def __post_init__(self) -> None:
        check_int("draft length", self.length, 0, MAX_DRAFT_LENGTH)
        check_float("draft margin", self.min_margin, 0.0)

    def next(self) -> int:
        return self.length


# Measured on a draft model that is the verifier at 8 bits (tests/bench/LOG.md): nearly all that is rejected was drawn
# with a lead of less than this, which is what rounding moves a logit.
DEFAULT_POLICY = Fixed(length=7, min_margin=0.3)
