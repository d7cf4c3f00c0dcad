"""``edgespec worker``, as a process: it listens, it warns, it ends when it is told to."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.verifiers.llama_rpc import Endpoint
from tests.verifiers.rpc_tools import free_port, wait_for_worker

ROOT = Path(__file__).parents[2]


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "edgespec", "worker", *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_lends_the_cpu_until_it_is_told_to_end(number: signal.Signals, code: int) -> None:
    port = free_port()
    with started("--port", str(port), "--threads", "1") as process:
        wait_for_worker(Endpoint("127.0.0.1", port))
        process.send_signal(number)
        output, told = process.communicate(timeout=20)
    assert process.returncode == code
    assert output == ""
    assert told.startswith("lending CPU (")
    assert f"at 127.0.0.1:{port}; Ctrl-C ends it" in told.splitlines()[0]
    assert "warning" not in told


def test_it_warns_where_others_can_reach_it() -> None:
    port = free_port()
    with started("--host", "0.0.0.0", "--port", str(port)) as process:
        wait_for_worker(Endpoint("127.0.0.1", port))
        process.terminate()
        _, told = process.communicate(timeout=20)
    assert told.startswith("warning: 0.0.0.0 can be reached from outside, and a worker asks nobody for a password\n")


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with started("--port", str(port)) as process:
            output, told = process.communicate(timeout=20)
    assert (process.returncode, output) == (10, "")
    assert told == (
        f"Error: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "choose another port, or an address of this box\n"
    )


@pytest.mark.parametrize("arguments", [("--port", "0"), ("--port", "x"), ("--threads", "0"), ("extra",)])
def test_wrong_options_are_refused(arguments: tuple[str, ...]) -> None:
    with started(*arguments) as process:
        _, told = process.communicate(timeout=20)
    assert process.returncode == 2
    assert told.count("\n") == 1
