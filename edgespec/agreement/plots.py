"""Curves of a distillation as PNG. Only this module imports matplotlib, which draws them without a display."""

from __future__ import annotations

import collections.abc as abc
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from edgespec.agreement.drafting_result import TEMPERATURES, Drafting
from edgespec.agreement.matches import LENGTHS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from quantize.distill.history import Point

INCHES, DPI = (9.0, 3.6), 110


def plot_loss(points: abc.Sequence[Point], path: Path, rounded_from: int | None = None) -> None:
    """Loss and agreement over what was trained on, to a PNG; a line where rounding begins, if a point is that late."""
    figure = Figure(INCHES, DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    millions = [point.num_tokens / 1e6 for point in points]
    trained = [(point.num_tokens / 1e6, point.loss) for point in points if point.loss is not None]
    left.plot([tokens for tokens, _ in trained], [loss for _, loss in trained], label="training texts")
    left.plot(millions, [point.held_out_loss for point in points], label="held-out texts")
    left.set_ylabel("KL(teacher || student), nats")
    right.plot(millions, [point.agreement for point in points], label="held-out texts")
    right.set_ylabel("same most likely token")
    begin = _place(points, rounded_from)
    for axes in (left, right):
        axes.set_xlabel("tokens trained on, millions")
        if begin is not None:
            axes.axvline(begin, color="gray", linestyle="--", label="weights rounded from here on")
    _finish(figure, [left, right], path)


def _place(points: abc.Sequence[Point], step: int | None) -> float | None:
    """Where on the axis of tokens a step lies, between the points around it."""
    if step is None or not points or points[-1].step < step:
        return None
    steps, tokens = [point.step for point in points], [point.num_tokens / 1e6 for point in points]
    return float(np.interp(step, steps, tokens))


def plot_acceptance(draftings: abc.Mapping[str, Drafting], path: Path) -> None:
    """Acceptance by depth and by category, one line or bar for each draft and temperature, to a PNG."""
    figure = Figure(INCHES, DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = [(name, one, t) for name, one in draftings.items() for t in TEMPERATURES]
    for i, (name, drafting, temperature) in enumerate(shown):
        label, matches = f"{name}, T={temperature:g}", drafting.matches[temperature]
        whole = drafting.whole(temperature)
        left.plot(list(LENGTHS), [whole.reaching(depth) for depth in LENGTHS], marker=".", label=label)
        places = [place + 0.8 * i / len(shown) for place in range(len(matches))]
        right.bar(places, [one.agreement for one in matches.values()], 0.8 / len(shown), label=label)
    left.set_ylabel("all so far accepted")
    right.set_ylabel("tokens foreseen")
    categories = next(iter(draftings.values())).categories
    right.set_xticks([place + 0.4 - 0.4 / len(shown) for place in range(len(categories))], categories, rotation=40)
    left.set_xlabel("drafted tokens")
    _finish(figure, [left, right], path)


def _finish(figure: Figure, axes: list[Axes], path: Path) -> None:
    for one in axes:
        one.set_axisbelow(True)
        one.grid(alpha=0.3)
        one.legend(fontsize="small")
        one.set_ylim(bottom=0.0)
    figure.savefig(path, format="png")
