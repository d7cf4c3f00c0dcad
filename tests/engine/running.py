"""The loops as tests call them: over a bare drafter and policy."""

from __future__ import annotations

import collections.abc as abc

from edgespec.core.policy import Policy
from edgespec.core.sequence import Cancelled, Round, Sequence, never
from edgespec.drafters.base import Drafter
from edgespec.engine import loops
from edgespec.engine.draft_thread import DraftThread
from edgespec.engine.look_ahead import MAX_AHEAD
from edgespec.engine.rounds import Guide
from edgespec.verifiers.base import Verifier


def sequential(
    sequence: Sequence, drafter: Drafter, verifier: Verifier, policy: Policy, cancelled: Cancelled = never
) -> abc.Iterator[Round]:
    thread = DraftThread(drafter)
    try:
        yield from loops.sequential(sequence, thread, verifier, Guide(policy), cancelled)
    finally:
        thread.close()


def overlapped(
    sequence: Sequence,
    drafter: Drafter,
    verifier: Verifier,
    policy: Policy,
    cancelled: Cancelled = never,
    max_ahead: int = MAX_AHEAD,
) -> abc.Iterator[Round]:
    thread = DraftThread(drafter)
    try:
        yield from loops.overlapped(sequence, thread, verifier, Guide(policy), cancelled, max_ahead)
    finally:
        thread.close()
