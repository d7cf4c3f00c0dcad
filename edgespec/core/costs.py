"""What a round costs on this box: curves that were measured, and how today's times differ from them."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass

from edgespec.core.sequence import Round


@dataclass(frozen=True, slots=True)
class Overlap:
    """By what factor either side slows down while the other works too; 1.0: not at all."""

    verify: float = 1.0
    draft: float = 1.0


@dataclass(frozen=True, slots=True)
class Curves:
    """Measured seconds.

    widths    (W,) ascending, the first is 1: rows of one verification
    depths    (D,) ascending: tokens the cache holds
    verify_s  (D, W)
    batches   (B,) ascending, the first is 1: sequences drafted together; empty: no draft model was measured
    step_s    (B,) one drafted token for each of so many sequences
    overlap   None: the two sides cannot usefully work at the same time, or it was not measured
    """

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    verify_s: tuple[tuple[float, ...], ...]
    batches: tuple[int, ...] = ()
    step_s: tuple[float, ...] = ()
    overlap: Overlap | None = None


FLAT = Curves((1,), (0,), ((1.0,),), (1,), (0.1,), Overlap())


class Costs:
    """One thread: the engine's. ``curves`` are where it starts from; ``observe`` follows the box from there."""

    def __init__(self, curves: Curves = FLAT) -> None:
        self.curves = curves

    def verify_s(self, width: int, depth: int = 0) -> float:
        """One verification of ``width`` rows, all sequences together, ``depth`` tokens in the cache."""
        raise NotImplementedError

    def draft_s(self, num_tokens: int, num_sequences: int = 1) -> float:
        """Drafting so many tokens for each of so many sequences."""
        raise NotImplementedError

    def observe(self, rounds: abc.Sequence[Round], depth: int) -> None:
        """One verification and the rounds it made, ``depth`` the mean number of tokens before it."""
