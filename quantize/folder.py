"""Folders and files that appear whole or not at all."""

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
def new_folder(out: Path, marker: str, *, force: bool, sources: abc.Collection[Path] = ()) -> abc.Iterator[Path]:
    """Yield an empty folder beside ``out``; when the block ends well, its content is ``out``, else nothing is left.

    ``marker`` is the file that describes the content. With ``force`` an old ``out`` is replaced, if it has such a file
    (no other folder is ever removed) and is not, and does not hold, one of the ``sources``. When another process made
    ``out`` in the meantime and its marker equals ours, theirs stays.

    Files are on disk before the one rename that makes them visible, so a crash at any moment leaves either no ``out``
    or a whole one; what a killed process left beside it is removed by the next one.

    Raises FileAccessError when ``out`` exists and may not be replaced, or when the disk refuses.
    """
    with _as_access_error(out):
        _prepare(out, sources)
        _settled(lambda: _check_replaceable(out, marker, force))
        folder = _temporary(out)
        folder.mkdir()
    try:
        with _as_access_error(out):
            yield folder
            _sync(folder)
            _settled(lambda: _publish(folder, out, marker, force))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def new_file(out: Path, *, force: bool, sources: abc.Collection[Path] = ()) -> abc.Iterator[Path]:
    """Yield an empty file beside ``out``; when the block ends well, its content is ``out``, else nothing is left.

    Whole or not at all, as ``new_folder``. With ``force`` an old file ``out`` is replaced in one step, unless it is one
    of the ``sources``; anything else than a file never is. Raises FileAccessError.
    """
    with _as_access_error(out):
        _prepare(out, sources)
        _check_file(out, force)
        made = _temporary(out)
        made.open("xb").close()
    try:
        with _as_access_error(out):
            yield made
            _sync_file(made)
            _check_file(out, force)
            made.replace(out)
            _sync_entry(out.parent)
    finally:
        _remove(made)


def _prepare(out: Path, sources: abc.Collection[Path]) -> None:
    for source in sources:
        if _is_or_holds(out, source):
            raise FileAccessError(f"{out} is or holds the source {source}, which is never written; choose another one")
        if source.is_dir() and source.resolve() in out.resolve().parents:
            raise FileAccessError(f"{out} is inside the source {source}, which is never written; choose another one")
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(out)


def _is_or_holds(out: Path, source: Path) -> bool:
    """By whatever name: a file may have several."""
    place = source.resolve()
    return out.resolve() in (place, *place.parents) or (out.exists() and source.exists() and out.samefile(source))


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


def _check_file(out: Path, force: bool) -> None:
    if os.path.lexists(out) and not force:
        raise FileAccessError(f"{out} exists; choose another file, or replace it with force")
    if out.exists() and not out.is_file():
        raise FileAccessError(f"{out} is not a regular file, so it is not replaced; choose another file")


def _prefix(out: Path, process: int | str) -> str:
    """Names the owner, so that another process can tell whether it still lives."""
    return f".{out.name}.{socket.gethostname()}-{process}-"


def _temporary(out: Path) -> Path:
    """A name that nothing has. What is made under it, unlike by tempfile, has the permissions anything new gets."""
    return out.parent / (_prefix(out, os.getpid()) + secrets.token_hex(8))


def _remove_leftovers(out: Path) -> None:
    """Process ids mean something on their own host only, so what other hosts left is left alone."""
    prefix = _prefix(out, "")[:-1]
    for path in out.parent.iterdir():
        if not path.name.startswith(prefix):
            continue
        process = path.name[len(prefix) :].partition("-")[0]
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


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
    aside.mkdir()
    try:
        out.rename(aside / "old")
        made.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            _sync_entry(path)
        else:
            _sync_file(path)
    _sync_entry(folder)


def _sync_file(path: Path) -> None:
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


def _sync_entry(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
