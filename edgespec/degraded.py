"""Steps down from how a pair was meant to run: each logged once, and kept for whoever asks."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

logger = logging.getLogger("edgespec")


@dataclass(frozen=True, slots=True)
class Step:
    """``wanted`` and ``got`` are kinds of placement ("hybrid", "one device", "lookup", "plain") or modes."""

    wanted: str
    got: str
    reason: str

    def as_dict(self) -> dict[str, str]:
        return {"from": self.wanted, "to": self.got, "reason": self.reason}


class Degraded:
    """The steps down so far, in order. Any thread."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._lock = threading.Lock()

    def add(self, wanted: str, got: str, reason: str) -> None:
        """Remember a step and log it, unless it is known."""
        step = Step(wanted, got, reason)
        with self._lock:
            if step in self._steps:
                return
            self._steps.append(step)
        logger.warning("%s instead of %s: %s", got, wanted, reason)

    @property
    def steps(self) -> tuple[Step, ...]:
        with self._lock:
            return tuple(self._steps)

    def as_list(self) -> list[dict[str, str]]:
        """For JSON: [{"from", "to", "reason"}]."""
        return [step.as_dict() for step in self.steps]
