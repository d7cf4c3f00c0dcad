"""Many sequences at once: one batch per verification across them, each with a draft length of its own.

A single sequence runs by its own loop (engine/loops.py). Several are verified together; where the drafter can work
beside the verifier and that pays, they are split into two cohorts, one drafted while the other is verified. Nothing is
guessed then.
"""

from __future__ import annotations

import collections.abc as abc
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

from edgespec.core.costs import Costs
from edgespec.core.policy import Plan, Policy
from edgespec.core.prefix import num_common
from edgespec.core.sequence import Cancelled, Draft, Round, Sequence, never
from edgespec.core.track import Track
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.engine.draft_thread import DraftThread, Pending, empty
from edgespec.engine.look_ahead import MAX_AHEAD
from edgespec.engine.loops import overlapped, plain, sequential
from edgespec.engine.rounds import KEEP, KEEP_QUIET, NOTHING, Guide, commit, request, running
from edgespec.errors import EdgespecError
from edgespec.verifiers.base import Interrupted, Rows, ScoreRequest, Verifier

Mode = Literal["plain", "sequential", "overlapped"]

CHUNK = 512  # prompt tokens evaluated beside other sequences' rounds: a long prompt does not hold them up for longer


@dataclass(eq=False)
class Job:
    """One sequence on its way through the scheduler, which alone changes it.

    guide      decides its draft lengths; None for mode plain
    draft      what was drafted for its next round
    num_held   how many of its tokens the verifier's cache holds, as far as is known
    plan       for its next draft as one of several, and for how many steps more
    cohort     0 or 1
    """

    sequence: Sequence
    mode: Mode
    guide: Guide | None = None
    cancelled: Cancelled = never
    draft: Draft | None = None
    draft_s: float = 0.0
    hidden_s: float = 0.0
    num_held: int = 0
    plan: Plan = NOTHING
    plan_steps: int = 0
    cohort: int = 0
    loop: abc.Generator[Round, None, None] | None = None
    _num_read: int = 0  # of a sequence that nothing is drafted for

    @property
    def num_missing(self) -> int:
        """Tokens the verifier must evaluate before it can go on; 1 once the prompt is read."""
        return len(self.sequence.tokens) - self.num_held

    @property
    def num_drafter_held(self) -> int:
        """How many of its tokens the drafter's cache holds."""
        return self.guide.track.num_read if self.guide else self._num_read

    @num_drafter_held.setter
    def num_drafter_held(self, num_tokens: int) -> None:
        if self.guide:
            self.guide.track.num_read = num_tokens
        self._num_read = num_tokens

    def take_draft(self) -> Draft:
        draft, self.draft = self.draft or Draft(len(self.sequence.tokens)), None
        if not draft.tokens:
            self.draft_s = self.hidden_s = 0.0
        return draft

    def stop_loop(self) -> None:
        if self.loop is not None:
            self.loop.close()
            self.loop = None


@dataclass(frozen=True, slots=True)
class Event:
    """What a step did for one job: a round; or, as the last there is of it, an error, or neither: it was cancelled."""

    job: Job
    round: Round | None = None
    error: Exception | None = None


class Scheduler:
    """One thread: the engine's.

    Jobs join and leave at any step, in the order they came; as many run as both backends have slots. A job gets the
    free slot that holds most of its tokens already.
    """

    def __init__(
        self, verifier: Verifier, drafter: DraftThread | None, costs: Costs, *, max_ahead: int = MAX_AHEAD
    ) -> None:
        self._verifier, self._drafter, self._costs, self._max_ahead = verifier, drafter, costs, max_ahead
        num_slots = min(verifier.num_slots, drafter.num_slots) if drafter else verifier.num_slots
        # what each free slot holds, and how many tokens of it the drafter has read; the one left longest ago first
        self._free: dict[int, tuple[list[int], int]] = {slot: ([], 0) for slot in range(num_slots)}
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._turn = 0
        self._drafting: Drafting | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    def add(self, job: Job) -> None:
        """Let a job join, at once if a slot is free."""
        self._waiting.append(job)
        self._join()

    def step(self) -> list[Event]:
        """One verification, and what came of it; nothing where no job is left. Blocks for as long as a round takes."""
        self._leave()
        events = self._cancel()
        self._join()
        if len(self._running) == 1:
            return events + self._alone(self._running[0])
        return events + (self._together() if self._running else [])

    # Joining and leaving

    def _leave(self) -> None:
        for job in [job for job in self._running if job.sequence.finish_reason is not None]:
            self._drop(job)

    def _drop(self, job: Job) -> None:
        job.stop_loop()
        self._running.remove(job)
        self._free[job.sequence.slot] = list(job.sequence.tokens), job.num_drafter_held

    def _cancel(self) -> list[Event]:
        ended = [job for job in [*self._waiting, *self._running] if not running(job.sequence, job.cancelled)]
        self._waiting = deque(job for job in self._waiting if job not in ended)
        self._leave()
        return [Event(job) for job in ended]

    def _join(self) -> None:
        while self._waiting and self._free:
            job = self._waiting.popleft()
            tokens = job.sequence.tokens
            slot = max(self._free, key=lambda slot: num_common(self._free[slot][0], tokens))
            job.sequence.slot, (held, num_read) = slot, self._free.pop(slot)
            job.num_held = num_common(held, tokens)
            job.num_drafter_held = min(job.num_held, num_read)
            job.cohort = 0 if sum(other.cohort == 0 for other in self._running) * 2 <= len(self._running) else 1
            self._running.append(job)

    # One job

    def _alone(self, job: Job) -> list[Event]:
        job.loop = job.loop or self._loop(job)
        try:
            round_ = next(job.loop, None)
        except EdgespecError as error:
            return [self._fail(job, error)]
        job.num_held = len(job.sequence.tokens) - 1
        job.draft = None  # from when it was one of several
        return [Event(job, round_)]

    def _loop(self, job: Job) -> abc.Generator[Round, None, None]:
        if job.mode == "plain" or job.guide is None or self._drafter is None:
            return plain(job.sequence, self._verifier, job.cancelled)
        if job.mode == "sequential":
            return sequential(job.sequence, self._drafter, self._verifier, job.guide, job.cancelled)
        return overlapped(job.sequence, self._drafter, self._verifier, job.guide, job.cancelled, self._max_ahead)

    def _fail(self, job: Job, error: Exception) -> Event:
        self._drop(job)
        self._free[job.sequence.slot] = [], 0  # nobody knows what the caches hold
        return Event(job, error=error)

    # Several jobs

    def _together(self) -> list[Event]:
        for job in self._running:
            job.stop_loop()
        if self._drafting is not None:
            self._drafting.collect()
            self._drafting = None
        if not self._split():
            self._draft(self._running).collect()
            return self._verify(self._running)
        now, then = ([job for job in self._running if (job.cohort == self._turn) is mine] for mine in (True, False))
        self._turn = 1 - self._turn
        self._drafting = self._draft(then)
        events = self._verify(now)
        self._drafting.verified()
        return events

    def _split(self) -> bool:
        """Whether two cohorts pay: they take twice the slower side's time for half of it, instead of both sides'."""
        jobs, overlap = self._running, self._costs.curves.overlap
        if self._drafter is None or overlap is None or any(job.mode != "overlapped" for job in jobs):
            return False
        self._balance()
        length, half = max(job.plan.length for job in jobs), -(-len(jobs) // 2)
        one = self._costs.draft_s(length, len(jobs)) + self._costs.verify_s(len(jobs) * (length + 1))
        draft_s = self._costs.draft_s(length, half) * overlap.draft
        verify_s = self._costs.verify_s(half * (length + 1)) * overlap.verify
        return 2 * max(draft_s, verify_s) < one

    def _balance(self) -> None:
        """As many jobs in one cohort as in the other, or one more."""
        fewer, more = sorted(([job for job in self._running if job.cohort == cohort] for cohort in (0, 1)), key=len)
        for job in more[: (len(more) - len(fewer)) // 2]:
            job.cohort = 1 - job.cohort

    def _plans(self, jobs: abc.Sequence[Job]) -> list[Plan]:
        """A plan for each job, in order: those of one policy share its width. Plans are kept for some steps."""
        if any(job.plan_steps == 0 for job in jobs):
            groups: list[tuple[Policy, list[tuple[Job, Track]]]] = []  # a policy need not be hashable
            for job in jobs:
                if (guide := job.guide) is not None:
                    if (members := next((group for policy, group in groups if policy == guide.policy), None)) is None:
                        groups.append((guide.policy, members := []))
                    members.append((job, guide.track))
            for policy, members in groups:
                found = policy.plans([track for _, track in members], self._costs)
                keep = KEEP if any(plan.length for plan in found) else KEEP_QUIET
                for (job, track), plan in zip(members, found, strict=True):
                    job.plan, job.plan_steps = plan, keep if track.num_rounds else 1
        for job in jobs:
            job.plan_steps = max(0, job.plan_steps - 1)
        return [job.plan for job in jobs]

    def _draft(self, jobs: abc.Sequence[Job]) -> Drafting:
        """Have the jobs drafted whose prompt is read. A text that is new to the drafter is read in pieces, without."""
        due = [job for job in jobs if job.num_missing <= 1]
        asked: list[tuple[Job, DraftRequest]] = []
        for job, plan in zip(due, self._plans(due), strict=True):
            read = job.sequence.tokens[: job.num_drafter_held + CHUNK]
            wanted = request(job.sequence, read, plan)
            if len(read) < len(job.sequence.tokens):
                wanted = replace(wanted, num_draft=min(wanted.num_draft, 1))
            if wanted.num_draft > 0:
                asked.append((job, wanted))
        return Drafting(asked, self._drafter)

    def _verify(self, jobs: abc.Sequence[Job]) -> list[Event]:
        """Score all of them in one batch, and commit; of prompts that are not read yet, CHUNK tokens in all."""
        began, wanted = time.perf_counter(), _pieces(jobs)
        try:
            scored = self._verifier.score(list(wanted.values()), _all_of(list(wanted)))
        except Interrupted:
            return []
        except EdgespecError as error:
            return [self._fail(job, error) for job in wanted]
        verify_s, width = time.perf_counter() - began, sum(piece.num_rows for piece in wanted.values())
        is_plain = all(job.num_missing <= 1 for job in wanted)  # else its time is that of the prompts
        found = [
            self._commit(job, piece, rows, verify_s, width)
            for (job, piece), rows in zip(wanted.items(), scored, strict=True)
        ]
        events = [event for event in found if event is not None]
        rounds = [event.round for event in events if event.round is not None]
        if rounds and is_plain:
            self._costs.observe(rounds, sum(round_.draft.start for round_ in rounds) // len(rounds))
        return events

    def _commit(self, job: Job, piece: ScoreRequest, rows: Rows, verify_s: float, width: int) -> Event | None:
        if len(piece.tokens) < len(job.sequence.tokens):
            job.num_held = len(piece.tokens)
            return None
        draft = job.take_draft()
        try:
            round_ = commit(job.sequence, draft, rows, job.draft_s, verify_s, job.hidden_s)
        except EdgespecError as error:
            return self._fail(job, error)
        round_ = replace(round_, width=width)
        job.num_held = len(job.sequence.tokens) - 1
        if job.guide is not None:
            job.guide.remember(round_)
        return Event(job, round_)


class Drafting:
    """Drafts of several jobs, on their way in the drafter's thread."""

    def __init__(self, asked: list[tuple[Job, DraftRequest]], drafter: DraftThread | None) -> None:
        self._asked = asked
        self._began = self._ended = self._verified = time.perf_counter()
        self._pending: Pending[list[Draft]] | None = None
        if asked and drafter is not None:
            requests = [wanted for _, wanted in asked]
            self._pending = drafter.start(self._propose, _all_of([job for job, _ in asked]), empty(requests))

    def verified(self) -> None:
        """The verification beside it is over: what the drafter worked until now was hidden."""
        self._verified = time.perf_counter()

    def collect(self) -> None:
        """Wait, and give each job its draft; one whose text was read in part has none yet."""
        if self._pending is None:
            return
        drafts = self._pending.result()
        draft_s, hidden_s = (max(0.0, end - self._began) for end in (self._ended, min(self._verified, self._ended)))
        for (job, wanted), draft in zip(self._asked, drafts, strict=True):
            job.num_drafter_held = len(wanted.tokens)
            if len(wanted.tokens) == len(job.sequence.tokens):
                job.draft, job.draft_s, job.hidden_s = draft, draft_s, hidden_s

    def _propose(self, drafter: Drafter, cancelled: Cancelled) -> list[Draft]:
        self._began = time.perf_counter()
        drafts = drafter.propose([wanted for _, wanted in self._asked], cancelled)
        self._ended = time.perf_counter()
        return drafts


def _pieces(jobs: abc.Sequence[Job]) -> dict[Job, ScoreRequest]:
    """What each job has scored next: its draft, or the next part of its prompt, or nothing while others' are read."""
    pieces: dict[Job, ScoreRequest] = {}
    room = CHUNK
    for job in jobs:
        tokens, slot = job.sequence.tokens, job.sequence.slot
        unread = max(0, job.num_missing - 1)
        if unread <= room:
            drafted = job.draft.tokens if job.draft else ()
            pieces[job] = ScoreRequest(slot, [*tokens, *drafted], len(drafted) + 1)
        elif room:
            pieces[job] = ScoreRequest(slot, tokens[: job.num_held + room], 1)
        room -= min(unread, room)
    return pieces


def _all_of(jobs: abc.Sequence[Job]) -> Cancelled:
    return lambda: all(job.cancelled() for job in jobs)
