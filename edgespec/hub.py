"""Files of the Hugging Face hub: found by a pattern, fetched whole, resumed after a break, checked.

Only the listing and the credentials are left to huggingface_hub. Its own downloads throw away what they have when they
fail, and keep caches of their own; here a file goes straight to where it is wanted. Nothing is written elsewhere.
"""

from __future__ import annotations

import collections.abc as abc
import contextlib
import fnmatch
import hashlib
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from edgespec.errors import DownloadError, FileAccessError
from edgespec.hub_access import BrokenError, endpoint, explained, library, odd_answer

TIMEOUT_S = 30.0  # without a byte
NUM_TRIES = 5  # without any progress between them
PAUSE_S = 0.5  # after a try that brought something; doubled for each one in a row that did not
_MAX_LISTED = 12
_MIB = 1 << 20
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # how llama.cpp names the files of one model


@dataclass(frozen=True, slots=True)
class HubFile:
    """What the hub declares. ``sha256`` is "" where it declares none."""

    repository: str
    commit: str
    path: str
    size_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """Under which it is stored here."""
        return PurePosixPath(self.path).name


def find(repository: str, pattern: str, revision: str = "main") -> tuple[HubFile, ...]:
    """The GGUF of one model that matches (fnmatch, case matters): one file, or all files of a split one in their order.

    Raises DownloadError: no such repository or revision, no access, no network, nothing or several models that match;
    MissingDependencyError without huggingface_hub.
    """
    ggufs = [file for file in _listed(repository, revision) if file.path.endswith(".gguf")]
    return _one_model([file for file in ggufs if fnmatch.fnmatchcase(file.path, pattern)], ggufs, pattern, repository)


def _listed(repository: str, revision: str) -> list[HubFile]:
    try:
        with explained(repository, revision) as library:
            api = library.HfApi(endpoint=endpoint())
            info = api.model_info(repository, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
        if not re.fullmatch("[0-9a-f]{40,64}", info.sha):  # it becomes the name of a folder here
            raise ValueError(f"a commit called {info.sha!r}")
        return [_declared(repository, info.sha, entry) for entry in info.siblings]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise odd_answer(error) from None


def _declared(repository: str, commit: str, entry: Any) -> HubFile:
    sha256 = entry.lfs.sha256 if entry.lfs else ""
    return HubFile(repository, commit, str(entry.rfilename), int(entry.size or 0), str(sha256))


def _one_model(found: list[HubFile], ggufs: list[HubFile], pattern: str, repository: str) -> tuple[HubFile, ...]:
    if not found:
        raise DownloadError(f"{repository} has no GGUF that matches {pattern!r}; it has: {_names(ggufs) or 'none'}")
    models = {match[1] if (match := _SPLIT.fullmatch(file.path)) else file.path for file in found}
    if len(models) > 1:
        raise DownloadError(
            f"{pattern!r} matches {len(models)} models in {repository}: {_names(found)}; use a pattern for one of them"
        )
    for file in found:
        if not re.fullmatch(r"\w[\w. +-]*", file.name) or file.size_bytes < 1:
            raise DownloadError(f"{repository}: {file.path!r} of {file.size_bytes} bytes is not stored here")
    return _in_order(found, repository)


def _in_order(found: list[HubFile], repository: str) -> tuple[HubFile, ...]:
    by_path = {file.path: file for file in found}
    match = _SPLIT.fullmatch(found[0].path)
    wanted = [f"{match[1]}-{i + 1:05}-of-{match[3]}.gguf" for i in range(int(match[3]))] if match else list(by_path)
    if set(wanted) != set(by_path):
        odd = ", ".join(sorted(set(wanted) ^ set(by_path))[:_MAX_LISTED])
        raise DownloadError(f"{repository}: of a split GGUF not all files are there, or too many match: {odd}")
    return tuple(by_path[path] for path in wanted)


def _names(files: abc.Iterable[HubFile]) -> str:
    names = sorted(file.path for file in files)
    return ", ".join(names[:_MAX_LISTED]) + (f" and {len(names) - _MAX_LISTED} more" if names[_MAX_LISTED:] else "")


def check_access(file: HubFile) -> None:
    """Ask for the file without fetching it. Raises DownloadError, also where its size is not the one declared."""
    try:
        with explained(file.repository, file.commit) as library:
            size = library.get_hf_file_metadata(_url(file), timeout=TIMEOUT_S, endpoint=endpoint()).size
    except ValueError as error:  # redirected to an address that is none
        raise odd_answer(error) from None
    if size is not None and size != file.size_bytes:
        raise _wrong_size(file, size)


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise FileAccessError unless ``folder``, which need not exist yet, has room for that much."""
    with _disk(folder):
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise FileAccessError(
            f"{folder} needs {num_bytes / 1e9:.2f} GB and has {free / 1e9:.2f} GB free; free space, or set "
            "EDGESPEC_DATA_DIR to a folder on a larger disk"
        )


def num_missing(file: HubFile, folder: Path) -> int:
    """Bytes that ``download`` would still fetch."""
    with _disk(folder):
        held = _size(folder / file.name) or _size(_partial(file, folder))
    return max(file.size_bytes - held, 0)


def download(file: HubFile, folder: Path, progress: abc.Callable[[int], None] | None = None) -> Path:
    """Fetch a file into ``folder`` under its own name, and return its path; one that is there already is only checked.

    What came before a break, a kill or Ctrl-C lies beside it as NAME.partial; the next call goes on from there. The
    name appears when all of it has come, with the size and SHA-256 that the hub declares. Only one caller at a time
    (see ``only_one``). ``progress`` gets the number of bytes that are here.

    Raises DownloadError, FileAccessError, MissingDependencyError.
    """
    target, partial = folder / file.name, _partial(file, folder)
    with _disk(target):
        folder.mkdir(parents=True, exist_ok=True)
        if _size(target) == file.size_bytes:
            target.replace(partial)  # whole, as it seems: what an earlier call fetched is checked again
        if _size(partial) > file.size_bytes:
            partial.unlink()
        _fetch(file, partial, progress or (lambda num_bytes: None))
        _check_content(file, partial)
        partial.replace(target)
    return target


def _partial(file: HubFile, folder: Path) -> Path:
    return folder / f"{file.name}.partial"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _fetch(file: HubFile, partial: Path, progress: abc.Callable[[int], None]) -> None:
    """Until all is there; gives up when several tries in a row bring nothing."""
    progress(_size(partial))
    failures = 0
    while (had := _size(partial)) < file.size_bytes:
        try:
            _stream(file, partial, progress)
            reason = "the connection ended early"
        except BrokenError as error:
            reason = str(error)
        failures = 0 if _size(partial) > had else failures + 1
        if failures >= NUM_TRIES:
            raise DownloadError(
                f"{file.repository}: {file.name} broke off at {_size(partial)} of {file.size_bytes} bytes ({reason}); "
                "what came is kept: run the same command again to go on"
            )
        if _size(partial) < file.size_bytes:
            time.sleep(PAUSE_S * 2**failures)


def _stream(file: HubFile, partial: Path, progress: abc.Callable[[int], None]) -> None:
    """One request for what is missing, written as it comes."""
    start = _size(partial)
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    with (
        explained(file.repository, file.commit, retry=True) as library,
        library.utils.get_session().stream(
            "GET", _url(file), headers=library.utils.build_hf_headers() | headers, timeout=TIMEOUT_S
        ) as response,
    ):
        library.utils.hf_raise_for_status(response)
        if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            start = 0  # a server may ignore the range
        _check_size(file, start, response)
        _write(file, partial, start, response.iter_raw(), progress)


def _check_size(file: HubFile, start: int, response: Any) -> None:
    """The length that the server announces, against the one declared. What is here is kept: the answer may come from
    something between here and the hub."""
    length = response.headers.get("Content-Length", "")
    if length.isdecimal() and start + int(length) != file.size_bytes:
        raise _wrong_size(file, start + int(length))


def _write(
    file: HubFile, partial: Path, start: int, blocks: abc.Iterable[bytes], progress: abc.Callable[[int], None]
) -> None:
    num_bytes = told = start
    with _disk(partial), partial.open("ab") as stream:
        stream.truncate(start)
        progress(start)
        for block in blocks:
            num_bytes += len(block)
            if num_bytes > file.size_bytes:
                break
            stream.write(block)
            if num_bytes - told >= _MIB or num_bytes == file.size_bytes:
                told = num_bytes
                progress(num_bytes)
    if num_bytes > file.size_bytes:
        partial.unlink()
        raise _wrong_size(file, num_bytes)


def _check_content(file: HubFile, partial: Path) -> None:
    digest = hashlib.sha256()
    with partial.open("rb+") as stream:
        while block := stream.read(_MIB):
            digest.update(block)
        os.fsync(stream.fileno())
    if file.sha256 and digest.hexdigest() != file.sha256:
        partial.unlink(missing_ok=True)
        raise DownloadError(
            f"{file.repository}: {file.name} came with the SHA-256 {digest.hexdigest()[:12]}…, the hub declares "
            f"{file.sha256[:12]}…; it was thrown away: pull again"
        )


def _wrong_size(file: HubFile, size: int) -> DownloadError:
    return DownloadError(
        f"{file.repository}: {file.name} has {size} bytes or more on the server, the hub declares {file.size_bytes}; "
        "try again later, or ask the repository's owner"
    )


@contextlib.contextmanager
def only_one(lock: Path) -> abc.Iterator[None]:
    """Hold the lock file while the block runs; the system lets go of it when the process dies.

    Raises FileAccessError when another process holds it, or it cannot be made.
    """
    library()
    from filelock import FileLock, Timeout

    with _disk(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(lock)
        try:
            held.acquire(timeout=0)
        except Timeout:
            raise FileAccessError(f"another process is at it already ({lock}); wait until it is done") from None
    try:
        yield
    finally:
        held.release()


@contextlib.contextmanager
def _disk(path: Path) -> abc.Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise FileAccessError(f"{path} cannot be written: {reason}; free space, or set EDGESPEC_DATA_DIR") from None


def _url(file: HubFile) -> str:
    address = library().hf_hub_url(file.repository, file.path, revision=file.commit, endpoint=endpoint())
    return str(address)
