"""Signals that end a process wait until what is half done is done."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import signal
import threading
from types import FrameType

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextlib.contextmanager
def signals_between_steps() -> abc.Iterator[abc.Callable[[], bool]]:
    """Yield a function that says whether a signal came that would end the process. It ends it when the block ends, by
    whatever handler was there before; a second one does at once. Outside the main thread nothing is held back."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: bool(came)
    finally:
        restore()
        if came:
            signal.raise_signal(came[0])
