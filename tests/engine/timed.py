"""Two sides that take as long as a test says, by a clock that only they move."""

from __future__ import annotations

import collections.abc as abc
import threading
import time
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from edgespec.core.sequence import Cancelled, Draft, never
from edgespec.drafters.base import DraftRequest
from edgespec.owner import Owner
from edgespec.verifiers.base import Rows, ScoreRequest, check_requests

_T = TypeVar("_T")
VerifyCost = abc.Callable[[int, int], float]  # rows, depth -> seconds
DraftCost = abc.Callable[[int], float]  # sequences -> seconds of a token


class ScriptedClock(threading.local):
    """A time of its own in every thread."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class TimedVerifier:
    """Evaluating tokens that are not cached costs ``prefill_s`` each, beyond the rows. Costs ``slowdown`` times as much
    while ``drafting`` is set.

    timed  (rows, depth) of every call
    """

    num_slots = 1

    def __init__(
        self,
        clock: ScriptedClock,
        cost: VerifyCost,
        *,
        num_ctx: int = 4096,
        prefill_s: float = 0.0,
        drafting: threading.Event | None = None,
        slowdown: float = 1.0,
    ) -> None:
        self.num_vocab, self.num_ctx = 50, num_ctx
        self.timed: list[tuple[int, int]] = []
        self.spent_s = 0.0
        self._clock, self._cost, self._prefill_s = clock, cost, prefill_s
        self.drafting, self._slowdown = drafting or threading.Event(), slowdown
        self._held = 0

    def score(self, requests: abc.Sequence[ScoreRequest], cancelled: Cancelled = never) -> list[Rows]:
        check_requests(self, requests)
        (request,) = requests
        depth = len(request.tokens) - request.num_rows
        seconds = self._cost(request.num_rows, depth) * (self._slowdown if self.drafting.is_set() else 1.0)
        seconds += self._prefill_s * max(0, depth - self._held)
        self._held = len(request.tokens)
        self.timed.append((request.num_rows, depth))
        self._clock.now += seconds
        self.spent_s += seconds
        return [np.zeros((request.num_rows, self.num_vocab), np.float32)]

    def set_threads(self, num_threads: int, num_threads_batch: int | None = None) -> None: ...

    def close(self) -> None: ...


class TimedDrafter:
    """A token costs what the number of sequences says, and ``slowdown`` times as much beside a verification; reading
    costs ``read_s`` a token that is not cached.

    drafting  set while drafts are made beside verifications; DraftOwner clears it
    reach     most tokens it can read
    """

    name = "timed"

    def __init__(
        self,
        clock: ScriptedClock,
        cost: DraftCost,
        *,
        num_slots: int = 1,
        read_s: float = 0.0,
        slowdown: float = 1.0,
        reach: int = 10**6,
    ) -> None:
        self.num_slots = num_slots
        self.drafting = threading.Event()
        self.threads: set[str] = set()
        self._clock, self._cost, self._read_s, self._slowdown, self._reach = clock, cost, read_s, slowdown, reach
        self._held: dict[int, list[int]] = {}

    def propose(self, requests: abc.Sequence[DraftRequest], cancelled: Cancelled = never) -> list[Draft]:
        self.threads.add(threading.current_thread().name)
        slowdown = self._slowdown if self.drafting.is_set() else 1.0
        if cancelled is not never:  # a draft that may be ended: from the next one on, a verification runs along
            self.drafting.set()
            time.sleep(0.001)  # or thousands would be made while the verifications pass
        drafts = [self._propose(request) for request in requests]
        self._clock.now += max(len(draft.tokens) for draft in drafts) * self._cost(len(requests)) * slowdown
        return drafts

    def _propose(self, request: DraftRequest) -> Draft:
        tokens = [*request.tokens]
        if self._held.get(request.slot) != tokens:
            self._clock.now += self._read_s * (len(tokens) - 1)
        self._held[request.slot] = tokens
        num_drafted = max(0, min(request.num_draft, self._reach - len(tokens)))
        return Draft(len(tokens), (7,) * num_drafted)

    def close(self) -> None: ...


class DraftOwner(Owner):
    """The drafter's thread, which knows when nothing is drafted beside a verification any more."""

    def __init__(self) -> None:
        super().__init__("drafts")
        self.drafter: TimedDrafter | None = None

    def submit(self, call: abc.Callable[[], _T]) -> Future[_T]:
        def run() -> _T:
            try:
                return call()
            finally:
                if self.drafter is not None:
                    self.drafter.drafting.clear()

        return super().submit(run)
