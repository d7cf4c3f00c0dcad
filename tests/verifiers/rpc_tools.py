"""A real RPC worker on loopback, as a process of its own."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from edgespec.errors import BackendError
from edgespec.verifiers.llama_rpc import Endpoint, check_reachable

ROOT = Path(__file__).parents[2]
CODE = (
    "import sys; from edgespec.verifiers.llama_rpc import start_worker; start_worker('127.0.0.1', int(sys.argv[1]), 1)"
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Worker:
    """Lends the CPU, on one thread. ``kill`` and ``start`` may follow each other."""

    def __init__(self) -> None:
        self.endpoint = Endpoint("127.0.0.1", free_port())
        self.start()

    def __str__(self) -> str:
        return str(self.endpoint)

    def start(self) -> None:
        command = [sys.executable, "-c", CODE, str(self.endpoint.port)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_worker(self.endpoint)

    def stop(self) -> None:
        """It stays, and does nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def wait_for_worker(endpoint: Endpoint) -> None:
    for _ in range(600):
        try:
            return check_reachable([endpoint])
        except BackendError:
            time.sleep(0.05)
    raise AssertionError(f"no worker at {endpoint}")
