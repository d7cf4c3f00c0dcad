"""Prompt lookup: propose what followed the last time the same tokens came by. No model.

After Saxena, "Prompt Lookup Decoding", 2023 (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

import collections.abc as abc

from edgespec.core.prefix import num_common
from edgespec.core.sequence import Cancelled, Candidate, Draft, never
from edgespec.drafters.base import DraftRequest
from edgespec.errors import ClosedError, ParameterError

MIN_NGRAM = 2
MAX_NGRAM = 8
MAX_CANDIDATES = 256


class LookupDrafter:
    """Finds the longest suffix of the tokens that occurred before (the most recent one among equals) and copies on.

    min_ngram, max_ngram  shortest match worth a draft, and the length from which a longer one is no better. One token
                          matches nearly everywhere and predicts little, hence two.

    At most MAX_CANDIDATES earlier occurrences are compared, latest first. Draws are certain, so drafts carry no
    distributions. How many tokens matched is how sure it is of every token it copies. One thread may call it.
    """

    name = "lookup"

    def __init__(self, num_slots: int = 1, *, min_ngram: int = MIN_NGRAM, max_ngram: int = MAX_NGRAM) -> None:
        if num_slots < 1:
            raise ParameterError(f"num_slots: got {num_slots}; allowed: 1 or more")
        if not 1 <= min_ngram <= max_ngram:
            raise ParameterError(f"min_ngram and max_ngram: got {min_ngram} and {max_ngram}; allowed: 1 <= min <= max")
        self._indices = [SuffixIndex(min_ngram, max_ngram) for _ in range(num_slots)]
        self._closed = False

    @property
    def num_slots(self) -> int:
        return len(self._indices)

    def propose(self, requests: abc.Sequence[DraftRequest], cancelled: Cancelled = never) -> list[Draft]:
        """See Drafter.propose. Costs microseconds: only tokens that are new to the slot are indexed."""
        if self._closed:
            raise ClosedError("this lookup drafter was closed; make a new one")
        return [self._propose(request, cancelled()) for request in requests]

    def _propose(self, request: DraftRequest, cancelled: bool) -> Draft:
        if not 0 <= request.slot < self.num_slots:
            raise ParameterError(f"slot: got {request.slot}; allowed: 0 to {self.num_slots - 1}")
        tokens = list(request.tokens)
        if cancelled or request.num_draft < 1:
            return Draft(start=len(tokens))
        index = self._indices[request.slot]
        index.sync(tokens)
        found, size = index.continuation(request.num_draft)
        if found and size < request.min_confidence:
            return Draft(start=len(tokens), held_back=Candidate(found[0], float(size)))
        end = next((i + 1 for i, token in enumerate(found) if token in request.end_tokens), len(found))
        return Draft(start=len(tokens), tokens=found[:end], confidences=(float(size),) * end)

    def close(self) -> None:
        self._closed = True
        for index in self._indices:
            index.sync([])


class SuffixIndex:
    """Where each run of ``min_ngram`` tokens ended last, and before that, and before that.

    ``_last`` maps a run to the position after its latest occurrence; ``_before[i]`` is the occurrence before the one
    that ends at position i, 0 for none. Dropping tokens walks the same links backwards, so a divergence costs what it
    drops.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._min, self._max = min_ngram, max_ngram
        self._tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        self._before: list[int] = [0]

    def sync(self, tokens: list[int]) -> None:
        """Hold exactly these tokens."""
        keep = num_common(self._tokens, tokens)
        while len(self._tokens) > keep:
            self._drop()
        for token in tokens[keep:]:
            self._add(token)

    def _add(self, token: int) -> None:
        self._tokens.append(token)
        end, before = len(self._tokens), 0
        if end >= self._min:
            run = tuple(self._tokens[end - self._min :])
            before = self._last.get(run, 0)
            self._last[run] = end
        self._before.append(before)

    def _drop(self) -> None:
        before, end = self._before.pop(), len(self._tokens)
        if end >= self._min:
            run = tuple(self._tokens[end - self._min :])
            if before:
                self._last[run] = before
            else:
                del self._last[run]
        self._tokens.pop()

    def continuation(self, num_tokens: int) -> tuple[tuple[int, ...], int]:
        """What followed the best earlier match of the suffix, and how many tokens matched; ((), 0) without a match.

        A match that reaches the end repeats periodically.
        """
        position, size = self._best()
        if not position:
            return (), 0
        period = self._tokens[position : position + num_tokens]
        return tuple((period * (num_tokens // len(period) + 1))[:num_tokens]), size

    def _best(self) -> tuple[int, int]:
        """The position after the longest earlier match, the latest among equals, 0 for none; and its length."""
        best, best_size = 0, self._min - 1
        position = self._before[-1]
        for _ in range(MAX_CANDIDATES):
            if not position or best_size >= self._max:
                break
            size = self._match(position)
            if size > best_size:
                best, best_size = position, size
            position = self._before[position]
        return best, best_size

    def _match(self, position: int) -> int:
        """How many tokens before ``position`` equal the suffix, at most max_ngram; min_ngram of them are known to."""
        tokens, end, size = self._tokens, len(self._tokens), self._min
        while size < self._max and size < position and tokens[position - size - 1] == tokens[end - size - 1]:
            size += 1
        return size
