"""Boxes and texts that exist as numbers only: what a policy makes of them, without a clock."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass, field

import numpy as np

from edgespec.core.costs import Costs, Curves
from edgespec.core.policy import Plan, Policy, _Forecast
from edgespec.core.sequence import Candidate, Draft, Round
from edgespec.core.track import Outlook, Track

WRONG, RIGHT = 0, 1  # what a drafter may say; the verifier always says RIGHT

Acceptance = abc.Callable[[int], float]


class Text:
    """What the drafter makes of each position, if all before it is right: whether it is right, and how sure.

    acceptance  the chance by position
    sure        confidences of right tokens are larger by this, on average (as leads are); None: none are given
    """

    def __init__(self, acceptance: Acceptance, sure: float | None = None, seed: int = 0, size: int = 8192) -> None:
        rng = np.random.default_rng(seed)
        self.sure = sure
        right = rng.random(size) < [acceptance(position) for position in range(size)]
        self._tokens = right.astype(int).tolist()
        self._confidences = (rng.gamma(1.5, 0.4, size) * (1 + (sure or 0.0) * right)).tolist()

    def token(self, position: int, astray: bool) -> tuple[int, float]:
        """After a wrong token all others are, and none looks it."""
        return WRONG if astray else self._tokens[position], self._confidences[position]


@dataclass(frozen=True)
class Box:
    """Real seconds. ``curves`` is what was measured before; the rest is the truth."""

    curves: Curves
    truth: Curves
    noise: float = 0.0
    overlapped: bool = False

    @classmethod
    def of(cls, curves: Curves, noise: float = 0.0, overlapped: bool = False) -> Box:
        return cls(curves, curves, noise, overlapped)


@dataclass
class Result:
    tokens: int = 0
    seconds: float = 0.0
    lengths: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Session:
    """Requests one after the other, as an engine would run them. Times of first rounds are left out.

    costs, prior  live on between requests
    """

    box: Box
    policy: Policy
    seed: int = 0

    def __post_init__(self) -> None:
        self.costs, self.prior, self.result = Costs(self.box.curves), Track(), Result()
        self._truth, self._rng = Costs(self.box.truth), np.random.default_rng(self.seed)

    def request(self, text: Text, num_tokens: int, num_prompt: int = 20) -> Result:
        """Generate; the result of this request alone."""
        track, total = Track(self.prior), Result()
        position, ready = num_prompt, None
        while position < num_prompt + num_tokens:
            plan = self._plan(track, False) if ready is None else self._ahead
            unread = position - track.num_read
            draft = ready or self._draft(text, position, plan)
            self._ahead = self._plan(track, True) if self.box.overlapped else Plan(0)
            guess = text.token(position + len(draft.tokens), WRONG in draft.tokens)[0]
            round_ = self._round(draft, unread, kept=ready is not None)
            track.observe(round_)
            self.prior.observe(round_)
            position += len(round_.tokens)
            if track.num_rounds > 1:
                total.tokens += len(round_.tokens)
                total.seconds += round_.verify_s + round_.draft_s - round_.hidden_s
                total.lengths.append(round_.drafted)
                self.costs.observe([round_], position)
            whole = round_.accepted == round_.drafted and guess == RIGHT
            ready = self._draft(text, position, self._ahead) if self._ahead.length and whole else None
        self.result.tokens += total.tokens
        self.result.seconds += total.seconds
        self.result.lengths += total.lengths
        return total

    def _plan(self, track: Track, overlapped: bool) -> Plan:
        (plan,) = self.policy.plans([track], self.costs, overlapped=overlapped)
        return plan

    def _draft(self, text: Text, position: int, plan: Plan) -> Draft:
        tokens: list[int] = []
        confidences: list[float] = []
        for i in range(plan.length):
            token, confidence = text.token(position + i, WRONG in tokens)
            if text.sure is not None and confidence < plan.min_confidence:
                return Draft(position, tuple(tokens), None, tuple(confidences), Candidate(token, confidence))
            tokens.append(token)
            confidences.append(confidence)
        return Draft(position, tuple(tokens), None, () if text.sure is None else tuple(confidences))

    def _round(self, draft: Draft, unread: int, kept: bool) -> Round:
        num = len(draft.tokens)
        accepted = draft.tokens.index(WRONG) if WRONG in draft.tokens else num
        num_steps = num + (draft.held_back is not None)
        verify_s = self._noisy(self._truth.verify_s(num + 1, draft.start))
        draft_s = self._noisy(self._truth.draft_s(num_steps + kept))  # a look-ahead begins with its guess
        if num_steps:
            draft_s += self._truth.read_s(unread)
        hidden_s = min(verify_s, draft_s) if kept else 0.0
        return Round((RIGHT,) * (accepted + 1), draft, accepted, draft_s, verify_s, hidden_s, num + 1)

    def _noisy(self, seconds: float) -> float:
        return seconds * float(self._rng.uniform(1 - self.box.noise, 1 + self.box.noise))


def curves(name: str, step: float = 0.0) -> Curves:
    """One of the known shapes; ``step`` is what a drafted token costs, in verifications of one row."""
    widths, verify_s = SHAPES[name]
    batches, step_s = ((1,), (step * verify_s[0],)) if step else ((), ())
    return Curves(widths, (0,), (verify_s,), batches, step_s, read_s=0.02 * step * verify_s[0] if step else None)


_MEASURED = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
# Milliseconds were measured, the first two are idealised.
SHAPES: dict[str, tuple[tuple[int, ...], tuple[float, ...]]] = {
    "flat": ((1, 16, 64), (0.02, 0.021, 0.04)),
    "linear": ((1, 32), (0.05, 0.05 + 31 * 0.022)),
    "steep": ((1, 32), (0.05, 0.05 * 32)),
    "no AMX, Q4_0": (_MEASURED, (0.111, 0.132, 0.164, 0.139, 0.174, 0.207, 0.241, 0.351, 0.389, 0.770)),
    "AMX, Q8_0": (_MEASURED, (0.0887, 0.110, 0.124, 0.136, 0.154, 0.163, 0.195, 0.247, 0.284, 0.584)),
    "Zen 4, Q8_0": (_MEASURED, (0.0501, 0.108, 0.123, 0.133, 0.191, 0.209, 0.196, 0.266, 0.331, 0.589)),
}


def gain(costs: Costs, acceptance: float, overlapped: bool = False, max_length: int = 16) -> float:
    """What the policy foresees at best over plain decoding if every drafted token is accepted with this chance."""
    return _Forecast(Outlook.constant(acceptance, max_length), costs, 0, overlapped).best_gain
