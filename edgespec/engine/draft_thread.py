"""The drafter's own thread: it drafts while the engine's thread verifies, and cannot take the engine down with it."""

from __future__ import annotations

import collections.abc as abc
import threading
import time
from concurrent.futures import TimeoutError
from typing import Generic, TypeVar

from edgespec.core.sequence import Cancelled, Draft
from edgespec.degraded import Degraded
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.errors import BackendError
from edgespec.owner import Owner

NAME = "edgespec-drafter"
PATIENCE_S = 60.0  # a drafter gives a sign of life every token, or every 128 tokens of a prompt
LOOKS = 8  # waits, within that time, after each of which it is looked for one
CLOSE_S = 5.0  # for one that was given up

_T = TypeVar("_T")
Work = abc.Callable[[Drafter, Cancelled], _T]


class DraftThread:
    """A drafter, and the only thread that touches it. The engine's thread calls; ``close`` may come from any.

    A drafter that fails, or gives no sign of life for ``patience_s`` seconds, is given up: ``degraded`` says so once,
    and from then on every draft is empty, which the engine takes as plain decoding.
    """

    def __init__(
        self,
        drafter: Drafter,
        degraded: Degraded | None = None,
        *,
        owner: Owner | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """``owner`` is the thread that opened the drafter; None: a new one."""
        self._drafter, self._degraded = drafter, degraded or Degraded()
        self._owner = owner or Owner(NAME)
        self.patience_s = patience_s
        self.is_lost = False
        self.signs = 0  # of life, so far

    @property
    def name(self) -> str:
        return self._drafter.name

    @property
    def num_slots(self) -> int:
        return self._drafter.num_slots

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the drafter's thread."""
        return self._owner.is_current

    def start(self, work: Work[_T], cancelled: Cancelled, default: _T) -> Pending[_T]:
        """Have ``work`` done, after what was started before; ``default`` is its result if the drafter is given up."""
        return Pending(self, work, cancelled, default)

    def propose(self, requests: abc.Sequence[DraftRequest], cancelled: Cancelled) -> list[Draft]:
        """See Drafter.propose; empty drafts from one that was given up."""
        return self.start(lambda drafter, asked: drafter.propose(requests, asked), cancelled, empty(requests)).result()

    def lose(self, reason: str) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._degraded.add(f"the {self.name} drafter", "plain", reason)

    def close(self) -> None:
        """Free the drafter on its thread and end that; one that hangs is left to the end of the process."""
        if not self.is_current:
            freed = self._owner.submit(self._drafter.close)
            self._owner.stop()
            try:
                freed.result(timeout=min(CLOSE_S, self.patience_s) if self.is_lost else self.patience_s)
            except TimeoutError:
                self.lose("it does not answer")

    def give(self, pending: Pending[_T]) -> None:
        """Have it run on the drafter's thread."""
        self._owner.give(pending.run, pending)

    def use(self, work: Work[_T], cancelled: Cancelled) -> _T:
        """On the drafter's thread."""
        return work(self._drafter, cancelled)


class Pending(Generic[_T]):
    """Work that the drafter was given. Made by DraftThread.start; any thread may wait for it."""

    def __init__(self, thread: DraftThread, work: Work[_T], cancelled: Cancelled, default: _T) -> None:
        self._thread, self._work, self._cancelled = thread, work, cancelled
        self._looked, self._signs, self._num_silent = time.monotonic(), thread.signs, 0
        self._default = self._result = default
        self._error: BaseException | None = None
        self._is_done = thread.is_lost
        self._waiting = threading.Lock()  # held until it is done: all that one result needs
        if not self._is_done:
            self._waiting.acquire()
            thread.give(self)

    def is_over(self) -> bool:
        """Whether ``result`` need not wait. Asked again and again, it gives a drafter up that hangs."""
        thread, now = self._thread, time.monotonic()
        if self._is_done or thread.is_lost:
            return True
        if now - self._looked >= thread.patience_s / LOOKS:
            self._num_silent = self._num_silent + 1 if thread.signs == self._signs else 0
            self._looked, self._signs = now, thread.signs
            if self._num_silent >= LOOKS:
                thread.lose(f"no sign of life for {thread.patience_s:g} s")
        return thread.is_lost

    def result(self) -> _T:
        """Wait for it. Raises what the work raised, except for a BackendError, which gives the drafter up.

        Waits are counted, not timed: a process that was stopped for a while has not hung. A sign of life may come from
        what was started before.
        """
        thread, num_silent = self._thread, 0
        while not self._is_done and not thread.is_lost:
            signs = thread.signs
            if self._waiting.acquire(timeout=thread.patience_s / LOOKS):
                self._waiting.release()  # others may wait too
            elif thread.signs != signs:
                num_silent = 0
            elif (num_silent := num_silent + 1) == LOOKS:
                thread.lose(f"no sign of life for {thread.patience_s:g} s")
        return self._default if thread.is_lost else self._outcome()

    def _outcome(self) -> _T:
        if isinstance(self._error, BackendError):
            self._thread.lose(str(self._error))
            return self._default
        if self._error is not None:
            raise self._error
        return self._result

    # On the drafter's thread

    def run(self) -> _T:
        self._thread.signs += 1
        return self._thread.use(self._work, self._alive)

    def set_result(self, result: _T) -> None:
        self._result = result
        self._end()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self._is_done = True
        self._waiting.release()

    def _alive(self) -> bool:
        self._thread.signs += 1
        return self._thread.is_lost or self._cancelled()


def empty(requests: abc.Sequence[DraftRequest]) -> list[Draft]:
    return [Draft(len(request.tokens)) for request in requests]
