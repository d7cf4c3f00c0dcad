"""How many tokens to draft next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edgespec.errors import ParameterError

MAX_DRAFT_LENGTH = 64


class Policy(Protocol):
    def next(self) -> int:
        """The next round's draft length, 0 or more; the loop clamps it to the room that is left."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length: for experiments, and where nothing was measured yet."""

    length: int

    def __post_init__(self) -> None:
        length = self.length
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= MAX_DRAFT_LENGTH:
            raise ParameterError(f"draft length: got {length!r}; allowed: a whole number from 0 to {MAX_DRAFT_LENGTH}")

    def next(self) -> int:
        return self.length


DEFAULT_POLICY = Fixed(7)
