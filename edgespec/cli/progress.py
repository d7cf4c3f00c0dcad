"""Progress on standard error: a bar that rewrites itself on a terminal, elsewhere a line per stage."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import sys
import time

import click

Progress = abc.Callable[[str, float], None]

_WIDTH = 24
_MIN_FRACTION = 0.03  # below it, an estimate of the time left would only jump about


@contextlib.contextmanager
def bar(label: str) -> abc.Iterator[Progress]:
    """Yield a function that takes (stage, finished fraction 0..1); any thread may call it, one at a time."""
    shown = _Bar(label)
    try:
        yield shown.update
    finally:
        shown.close()


class _Bar:
    def __init__(self, label: str) -> None:
        self._label, self._stage, self._start = label, "", time.monotonic()
        self._first: float | None = None  # fraction, above 0 where earlier work is gone on with
        self._open = False  # whether the cursor stands at the end of a bar
        self._terminal = sys.stderr is not None and sys.stderr.isatty()

    def update(self, stage: str, fraction: float) -> None:
        self._first = fraction if self._first is None else self._first
        if self._terminal:
            click.echo(f"\r\x1b[K{self._line(stage, fraction)}", nl=False, err=True)
            self._open = True
        elif sys.stderr is not None and stage != self._stage:
            click.echo(f"{self._label}: {stage}", err=True)
        self._stage = stage

    def _line(self, stage: str, fraction: float) -> str:
        done = min(max(fraction, 0.0), 1.0)
        filled = round(done * _WIDTH)
        elapsed_s = time.monotonic() - self._start
        own = done - (self._first or 0.0)
        left = f" {elapsed_s * (1 - done) / own:.0f} s left" if own > _MIN_FRACTION and done < 1 else ""
        return f"{self._label}: {'█' * filled}{'░' * (_WIDTH - filled)} {done:4.0%} {stage}{left}"

    def close(self) -> None:
        if self._open:
            click.echo(err=True)
