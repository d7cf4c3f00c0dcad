"""What became of a distillation, for people, for machines and to look at."""

from __future__ import annotations

import collections.abc as abc
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.agreement.drafting_result import DEPTH, TEMPERATURES, Drafting, markdown, one_line

if TYPE_CHECKING:
    from quantize.distill.history import History

TEXT, DATA, LOSS, ACCEPTANCE = FILES = "report.md", "report.json", "loss.png", "acceptance.png"

_NOTES = f"""\
A token is foreseen where the draft model, given the verifier's answer so far, proposes the token that the verifier goes
on with; above T=0 both draw with the same noise. *All accepted* is the share of places from which so many tokens in a
row were foreseen, *accepted* what a round with a draft of that length accepts in the mean. The predicted speedup is
over plain decoding on the device that made this report: drafting and verifying one after the other, all drafts of this
length, without lookup, {DEPTH} tokens in the caches."""


@dataclass(frozen=True, slots=True)
class Report:
    """
    settings   what the distillation was told, seeds included; values that JSON has
    history    of the training
    draftings  what each export is worth, by its name ("int8")
    """

    settings: abc.Mapping[str, Any]
    history: History
    draftings: abc.Mapping[str, Drafting]

    @property
    def chosen(self) -> str:
        """The export with the largest predicted speedup (see Drafting.worth); the first of equals."""
        return max(self.draftings, key=lambda name: self.draftings[name].worth)

    def write(self, out: Path) -> None:
        """TEXT, DATA, LOSS and ACCEPTANCE into the folder ``out``, each whole or not at all; old ones are replaced.

        Raises MissingDependencyError without matplotlib, FileAccessError.
        """
        from quantize.extras import require

        require("matplotlib")
        from edgespec.agreement.plots import plot_acceptance, plot_loss
        from quantize.folder import new_file

        with new_file(out / LOSS, force=True) as path:
            plot_loss(self.history.points, path, self.history.rounded_from)
        with new_file(out / ACCEPTANCE, force=True) as path:
            plot_acceptance(self.draftings, path)
        with new_file(out / TEXT, force=True) as path:
            path.write_text(self.text(), encoding="utf-8", errors="replace")  # file names may hold what is no text
        with new_file(out / DATA, force=True) as path:  # the last: where it is, all are
            path.write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; null for what is no finite number."""
        content: dict[str, Any] = _finite(
            {
                "settings": dict(self.settings),
                "history": self.history.as_dict(),
                "drafts": {name: drafting.as_dict() for name, drafting in self.draftings.items()},
                "chosen": self.chosen,
            }
        )
        return content

    def text(self) -> str:
        """Markdown."""
        verifier = self.draftings[self.chosen].verifier
        lines = [f"# A draft model for {verifier.name}", "", *self._overview(), "", self._measured_on(), ""]
        for name, drafting in self.draftings.items():
            lines += [f"## {name}", "", *drafting.category_lines(), "", *drafting.length_lines(), ""]
        lines += [*_NOTES.splitlines(), ""]
        lines += [f"![Acceptance]({ACCEPTANCE})", "", "## Training", "", *self._training(), "", f"![Loss]({LOSS})", ""]
        lines += ["## Settings", "", *markdown([["setting", "value"], *self._setting_cells()])]
        return "\n".join(lines) + "\n"

    def _overview(self) -> list[str]:
        titles = ["draft", "MB", "ms a token"]
        titles += [
            f"T={t:g}: {what}" for t in TEMPERATURES for what in ("agreement", "best length", "predicted speedup")
        ]
        return markdown([titles, *(self._overview_cells(name) for name in self.draftings)])

    def _overview_cells(self, name: str) -> list[str]:
        drafting = self.draftings[name]
        cells = [f"**{name}** (in the pair)" if name == self.chosen else name]
        cells += [f"{drafting.size_bytes / 1e6:.1f}", f"{drafting.ms_per_token:.2f}"]
        for temperature in TEMPERATURES:
            length = drafting.best_length(temperature)
            cells += [f"{drafting.agreement(temperature):.3f}", str(length)]
            cells += [f"{drafting.speedup(length, temperature):.2f}"]
        return cells

    def _measured_on(self) -> str:
        one = self.draftings[self.chosen]
        left_out = f" ({one.num_left_out} more were too long)" if one.num_left_out else ""
        return (
            f"Measured on the verifier's own answers, of at most {one.max_tokens} tokens, to {one.num_prompts} prompts"
            f"{left_out}; seeds from {one.seed}; the draft on {one.num_threads} threads."
        )

    def _training(self) -> list[str]:
        history, points = self.history, self.history.points
        if not points:
            return ["Nothing was trained."]
        last, rounded = points[-1], ""
        if history.rounded_from is not None:
            rounded = f" From step {history.rounded_from} on, with weights rounded to 4 bits."
        return [
            f"{last.step} of {history.num_steps} steps, {last.num_tokens / 1e6:.2f} million tokens, "
            f"{last.seconds_s / 3600:.2f} hours, on {history.num_texts} texts; {history.num_held_out} others were held "
            f"out: loss {last.held_out_loss:.3f}, {last.agreement:.1%} with the same most likely token.{rounded}",
        ]

    def _setting_cells(self) -> list[list[str]]:
        return [[name, _one_line(value)] for name, value in self.settings.items()]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _one_line(value: Any) -> str:
    return one_line(value if isinstance(value, str) else json.dumps(value, default=str))
