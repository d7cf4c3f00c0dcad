"""One process at a time in a folder."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import os
from pathlib import Path

from edgespec.errors import FileAccessError


@contextlib.contextmanager
def alone_in(folder: Path) -> abc.Iterator[None]:
    """Raises FileAccessError while another one is within such a block. The lock is the folder's own, no file stays
    behind, and a killed process leaves none; where the system or its file system has no such locks, nothing is held."""
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        with contextlib.suppress(OSError):
            _take(fcntl.flock, handle, fcntl.LOCK_EX | fcntl.LOCK_NB, folder)
        yield
    finally:
        os.close(handle)


def _take(flock: abc.Callable[[int, int], None], handle: int, how: int, folder: Path) -> None:
    try:
        flock(handle, how)
    except BlockingIOError as error:
        raise FileAccessError(
            f"{folder} is being worked in by another distillation; wait for its end, or choose another folder"
        ) from error
