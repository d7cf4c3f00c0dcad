"""How many tokens to draft next."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from edgespec.core.check import check_float, check_int
from edgespec.core.costs import Costs
from edgespec.core.track import Track

MAX_DRAFT_LENGTH = 32


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


# Measured on a draft model that is the verifier at 8 bits (tests/bench/LOG.md): nearly all that is rejected was drawn
# with a lead of less than this, which is what rounding moves a logit.
DEFAULT_POLICY = Fixed(length=7, min_confidence=0.3)
