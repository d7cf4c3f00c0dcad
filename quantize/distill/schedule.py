"""How fast a training learns at each step: warm-up, a constant rate, a linear decay at the end.

Until the decay nothing depends on how long the training will be, so a longer one goes on from there. ("WSD", Hu et al.
2404.06395.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

DECAY_SHARE = 0.3  # of the steps, or of the hours


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps count from 0.

    warm_up       steps until the full rate
    decay_from    the step at which the decay began, None before
    num_steps     the step at which it ends, decided when it begins
    decay_factor  of the full rate, when it began
    """

    warm_up: int
    decay_from: int | None = None
    num_steps: int | None = None
    decay_factor: float = 1.0

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by at that step: above 0, at most 1."""
        if self.decay_from is None or self.num_steps is None:
            return min(1.0, (step + 1) / max(1, self.warm_up))
        left = max(1, self.num_steps - step)
        return self.decay_factor * min(1.0, left / max(1, self.num_steps - self.decay_from))

    def is_over(self, step: int) -> bool:
        return self.num_steps is not None and step >= self.num_steps

    def decaying(self, step: int, num_steps: int) -> Schedule:
        """From this step on to ``num_steps``, from the rate it has now."""
        return replace(self, decay_from=step, num_steps=num_steps, decay_factor=self.factor(step))
