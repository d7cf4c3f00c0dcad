"""Text that a model writes itself: what it will be asked to draft, for counting which tokens that takes."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass

import numpy as np

from edgespec.core.sequence import Draft, SamplingParams
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.errors import ModelFormatError
from quantize.head_text import TextSide

NUM_SLOTS = 8  # more were measured to write hardly more tokens a second
_MAX_QUESTION = 96  # tokens of a user's words
_NUM_DRAFT = 4  # the distribution of each is kept until all are drafted


@dataclass(slots=True)
class _Text:
    """One text on its way.

    number    counts texts; with the seed it decides what is drawn
    tokens    all that stands there, written by the model or not
    max_tokens  of what is being written now
    question  whether that is a user's words, and the answer is still to come
    """

    number: int
    params: SamplingParams
    tokens: list[int]
    max_tokens: int
    question: bool

    @property
    def room(self) -> int:
        return self.max_tokens - len(self.tokens)


class Writer:
    """Writes texts by sampling at temperature 1: a user's words and the answer to them, or running text where the model
    knows no chats. The same model, side and seed give the same texts. One thread.

    num_ctx  the drafter's
    """

    def __init__(self, drafter: Drafter, side: TextSide, num_ctx: int, seed: int) -> None:
        self._drafter, self._end_tokens, self._num_ctx, self._seed = drafter, side.end_tokens, num_ctx, seed
        fits = len(side.start) + len(side.bridge) + 2 * _MAX_QUESTION <= num_ctx
        self._start, self._bridge = (side.start, side.bridge) if fits else (side.start[:1], ())
        self._num_begun = 0
        self._texts = [self._begin() for _ in range(drafter.num_slots)]

    def pieces(self) -> abc.Iterator[tuple[int, Draft]]:
        """Without end: the number of a text and what the model just added to it, with the distributions it was drawn
        from. Raises BackendError, or ModelFormatError for a model that writes nothing."""
        while True:
            drafts = self._drafter.propose([self._request(slot, text) for slot, text in enumerate(self._texts)])
            if not any(draft.tokens for draft in drafts):
                raise ModelFormatError(f"the model writes no text in a context of {self._num_ctx}; give a corpus")
            for slot, draft in enumerate(drafts):
                text = self._texts[slot]
                yield text.number, draft
                text.tokens += draft.tokens
                if not text.room or text.tokens[-1] in self._end_tokens:
                    self._texts[slot] = self._answer(text) if text.question else self._begin()

    def _begin(self) -> _Text:
        number, self._num_begun = self._num_begun, self._num_begun + 1
        drawn = np.random.SeedSequence((self._seed, number)).generate_state(1, np.uint64)[0] >> np.uint64(1)
        # The rule whose drafts come with their distributions.
        params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=int(drawn), rule="rejection")
        if self._bridge:
            return _Text(number, params, list(self._start), len(self._start) + _MAX_QUESTION, True)
        return _Text(number, params, list(self._start), self._num_ctx, False)

    def _answer(self, text: _Text) -> _Text:
        asked = text.tokens[:-1] if text.tokens[-1] in self._end_tokens else text.tokens
        return _Text(text.number, text.params, [*asked, *self._bridge], self._num_ctx, False)

    def _request(self, slot: int, text: _Text) -> DraftRequest:
        num_draft = min(_NUM_DRAFT, text.room)
        return DraftRequest(slot, text.tokens, len(self._start), num_draft, text.params, self._end_tokens)
