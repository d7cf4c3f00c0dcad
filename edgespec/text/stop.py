"""Stop strings in text that arrives in chunks."""

from __future__ import annotations

import collections.abc as abc


class StopScanner:
    """Lets text through up to the first stop string, and never a part of that stop string.

    The output ends at the first character that completes any stop string; where several are complete there, the longest
    is cut off. So the result depends on the text only, not on how it is cut into chunks.

    stops  texts of one character or more

    Belongs to one output and one thread.
    """

    def __init__(self, stops: abc.Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """(text to let through, whether a stop string was met); after one was met, always ("", True)."""
        if self._stopped:
            return "", True
        text = self._held + text
        start = self._find(text)
        self._stopped = start is not None
        if start is None:
            start = self._open(text)
        self._held = "" if self._stopped else text[start:]
        return text[:start], self._stopped

    def flush(self) -> str:
        """What was held back because it could have begun a stop string; the output is over."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int | None:
        """Start of the stop string that is complete first, of those the one that starts first."""
        starts = ((text.find(stop), len(stop)) for stop in self._stops)
        matches = [(start + length, start) for start, length in starts if start >= 0]
        return min(matches)[1] if matches else None

    def _open(self, text: str) -> int:
        """Start of the longest suffix that could grow into a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
