"""Which mode pays, judged from what was measured. How well drafts will be received nobody knows beforehand.

Taking turns is ruled out only where it would not pay even if every drafted token were accepted: a policy that drafts
nothing makes it plain decoding. Both at once, each side with a part of the CPUs, has to pay at a usual acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.core.costs import Costs, Curves
from edgespec.engine.scheduler import Mode

MAX_LENGTH = 16  # longest draft that is considered
USUAL_ACCEPTANCE = 0.9  # per token, of a draft model that fits its verifier: at this the two ways are compared
MARGIN = 1.03  # less gain than this is within what measurements differ by
DEPTH = 256  # tokens of a usual conversation


@dataclass(frozen=True, slots=True)
class Advice:
    """
    mode    the one that pays
    gain    tokens per second over those of plain decoding, if every drafted token were accepted
    reason  a sentence, for people
    """

    mode: Mode
    gain: float
    reason: str


def advise(
    turns: Curves, together: Curves | None = None, *, acceptance: float | None = None, is_free: bool = False
) -> Advice:
    """Plain, sequential or overlapped.

    turns     measured with the threads that each side has when they take turns
    together  with those that they have when both work at once; None: they cannot, or nobody measured it
    acceptance  of a drafted token, where that was measured
    is_free   drafting costs nothing (lookup), and therefore was not measured
    """
    if not turns.step_s and not is_free:
        return Advice("plain", 1.0, "there is no draft model")
    acceptance = USUAL_ACCEPTANCE if acceptance is None else acceptance
    base_s = plain_s(turns, together)
    gain, usual = speedup(turns, base_s, 1.0), speedup(turns, base_s, acceptance)
    compared = ""
    if together is not None and together.overlap is not None and together.step_s:
        gain_at_once = speedup(together, base_s, 1.0, overlapped=True)
        usual_at_once = speedup(together, base_s, acceptance, overlapped=True)
        compared = (
            f"; at an acceptance of {acceptance:.0%} both at once would reach {usual_at_once:.2f} x, one after "
            f"the other {usual:.2f} x"
        )
        if usual_at_once >= MARGIN * max(usual, 1.0):
            return Advice("overlapped", gain_at_once, _best_case(gain_at_once) + compared)
    return Advice("sequential" if gain >= MARGIN else "plain", gain, _best_case(gain) + compared)


def _best_case(gain: float) -> str:
    return f"were every drafted token accepted, drafting would reach {gain:.2f} x plain"


def plain_s(*measured: Curves | None) -> float:
    """A token of plain decoding, with the threads that do it best."""
    return min(Costs(curves).verify_s(1, DEPTH) for curves in measured if curves is not None)


def speedup(curves: Curves, base_s: float, acceptance: float = USUAL_ACCEPTANCE, *, overlapped: bool = False) -> float:
    """Tokens per second over those of plain decoding (``base_s`` each), at the draft length that suits best."""
    costs = Costs(curves)
    return max(
        _num_tokens(length, acceptance) * base_s / _round_s(costs, length, acceptance, overlapped)
        for length in range(1, MAX_LENGTH + 1)
    )


def _num_tokens(length: int, acceptance: float) -> float:
    """Committed in a round, in the mean: the accepted ones and the verifier's own."""
    return sum(acceptance**i for i in range(length + 1))


def _round_s(costs: Costs, length: int, acceptance: float, overlapped: bool) -> float:
    """A round in the mean. Of a draft made beside a verification nothing is kept unless the whole draft before it was
    accepted, and the verifier's own token was guessed.
    """
    verify_s, draft_s = costs.verify_s(length + 1, DEPTH), costs.draft_s(length)
    if not overlapped:
        return verify_s + draft_s
    verify_s *= costs.overlap.verify
    hidden_s = min(costs.draft_s(length + 1), verify_s / costs.overlap.draft)
    useful_s = max(0.0, hidden_s - costs.draft_s(1))  # the guess itself is no part of the next draft
    return verify_s + draft_s - acceptance ** (length + 1) * useful_s
