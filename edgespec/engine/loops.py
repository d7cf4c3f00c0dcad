"""The loops that generate, side by side: ``plain`` is the reference, ``sequential`` drafts before it verifies,
``overlapped`` while it does. Same helpers, same output.

A loop is a generator of rounds over one sequence. Between two rounds its consumer may end the sequence (a stop string)
by ``cut``; the loop then stops. All run on the engine's thread, which owns the verifier.
"""

from __future__ import annotations

import collections.abc as abc

from edgespec.core.sequence import Cancelled, Draft, Round, Sequence, never
from edgespec.engine.draft_thread import DraftThread
from edgespec.engine.look_ahead import MAX_AHEAD, LookAhead, Reading
from edgespec.engine.rounds import NOTHING, Guide, commit, propose, running, verify
from edgespec.verifiers.base import Verifier


def plain(sequence: Sequence, verifier: Verifier, cancelled: Cancelled = never) -> abc.Generator[Round, None, None]:
    """One token a round, by the verifier alone."""
    while running(sequence, cancelled):
        draft = Draft(len(sequence.tokens))
        rows, verify_s = verify(sequence, draft, verifier, cancelled)
        if rows is not None:
            yield commit(sequence, draft, rows, 0.0, verify_s)


def sequential(
    sequence: Sequence, drafter: DraftThread, verifier: Verifier, guide: Guide, cancelled: Cancelled = never
) -> abc.Generator[Round, None, None]:
    """Draft, verify all of it in one batch, commit; one after the other."""
    while running(sequence, cancelled):
        draft, draft_s = propose(sequence, drafter, guide.plan(), cancelled)
        rows, verify_s = verify(sequence, draft, verifier, cancelled)
        if rows is not None:
            yield guide.learn(commit(sequence, draft, rows, draft_s, verify_s))


def overlapped(
    sequence: Sequence,
    drafter: DraftThread,
    verifier: Verifier,
    guide: Guide,
    cancelled: Cancelled = never,
    max_ahead: int = MAX_AHEAD,
) -> abc.Generator[Round, None, None]:
    """While a draft is verified, the drafter goes on past it; what the verdict does not refute is the next draft."""
    ahead: LookAhead | None = None
    reading = Reading(sequence, drafter, guide, cancelled)
    try:
        while running(sequence, cancelled):
            kept = ahead.kept() if ahead else None
            plan = guide.plan() if reading.is_over else NOTHING
            draft, draft_s, hidden_s = kept or (*propose(sequence, drafter, plan, cancelled), 0.0)
            plan = guide.plan(overlapped=True) if reading.is_over else NOTHING
            ahead = LookAhead(sequence, draft, drafter, plan, max_ahead, cancelled)
            rows, verify_s = verify(sequence, draft, verifier, cancelled)
            if rows is not None:
                yield guide.learn(ahead.judge(commit(sequence, draft, rows, draft_s, verify_s, hidden_s)))
    finally:
        reading.stop()
        if ahead:
            ahead.stop()
