"""One position of two models in numbers, and many positions in averages. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from edgespec.agreement.result import TEMPERATURE, TOP_K, Scores
from edgespec.core.head import Head, Ids
from edgespec.core.ranking import Row, most_likely
from edgespec.core.sampling import Floats, Stream, distribution, pick
from edgespec.core.sequence import Distribution, SamplingParams

NUM_DRAWS = 4  # with different seeds, of what the rule ``coupled`` would accept

_PARAMS = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, top_p=1.0, min_p=0.0)
_DRAWS = tuple(replace(_PARAMS, rule="coupled", seed=seed) for seed in range(NUM_DRAWS))


class Shared:
    """The ids that both models can say, and where their logits are.

    num_source        width of the source's rows
    num_logits, head  width of the subject's rows, and what its columns stand for (None: the id that is the index)
    """

    def __init__(self, num_source: int, num_logits: int, head: Head | None) -> None:
        self._columns: slice | Ids = slice(min(num_source, num_logits))
        self._ids: slice | Ids = self._columns
        known = np.arange(min(num_source, num_logits))
        if head is not None:
            self._columns = np.flatnonzero(head.d2t < num_source)
            self._columns = self._columns[head.d2t[self._columns].argsort()]
            self._ids = known = head.d2t[self._columns]
        self.head = Head(known)

    def of_source(self, row: Row) -> Row:
        """Its logits of these ids, ascending."""
        return row[self._ids]

    def of_subject(self, row: Row) -> Row:
        """Its logits of these ids, ascending."""
        return row[self._columns]

    def place(self, token: int) -> int | None:
        """Where among these ids a token is; None where the subject cannot say it."""
        place = int(self.head.t2d.take(token, mode="clip"))
        return None if place < 0 else place


@dataclass(slots=True)
class Tally:
    """Sums over positions."""

    num_positions: int = 0
    num_agreed: int = 0
    num_covered: int = 0
    kl: float = 0.0
    subject_loss: float = 0.0
    source_loss: float = 0.0
    rejection: float = 0.0
    coupled: float = 0.0

    def add(self, other: Tally) -> None:
        for name in Tally.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def scores(self) -> Scores:
        """The averages; of at least one position."""
        num = self.num_positions
        return Scores(
            num_positions=num,
            agreement=self.num_agreed / num,
            kl=self.kl / num,
            coverage=self.num_covered / num,
            subject_perplexity=_perplexity(self.subject_loss, self.num_covered),
            source_perplexity=_perplexity(self.source_loss, self.num_covered),
            rejection=self.rejection / num,
            coupled=self.coupled / num,
        )


def _perplexity(loss: float, num: int) -> float:
    try:
        return math.exp(loss / num)
    except ZeroDivisionError:
        return math.nan
    except OverflowError:
        return math.inf


def position_tally(source_row: Row, subject_row: Row, token: int, position: int, shared: Shared) -> Tally:
    """What one position adds.

    source_row   (n,) float32, not changed, as ``subject_row`` (m,)
    token        what the text goes on with
    position     of this position among all, for the noise of the draws
    Raises BackendError for a row with NaN, +inf or nothing finite (whose, the caller knows by ``most_likely``).
    """
    theirs, ours = shared.of_source(source_row), shared.of_subject(subject_row)
    source_best, _ = most_likely(source_row)
    subject_best, _ = most_likely(ours)
    p, q = _log_softmax(theirs), _log_softmax(ours)
    tally = Tally(1, int(shared.head.ids[subject_best] == source_best), kl=_kl(p, q))
    if (place := shared.place(token)) is not None:
        tally.num_covered = 1
        tally.subject_loss = -float(q[place])
        tally.source_loss = -float(p[place]) + _log_share(source_row, theirs)
    target, proposal = distribution(source_row, _PARAMS, (), 0), distribution(ours, _PARAMS, (), 0, shared.head)
    tally.rejection = overlap(target, proposal)
    tally.coupled = sum(_match(target, proposal, params, position) for params in _DRAWS) / NUM_DRAWS
    return tally


def overlap(p: Distribution, q: Distribution) -> float:
    """How often the rule ``rejection`` accepts a token drawn from q: the sum of min(p, q)."""
    _, ours, theirs = np.intersect1d(p.ids, q.ids, assume_unique=True, return_indices=True)
    return float(np.minimum(p.probs[ours], q.probs[theirs]).sum())


def _match(p: Distribution, q: Distribution, params: SamplingParams, position: int) -> bool:
    return pick(p, params, position, Stream.TARGET) == pick(q, params, position, Stream.DRAFT)


def _log_softmax(logits: Row) -> Floats:
    values = logits.astype(np.float64)
    top = values.max()
    if top == -np.inf:  # the source rules out all that the subject can say
        return values
    values -= top
    values -= math.log(np.exp(values).sum())
    return values


def _log_share(row: Row, part: Row) -> float:
    """log(mass of the whole row / mass of a part of it)."""
    if len(part) == len(row):
        return 0.0
    top = float(row.max())
    whole, inner = (float(np.exp(values.astype(np.float64) - top).sum()) for values in (row, part))
    return math.log(whole / inner) if inner > 0 else math.inf


def _kl(p: Floats, q: Floats) -> float:
    """KL(p || q) in nats of two log distributions; inf where q rules out what p does not."""
    probs = np.exp(p)
    possible = probs > 0
    return max(0.0, float((probs[possible] * (p[possible] - q[possible])).sum()))
