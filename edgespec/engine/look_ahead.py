"""Drafting beside a verification: on from its draft, guessing that all of it is accepted, and what comes then."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace

from edgespec.core.policy import Plan
from edgespec.core.sequence import Ahead, Cancelled, Draft, Round, Sequence
from edgespec.drafters.base import Drafter
from edgespec.engine.draft_thread import DraftThread, Pending
from edgespec.engine.rounds import Guide, request

MAX_AHEAD = 8


class LookAhead:
    """One look-ahead. The engine's thread makes it, before it verifies ``draft``, and judges it after.

    Its first token guesses the verifier's own; the rest is the next round's draft, if the guess is right. At most
    ``max_ahead`` tokens in all. Nothing is drafted where nothing could be kept.
    """

    def __init__(
        self,
        sequence: Sequence,
        draft: Draft,
        drafter: DraftThread,
        plan: Plan,
        max_ahead: int = MAX_AHEAD,
        cancelled: Cancelled = lambda: False,
    ) -> None:
        tokens = [*sequence.tokens, *draft.tokens]
        self._num_drafted = len(draft.tokens)
        self._stop = threading.Event()
        self._outcome: Ahead | None = None
        self._guess: Pending[Draft] | None = None
        self._rest: Pending[Draft] | None = None
        self._began = self._ended = self._judged = 0.0
        self._request = request(sequence, tokens, plan._replace(length=min(plan.length, max_ahead - 1) + 1))
        ends = bool(draft.tokens) and draft.tokens[-1] in sequence.end_tokens
        if plan.length > 0 and self._request.num_draft > 1 and not ends:

            def stopped() -> bool:
                return self._stop.is_set() or cancelled()

            self._guess = drafter.start(self._draw_guess, stopped, Draft(len(tokens)))
            self._rest = drafter.start(self._draw_rest, stopped, Draft(len(tokens) + 1))

    def judge(self, round_: Round) -> Round:
        """The round with what became of this; stops the drafting unless it was right. Waits for the guess at most."""
        self._judged = time.perf_counter()
        if self._guess is None:
            return round_
        if round_.accepted < self._num_drafted or len(round_.tokens) <= self._num_drafted:
            self._outcome = "rejected"
            self.stop()
        elif self._guess.result().tokens == round_.tokens[-1:]:
            self._outcome = "kept"
        else:
            self._outcome = "wrong guess"
            self.stop()
        return replace(round_, ahead=self._outcome)

    def kept(self) -> tuple[Draft, float, float] | None:
        """What holds: the next draft, the seconds it took, and those of them that were hidden. Waits for its end."""
        if self._outcome != "kept" or self._rest is None:
            return None
        draft = self._rest.result()
        draft_s = max(0.0, self._ended - self._began)  # a drafter that is given up never ends
        return draft, draft_s, max(0.0, min(self._ended, self._judged) - self._began)

    def stop(self) -> None:
        """End the drafting within a token."""
        self._stop.set()

    # On the drafter's thread

    def _draw_guess(self, drafter: Drafter, cancelled: Cancelled) -> Draft:
        self._began = time.perf_counter()
        (guess,) = drafter.propose([replace(self._request, num_draft=1, min_confidence=0.0)], cancelled)
        return guess

    def _draw_rest(self, drafter: Drafter, cancelled: Cancelled) -> Draft:
        assert self._guess is not None
        guess = self._guess.result()
        tokens = [*self._request.tokens, *guess.tokens]
        rest = [Draft(len(tokens))]
        if guess.tokens and not cancelled():
            after = replace(self._request, tokens=tokens, num_draft=self._request.num_draft - 1)
            rest = drafter.propose([after], cancelled)
        self._ended = time.perf_counter()
        return rest[0]


class Reading:
    """The drafter reading a new sequence's text while the verifier does. The engine's thread makes it, and stops it.

    For a policy that drafts nothing for the first round. What was read when it is stopped, the drafter keeps.
    """

    def __init__(self, sequence: Sequence, drafter: DraftThread, guide: Guide, cancelled: Cancelled) -> None:
        self._stop = threading.Event()
        self._pending: Pending[list[Draft]] | None = None
        # It is the text that is to be read: no draft is as sure as that.
        wanted = replace(request(sequence, list(sequence.tokens), Plan(1)), min_confidence=math.inf)
        if guide.track.num_rounds == 0 and guide.plan().length == 0 and wanted.num_draft > 0:
            self._pending = drafter.start(
                lambda drafter, asked: drafter.propose([wanted], asked),
                lambda: self._stop.is_set() or cancelled(),
                [Draft(len(wanted.tokens))],
            )
            guide.track.num_read = len(wanted.tokens)

    @property
    def is_over(self) -> bool:
        """Whether a draft would not have to wait for it."""
        if self._pending is not None and self._pending.is_over():
            self._pending.result()  # raises what is no failure of the drafter's
            self._pending = None
        return self._pending is None

    def stop(self) -> None:
        self._stop.set()
