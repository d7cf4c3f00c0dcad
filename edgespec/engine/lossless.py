"""Checking an output against plain decoding, token by token.

Kernels round differently for different batch widths, so a near-tie may fall either way. A difference is *explained*
when all of this holds; anything else is a bug:

- judging the row of the width it was verified at gives the token that was emitted, judging the row of width 1 plain's;
- the two rows differ by no more than rounding can: half the standard deviation of the row's logits;
- plain's token was ahead of the other at width 1 by no more than twice the largest difference between the two rows, or,
  where a filter (top-k, top-p, min-p) let only one of them in, that much would have let the other in as well.
"""

from __future__ import annotations

import collections.abc as abc
from dataclasses import asdict, dataclass, replace

import numpy as np

from edgespec.core.acceptance import judge
from edgespec.core.sampling import distribution, penalise, scores
from edgespec.core.sequence import Cancelled, Draft, SamplingParams, Sequence, never
from edgespec.errors import BackendError, ParameterError
from edgespec.verifiers.base import Interrupted, Rows, ScoreRequest, Verifier

MAX_ROUNDING = 0.5  # of the standard deviation of a row's logits


@dataclass(frozen=True, slots=True)
class Divergence:
    """One place where plain decoding, given the same tokens before it, would have drawn another token.

    position    index in the output
    token, plain_token  what was emitted, what plain draws
    width       rows in the batch that verified it
    margin      how far plain's token was ahead at width 1, in logits; None where a filter (top-k, top-p, min-p) let the
                one in at one width and not at the other
    difference  largest absolute difference between the two rows, in logits
    explained   see the module
    """

    position: int
    token: int
    plain_token: int
    width: int
    margin: float | None
    difference: float
    explained: bool

    def as_dict(self) -> dict[str, int | float | bool | None]:
        return asdict(self)

    def __str__(self) -> str:
        margin = "at a filter's edge" if self.margin is None else f"top-2 margin {self.margin:.4f}"
        verdict = "a near-tie" if self.explained else "NOT explained"
        return (
            f"token {self.position}: {self.token} where plain draws {self.plain_token}; {margin}, rows of width "
            f"{self.width} and 1 differ by up to {self.difference:.4f}: {verdict}"
        )


def check_params(params: SamplingParams) -> None:
    """Raise ParameterError for rule rejection at a temperature above 0: its draws differ from plain's by design."""
    if params.rule == "rejection" and not params.greedy:
        raise ParameterError(
            "lossless check: got rule rejection at a temperature above 0; use rule coupled or temperature 0"
        )


def forget(sequence: Sequence, verifier: Verifier) -> None:
    """Empty the sequence's slot of all but one token: what follows is then evaluated in the same batches every time."""
    _score(sequence, verifier, sequence.tokens[:1], 1)


def check(
    sequence: Sequence, drafts: abc.Sequence[Draft], verifier: Verifier, cancelled: Cancelled = never
) -> list[Divergence]:
    """Every divergence of a finished sequence, in order; its first one is where a plain run would have left it.

    drafts   the draft of each round that made the output, in order; the first round began after ``forget``
    Costs a plain run over the output, and a second run of the rounds when something diverged. Uses the sequence's slot
    and runs on the thread that owns the verifier. Raises as ``check_params`` does, and Interrupted when cancelled.
    """
    check_params(sequence.params)
    forget(sequence, verifier)
    plain_rows: dict[int, tuple[int, Rows]] = {}
    for position in range(sequence.num_prompt, len(sequence.tokens)):
        if cancelled():
            raise Interrupted
        row = _score(sequence, verifier, sequence.tokens[:position], 1)
        token = _draw(row, sequence, position)
        if token != sequence.tokens[position]:
            plain_rows[position] = token, row[0].copy()
    return _explain(sequence, drafts, verifier, plain_rows) if plain_rows else []


def _explain(
    sequence: Sequence, drafts: abc.Sequence[Draft], verifier: Verifier, plain_rows: dict[int, tuple[int, Rows]]
) -> list[Divergence]:
    """Run the rounds again exactly as they ran, and compare their rows where plain's token differed."""
    found: list[Divergence] = []
    forget(sequence, verifier)
    for draft in drafts:
        rows = _score(sequence, verifier, [*sequence.tokens[: draft.start], *draft.tokens], len(draft.tokens) + 1)
        for position, row in enumerate(rows, draft.start):
            drafted = draft.tokens[: position - draft.start]
            if position in plain_rows and tuple(sequence.tokens[draft.start : position]) == drafted:
                found.append(_compare(sequence, position, row, *plain_rows.pop(position), len(rows)))
        if not plain_rows:
            return found
    raise BackendError(f"{len(plain_rows)} tokens of the output come from no round; please report this with the prompt")


def _compare(sequence: Sequence, position: int, row: Rows, plain_token: int, plain_row: Rows, width: int) -> Divergence:
    token = sequence.tokens[position]
    finite = np.isfinite(row) & np.isfinite(plain_row)
    difference = float(np.abs(row[finite] - plain_row[finite]).max())
    margin = _margin(plain_row, sequence, position, plain_token, token)
    near = margin <= 2 * difference if margin is not None else _let_in(plain_row, sequence, position, token, difference)
    small = difference <= MAX_ROUNDING * float(plain_row[finite].std())
    replayed = _draw(row[None], sequence, position) == token
    explained = replayed and small and near
    return Divergence(position - sequence.num_prompt, token, plain_token, width, margin, difference, explained)


def _let_in(row: Rows, sequence: Sequence, position: int, token: int, difference: float) -> bool:
    """Whether the filters let ``token`` in once every logit may be off by ``difference``.

    Its own logit then rises by twice as much against the others; a tail's mass changes by the factor exp(2 d / T).
    """
    params = sequence.params
    factor = float(np.exp(-2 * difference / params.temperature))
    loose = replace(params, top_p=1 - (1 - params.top_p) * factor, min_p=params.min_p * factor)
    raised = row.copy()
    raised[token] += 2 * difference
    return token in distribution(raised, loose, sequence.tokens[:position], sequence.num_prompt).ids


def _score(sequence: Sequence, verifier: Verifier, tokens: list[int], num_rows: int) -> Rows:
    (rows,) = verifier.score([ScoreRequest(sequence.slot, tokens, num_rows)])
    return rows


def _draw(row: Rows, sequence: Sequence, position: int) -> int:
    """The token plain decoding draws from ``row``, shape (1, vocabulary)."""
    verdict = judge(Draft(position), row, sequence.params, sequence.tokens[:position], sequence.num_prompt)
    return verdict.tokens[0]


def _margin(row: Rows, sequence: Sequence, position: int, winner: int, loser: int) -> float | None:
    """How far ``winner`` is ahead of ``loser``, in logits: of the logit, or of log probability + Gumbel noise."""
    params, tokens = sequence.params, sequence.tokens[:position]
    if params.greedy:
        logits = penalise(row, params, tokens, sequence.num_prompt)
        return float(logits[winner] - logits[loser])
    dist = distribution(row, params, tokens, sequence.num_prompt)
    if loser not in dist.ids:
        return None
    by_id = dict(zip(dist.ids.tolist(), scores(dist, params, position), strict=True))
    return float(params.temperature * (by_id[winner] - by_id[loser]))
