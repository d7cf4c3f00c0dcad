"""What a comparison comes to."""

from __future__ import annotations

import collections.abc as abc
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TEMPERATURE, TOP_K = 0.8, 40  # at which sampled acceptance is predicted

_TITLES = ("text", "positions", "agreement", "KL", "perplexity", "source's", "rejection", "coupled", "covered")


@dataclass(frozen=True, slots=True)
class Scores:
    """Averages over positions of a text, given its tokens so far (teacher-forced).

    agreement    where both models have the same most likely token, the source's out of its whole vocabulary. It is the
                 acceptance rate to expect of a draft at temperature 0
    kl           KL(source || subject) in nats, over the ids that the subject can say, both renormalised
    coverage     where the text goes on with a token that the subject can say: 1 but for a trimmed head
    subject_perplexity, source_perplexity  on those positions, of the subject over what it can say, of the source over
                 its whole vocabulary; nan where there are none
    rejection, coupled  acceptance rate to expect at TEMPERATURE and TOP_K under either rule (core/acceptance.py)
    """

    num_positions: int
    agreement: float
    kl: float
    coverage: float
    subject_perplexity: float
    source_perplexity: float
    rejection: float
    coupled: float

    def cells(self) -> tuple[str, ...]:
        return (
            str(self.num_positions),
            f"{self.agreement:.3f}",
            f"{self.kl:.4f}",
            f"{self.subject_perplexity:.2f}",
            f"{self.source_perplexity:.2f}",
            f"{self.rejection:.3f}",
            f"{self.coupled:.3f}",
            f"{self.coverage:.1%}",
        )


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well ``subject`` stands for ``source``.

    total, by_category  over all texts, and over those of each category
    num_head_vocab  ids that the subject can say; None where it can say all that the source can
    subject_bytes, source_bytes  on disk, all files of the model together
    subject_ms, source_ms  a token, median of single steps at a short context on ``num_threads``; None for a checkpoint
                    folder, which is computed by a stand-in
    """

    subject: Path
    source: Path
    total: Scores
    by_category: abc.Mapping[str, Scores]
    num_texts: int
    num_head_vocab: int | None
    subject_bytes: int
    source_bytes: int
    subject_ms: float | None
    source_ms: float | None
    num_threads: int

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON: paths are text, and numbers that are not finite None."""
        content = {name: getattr(self, name) for name in self.__slots__ if name not in ("total", "by_category")}
        content |= asdict(self.total)
        content |= {"temperature": TEMPERATURE, "top_k": TOP_K}
        content["by_category"] = {name: _plain(asdict(scores)) for name, scores in self.by_category.items()}
        return _plain(content)

    def lines(self) -> list[str]:
        """A table for people."""
        rows = [_TITLES, *((name, *scores.cells()) for name, scores in self.by_category.items())]
        if len(self.by_category) > 1:
            rows.append(("all", *self.total.cells()))
        widths = [max(len(row[i]) for row in rows) for i in range(len(_TITLES))]
        table = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        return [f"{self.subject.name} against {self.source.name}", *table, *self._notes()]

    def _notes(self) -> list[str]:
        ratio = self.subject_bytes / max(self.source_bytes, 1)
        notes = [f"size {self.subject_bytes / 1e6:.1f} MB, source {self.source_bytes / 1e6:.1f} MB ({ratio:.2f} x)"]
        if self.subject_ms is not None:
            source = "" if self.source_ms is None else f", source {self.source_ms:.2f} ms"
            notes.append(f"{self.subject_ms:.2f} ms a token on {self.num_threads} threads{source}")
        notes.append(
            f"rejection and coupled: tokens accepted at temperature {TEMPERATURE}, top-k {TOP_K}; at 0: agreement"
        )
        if self.num_head_vocab is not None:
            notes.append(
                f"the subject can say {self.num_head_vocab} ids: KL is over these, renormalised, perplexity where the "
                "text goes on with one"
            )
        return notes


def _plain(content: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain_value(value) for name, value in content.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
