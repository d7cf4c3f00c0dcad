"""Files of the Hugging Face hub: found by a pattern, fetched whole, resumed after a break, checked.

Only the listing and the credentials are left to huggingface_hub. Its own downloads throw away what they have when they
fail, and keep caches of their own; here a file goes straight to where it is wanted. Nothing is written elsewhere.
"""

from __future__ import annotations

import collections.abc as abc
import contextlib
import fnmatch
import hashlib
import importlib
import os
import re
import shutil
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from edgespec.errors import DownloadError, FileAccessError, MissingDependencyError

TIMEOUT_S = 30.0  # without a byte
NUM_TRIES = 5  # without any progress between them
PAUSE_S = 0.5  # before the second try; doubled for each further one
_MAX_LISTED = 12
_MIB = 1 << 20
_RETRIED = (408, 429, 500, 502, 503, 504)
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


class _BrokenError(Exception):
    """The connection broke, or the server was busy: worth another try."""


def find(repository: str, pattern: str, revision: str = "main") -> tuple[HubFile, ...]:
    """The GGUF of one model that matches (fnmatch, case matters): one file, or all files of a split one in their order.

    Raises DownloadError: no such repository or revision, no access, no network, nothing or several models that match;
    MissingDependencyError without huggingface_hub.
    """
    ggufs = [file for file in _listed(repository, revision) if file.path.endswith(".gguf")]
    return _one_model([file for file in ggufs if fnmatch.fnmatchcase(file.path, pattern)], ggufs, pattern, repository)


def _listed(repository: str, revision: str) -> list[HubFile]:
    library = _library()
    try:
        with _explained(repository, revision):
            hub = library.HfApi(endpoint=_endpoint())
            info = hub.model_info(repository, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
        return [_declared(repository, info.sha, entry) for entry in info.siblings]
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # a hotel's login page, for one
        reason = f"{type(error).__name__}: {error}"
        raise DownloadError(f"{_endpoint()} does not answer as the hub does ({reason}); check HF_ENDPOINT") from None


def _declared(repository: str, commit: str, entry: Any) -> HubFile:
    sha256 = entry.lfs.sha256 if entry.lfs else ""
    return HubFile(repository, str(commit), str(entry.rfilename), int(entry.size or 0), str(sha256))


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
    library = _library()
    with _explained(file.repository, file.commit):
        size = library.get_hf_file_metadata(_url(file), timeout=TIMEOUT_S, endpoint=_endpoint()).size
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
    """Fetch a file into ``folder`` under its own name, and return its path; one that is there already is kept.

    What came before a break, a kill or Ctrl-C lies beside it as NAME.partial; the next call goes on from there. The
    name appears when all of it has come, with the size and SHA-256 that the hub declares. Only one caller at a time
    (see ``only_one``). ``progress`` gets the number of bytes that are here.

    Raises DownloadError, FileAccessError, MissingDependencyError.
    """
    target, partial = folder / file.name, _partial(file, folder)
    with _disk(target):
        folder.mkdir(parents=True, exist_ok=True)
        if _size(target) == file.size_bytes:
            return target
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
    failures = 0
    while (had := _size(partial)) < file.size_bytes:
        try:
            _stream(file, partial, progress)
            reason = "the connection ended early"
        except _BrokenError as error:
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
    library, start = _library(), _size(partial)
    headers = library.utils.build_hf_headers() | {"Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={start}-"} if start else {}
    with (
        _explained(file.repository, file.commit, retry=True),
        library.utils.get_session().stream("GET", _url(file), headers=headers, timeout=TIMEOUT_S) as response,
    ):
        library.utils.hf_raise_for_status(response)
        if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            start = 0  # a server may ignore the range
        _check_size(file, partial, start, response)
        _write(file, partial, start, response.iter_raw(), progress)


def _check_size(file: HubFile, partial: Path, start: int, response: Any) -> None:
    """The length that the server announces, against the one declared."""
    length = response.headers.get("Content-Length", "")
    if length.isdecimal() and start + int(length) != file.size_bytes:
        partial.unlink(missing_ok=True)
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
    _library()
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


@cache
def _library() -> Any:
    """huggingface_hub, without its telemetry."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when it is imported
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise MissingDependencyError(
            f"downloading needs huggingface_hub ({error}); get it with: pip install 'edgespec[hub]'"
        ) from None
    return huggingface_hub


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def _url(file: HubFile) -> str:
    address = _library().hf_hub_url(file.repository, file.path, revision=file.commit, endpoint=_endpoint())
    return str(address)


@contextlib.contextmanager
def _explained(repository: str, revision: str, *, retry: bool = False) -> abc.Iterator[None]:
    """What goes wrong between here and the hub, in words; with ``retry`` what may pass is _BrokenError."""
    library = _library()
    errors, session = library.errors, library.utils.get_session()
    http = importlib.import_module(type(session).__module__.partition(".")[0])  # httpx, or what took its place
    try:
        yield
    except errors.OfflineModeIsEnabled:
        raise DownloadError(f"{repository}: HF_HUB_OFFLINE is set; unset it to download") from None
    except errors.HfHubHTTPError as error:
        if retry and error.response.status_code in _RETRIED:
            raise _BrokenError(f"the hub answered {error.response.status_code}") from None
        raise _refused(errors, error, repository, revision) from None
    except http.TransportError as error:
        if retry:
            raise _BrokenError(str(error) or type(error).__name__) from None
        raise _unreachable(error) from None
    except (http.HTTPError, http.InvalidURL) as error:
        raise _unreachable(error) from None


def _unreachable(error: Exception) -> DownloadError:
    reason = str(error) or type(error).__name__
    return DownloadError(f"cannot reach {_endpoint()}: {reason}; check the network, the proxy, and HF_ENDPOINT")


def _refused(errors: Any, error: Any, repository: str, revision: str) -> DownloadError:
    status, page = error.response.status_code, f"{_endpoint()}/{repository}"
    login = "log in with: hf auth login"
    if isinstance(error, errors.GatedRepoError):
        return DownloadError(f"{repository} is gated: accept its licence at {page}, then {login}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return DownloadError(
            f"no repository {repository} at {_endpoint()}, or a private one: check the name, or {login}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return DownloadError(f"{repository} has no revision {revision!r}; look for one at {page}")
    if isinstance(error, errors.EntryNotFoundError):
        return DownloadError(f"{repository} has no such file at {revision}; look for it at {page}/tree/{revision}")
    if status in (401, 403):
        return DownloadError(f"{repository}: access refused ({status}); accept its licence at {page}, then {login}")
    return DownloadError(f"{repository}: the hub answered {status}; try again later")
