"""The two loops that generate: ``plain`` is the reference, ``sequential`` drafts first. Same helpers, same output.

A loop is a generator of rounds over one sequence. Between two rounds its consumer may end the sequence (a stop string)
by ``cut``; the loop then stops. Both run on the thread that owns the backends.
"""

from __future__ import annotations

import collections.abc as abc
import time

from edgespec.core.acceptance import judge
from edgespec.core.policy import Policy
from edgespec.core.sequence import Cancelled, Draft, Round, Sequence, never
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.verifiers.base import Interrupted, Rows, ScoreRequest, Verifier


def plain(sequence: Sequence, verifier: Verifier, cancelled: Cancelled = never) -> abc.Iterator[Round]:
    """One token a round, by the verifier alone."""
    while running(sequence, cancelled):
        draft = Draft(len(sequence.tokens))
        rows, verify_s = verify(sequence, draft, verifier, cancelled)
        if rows is not None:
            yield commit(sequence, draft, rows, 0.0, verify_s)


def sequential(
    sequence: Sequence, drafter: Drafter, verifier: Verifier, policy: Policy, cancelled: Cancelled = never
) -> abc.Iterator[Round]:
    """Draft, verify all of it in one batch, commit; one after the other."""
    while running(sequence, cancelled):
        draft, draft_s = propose(sequence, drafter, policy, cancelled)
        rows, verify_s = verify(sequence, draft, verifier, cancelled)
        if rows is not None:
            yield commit(sequence, draft, rows, draft_s, verify_s)


def running(sequence: Sequence, cancelled: Cancelled) -> bool:
    """Whether another round is due; a cancelled or full sequence is finished here."""
    if sequence.finish_reason is None:
        if cancelled():
            sequence.finish_reason = "cancelled"
        elif sequence.room == 0:
            sequence.finish_reason = "length"
    return sequence.finish_reason is None


def propose(sequence: Sequence, drafter: Drafter, policy: Policy, cancelled: Cancelled) -> tuple[Draft, float]:
    """A draft, and the seconds it took. Never longer than could be committed together with the verifier's own token."""
    length = min(policy.next(), sequence.room - 1)
    if length <= 0:
        return Draft(len(sequence.tokens)), 0.0
    began = time.perf_counter()
    request = DraftRequest(
        sequence.slot,
        sequence.tokens,
        sequence.num_prompt,
        length,
        sequence.params,
        sequence.end_tokens,
        policy.min_confidence,
    )
    (draft,) = drafter.propose([request], cancelled)
    return draft, time.perf_counter() - began


def verify(sequence: Sequence, draft: Draft, verifier: Verifier, cancelled: Cancelled) -> tuple[Rows | None, float]:
    """The verifier's rows for every drafted token and one more, and the seconds; None when it was interrupted."""
    began = time.perf_counter()
    request = ScoreRequest(sequence.slot, [*sequence.tokens, *draft.tokens], len(draft.tokens) + 1)
    try:
        (rows,) = verifier.score([request], cancelled)
    except Interrupted:
        return None, 0.0
    return rows, time.perf_counter() - began


def commit(sequence: Sequence, draft: Draft, rows: Rows, draft_s: float, verify_s: float) -> Round:
    """Judge the draft and extend the sequence by what the verifier agrees to."""
    verdict = judge(draft, rows, sequence.params, sequence.tokens, sequence.num_prompt)
    tokens = sequence.extend(verdict.tokens)
    accepted = min(verdict.accepted, len(tokens))
    return Round(tokens, draft, accepted, draft_s, verify_s)
