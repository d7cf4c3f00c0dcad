"""What is remembered of how a sequence's drafts were received."""

from __future__ import annotations

from edgespec.core.sequence import Round


class Track:
    """One sequence's. One thread: the engine's.

    prior  what earlier sequences were like, to start from
    """

    def __init__(self, prior: Track | None = None) -> None:
        self.num_rounds = 0

    def observe(self, round_: Round) -> None:
        self.num_rounds += 1
