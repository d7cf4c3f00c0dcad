"""OnnxDrafter: a small decoder on ONNX Runtime's CPU provider proposes tokens."""

from __future__ import annotations

import collections.abc as abc
import functools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.core.check import check_int
from edgespec.core.head import Head
from edgespec.core.prefix import num_common
from edgespec.core.ranking import foremost, lead
from edgespec.core.sampling import Stream, distribution, penalise, pick, scores
from edgespec.core.sequence import Cancelled, Candidate, Distribution, Draft, never
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.onnx_open import open_model, read_tokens
from edgespec.drafters.onnx_session import DraftModel, Row
from edgespec.errors import BackendError, ClosedError, ParameterError


class OnnxDrafter:
    """Drafts with an ONNX decoder; make one with ``open``. One thread may call it, always the same one.

    The cache of a slot holds the tokens and all drafted ones but the last. A request whose tokens the model cannot read
    (ids beyond its embedding table), or whose tokens fill ``num_ctx``, gets an empty draft; one that comes near the end
    gets what there is room for.
    """

    name = "onnx"

    def __init__(self, model: DraftModel, num_slots: int, num_vocab: int, tokens_path: Path, head: Head | None) -> None:
        self._model: DraftModel | None = model
        self._tokens_path = tokens_path
        self._cached: list[list[int]] = [[] for _ in range(num_slots)]
        self._columns, self._head = _spoken(model.num_logits, num_vocab, head)
        self.num_ctx, self.num_vocab = model.num_ctx, model.num_vocab

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        num_ctx: int,
        num_threads: int,
        num_slots: int = 1,
        num_vocab: int | None = None,
        spin: bool = True,
        provider: str = "cpu",
    ) -> OnnxDrafter:
        """Load a folder that ``quantize`` wrote, or a published decoder export (its folder or its .onnx file).

        num_ctx      most tokens of a sequence; the model's own limit holds if it is lower
        num_threads  CPUs to use; the caller knows how they are shared
        num_vocab    the verifier's vocabulary: no id at or above it is ever drafted
        spin         threads wait actively within a run, never between two: faster, unless somebody else needs the
                     cores at the same time
        provider     "cpu", or "cuda": then the caches cross the bus for every token, which has not been measured

        Raises ParameterError, ModelNotFoundError, FileAccessError, ModelFormatError or MissingDependencyError.
        """
        sizes = {"num_ctx": num_ctx, "num_threads": num_threads, "num_slots": num_slots, "num_vocab": num_vocab}
        for name, value in sizes.items():
            if value is not None:
                check_int(name, value, 1)
        opened = open_model(
            Path(path), num_ctx=num_ctx, num_threads=num_threads, num_slots=num_slots, spin=spin, provider=provider
        )
        return cls(opened.model, num_slots, num_vocab or opened.num_vocab, opened.tokens_path, opened.head)

    @property
    def num_slots(self) -> int:
        return len(self._cached)

    @functools.cached_property
    def tokens(self) -> tuple[str, ...]:
        """Raw token texts by id, read on first use, for ``vocabulary.check``.

        Raises VocabularyMismatchError for an export without one, FileAccessError or ModelFormatError.
        """
        return read_tokens(self._tokens_path)

    def propose(self, requests: abc.Sequence[DraftRequest], cancelled: Cancelled = never) -> list[Draft]:
        """See Drafter.propose. Missing prefixes are evaluated slot by slot, then all requests advance together."""
        if self._model is None:
            raise ClosedError("this ONNX drafter was closed; open another")
        self._check(requests)
        works = [self._begin(request) for request in requests]
        self._draft(self._model, [work for work in works if not work.done], cancelled)
        return [work.draft() for work in works]

    def close(self) -> None:
        """Free the model and its caches; a second call does nothing."""
        if self._model is not None:
            self._model.close()
            self._model = None

    def _check(self, requests: abc.Sequence[DraftRequest]) -> None:
        slots = [request.slot for request in requests]
        if len(set(slots)) < len(slots) or any(not 0 <= slot < self.num_slots for slot in slots):
            raise ParameterError(f"slots: got {slots}; allowed: different ones from 0 to {self.num_slots - 1}")
        if any(not request.tokens for request in requests):
            raise ParameterError("tokens: got an empty list; allowed: one token or more")

    def _begin(self, request: DraftRequest) -> _Work:
        """Trim the slot's cache to what it shares with the tokens, and leave at least one to evaluate."""
        known, cached = list(request.tokens), self._cached[request.slot]
        work = _Work(request, known, cached, min(len(known) + request.num_draft, self.num_ctx))
        if work.done:
            return work
        keep = min(num_common(cached, known), len(known) - 1)
        if min(known[keep:]) < 0 or max(known[keep:]) >= self.num_vocab:
            work.end = len(known)
        else:
            del cached[keep:]
        return work

    def _draft(self, model: DraftModel, works: list[_Work], cancelled: Cancelled) -> None:
        # After a fully accepted draft two tokens are missing: two steps for all cost less than a call for each.
        behind = 1 if len(works) == 1 else 2
        for work in works:
            while work.num_missing > behind and not cancelled():
                self._extend(model, work)
        while (works := [work for work in works if not work.done]) and not cancelled():
            self._step(model, works)

    def _extend(self, model: DraftModel, work: _Work) -> None:
        start = len(work.cached)
        tokens = work.known[start : start + model.chunk(start)]
        self._advance(work, tokens, model.extend(work.request.slot, tokens, start))

    def _step(self, model: DraftModel, works: list[_Work]) -> None:
        tokens = {work.request.slot: work.known[len(work.cached)] for work in works}
        rows = model.step(tokens, [len(cached) for cached in self._cached])
        for work in works:
            slot = work.request.slot
            self._advance(work, [tokens[slot]], rows[slot])

    def _advance(self, work: _Work, tokens: list[int], row: Row) -> None:
        work.cached.extend(tokens)
        if work.num_missing > 0:
            return
        try:
            token, confidence = self._draw(work, row[self._columns])
        except BackendError as error:
            raise BackendError(f"the draft model {self._tokens_path.parent} gave no usable logits: {error}") from error
        work.take(token, confidence)

    def _draw(self, work: _Work, row: Row) -> tuple[int, float | None]:
        """The next token, and by how many logits it beat the next best; None where that must not matter."""
        params = work.request.params
        if params.greedy:
            return self._likeliest(work, row)
        dist = distribution(row, params, work.known, work.request.num_prompt, self._head)
        position = len(work.known)
        if params.rule == "rejection":
            work.distributions.append(dist)
            return pick(dist, params, position, Stream.DRAFT), None
        if len(dist.ids) == 1:
            return pick(dist, params, position, Stream.DRAFT), math.inf
        values = scores(dist, params, position)
        best = int(values.argmax())
        return int(dist.ids[best]), params.temperature * lead(values, best)

    def _likeliest(self, work: _Work, row: Row) -> tuple[int, float]:
        request, head = work.request, self._head
        if head is not None and head.order is not None:
            row = row[head.order]
        row = penalise(row, request.params, work.known, request.num_prompt, head)
        best, ahead = foremost(row)
        return best if head is None else int(head.ids[best]), ahead


@dataclass(slots=True)
class _Work:
    """One request on its way.

    known   its tokens and what is drafted
    cached  what its slot's cache holds: the drafter's own list, a prefix of ``known``
    end     the length of ``known`` at which the draft is done

    ``confidences`` and ``held_back`` are the draft's.
    """

    request: DraftRequest
    known: list[int]
    cached: list[int]
    end: int
    distributions: list[Distribution] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    held_back: Candidate | None = None

    @property
    def num_missing(self) -> int:
        return len(self.known) - len(self.cached)

    @property
    def done(self) -> bool:
        return len(self.known) >= self.end

    def take(self, token: int, confidence: float | None) -> None:
        """Draft ``token``, or hold it back for want of confidence; None says that nothing may be held back."""
        request = self.request
        if confidence is not None and confidence < request.min_confidence:
            self.held_back = Candidate(token, confidence)
        else:
            self.known.append(token)
            if confidence is not None:
                self.confidences.append(confidence)
        if self.held_back is not None or token in request.end_tokens:
            self.end = len(self.known)

    def draft(self) -> Draft:
        start = len(self.request.tokens)
        distributions = tuple(self.distributions) or None
        return Draft(start, tuple(self.known[start:]), distributions, tuple(self.confidences), self.held_back)


def _spoken(num_logits: int, num_vocab: int, head: Head | None) -> tuple[Any, Head | None]:
    """The columns of a row that stand for ids below ``num_vocab``, and the head of those columns."""
    if head is None:
        return slice(min(num_logits, num_vocab)), None
    columns = np.flatnonzero(head.d2t < num_vocab)
    if len(columns) == num_logits:
        return slice(None), head
    return columns, Head(head.d2t[columns])
