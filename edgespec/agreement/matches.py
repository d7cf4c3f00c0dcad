"""Where a draft model foresaw an answer, and what decoding that answer with its drafts comes to. Pure."""

from __future__ import annotations

import collections.abc as abc
from collections import Counter
from dataclasses import dataclass

from edgespec.core.costs import Costs

LENGTHS = range(1, 9)  # of drafts, which decoding is looked at for; and depths


@dataclass(frozen=True, slots=True)
class Rounds:
    """Answers decoded with drafts of one length. At the end of an answer a draft is as long as could be kept.

    num_tokens    committed
    num_accepted  of them drafted
    lengths       the rounds, by how many tokens were drafted for them
    """

    num_tokens: int
    num_accepted: int
    lengths: abc.Mapping[int, int]

    @property
    def num_rounds(self) -> int:
        return sum(self.lengths.values())

    @property
    def acceptance(self) -> float:
        """accepted / drafted; 0.0 where nothing was drafted."""
        return self.num_accepted / max(1, sum(length * count for length, count in self.lengths.items()))

    def speedup(self, costs: Costs, depth: float = 0) -> float:
        """Tokens per second over those of plain decoding, drafting and verifying one after the other.

        depth  tokens in the caches

        No box takes longer for one row than for more: where it seems to, it was measured at a busy moment.
        """
        plain_s = min(costs.verify_s(length + 1, depth) for length in (0, *self.lengths))
        seconds = sum(
            count * (costs.verify_s(length + 1, depth) + costs.draft_s(length))
            for length, count in self.lengths.items()
        )
        return self.num_tokens * plain_s / seconds if seconds else 1.0


@dataclass(frozen=True, slots=True)
class Matches:
    """
    answers  of each answer, of each of its tokens: whether the draft model, given what stands before it, would have
             proposed just this one
    """

    answers: tuple[tuple[bool, ...], ...]

    @classmethod
    def of_all(cls, parts: abc.Iterable[Matches]) -> Matches:
        return cls(tuple(answer for part in parts for answer in part.answers))

    @property
    def num_positions(self) -> int:
        return sum(map(len, self.answers))

    @property
    def agreement(self) -> float:
        """The share of all tokens that was foreseen; 0.0 of none."""
        return sum(map(sum, self.answers)) / max(1, self.num_positions)

    def reaching(self, depth: int) -> float:
        """The chance that a draft's first ``depth`` tokens are all accepted: the share of the places in the answers
        with so many tokens after them at which all of these were foreseen; 0.0 where no answer is so long."""
        ends = [all(answer[start : start + depth]) for answer in self.answers for start in _starts(answer, depth)]
        return sum(ends) / max(1, len(ends))

    def rounds(self, length: int) -> Rounds:
        """What speculative decoding would have done to get these answers, which does not change them: each round drafts
        ``length`` tokens and commits those before the first mistake and one of the verifier's own."""
        num_accepted, lengths = 0, Counter[int]()
        for answer in self.answers:
            place = 0
            while place < len(answer):
                drafted = answer[place : min(place + length, len(answer) - 1)]
                accepted = (*drafted, False).index(False)
                num_accepted += accepted
                lengths[len(drafted)] += 1
                place += accepted + 1
        return Rounds(self.num_positions, num_accepted, dict(lengths))


def _starts(answer: abc.Sized, depth: int) -> range:
    return range(len(answer) - depth + 1)
