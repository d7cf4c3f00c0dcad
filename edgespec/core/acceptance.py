"""How drafted tokens are judged. Both rules leave the output distributed as the verifier alone would sample it.

``coupled``    Drafter and verifier draw with the same noise; a drafted token is accepted if it is the token that the
               verifier draws (Daliri, Musco, Suresh 2408.07978). The output depends on seed and verifier only.
``rejection``  A token x drafted from q is accepted with probability min(1, p(x) / q(x)); the first rejected one is
               replaced by a draw from norm(max(p - q, 0)) (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

At temperature 0 both come to the same thing: p is one-hot, and what matches it is accepted.

A position that is drafted again in a later round sees the same noise again, and that is sound. What is committed at
position i is computed from the tokens before it and from the noise of positions up to i. Whatever was drafted beyond i
and thrown away never entered that decision, so given all that is committed the noise beyond i is still as good as new.
Under ``rejection`` this holds as long as the length of a draft is chosen without looking at the noise of positions that
it does not reach; under ``coupled`` what is drafted has no influence on the output at all.
"""

from __future__ import annotations

import collections.abc as abc

import numpy as np
from numpy.typing import NDArray

from edgespec.core.ranking import most_likely
from edgespec.core.sampling import Stream, distribution, one_hot, penalise, pick, seed_of, uniform
from edgespec.core.sequence import Distribution, Draft, SamplingParams, Verdict
from edgespec.errors import ParameterError

Target = abc.Callable[[int], Distribution]

_EMPTY_MASS = 1e-12


def judge(
    draft: Draft, rows: NDArray[np.float32], params: SamplingParams, tokens: abc.Sequence[int], num_prompt: int
) -> Verdict:
    """Accept the drafted tokens that hold, and add one of the verifier's own. Pure; any thread may call it.

    draft       continues ``tokens``, so draft.start == len(tokens)
    rows        (len(draft.tokens) + 1, n) float32, not changed: row i is what the verifier makes of tokens +
                draft.tokens[:i]. Read in order and no further than the first rejection
    tokens      all that is committed, prompt and output
    num_prompt  how many of them are the prompt

    Raises ParameterError if these do not fit together or a seed is missing, BackendError for a broken row.
    """
    _check(draft, len(rows), len(tokens))
    # Only penalties look back, and making an array of a long history is not free.
    history = np.array([*tokens, *draft.tokens] if params.penalised else [], dtype=np.int64)

    def likeliest(i: int) -> int:
        return most_likely(penalise(rows[i], params, history[: draft.start + i], num_prompt))[0]

    def target(i: int) -> Distribution:
        return distribution(rows[i], params, history[: draft.start + i], num_prompt)

    if params.greedy:
        return _match(draft, likeliest)
    if params.rule == "coupled":
        return _match(draft, lambda i: pick(target(i), params, draft.start + i, Stream.TARGET))
    return _reject(draft, target, params)


def _check(draft: Draft, num_rows: int, num_tokens: int) -> None:
    num_draft = len(draft.tokens)
    if num_tokens != draft.start or num_rows != num_draft + 1:
        raise ParameterError(
            f"draft of {num_draft} tokens at {draft.start}: got {num_tokens} tokens and {num_rows} rows; "
            f"allowed: {draft.start} and {num_draft + 1}; score the draft after the tokens it continues"
        )
    if draft.distributions is not None and len(draft.distributions) != num_draft:
        raise ParameterError(
            f"draft of {num_draft} tokens: got {len(draft.distributions)} distributions; allowed: one a token, or None"
        )


def _match(draft: Draft, draw: abc.Callable[[int], int]) -> Verdict:
    """Draw as if there were no draft, for as long as the draft foresaw it."""
    drawn: list[int] = []
    for i, drafted in enumerate((*draft.tokens, None)):
        drawn.append(draw(i))
        if drawn[i] != drafted:
            break
    return Verdict(len(drawn) - 1, tuple(drawn))


def _reject(draft: Draft, target: Target, params: SamplingParams) -> Verdict:
    seed, end = seed_of(params), len(draft.tokens)
    for i, drafted in enumerate(draft.tokens):
        p, q, position = target(i), _proposal(draft, i), draft.start + i
        if uniform(seed, Stream.ACCEPT, position) * _prob(q, drafted) >= _prob(p, drafted):
            replacement = pick(_residual(p, q), params, position, Stream.TARGET)
            return Verdict(i, (*draft.tokens[:i], replacement))
    return Verdict(end, (*draft.tokens, pick(target(end), params, draft.start + end, Stream.TARGET)))


def _proposal(draft: Draft, i: int) -> Distribution:
    """The q of one drafted token. Raises ParameterError for a token it cannot have come from: no rule survives that."""
    if draft.distributions is None:
        return one_hot(draft.tokens[i])
    if _prob(draft.distributions[i], draft.tokens[i]) == 0.0:
        raise ParameterError(
            f"draft token {draft.tokens[i]}: got probability 0 in its own distribution; "
            "allowed: tokens drawn from it; this is a fault of the drafter"
        )
    return draft.distributions[i]


def _prob(dist: Distribution, token: int) -> float:
    place = int(dist.ids.searchsorted(token))
    return float(dist.probs[place]) if place < len(dist.ids) and dist.ids[place] == token else 0.0


def _residual(p: Distribution, q: Distribution) -> Distribution:
    """norm(max(p - q, 0)); p itself where rounding leaves nothing (p equals q, which is then hardly ever rejected)."""
    places = np.minimum(q.ids.searchsorted(p.ids), len(q.ids) - 1)
    left = p.probs - np.where(q.ids[places] == p.ids, q.probs[places], 0.0)
    kept = left > 0
    mass = float(left[kept].sum())
    return Distribution(p.ids[kept], left[kept] / mass) if mass > _EMPTY_MASS else p
