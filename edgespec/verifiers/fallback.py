"""A verifier that goes on elsewhere when the place it runs in fails."""

from __future__ import annotations

import collections.abc as abc
import logging
from dataclasses import dataclass
from typing import Any

from edgespec.core.sequence import Cancelled, never
from edgespec.degraded import Degraded
from edgespec.errors import BackendError, ClosedError, ContextLengthError
from edgespec.verifiers.base import Interrupted, Rows, ScoreRequest, Verifier
from edgespec.verifiers.llama_vocabulary import Vocabulary

logger = logging.getLogger("edgespec")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a verifier may run.

    kind  what Degraded calls it: "hybrid", "one device", ...
    open  loads it there; raises BackendError where it does not fit or a device fails
    """

    kind: str
    open: abc.Callable[[], Verifier]


class FallbackVerifier:
    """The verifier of the first place that works; see verifiers/base.py for the contract of ``score``.

    When a score fails it is tried once more, then the verifier is closed and the same requests are scored in the next
    place that opens. They are whole token lists, so nothing is lost but time. There is no way back up. Where no place
    is left the error is raised, and the next call tries the last one again, opening it anew if it is gone.

    num_vocab, num_ctx, num_slots  see base.py; ``num_ctx`` may shrink with a step down
    """

    def __init__(self, places: abc.Sequence[Place], degraded: Degraded, vocabulary: Vocabulary | None = None) -> None:
        """Open the first place that can be. Raises the BackendError of each when none can, any other error at once.

        vocabulary  what ``model`` gives; closed with this verifier, also when that does not come to be
        """
        self._places = places
        self._degraded = degraded
        self._vocabulary = vocabulary
        self._index = 0
        self._closed = False
        self._verifier: Verifier | None = None
        self._threads: tuple[int, int | None] | None = None
        try:
            verifier = self._open(0)
        except BaseException:
            self.close()
            raise
        self.num_vocab, self.num_slots = verifier.num_vocab, verifier.num_slots
        self._num_ctx_at_load = verifier.num_ctx

    @property
    def num_ctx(self) -> int:
        return self._num_ctx

    @property
    def kind(self) -> str:
        """The kind of the place in use."""
        return self._places[self._index].kind

    @property
    def verifier(self) -> Verifier | None:
        """The one in use, for what is not in the contract (``description``, ``devices``); None while none is open."""
        return self._verifier

    @property
    def model(self) -> Any:
        """The ``llama_model*`` for a tokenizer: it outlives every verifier but this. Raises ClosedError."""
        self._check_open()
        if self._vocabulary is None:
            raise ClosedError("this verifier was opened without a vocabulary; give it one")
        return self._vocabulary.model

    def score(self, requests: abc.Sequence[ScoreRequest], cancelled: Cancelled = never) -> list[Rows]:
        """See Verifier.score. Raises ContextLengthError when text that fitted before a step down no longer does."""
        self._check_open()
        try:
            return self._score(requests, cancelled)
        except BackendError as error:
            if cancelled():  # nobody waits for the rows: whoever comes next opens what is gone
                logger.warning("the verifier failed after its request was cancelled: %s", error)
                raise Interrupted from error
            logger.warning("the verifier failed and is tried once more: %s", error)
        while True:
            try:
                return self._score(requests, cancelled)
            except BackendError as error:
                if self._index + 1 == len(self._places):
                    raise
                self._step_down(str(error))

    def set_threads(self, num_threads: int, num_threads_batch: int | None = None) -> None:
        """As LlamaVerifier.set_threads; a verifier opened later, in this place or another, gets the same numbers."""
        self._check_open()
        self._threads = num_threads, num_threads_batch
        self._pass_threads()

    def close(self) -> None:
        """Close what is open; a second call does nothing."""
        self._closed = True
        self._close_verifier()
        if self._vocabulary is not None:
            self._vocabulary.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this verifier is closed; open a new one")

    def _score(self, requests: abc.Sequence[ScoreRequest], cancelled: Cancelled) -> list[Rows]:
        verifier = self._verifier or self._open(self._index)
        longest = max((len(request.tokens) for request in requests), default=0)
        if verifier.num_ctx < longest <= self._num_ctx_at_load:
            raise ContextLengthError(
                f"the text has {longest} tokens; the verifier that took over ({self.kind}) holds {verifier.num_ctx}: "
                "shorten it"
            )
        return verifier.score(requests, cancelled)

    def _step_down(self, reason: str) -> None:
        """Where nothing below opens, the next score begins in the place that is left now."""
        self._close_verifier()
        self._open(self._index + 1, reason)

    def _open(self, first: int, reason: str = "") -> Verifier:
        """Open the first of these places that can be, and remember it as a step down if it is not the one in use."""
        failures, last = [reason] if reason else [], None
        for index, place in enumerate(self._places[first:], first):
            try:
                verifier = self._checked(place.open())
            except BackendError as error:
                failures, last = [*failures, str(error)], error
                continue
            if index != self._index:
                self._degraded.add(self.kind, place.kind, "; ".join(failures))
            self._index, self._verifier, self._num_ctx = index, verifier, verifier.num_ctx
            self._pass_threads()
            return verifier
        raise BackendError("; ".join(failures)) from last

    def _checked(self, verifier: Verifier) -> Verifier:
        """It must be able to take over. Closes it where it is not."""
        wanted = (getattr(self, "num_vocab", verifier.num_vocab), getattr(self, "num_slots", verifier.num_slots))
        got = verifier.num_vocab, verifier.num_slots
        if got != wanted:
            verifier.close()
            raise BackendError(
                f"another verifier (vocabulary, slots): got {got}, allowed {wanted}; use one model file everywhere"
            )
        return verifier

    def _pass_threads(self) -> None:
        set_threads = getattr(self._verifier, "set_threads", None)
        if set_threads is not None and self._threads is not None:
            set_threads(*self._threads)

    def _close_verifier(self) -> None:
        verifier, self._verifier = self._verifier, None
        if verifier is not None:
            verifier.close()
