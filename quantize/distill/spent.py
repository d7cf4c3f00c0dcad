"""How the hours of a distillation are shared out, and what of them is spent."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from edgespec.errors import ModelFormatError
from quantize.distill.settings import DistillSettings
from quantize.folder import new_file

TEXT_SHARE = 0.35  # of the hours, for text; where its tokens are given as well, they may take MOST_TEXT
MOST_TEXT = 0.6
REST_SHARE, MAX_REST_S = 0.1, 300.0  # for all that is neither text nor training
MIN_TRAINING = 0.05  # of the hours, however long the text took


@dataclass(slots=True)
class Spent:
    """A small file beside the text, so that a later sitting goes on counting.

    text_s       seconds of writing text so far
    written_for  the tokens and hours the text is finished for; empty before
    training_h   hours the training was promised
    """

    path: Path
    text_s: float = 0.0
    written_for: tuple[float | None, ...] = ()
    training_h: float | None = None

    @classmethod
    def read(cls, path: Path) -> Spent:
        """Raises ModelFormatError."""
        if not path.is_file():
            return cls(path)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            text_s, training_h = float(content["text_s"]), content["training_h"]
            return cls(path, text_s, tuple(content["written_for"]), None if training_h is None else float(training_h))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ModelFormatError(f"{path} is damaged; delete it, and the hours are counted from now on") from error

    def save(self) -> None:
        content = {name: value for name, value in asdict(self).items() if name != "path"}
        with new_file(self.path, force=True) as made:
            made.write_text(json.dumps(content) + "\n", encoding="utf-8")

    def text_left_s(self, settings: DistillSettings) -> float:
        """For writing text."""
        if settings.hours is None:
            return float("inf")
        share = TEXT_SHARE if settings.tokens is None else MOST_TEXT
        return share * 3600 * settings.hours - self.text_s

    def promise(self, settings: DistillSettings) -> float | None:
        """The hours of training; never fewer than were promised before."""
        if settings.hours is None:
            return None
        rest_h = min(REST_SHARE * settings.hours, MAX_REST_S / 3600)
        left_h = settings.hours - rest_h - self.text_s / 3600
        self.training_h = max(left_h, MIN_TRAINING * settings.hours, self.training_h or 0.0)
        return self.training_h
