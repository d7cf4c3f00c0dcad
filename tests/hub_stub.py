"""A hub on this machine: the parts of the Hugging Face hub's HTTP interface that a download needs, and its failures.

GET  /api/models/OWNER/NAME/revision/REVISION   the files with their sizes and SHA-256
HEAD, GET /OWNER/NAME/resolve/REVISION/PATH     answered with a redirect to another origin, as for large files
GET  /cdn/OWNER/NAME/PATH                       the content; understands Range
"""

from __future__ import annotations

import collections.abc as abc
import contextlib
import hashlib
import json
import os
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants

from edgespec import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@dataclass
class Repository:
    """``sent`` differs from ``files`` where the content is not what is declared."""

    files: dict[str, bytes]
    gated: int = 0  # the status that refuses the files: 401 or 403
    sizes: dict[str, int] = field(default_factory=dict)  # declared in the listing instead of the true ones
    sent: dict[str, bytes] = field(default_factory=dict)
    with_sha256: bool = True

    def listing(self) -> list[dict[str, Any]]:
        return [self._entry(path, content) for path, content in self.files.items()]

    def _entry(self, path: str, content: bytes) -> dict[str, Any]:
        size = self.sizes.get(path, len(content))
        entry: dict[str, Any] = {"rfilename": path, "size": size, "blobId": "f" * 40}
        if self.with_sha256:
            entry["lfs"] = {"size": size, "sha256": hashlib.sha256(content).hexdigest(), "pointerSize": 134}
        return entry


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class HubStub:
    """``failures`` are what the next requests for content get, in their order: a status, or ("break", bytes)."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    failures: list[int | tuple[str, int]] = field(default_factory=list)
    ignores_range: bool = False
    listing_text: str = ""  # sent instead of any listing
    commit: str = COMMIT  # that listings are of
    location: str = ""  # where requests for content are redirected to, instead of to the content

    def add(self, name: str, files: dict[str, bytes]) -> Repository:
        self.repositories[name] = Repository(files)
        return self.repositories[name]

    def ranges(self) -> list[str | None]:
        return [request.range for request in self.requests if request.path.startswith("/cdn/")]


@contextlib.contextmanager
def running() -> abc.Iterator[HubStub]:
    """A hub that answers as long as the block runs."""
    stub = HubStub()
    server = _Server(("127.0.0.1", 0), _handler(stub))
    stub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def in_use(monkeypatch: pytest.MonkeyPatch, home: Path) -> abc.Iterator[HubStub]:
    """A hub that this process downloads from, without proxies, credentials or pauses of the user's own."""
    for name in (*PROXIES, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(hub, "PAUSE_S", 0.0)
    close_session()  # it remembers the proxies it was made with
    with running() as stub:
        monkeypatch.setenv("HF_ENDPOINT", stub.address)
        yield stub
    close_session()


def environment(stub: HubStub, home: str) -> dict[str, str]:
    """For a process of its own that is to use the stub, whatever is set here."""
    dropped = {*PROXIES, *(name.lower() for name in PROXIES)}
    kept = {name: value for name, value in os.environ.items() if name not in dropped and not name.startswith("HF_")}
    return kept | {"HF_ENDPOINT": stub.address, "HOME": home, "XDG_CACHE_HOME": f"{home}/cache"}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news here."""


def _handler(stub: HubStub) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        hub = stub

    return Handler


class _Handler(BaseHTTPRequestHandler):
    hub: HubStub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(
            Request(self.command, path, self.headers.get("Range"), self.headers.get("Authorization"))
        )
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and parts[4:5] == ["revision"]:
            self._list("/".join(parts[2:4]), "/".join(parts[5:]))
        elif parts[2:3] == ["resolve"]:
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        elif parts[0] == "cdn":
            self._content("/".join(parts[1:3]), "/".join(parts[3:]))
        else:
            self._send(404, {})

    def _list(self, name: str, revision: str) -> None:
        repository = self.hub.repositories.get(name)
        if self.hub.listing_text:
            self._send(200, {"Content-Type": "text/html"}, self.hub.listing_text.encode())
        elif repository is None:  # the hub does not tell strangers whether it is private
            self._send(401, {"X-Error-Message": "Invalid username or password."})
        elif revision not in ("main", COMMIT):
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            content = {"id": name, "modelId": name, "sha": self.hub.commit, "siblings": repository.listing()}
            self._send(200, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repository = self.hub.repositories[name]
        if repository.gated:
            self._send(repository.gated, {"X-Error-Code": "GatedRepo"})
        elif path not in repository.files or revision not in ("main", COMMIT):
            self._send(404, {"X-Error-Code": "EntryNotFound"})
        else:
            content = repository.sent.get(path, repository.files[path])
            etag = hashlib.sha256(repository.files[path]).hexdigest()
            headers = {"X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{etag}"'}
            port = self.hub.address.rpartition(":")[2]
            location = self.hub.location or f"http://localhost:{port}/cdn/{name}/{path}"
            self._send(302, headers | {"Location": location})

    def _content(self, name: str, path: str) -> None:
        repository = self.hub.repositories[name]
        content = repository.sent.get(path, repository.files[path])
        failure = self.hub.failures.pop(0) if self.hub.failures else None
        if isinstance(failure, int):
            self._send(failure, {})
            return
        start, status, headers = 0, 200, {}
        if (wanted := self.headers.get("Range")) and not self.hub.ignores_range:
            start, status = int(wanted.removeprefix("bytes=").rstrip("-")), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(status, headers, content[start:], failure[1] if failure else None)

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"", num_bytes: int | None = None) -> None:
        """``num_bytes``: break the connection after so many of the body's."""
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:num_bytes])
        if num_bytes is not None:
            self.wfile.flush()
            self.close_connection = True
