"""The way to the hub: huggingface_hub with the user's settings, and what goes wrong on the way, in words."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import importlib
import os
from functools import cache
from typing import Any

from edgespec.errors import DownloadError, MissingDependencyError

_RETRIED = (408, 429, 500, 502, 503, 504)


class BrokenError(Exception):
    """The connection broke, or the server was busy: worth another try."""


@cache
def library() -> Any:
    """huggingface_hub, without its telemetry. Raises MissingDependencyError."""
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


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


@contextlib.contextmanager
def explained(repository: str, revision: str, *, retry: bool = False) -> abc.Iterator[Any]:
    """The library, and what goes wrong between here and the hub as DownloadError; with ``retry`` what may pass is
    BrokenError."""
    hub = _prepared()
    errors, session = hub.errors, hub.utils.get_session()
    http = importlib.import_module(type(session).__module__.partition(".")[0])  # httpx, or what took its place
    try:
        yield hub
    except errors.OfflineModeIsEnabled:
        raise DownloadError(f"{repository}: HF_HUB_OFFLINE is set; unset it to download") from None
    except errors.HfHubHTTPError as error:
        if retry and error.response.status_code in _RETRIED:
            raise BrokenError(f"the hub answered {error.response.status_code}") from None
        raise _refused(errors, error, repository, revision) from None
    except http.TransportError as error:
        if retry:
            raise BrokenError(str(error) or type(error).__name__) from None
        raise _unreachable(error) from None
    except (http.HTTPError, http.InvalidURL) as error:
        raise _unreachable(error) from None


def odd_answer(error: Exception) -> DownloadError:
    """From something that is no hub: a hotel's login page, for one."""
    reason = f"{type(error).__name__}: {error}"
    return DownloadError(f"{endpoint()} does not answer as the hub does ({reason}); check HF_ENDPOINT")


def _prepared() -> Any:
    """The library, once it has made a session and headers of the proxies, certificates and credentials that are set."""
    try:
        hub = library()
        hub.HfApi()  # imports what reads more of them
        hub.utils.get_session()
        for value in hub.utils.build_hf_headers().values():
            value.encode("ascii")
    except (ImportError, OSError, ValueError) as error:
        raise DownloadError(
            f"cannot reach {endpoint()} with the settings of this environment: {error}; check the proxy (HTTPS_PROXY, "
            "ALL_PROXY), SSL_CERT_FILE, and what begins with HF_"
        ) from None
    return hub


def _unreachable(error: Exception) -> DownloadError:
    reason = str(error) or type(error).__name__
    return DownloadError(f"cannot reach {endpoint()}: {reason}; check the network, the proxy, and HF_ENDPOINT")


def _refused(errors: Any, error: Any, repository: str, revision: str) -> DownloadError:
    status, page = error.response.status_code, f"{endpoint()}/{repository}"
    login = "log in with: hf auth login"
    if isinstance(error, errors.GatedRepoError):
        return DownloadError(f"{repository} is gated: accept its licence at {page}, then {login}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return DownloadError(
            f"no repository {repository} at {endpoint()}, or a private one: check the name, or {login}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return DownloadError(f"{repository} has no revision {revision!r}; look for one at {page}")
    if isinstance(error, errors.EntryNotFoundError):
        return DownloadError(f"{repository} has no such file at {revision}; look for it at {page}/tree/{revision}")
    if status in (401, 403):
        return DownloadError(f"{repository}: access refused ({status}); accept its licence at {page}, then {login}")
    return DownloadError(f"{repository}: the hub answered {status}; try again later")
