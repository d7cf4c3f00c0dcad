"""What a draft model is worth to its verifier."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.agreement.matches import LENGTHS, Matches
from edgespec.core.costs import Costs, Curves

TEMPERATURES = (0.0, 0.8)
DEPTH = 200  # tokens in the cache when a drafted token's time is taken, and a verification's


@dataclass(frozen=True, slots=True)
class Drafting:
    """Of one draft model, reading the verifier's own answers.

    matches     by temperature, then by category in the order of the prompts. At temperature 0 both sides take the
                likeliest token; above it both draw with the same noise, with the runtime's own defaults (rule
                ``coupled``), and so does a verifier without a draft: these are the tokens that a round would accept
    num_prompts, max_tokens, seed  the answers: of how many prompts, of how many tokens at most, prompt i with seed + i
    num_left_out  prompts too long for the context
    curves      this device: verifying by width, and one drafted token
    num_threads  for the draft model
    size_bytes  of the draft's folder
    """

    draft: Path
    verifier: Path
    matches: abc.Mapping[float, abc.Mapping[str, Matches]]
    num_prompts: int
    num_left_out: int
    max_tokens: int
    seed: int
    curves: Curves
    num_threads: int
    size_bytes: int

    @property
    def categories(self) -> list[str]:
        return list(self.matches[TEMPERATURES[0]])

    @property
    def ms_per_token(self) -> float:
        """A drafted token at temperature 0, DEPTH tokens in the cache."""
        return 1000 * self.curves.step_s[0]

    def whole(self, temperature: float) -> Matches:
        """Of all categories together."""
        return Matches.of_all(self.matches[temperature].values())

    def agreement(self, temperature: float = 0.0) -> float:
        """The share of the answers' tokens that were foreseen."""
        return self.whole(temperature).agreement

    def accepted(self, length: int, temperature: float = 0.0) -> float:
        """Of a draft of ``length`` tokens, in the mean of all rounds."""
        rounds = self.whole(temperature).rounds(length)
        return rounds.num_accepted / max(1, rounds.num_rounds)

    def speedup(self, length: int, temperature: float = 0.0) -> float:
        """Predicted for this device, over plain decoding; see Rounds.speedup."""
        return self.whole(temperature).rounds(length).speedup(Costs(self.curves), DEPTH)

    def best_length(self, temperature: float = 0.0) -> int:
        """The draft length of the largest predicted speedup."""
        return max(LENGTHS, key=lambda length: self.speedup(length, temperature))

    @property
    def worth(self) -> float:
        """The predicted speedups, each at its best length, in the mean of the temperatures: what to choose a draft by.
        Lengths are not mixed, and nothing is drafted by lookup."""
        return sum(self.speedup(self.best_length(t), t) for t in TEMPERATURES) / len(TEMPERATURES)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "draft": self.draft.name,
            "verifier": self.verifier.name,
            "size_bytes": self.size_bytes,
            "ms_per_token": self.ms_per_token,
            "num_threads": self.num_threads,
            "num_prompts": self.num_prompts,
            "num_left_out": self.num_left_out,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "verify_ms": {width: 1000 * Costs(self.curves).verify_s(width, DEPTH) for width in self.curves.widths},
            "temperatures": {f"{temperature:g}": self._at(temperature) for temperature in TEMPERATURES},
        }

    def _at(self, temperature: float) -> dict[str, Any]:
        whole, by_category = self.whole(temperature), self.matches[temperature]
        return {
            "agreement": whole.agreement,
            "num_positions": whole.num_positions,
            "by_category": {name: _of_category(matches) for name, matches in by_category.items()},
            "by_depth": {depth: whole.reaching(depth) for depth in LENGTHS},
            "accepted": {length: self.accepted(length, temperature) for length in LENGTHS},
            "predicted_speedup": {length: self.speedup(length, temperature) for length in LENGTHS},
        }

    def category_lines(self) -> list[str]:
        """A markdown table: agreement by category."""
        titles = ["category", "tokens", *(f"T={temperature:g}" for temperature in TEMPERATURES)]
        rows = [
            [one_line(name), *_category_cells([self.matches[temperature][name] for temperature in TEMPERATURES])]
            for name in self.categories
        ]
        rows.append(["all", *_category_cells([self.whole(temperature) for temperature in TEMPERATURES])])
        return markdown([titles, *rows])

    def length_lines(self) -> list[str]:
        """A markdown table by draft length, which is depth, too; the first row is plain decoding."""
        titles = ["draft length", "verifying it, ms"]
        for temperature in TEMPERATURES:
            titles += [f"T={temperature:g}: {what}" for what in ("all accepted", "accepted", "predicted speedup")]
        plain = ["0", f"{self._verify_ms(0):.1f}", *["", "", "1.00"] * len(TEMPERATURES)]
        return markdown([titles, plain, *(self._length_cells(length) for length in LENGTHS)])

    def _verify_ms(self, length: int) -> float:
        return 1000 * Costs(self.curves).verify_s(length + 1, DEPTH)

    def _length_cells(self, length: int) -> list[str]:
        cells = [str(length), f"{self._verify_ms(length):.1f}"]
        for temperature in TEMPERATURES:
            reaching = self.whole(temperature).reaching(length)
            cells += [f"{reaching:.3f}", f"{self.accepted(length, temperature):.2f}"]
            cells += [f"{self.speedup(length, temperature):.2f}"]
        return cells


def _of_category(matches: Matches) -> dict[str, Any]:
    return {"agreement": matches.agreement, "num_positions": matches.num_positions}


def _category_cells(by_temperature: list[Matches]) -> list[str]:
    return [str(by_temperature[0].num_positions), *(f"{matches.agreement:.3f}" for matches in by_temperature)]


def one_line(text: str) -> str:
    """As a cell has it."""
    return " ".join(text.split()).replace("|", "\\|")


def markdown(rows: abc.Sequence[abc.Sequence[str]]) -> list[str]:
    """A table; the first row is its titles."""
    first, *others = [f"| {' | '.join(row)} |" for row in rows]
    return [first, "|" + "---|" * len(rows[0]), *others]
