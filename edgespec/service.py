"""The owner thread's side of a Runtime: requests in, rounds by the scheduler, chunks out."""

from __future__ import annotations

import collections.abc as abc
import logging
import queue
import threading
import time
from collections import deque
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, field
from typing import TypeVar

from edgespec.core.costs import FLAT, Costs, Curves
from edgespec.core.policy import Policy
from edgespec.core.sequence import Cancelled, Draft, FinishReason, Sequence
from edgespec.core.track import Received, Track
from edgespec.engine import lossless
from edgespec.engine.draft_thread import DraftThread
from edgespec.engine.look_ahead import MAX_AHEAD
from edgespec.engine.rounds import Guide
from edgespec.engine.scheduler import Event, Job, Mode, Scheduler
from edgespec.engine.stats import Stats, Tally
from edgespec.errors import BackendError, ClosedError
from edgespec.owner import Owner
from edgespec.text.output import OutputText
from edgespec.verifiers.base import Interrupted, Verifier

logger = logging.getLogger("edgespec")

PATIENCE_S = 120.0  # the verifier gives a sign of life every round, within a long prompt more often
LOOKS = 8  # waits, within that time, after each of which it is looked for one

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round added. The texts of all chunks make the answer, their tokens the output.

    text    may be empty: a character, or what could become a stop string, is not whole yet
    tokens  verifier ids, an end-of-generation token included
    finish_reason  in the last chunk only (which has no tokens): "stop", "length" or "cancelled"
    divergences  in the last chunk, where a check was asked for: every difference from plain decoding
    """

    text: str
    tokens: tuple[int, ...]
    stats: Stats
    finish_reason: FinishReason | None = None
    divergences: tuple[lossless.Divergence, ...] | None = None


Item = Chunk | Exception | None


class _HungError(Exception):
    pass


@dataclass(eq=False)
class Request:
    """One prompt on its way, encoded and checked. The owner thread fills ``chunks``, None at the end.

    check  compare with plain decoding at the end; such a request runs alone, so that its rounds can be run again
    """

    sequence: Sequence
    mode: Mode
    policy: Policy
    text: OutputText
    tally: Tally
    check: bool
    cancelled: threading.Event = field(default_factory=threading.Event)
    chunks: queue.SimpleQueue[Item] = field(default_factory=queue.SimpleQueue)
    drafts: list[Draft] = field(default_factory=list)

    def end(self, last: Chunk | Exception) -> None:
        self.chunks.put(last)
        self.chunks.put(None)


class Service:
    """Serves requests on the thread that owns the verifier.

    ``submit``, ``wait`` and ``close`` may be called from any thread; all else runs on the owner's. It must not know its
    Runtime, whose end it outlives.

    costs, prior  what all requests learn from and add to
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: DraftThread | None,
        *,
        curves: Curves | None = None,
        received: abc.Iterable[Received] = (),
        max_ahead: int = MAX_AHEAD,
        owner: Owner | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._verifier, self._drafter, self._patience_s = verifier, drafter, patience_s
        self.is_measured = curves is not None
        self.costs, self.prior = Costs(curves or FLAT), Track(received=received)
        self._max_ahead = max_ahead
        self._owner = owner or Owner()
        self._scheduler = self._new_scheduler()
        self._inbox: deque[Request] = deque()
        self._active: dict[Job, Request] = {}
        self._closing, self._hung = threading.Event(), threading.Event()
        self._sign = time.monotonic()

    def submit(self, request: Request) -> None:
        self._inbox.append(request)
        self._owner.submit(self._pump)

    def wait(self, request: Request) -> Item:
        """The request's next item. A verifier without a sign of life for ``patience_s`` ends all requests."""
        try:
            return self._wait(lambda seconds: request.chunks.get(timeout=seconds), queue.Empty)
        except _HungError as error:
            return BackendError(f"{error} and is given up; load it again, on another device if it stays so")

    def refuse(self) -> None:
        """Let nobody in any more, and cancel what runs; ``close`` is to follow."""
        self._closing.set()

    def close(self) -> None:
        """Cancel what runs, and free both models on the threads that own them; a verifier that hangs is left alone."""
        self._closing.set()
        if self._owner.is_current:  # a collected runtime may be finished on any thread
            self._free()
            self._owner.stop()
        elif self._hung.is_set():
            self._owner.stop()
        else:
            freed = self._owner.submit(self._free)
            self._owner.stop()
            if self._drafter is None or not self._drafter.is_current:  # whose thread is needed to free the drafter
                self._wait_until(freed)

    def _wait_until(self, freed: Future[None]) -> None:
        try:
            self._wait(freed.result, TimeoutError)
        except _HungError as error:
            logger.warning("%s and is left to the end of the process", error)
        else:
            self._owner.stop(wait=True)

    def _wait(self, get: abc.Callable[[float], _T], nothing: type[Exception]) -> _T:
        """What ``get`` gives, asked for so many seconds at a time; it raises ``nothing`` where there is none yet.

        Waits are counted, not timed: a process that was stopped for a while has not hung. Raises _HungError.
        """
        num_silent, sign = 0, self._sign
        while num_silent < LOOKS:
            try:
                return get(self._patience_s / LOOKS)
            except nothing:
                num_silent, sign = (num_silent + 1 if self._sign == sign else 0), self._sign
        self._hung.set()
        self._closing.set()
        raise _HungError(f"the verifier gave no sign of life for {self._patience_s:g} s")

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting + len(self._inbox)

    # On the owner thread

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self._verifier, self._drafter, self.costs, max_ahead=self._max_ahead)

    def _free(self) -> None:
        for request in [*self._active.values(), *self._inbox]:
            request.end(ClosedError("this runtime was closed; load another"))
        try:
            if self._drafter is not None:
                self._drafter.close()
        finally:
            self._verifier.close()

    def _pump(self) -> None:
        """Serve until nothing is left to do."""
        try:
            while self._admit() or not self._scheduler.is_idle:
                self._sign = time.monotonic()
                for event in self._scheduler.step():
                    self._deliver(event)
        except Exception as error:  # each caller's thread raises it
            for job, request in self._active.items():
                job.stop_loop()
                request.end(error)
            self._active.clear()
            self._scheduler = self._new_scheduler()

    def _admit(self) -> bool:
        """Let in who came. One that is to be checked waits until it is alone, and whoever came after it waits too."""
        admitted = False
        while self._inbox and not (self._active and (self._inbox[0].check or self._is_checking)):
            request = self._inbox.popleft()
            job = self._job(request)
            self._active[job] = request
            self._scheduler.add(job)
            if request.check:
                lossless.forget(request.sequence, self._verifier)
            admitted = True
        return admitted

    def _job(self, request: Request) -> Job:
        guide = (
            None if request.mode == "plain" else Guide(request.policy, self.costs, self.prior, request.sequence.room)
        )
        return Job(request.sequence, request.mode, guide, self._cancelled(request))

    @property
    def _is_checking(self) -> bool:
        return any(request.check for request in self._active.values())

    def _deliver(self, event: Event) -> None:
        request = self._active[event.job]
        if event.error is not None:
            request.end(event.error)
        elif event.round is not None:
            request.chunks.put(self._chunk(request, event))
        if event.error is not None or request.sequence.finish_reason is not None:
            if event.error is None:
                request.end(self._last(request))
            del self._active[event.job]

    def _chunk(self, request: Request, event: Event) -> Chunk:
        round_, sequence = event.round, request.sequence
        assert round_ is not None
        shown = request.text.feed(round_.tokens)
        if shown.stopped:
            sequence.cut(len(round_.tokens) - shown.num_tokens)
        if request.check:
            request.drafts.append(round_.draft)
        plain_s = self.costs.plain_s(round_.draft.start, max(1, self.num_running)) if self.is_measured else 0.0
        return Chunk(
            shown.emit, round_.tokens[: shown.num_tokens], request.tally.add(round_, shown.num_tokens, plain_s)
        )

    def _last(self, request: Request) -> Chunk | Exception:
        try:
            divergences = self._divergences(request)
        except Exception as error:
            return error
        return Chunk(request.text.flush(), (), request.tally.stats, request.sequence.finish_reason, divergences)

    def _divergences(self, request: Request) -> tuple[lossless.Divergence, ...] | None:
        if not request.check:
            return None
        try:
            found = lossless.check(request.sequence, request.drafts, self._verifier, self._cancelled(request))
        except Interrupted:
            return None
        return tuple(found)

    def _cancelled(self, request: Request) -> Cancelled:
        def cancelled() -> bool:
            self._sign = time.monotonic()
            return request.cancelled.is_set() or self._closing.is_set()

        return cancelled
