"""Measuring a pair: the whole way, which tries threads, or quickly. On the thread that owns the verifier."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import logging
import time
from concurrent import futures
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import pairwise
from typing import Protocol

from edgespec.calibration.key import Key
from edgespec.calibration.stored import Calibration, store
from edgespec.calibration.usual import Usual
from edgespec.core.costs import Curves
from edgespec.core.sequence import Cancelled, never
from edgespec.core.track import Received
from edgespec.devices.threads import Threads, busy_cpus
from edgespec.drafters.base import Drafter
from edgespec.engine.advice import USUAL_ACCEPTANCE, Advice, advise, plain_s, speedup
from edgespec.engine.calibrate import FULL, QUICK, RunDraft, Scope, measure, measure_step
from edgespec.engine.reception import acceptance, receive
from edgespec.engine.samples import Clock, Progress
from edgespec.errors import BackendError
from edgespec.verifiers.base import Verifier

logger = logging.getLogger("edgespec")

QUICK_S = 3.0
QUICK_RECEIVE, QUICK_TOKENS = 0.25, 24  # of the quick version, to see how drafts are received
RECEIVE_S, RECEIVE_TOKENS = 8.0, 48  # of the whole way
STEP_S, TURNS_S, TRY_S, TOGETHER_S = 1.0, 24.0, 4.0, 14.0  # for each part of the whole way
MARGIN = 1.03  # gain that more threads for the draft model must bring
BUSY = 0.5  # CPUs at work before a measurement begins
CLOSE_S = 10.0  # a drafter that hangs is left to the end of the process
NO_MODEL = ("lookup", "none")


class ThreadedVerifier(Verifier, Protocol):
    def set_threads(self, num_threads: int, num_threads_batch: int | None = None) -> None:
        """See LlamaVerifier.set_threads."""
        ...


def quick(
    verifier: Verifier,
    drafter: Drafter | None,
    run_draft: RunDraft,
    key: Key,
    threads: Threads,
    *,
    usual: Usual | None = None,
    progress: Progress | None = None,
    cancelled: Cancelled = never,
    clock: Clock = time.perf_counter,
) -> Calibration:
    """Three seconds with both models as they are loaded; kept for ``key``. On the thread that owns the verifier.

    run_draft  has calls done on the drafter's thread
    threads    those the backends were loaded with
    usual      text to see on how drafts are received; None: nobody knows

    Where the draft model cannot be measured the mode is plain, and nothing is kept. Raises Interrupted, and
    BackendError where the verifier cannot be measured either.
    """
    drafts = None if key.draft in NO_MODEL else drafter
    problem = ""
    received: tuple[Received, ...] = ()
    try:
        curves = measure(
            verifier,
            drafts,
            budget_s=QUICK_S * (1 - QUICK_RECEIVE) if drafts and usual else QUICK_S,
            scope=QUICK,
            run_draft=run_draft,
            with_overlap=threads.together,
            progress=progress,
            cancelled=cancelled,
            clock=clock,
        )
        if drafts is not None and usual is not None:
            budget_s = QUICK_S * QUICK_RECEIVE
            received = _received(verifier, drafts, run_draft, usual, budget_s, QUICK_TOKENS, cancelled, clock)
    except BackendError as error:
        problem = str(error)
        curves = measure(verifier, None, budget_s=QUICK_S, scope=QUICK, cancelled=cancelled, clock=clock)
    together = curves if threads.together else None
    expected, is_free = acceptance(received), key.draft == "lookup"
    advice = (
        Advice("plain", 1.0, problem) if problem else advise(curves, together, acceptance=expected, is_free=is_free)
    )
    found = _calibration(curves, threads, advice, plain_s(curves), QUICK_S, received, is_quick=True)
    if not problem:
        store(key, found)
    return found


def calibrate(
    verifier: ThreadedVerifier,
    open_drafter: abc.Callable[[Threads], Drafter] | None,
    run_draft: RunDraft,
    key: Key,
    in_turn: Threads,
    at_once: abc.Sequence[Threads],
    *,
    usual: Usual | None = None,
    is_free: bool = False,
    progress: Progress | None = None,
    cancelled: Cancelled = never,
    clock: Clock = time.perf_counter,
) -> Calibration:
    """The whole way, within a minute; kept for ``key``. On the thread that owns the verifier, whose threads it changes.

    open_drafter  loads the draft model with so many threads; done by ``run_draft``, on the drafter's thread. None:
                  there is no model
    in_turn       threads for sides that take turns
    at_once       ways to share the CPUs that are worth a try; see devices/threads.py
    usual         text to see on how drafts are received; None: nobody knows
    is_free       drafting costs nothing (lookup)

    Raises what ``open_drafter`` raises, BackendError, Interrupted.
    """
    _warn_if_busy()
    show = progress or (lambda _, __: None)
    trial = _Trial(verifier, open_drafter, run_draft, in_turn, at_once, usual, is_free, show, cancelled, clock)
    found = trial.calibration()
    store(key, found)
    show("done", 1.0)
    return found


def _warn_if_busy() -> None:
    busy = busy_cpus()
    if busy > BUSY:
        logger.warning(
            "other processes keep %.1f CPUs busy, and what is measured is what they leave: do it again on a quiet box",
            busy,
        )


@dataclass(frozen=True, slots=True)
class _Trial:
    """Drafters are opened as they are tried."""

    verifier: ThreadedVerifier
    open_drafter: abc.Callable[[Threads], Drafter] | None
    run_draft: RunDraft
    in_turn: Threads
    at_once: abc.Sequence[Threads]
    usual: Usual | None
    is_free: bool
    progress: Progress
    cancelled: Cancelled
    clock: Clock

    def calibration(self) -> Calibration:
        """In turn first, which tells what plain decoding costs; then whether working at the same time beats it."""
        threads = self._turns()
        turns = curves = self._measure(threads, FULL, TURNS_S, 0.05, 0.5)
        received = self._received(threads)
        expected = acceptance(received)
        advice = advise(turns, acceptance=expected, is_free=self.is_free)
        shared, together = self._best_split(turns, USUAL_ACCEPTANCE if expected is None else expected)
        if together is not None:
            advice = advise(turns, together, acceptance=expected)
        if advice.mode == "overlapped":
            together = self._measure(shared, FULL, TOGETHER_S, 0.7, 1.0)
            advice = advise(turns, together, acceptance=expected)
            if advice.mode == "overlapped":
                threads, curves = shared, together
        budget_s = STEP_S + TURNS_S + RECEIVE_S + TRY_S + TOGETHER_S
        return _calibration(curves, threads, advice, plain_s(turns, together), budget_s, received, is_quick=False)

    def _turns(self) -> Threads:
        """Threads for taking turns: a small draft model may be no faster with more than one."""
        threads = self.in_turn
        if self.open_drafter is None or threads.draft == 1:
            return threads
        self.progress("draft threads", 0.0)
        one, all_ = (self._step_s(replace(threads, draft=count)) for count in (1, threads.draft))
        is_faster = one is not None and all_ is not None and one >= MARGIN * all_
        return threads if is_faster or one is None else replace(threads, draft=1)

    def _received(self, threads: Threads) -> tuple[Received, ...]:
        if self.usual is None or self.open_drafter is None:
            return ()
        self.progress("in turn: how drafts are received", 0.5)
        with self._drafter(threads) as drafter:
            assert drafter is not None
            return _received(
                self.verifier,
                drafter,
                self.run_draft,
                self.usual,
                RECEIVE_S,
                RECEIVE_TOKENS,
                self.cancelled,
                self.clock,
            )

    def _best_split(self, turns: Curves, expected: float) -> tuple[Threads, Curves | None]:
        """Of the ways to work at the same time, and its curves; without one the threads for taking turns, and None."""
        ways = self.at_once if self.open_drafter is not None else ()
        tried: list[tuple[Threads, Curves | None]] = [(self.in_turn, None)]
        bounds = [0.55 + 0.15 * index / len(ways) for index in range(len(ways) + 1)] if ways else [0.55]
        for threads, (start, end) in zip(ways, pairwise(bounds), strict=True):
            curves = self._measure(threads, QUICK, TRY_S / len(ways), start, end)
            if curves.overlap is not None:
                tried.append((threads, curves))
        base_s = plain_s(turns)
        return max(tried, key=lambda way: speedup(way[1], base_s, expected, overlapped=True) if way[1] else 0.0)

    def _measure(self, threads: Threads, scope: Scope, budget_s: float, start: float, end: float) -> Curves:
        self.verifier.set_threads(threads.verifier)
        how = "at once" if threads.together else "in turn"
        with self._drafter(threads) as drafter:
            return measure(
                self.verifier,
                drafter,
                budget_s=budget_s,
                scope=scope,
                run_draft=self.run_draft,
                with_overlap=threads.together,
                progress=lambda stage, done: self.progress(f"{how}: {stage}", start + (end - start) * done),
                cancelled=self.cancelled,
                clock=self.clock,
            )

    def _step_s(self, threads: Threads) -> float | None:
        with self._drafter(threads) as drafter:
            if drafter is None:
                return None
            return measure_step(
                drafter,
                self.verifier.num_vocab,
                budget_s=STEP_S / 2,
                run_draft=self.run_draft,
                cancelled=self.cancelled,
                clock=self.clock,
            )

    @contextlib.contextmanager
    def _drafter(self, threads: Threads) -> abc.Iterator[Drafter | None]:
        open_drafter = self.open_drafter
        if open_drafter is None:
            yield None
            return
        drafter = self.run_draft(lambda: open_drafter(threads)).result()
        try:
            yield drafter
        finally:
            futures.wait([self.run_draft(drafter.close)], timeout=CLOSE_S)


def _received(
    verifier: Verifier,
    drafter: Drafter,
    run_draft: RunDraft,
    usual: Usual,
    budget_s: float,
    num_tokens: int,
    cancelled: Cancelled,
    clock: Clock,
) -> tuple[Received, ...]:
    return receive(
        verifier,
        drafter,
        run_draft,
        usual.prompts,
        budget_s=budget_s,
        num_tokens=num_tokens,
        end_tokens=usual.end_tokens,
        cancelled=cancelled,
        clock=clock,
    )


def _calibration(
    curves: Curves,
    threads: Threads,
    advice: Advice,
    base_s: float,
    budget_s: float,
    received: tuple[Received, ...],
    *,
    is_quick: bool,
) -> Calibration:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Calibration(
        curves, threads, advice.mode, advice.reason, advice.gain, base_s, now, budget_s, is_quick, received
    )
