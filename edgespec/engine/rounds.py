"""What every loop is made of: is another round due, draft, verify, commit; and what decides a draft's length."""

from __future__ import annotations

import math
import time

from edgespec.core.acceptance import judge
from edgespec.core.costs import Costs
from edgespec.core.policy import Plan, Policy
from edgespec.core.sequence import Cancelled, Draft, Round, Sequence
from edgespec.core.track import Track
from edgespec.drafters.base import DraftRequest
from edgespec.engine.draft_thread import DraftThread
from edgespec.verifiers.base import Interrupted, Rows, ScoreRequest, Verifier

# Making a plan costs as much as judging a draft: one that works is kept for some rounds, longer if the one before was
# the same, and the longer nothing is drafted the longer it is left at that.
KEEP, KEEP_SAME, KEEP_QUIET = 4, 8, 16
NOTHING = Plan(0)


class Guide:
    """Decides the draft lengths of one sequence, and learns from its rounds. The engine's thread.

    costs  what rounds cost, followed live; shared by all sequences of a runtime
    prior  what its sequences were like so far; learns along
    room   most tokens that this one may have yet
    """

    def __init__(
        self, policy: Policy, costs: Costs | None = None, prior: Track | None = None, room: float = math.inf
    ) -> None:
        self.policy, self.costs, self.prior = policy, costs or Costs(), prior
        self.track = Track(prior, room=room)
        self._plans: dict[bool, Plan] = {}
        self._before: dict[bool, Plan] = {}
        self._num_kept = self._num_quiet = 0
        self._learned = 0.0

    def plan(self, *, overlapped: bool = False) -> Plan:
        if overlapped not in self._plans:
            (self._plans[overlapped],) = self.policy.plans([self.track], self.costs, overlapped=overlapped)
        return self._plans[overlapped]

    def learn(self, round_: Round) -> Round:
        """Remember a round that ran alone, and when a new plan is due also its time; that of a first round, which
        evaluates the prompt, says nothing about the next."""
        now, is_first = time.perf_counter(), self.track.num_rounds == 0
        self.remember(round_)
        if not is_first and not self._plans:
            worked_s = round_.verify_s + round_.draft_s - round_.hidden_s
            self.costs.observe([round_], round_.draft.start, now - self._learned - worked_s)
        self._learned = now
        return round_

    def remember(self, round_: Round) -> Round:
        """How its draft was received, without its time."""
        self.track.observe(round_)
        if self.prior is not None:
            self.prior.observe(round_)
        self._num_kept += 1
        self._num_quiet = 0 if any(plan.length for plan in self._plans.values()) else self._num_quiet + 1
        quiet = min(self._num_quiet // 2, KEEP_QUIET)
        keep = KEEP_SAME if self._plans == self._before else KEEP
        if self._num_kept >= (quiet if self._num_quiet else keep if round_.accepted else 0):
            self._before, self._plans = self._plans, {}
            self._num_kept = 0
        return round_


def running(sequence: Sequence, cancelled: Cancelled) -> bool:
    """Whether another round is due; a cancelled or full sequence is finished here."""
    if sequence.finish_reason is None:
        if cancelled():
            sequence.finish_reason = "cancelled"
        elif sequence.room == 0:
            sequence.finish_reason = "length"
    return sequence.finish_reason is None


def request(sequence: Sequence, tokens: list[int], plan: Plan) -> DraftRequest:
    """A request to draft after ``tokens``, which begin with the sequence's own; as long as could ever be committed
    together with the verifier's own token.

    Where a draft's tokens are drawn with noise of their own it does not end with an end token: its length, from which
    the policy learns, would tell of noise that is drawn again should a token before that one be refused.
    """
    params = sequence.params
    room = sequence.room - (len(tokens) - len(sequence.tokens)) - 1
    drawn = params.rule == "rejection" and not params.greedy
    return DraftRequest(
        sequence.slot,
        tokens,
        sequence.num_prompt,
        max(0, min(plan.length, room)),
        params,
        frozenset() if drawn else sequence.end_tokens,
        0.0 if drawn else plan.min_confidence,
    )


def propose(sequence: Sequence, drafter: DraftThread, plan: Plan, cancelled: Cancelled) -> tuple[Draft, float]:
    """A draft, and the seconds it took."""
    wanted = request(sequence, list(sequence.tokens), plan)
    if wanted.num_draft == 0:
        return Draft(len(sequence.tokens)), 0.0
    began = time.perf_counter()
    (draft,) = drafter.propose([wanted], cancelled)
    return draft, time.perf_counter() - began


def verify(sequence: Sequence, draft: Draft, verifier: Verifier, cancelled: Cancelled) -> tuple[Rows | None, float]:
    """The verifier's rows for every drafted token and one more, and the seconds; None when it was interrupted."""
    began = time.perf_counter()
    wanted = ScoreRequest(sequence.slot, [*sequence.tokens, *draft.tokens], len(draft.tokens) + 1)
    try:
        (rows,) = verifier.score([wanted], cancelled)
    except Interrupted:
        return None, 0.0
    return rows, time.perf_counter() - began


def commit(
    sequence: Sequence, draft: Draft, rows: Rows, draft_s: float, verify_s: float, hidden_s: float = 0.0
) -> Round:
    """Judge the draft and extend the sequence by what the verifier agrees to. A batch of its own: width is its rows."""
    verdict = judge(draft, rows, sequence.params, sequence.tokens, sequence.num_prompt)
    tokens = sequence.extend(verdict.tokens)
    accepted = min(verdict.accepted, len(tokens))
    return Round(tokens, draft, accepted, draft_s, verify_s, hidden_s, len(rows))
