"""How a training went: what a checkpoint keeps of it and a report draws."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Point:
    """One look at the held-out texts.

    step             steps taken so far
    num_tokens       positions trained on so far, those of earlier epochs counted again
    seconds_s        wall time of training so far, over all sittings
    learning_rate    of the last step; 0 before the first
    loss             KL(teacher || student) in nats over the head, in the mean of the batches since the last
                     point; None at the first, where nothing was trained yet
    held_out_loss    the same, on texts never trained on
    held_out_hidden  1 - cosine between the student's last hidden states and the teacher's, on those
    agreement        where both have the same most likely token of the head, over written positions of those, 0 to 1
    """

    step: int
    num_tokens: int
    seconds_s: float
    learning_rate: float
    loss: float | None
    held_out_loss: float
    held_out_hidden: float
    agreement: float


@dataclass(frozen=True, slots=True)
class History:
    """``num_steps`` are planned; ``num_texts`` were trained on and ``num_held_out`` others measured by. From the step
    ``rounded_from`` on, all was done with weights rounded as the draft will have them; None: it was not, or not yet."""

    points: tuple[Point, ...]
    num_steps: int
    num_texts: int
    num_held_out: int
    rounded_from: int | None = None

    @property
    def finished(self) -> bool:
        return bool(self.points) and self.points[-1].step >= self.num_steps

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "points": [asdict(point) for point in self.points]}

    @classmethod
    def of(cls, content: abc.Mapping[str, Any]) -> History:
        """What ``as_dict`` gave."""
        values = {field.name: content[field.name] for field in fields(cls) if field.name in content}
        return cls(**{**values, "points": tuple(Point(**point) for point in content["points"])})
