"""Measures what a round costs on this box: verifying by width and depth, drafting, and both at once.

Everything is asked of the two protocols alone. What matters most is measured first, so that a budget that ends early
leaves a curve with fewer points, not a wrong one.
"""

from __future__ import annotations

import collections.abc as abc
import math
import random
import threading
import time
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from edgespec.core.costs import Curves, Overlap
from edgespec.core.sequence import Cancelled, SamplingParams, never
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.engine.samples import MAX_SAMPLE_S, Clock, Progress, Sampler, Samples, typical
from edgespec.errors import BackendError
from edgespec.verifiers.base import ScoreRequest, Verifier

_T = TypeVar("_T")

REPEATS = 5  # samples of a point
PATIENCE_S = 60.0  # a drafter that does not answer for so long hangs
BATCHES = (1, 2, 4, 8, 16, 32, 64)
MUST = 3  # so many of a scope's widths are measured however slow the model is
NUM_DRAFT = 4  # tokens of a draft whose time is taken
NUM_AHEAD = 8  # and of those made beside a verification
OVERLAP_WIDTHS = (4, 2, 1)  # the first that was measured is verified while a draft is made
NUM_PROBED = 16  # tokens whose evaluation tells how long a longer prefix would take
NUM_IDS = 4096  # tokens are drawn from the first ids, which every draft model of the family can read
GREEDY = SamplingParams(temperature=0.0)
PREFIX_SHARE = 0.2  # most of the budget that goes into the first prefix


@dataclass(frozen=True, slots=True)
class Scope:
    """What to measure.

    widths   rows, the most important first
    first    depths: the deepest that is reached in a small part of the budget is measured first
    deeper   depths beyond; each is measured whole or not at all
    shares   of the budget, added up, at which the next thing is due: after the first widths, drafting, both at once,
             more widths; the rest is for larger batches and deeper depths
    repeats  samples of each point
    """

    widths: tuple[int, ...]
    first: tuple[int, ...]
    deeper: tuple[int, ...]
    shares: tuple[float, float, float, float]
    repeats: int = REPEATS


FULL = Scope((1, 8, 4, 2, 16, 6, 3, 12, 32, 5, 24), (16, 64), (512, 2048), (0.25, 0.35, 0.45, 0.7))
QUICK = Scope((1, 8, 4, 2), (16, 64, 256), (), (0.4, 0.6, 0.8, 1.0))


class RunDraft(Protocol):
    """Has a call done on the one thread that may touch the drafter; Owner.submit is one."""

    def __call__(self, call: abc.Callable[[], _T], /) -> futures.Future[_T]: ...


def measure(
    verifier: Verifier,
    drafter: Drafter | None,
    *,
    budget_s: float,
    scope: Scope = FULL,
    run_draft: RunDraft | None = None,
    with_overlap: bool = True,
    progress: Progress | None = None,
    cancelled: Cancelled = never,
    clock: Clock = time.perf_counter,
) -> Curves:
    """Measured curves. On the thread that owns the verifier; what the caches held is lost.

    drafter       None: there is no draft model, or drafting costs nothing (lookup)
    budget_s      what may be spent, the first touch of the weights not counted; exceeded by what cannot be left out:
                  three widths, a draft, and one verification beside a draft
    run_draft     None: the drafter belongs to the calling thread, and overlap is not measured
    with_overlap  whether both sides are ever to work at the same time
    progress      called with (stage, 0..1)
    clock         seconds, of any thread; a jump costs a sample

    Raises Interrupted when ``cancelled``, BackendError when a side fails, the drafter does not answer, or the clock
    gave no usable sample.
    """
    sampler = Sampler(clock, budget_s, scope.repeats, progress, cancelled)
    verifying = _Verifying(verifier, scope, sampler, cancelled)
    drafting = _Drafting(drafter, sampler, run_draft, cancelled)
    depth, token_s = verifying.begin()
    first, drafts, both, more = scope.shares
    samples = verifying.sweep("verify", scope.widths[: MUST + 1], depth, first, must=MUST)
    if 1 not in samples:
        raise BackendError("no verification got a usable time: the clock jumps; try again")
    drafting.prefix = verifying.prefix[: max(1, depth)]
    steps = drafting.sweep("draft", (1,), drafts, must=1)
    overlap = _overlap(verifying, drafting, samples, steps, both) if with_overlap and steps else None
    reads = drafting.sweep_reads(both, steps)
    missing = [width for width in scope.widths if width not in samples]
    samples |= verifying.sweep("more widths", missing, depth, more, known=samples)
    if steps:
        steps |= drafting.sweep("larger batches", drafting.batches, 1.0, known=steps)
    by_depth = {depth: samples} | verifying.deeper(depth, token_s, samples)
    sampler.report("done", 1.0)
    return _curves(by_depth, steps, overlap, reads)


def measure_step(
    drafter: Drafter,
    num_vocab: int,
    *,
    budget_s: float,
    run_draft: RunDraft | None = None,
    cancelled: Cancelled = never,
    clock: Clock = time.perf_counter,
) -> float | None:
    """Seconds of one drafted token; None where it drafts nothing. Arguments and errors as for ``measure``."""
    drafting = _Drafting(drafter, Sampler(clock, budget_s, REPEATS, None, cancelled), run_draft, cancelled)
    drafting.prefix = random_tokens(random.Random(0), num_vocab, NUM_PROBED)
    return typical(drafting.sweep("draft", (1,), 1.0, must=1)).get(1)


def random_tokens(source: random.Random, num_vocab: int, num_tokens: int) -> list[int]:
    return source.choices(range(min(num_vocab, NUM_IDS)), k=num_tokens)


class _Verifying:
    """Times verifications of slot 0."""

    def __init__(self, verifier: Verifier, scope: Scope, sampler: Sampler, cancelled: Cancelled) -> None:
        self._verifier, self._scope, self._sampler, self._cancelled = verifier, scope, sampler, cancelled
        self._random = random.Random(0)
        most = max(width for width in (1, *scope.widths) if width < max(2, verifier.num_ctx))
        self._max_depth, self._max_width = verifier.num_ctx - most, most
        self.depth = 0
        self.prefix = self._tokens(max(1, min(max((*scope.first, *scope.deeper)), self._max_depth)))

    def begin(self) -> tuple[int, float]:
        """The depth to measure at first, and what a token of a prefix costs. The first call touches all weights."""
        self._sampler.report("verify", 0.0)
        self._score(1, 1)
        num_probed = min(NUM_PROBED, len(self.prefix))
        token_s = (self._sampler.timed(lambda: self._score(num_probed, 1)) or math.inf) / num_probed
        depths = sorted({min(depth, self._max_depth) for depth in self._scope.first})
        reached = [depth for depth in depths if depth * token_s <= PREFIX_SHARE * self._sampler.budget_s]
        seconds = self._go_to(max(reached, default=depths[0]))
        if seconds is not None and self.depth > num_probed:  # larger batches cost less a token
            token_s = min(token_s, seconds / (self.depth - num_probed))
        return self.depth, token_s

    def sweep(
        self,
        stage: str,
        widths: abc.Sequence[int],
        depth: int,
        share: float,
        *,
        must: int = 0,
        known: Samples | None = None,
    ) -> Samples:
        self.depth = depth
        fitting = [width for width in widths if width <= self._max_width]
        return self._sampler.sweep(stage, fitting, self.once, share, must=must, known=known)

    def once(self, width: int) -> float | None:
        """Seconds to score so many rows alone: the cache is cut back to the prefix before the clock starts."""
        self._go_to(self.depth)
        draft = self._tokens(width)
        return self._sampler.timed(lambda: self._score(self.depth, width, draft))

    def deeper(self, depth: int, token_s: float, at_first: Samples) -> dict[int, Samples]:
        """Samples of the same widths by depth, as far as the budget reaches."""
        found: dict[int, Samples] = {}
        row = typical(at_first)
        sweep_s = sum(row.values()) + len(row) * row[1]  # before each sample the cache is cut back, by one row
        for deep in sorted({min(deep, self._max_depth) for deep in self._scope.deeper}):
            expected_s = (deep - depth) * token_s + sweep_s
            if deep <= depth or self._sampler.spent_s + expected_s > self._sampler.budget_s:
                continue
            self._sampler.report(f"{deep} tokens deep")
            self._go_to(deep)
            samples = self.sweep(f"{deep} tokens deep", list(at_first), deep, 1.0, known=at_first)
            if samples.keys() == at_first.keys():
                found[deep], depth = samples, deep
        return found

    def _go_to(self, depth: int) -> float | None:
        self.depth = depth
        return self._sampler.timed(lambda: self._score(depth, 1)) if depth else None

    def _score(self, depth: int, num_rows: int, draft: abc.Sequence[int] = ()) -> None:
        self._verifier.score([ScoreRequest(0, [*self.prefix[:depth], *draft], num_rows)], self._cancelled)

    def _tokens(self, num_tokens: int) -> list[int]:
        return random_tokens(self._random, self._verifier.num_vocab, num_tokens)


class _Drafting:
    """Times drafts, on the drafter's thread."""

    def __init__(
        self, drafter: Drafter | None, sampler: Sampler, run_draft: RunDraft | None, cancelled: Cancelled
    ) -> None:
        self._drafter, self._sampler, self._cancelled = drafter, sampler, cancelled
        self._run_draft = run_draft
        self.prefix: list[int] = []

    @property
    def batches(self) -> list[int]:
        """Beyond the first."""
        return [size for size in BATCHES[1:] if self._drafter is not None and size <= self._drafter.num_slots]

    def sweep(
        self, stage: str, batches: abc.Sequence[int], share: float, *, must: int = 0, known: Samples | None = None
    ) -> Samples:
        if self._drafter is None:
            return {}
        return self._sampler.sweep(stage, batches, self._once, share, must=must, known=known)

    def _once(self, size: int) -> float | None:
        """Seconds per token of a draft for each of so many sequences, one token after what the caches hold."""
        self._sampler.spend(self._run(lambda: self._timed(size, 1))[0])  # reads the prefix, the first time
        taken_s, num_steps = self._run(lambda: self._timed(size, NUM_DRAFT))
        seconds = self._sampler.spend(taken_s)
        return seconds / num_steps if seconds is not None and num_steps else None

    def sweep_reads(self, share: float, steps: Samples) -> Samples:
        """Seconds per token of reading a prefix that no cache holds; by 1, the only point there is."""

        def once(_: int) -> float | None:
            self.prefix = [self.prefix[-1], *self.prefix[:-1]]
            seconds = self._sampler.spend(self._run(lambda: self._timed(1, 1))[0])
            read_s = 0.0 if seconds is None else seconds - typical(steps)[1]
            return read_s / len(self.prefix) if read_s > 0.0 else None

        return self._sampler.sweep("draft", (1,), once, share) if steps else {}

    def beside(self) -> _Beside | None:
        """Drafts that go on and on, just started; None where there is no thread for them."""
        if self._run_draft is None:
            return None
        return _Beside(self._run_draft, partial(self._propose, 1), self._sampler.clock)

    def _run(self, call: abc.Callable[[], _T]) -> _T:
        return call() if self._run_draft is None else answer(self._run_draft(call))

    # On the drafter's thread

    def _timed(self, size: int, num_draft: int) -> tuple[float, int]:
        began = self._sampler.clock()
        num_steps = self._propose(size, num_draft)
        return self._sampler.clock() - began, num_steps

    def _propose(self, size: int, num_draft: int, cancelled: Cancelled | None = None) -> int:
        """The tokens of the longest draft."""
        assert self._drafter is not None
        tokens = [*self.prefix, self.prefix[0]]
        requests = [DraftRequest(slot, tokens, len(self.prefix), num_draft, GREEDY) for slot in range(size)]
        return max(len(draft.tokens) for draft in self._drafter.propose(requests, cancelled or self._cancelled))


class _Beside:
    """Draws drafts on the drafter's thread until ``end``."""

    def __init__(self, run_draft: RunDraft, propose: abc.Callable[[int, Cancelled], int], clock: Clock) -> None:
        self._propose, self._clock = propose, clock
        self._began, self._stop = threading.Event(), threading.Event()
        self._future = run_draft(self._draft)
        self._future.add_done_callback(lambda _: self._began.set())

    def wait(self) -> None:
        """Until the first draft, which reads the prefix, is made."""
        if not self._began.wait(PATIENCE_S):
            raise _noanswer()

    def stop(self) -> None:
        self._stop.set()

    def end(self) -> tuple[float, int]:
        """Seconds, and tokens drafted in them; those of the first draft not counted."""
        self.stop()
        return answer(self._future)

    def _draft(self) -> tuple[float, int]:
        self._propose(NUM_AHEAD, self._stop.is_set)
        self._began.set()
        began = self._clock()
        num_steps = num_new = self._propose(1, never)  # a token at least, however soon the end comes
        while num_new and not self._stop.is_set():
            num_new = self._propose(NUM_AHEAD, self._stop.is_set)
            num_steps += num_new
        return self._clock() - began, num_steps


def _overlap(
    verifying: _Verifying, drafting: _Drafting, samples: Samples, steps: Samples, share: float
) -> Overlap | None:
    """By what factors the sides slow down while the drafter drafts all through several verifications."""
    beside = drafting.beside()
    if beside is None:
        return None
    width = next(width for width in OVERLAP_WIDTHS if width in samples)
    try:
        beside.wait()
        together = verifying.sweep("both at once", (width,), verifying.depth, share, must=1)
    finally:
        beside.stop()
    taken_s, num_steps = beside.end()
    if not together or not num_steps or not 0.0 < taken_s < MAX_SAMPLE_S:
        return None
    verify = typical(together)[width] / typical(samples)[width]
    draft = taken_s / num_steps / typical(steps)[1]
    return Overlap(max(1.0, verify), max(1.0, draft))


def _curves(by_depth: dict[int, Samples], steps: Samples, overlap: Overlap | None, reads: Samples) -> Curves:
    rows = {depth: typical(by_depth[depth]) for depth in sorted(by_depth)}
    widths = next(iter(rows.values()))
    step_s = typical(steps)
    verify_s = tuple(tuple(row.values()) for row in rows.values())
    return Curves(
        tuple(widths), tuple(rows), verify_s, tuple(step_s), tuple(step_s.values()), overlap, typical(reads).get(1)
    )


def answer(future: futures.Future[_T]) -> _T:
    """What the drafter's thread gives back. Raises what it raised, and BackendError where it does not answer."""
    try:
        return future.result(timeout=PATIENCE_S)
    except futures.TimeoutError:
        if future.done():  # the drafter's own error
            raise
        raise _noanswer() from None


def _noanswer() -> BackendError:
    return BackendError(f"the draft model gave no answer in {PATIENCE_S:g} s; try another one, or: --draft lookup")
