"""The process an isolated verifier runs in: ``python -m edgespec.verifiers.isolated_child SOCKET MEMORY``.

Both arguments are descriptors handed down by verifiers/isolated.py. What is said on standard output and error is for
the parent to read, should this process die.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError
from edgespec.verifiers.base import Interrupted
from edgespec.verifiers.child import leave_no_core
from edgespec.verifiers.isolated_wire import PROPERTIES, Kind, SharedMemory, receive, send, send_json, unpack_requests
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from edgespec.verifiers.llama_devices import list_devices
from edgespec.verifiers.llama_library import explain_aborts
from edgespec.verifiers.llama_rpc import add_workers, parse_endpoints


class Child:
    """Answers every message with one. What is raised and is no EdgespecError ends the process, traceback and all."""

    def __init__(self, connection: socket.socket, memory: SharedMemory) -> None:
        self._connection = connection
        self._memory = memory

    def serve(self) -> None:
        """Until the parent hangs up, which is an EOFError or an OSError. The first message must be OPEN."""
        answers = {Kind.OPEN: self._open, Kind.SCORE: self._score, Kind.THREADS: self._set_threads}
        while True:
            kind, payload = receive(self._connection)
            try:
                content = answers[kind](payload)
            except Interrupted:
                send(self._connection, Kind.INTERRUPTED)
            except EdgespecError as error:
                send_json(self._connection, Kind.FAILED, {"error": type(error).__name__, "message": str(error)})
            except OSError as error:  # of this box, and not that the parent hung up
                send_json(self._connection, Kind.FAILED, {"error": "BackendError", "message": str(error)})
            else:
                send_json(self._connection, Kind.DONE, content)

    def _open(self, payload: bytes) -> dict[str, Any]:
        asked = json.loads(payload)
        if asked["workers"]:
            add_workers(parse_endpoints(asked["workers"]))
        self._memory.beat()
        options = _options(asked["options"])
        self._verifier = verifier = LlamaVerifier(options, self._memory.beat)
        self._held: list[list[int]] = [[] for _ in range(verifier.num_slots)]
        self._memory.reserve(options.max_rows, verifier.num_vocab)
        self._rows = self._memory.rows(options.max_rows, verifier.num_vocab)
        return {
            **{name: getattr(verifier, name) for name in PROPERTIES},
            "max_rows": options.max_rows,
            "devices": [asdict(device) for device in list_devices()],
        }

    def _score(self, payload: bytes) -> None:
        """Puts the rows one after the other into the shared memory."""
        start = 0
        for rows in self._verifier.score(unpack_requests(payload, self._held), self._cancelled):
            self._rows[start : start + len(rows)] = rows
            start += len(rows)

    def _set_threads(self, payload: bytes) -> None:
        self._verifier.set_threads(*json.loads(payload))

    def _cancelled(self) -> bool:
        self._memory.beat()
        return self._memory.cancelled


class _Forward(logging.Handler):
    """The library's warnings are the parent's to log."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        send_json(self._connection, Kind.LOG, [record.levelno, record.getMessage()])


def _options(fields: dict[str, Any]) -> LlamaOptions:
    """From JSON, which knows neither tuples nor paths."""
    fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return LlamaOptions(**fields | {"path": Path(fields["path"])})


def _end_with_parent() -> None:
    """Standard input is a pipe that the parent never writes to: its end is the parent's, however that came."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(0)  # the main thread may be deep in llama.cpp

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    """Never returns."""
    for number in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when this ends
    leave_no_core()
    explain_aborts()
    _end_with_parent()
    connection = socket.socket(fileno=int(sys.argv[1]))
    logger = logging.getLogger("edgespec")
    logger.addHandler(_Forward(connection))
    logger.propagate = False
    try:
        Child(connection, SharedMemory(int(sys.argv[2]))).serve()
    except (EOFError, OSError):
        os._exit(0)  # the parent has hung up


if __name__ == "__main__":
    main()
