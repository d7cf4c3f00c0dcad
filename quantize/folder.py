"""A folder that appears whole or not at all."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import os
import secrets
import shutil
import socket
from pathlib import Path

import psutil

from edgespec.errors import FileAccessError

_NUM_TRIES = 20


@contextlib.contextmanager
def new_folder(out: Path, marker: str, *, force: bool) -> abc.Iterator[Path]:
    """Yield an empty folder beside ``out``; when the block ends well, its content is ``out``, else nothing is left.

    ``marker`` is the file that describes the content. With ``force`` an old ``out`` is replaced, if it has such a file
    (no other folder is ever removed). When another process made ``out`` in the meantime and its marker equals ours,
    theirs stays.

    Files are on disk before the one rename that makes them visible, so a crash at any moment leaves either no ``out``
    or a whole one; what a killed process left beside it is removed by the next one.

    Raises FileAccessError when ``out`` exists and may not be replaced, or when the disk refuses.
    """
    with _as_access_error(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out)
        _settled(lambda: _check_replaceable(out, marker, force))
        folder = _temporary(out)
    try:
        with _as_access_error(out):
            yield folder
            _sync(folder)
            _settled(lambda: _publish(folder, out, marker, force))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _as_access_error(out: Path) -> abc.Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileAccessError(
            f"{out} cannot be written: {error.strerror or error}; free space or choose another folder"
        ) from error


def _check_replaceable(out: Path, marker: str, force: bool) -> None:
    if not out.exists():
        return
    if not force:
        raise FileAccessError(f"{out} exists; choose another folder, or replace it with force")
    if not (out / marker).is_file():
        raise FileAccessError(f"{out} exists and has no {marker}, so it is not replaced; choose another folder")


def _prefix(out: Path, process: int | str) -> str:
    """Names the owner, so that another process can tell whether it still lives."""
    return f".{out.name}.{socket.gethostname()}-{process}-"


def _temporary(out: Path) -> Path:
    """Unlike tempfile's, it has the permissions any new folder gets: it becomes ``out``."""
    folder = out.parent / (_prefix(out, os.getpid()) + secrets.token_hex(8))
    folder.mkdir()
    return folder


def _remove_leftovers(out: Path) -> None:
    """Process ids mean something on their own host only, so folders of other hosts are left alone."""
    prefix = _prefix(out, "")[:-1]
    for path in out.parent.iterdir():
        if not path.name.startswith(prefix):
            continue
        process = path.name[len(prefix) :].partition("-")[0]
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            shutil.rmtree(path, ignore_errors=True)


def _settled(step: abc.Callable[[], None]) -> None:
    """Others may publish or move a folder between two looks at it, so a failure is final only when it stays."""
    for _ in range(_NUM_TRIES - 1):
        with contextlib.suppress(OSError, FileAccessError):
            return step()
    return step()


def _publish(made: Path, out: Path, marker: str, force: bool) -> None:
    if not force and _content(out / marker) == _content(made / marker):
        return
    _check_replaceable(out, marker, force)
    if out.exists():
        _replace(made, out)
    else:
        made.rename(out)
    _sync_entry(out.parent)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _replace(made: Path, out: Path) -> None:
    """A folder with content cannot be renamed over: move the old one aside, where a crash leaves it as leftovers."""
    aside = _temporary(out)
    try:
        out.rename(aside / "old")
        made.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb+") as stream:
            os.fsync(stream.fileno())
    _sync_entry(folder)


def _sync_entry(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
