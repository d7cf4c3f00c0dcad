"""RPC workers on loopback: the real ones of llama.cpp, and listeners that are none."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from edgespec.degraded import Degraded
from edgespec.errors import BackendError, MissingDependencyError, ParameterError
from edgespec.verifiers import llama_rpc
from edgespec.verifiers.base import ScoreRequest
from edgespec.verifiers.fallback import FallbackVerifier, Place
from edgespec.verifiers.isolated import IsolatedVerifier
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from edgespec.verifiers.llama_devices import LlamaDevice
from edgespec.verifiers.llama_rpc import (
    Endpoint,
    check_free,
    check_reachable,
    lent_devices,
    parse_endpoint,
    parse_endpoints,
    start_worker,
    supports_rpc,
)
from tests.verifiers.contract import row_at
from tests.verifiers.rpc_tools import Worker, free_port
from tests.verifiers.test_fallback import greedy


def test_this_build_has_rpc() -> None:
    """Were it not so, the tests below would fail for another reason: pip install with CMAKE_ARGS=-DGGML_RPC=ON."""
    assert supports_rpc()


# Endpoints


@pytest.mark.parametrize(
    ("text", "host", "port"), [("127.0.0.1:50052", "127.0.0.1", 50052), ("gpu-box_2.lan:1", "gpu-box_2.lan", 1)]
)
def test_an_endpoint_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert parse_endpoint(text) == Endpoint(host, port)
    assert str(parse_endpoint(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":50052", "host:0", "host:65536", "host:-1", "host:+1", "host: 1", "host:1 ", "host:٣",
     "http://host:1", "hôte:1", "host:1\n", "a b:1", "host:123456"],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ParameterError, match="allowed: host:port with a name or an IPv4 address"):
        parse_endpoint(text)


@pytest.mark.parametrize("text", ["[::1]:50052", "::1:50052", "fe80::1%eth0:50052"])
def test_ipv6_is_refused_with_the_reason(text: str) -> None:
    with pytest.raises(ParameterError, match=r"llama\.cpp's RPC speaks IPv4 only"):
        parse_endpoint(text)


def test_a_worker_is_named_once_and_there_are_at_most_16() -> None:
    with pytest.raises(ParameterError, match="got a:1 twice"):
        parse_endpoints(["a:1", "b:1", "a:1"])
    with pytest.raises(ParameterError, match="number of workers: got 17"):
        parse_endpoints([f"a:{port}" for port in range(1, 18)])


# Whether somebody is there


def test_a_port_nobody_listens_on_is_an_error_with_the_command() -> None:
    port = free_port()
    with pytest.raises(BackendError) as caught:
        check_reachable([Endpoint("127.0.0.1", port)])
    assert str(caught.value) == (
        f"no worker at 127.0.0.1:{port}: Connection refused; "
        f"start it there: edgespec worker --host 127.0.0.1 --port {port}"
    )


def test_a_host_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(BackendError, match=r"no worker at no-such-host\.invalid:1: .*start it there"):
        check_reachable([Endpoint("no-such-host.invalid", 1)])
    with pytest.raises(BackendError, match=r"no worker at a\.\.b:1: .*start it there"):
        check_reachable([Endpoint("a..b", 1)])


def test_one_that_says_nothing_is_called_busy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])
        with pytest.raises(BackendError, match=r"says nothing for 0\.2 s; it serves one client at a time"):
            check_reachable([endpoint], timeout_s=0.2)


def test_one_that_answers_or_hangs_up_is_left_to_the_library() -> None:
    with answering(b"x", b"") as port:
        for _ in range(2):
            check_reachable([Endpoint("127.0.0.1", port)])


def test_one_worker_by_two_names_is_refused() -> None:
    with (
        answering(b"x", b"x") as port,
        pytest.raises(ParameterError, match=rf"got 127\.0\.0\.1:{port} and localhost:{port}, which are the same"),
    ):
        check_reachable([Endpoint("127.0.0.1", port), Endpoint("localhost", port)])


@contextlib.contextmanager
def answering(*answers: bytes) -> abc.Iterator[int]:
    """The port of one that gives each connection an answer and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(64)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


# The worker


def test_a_port_in_use_is_an_error_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            BackendError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use; choose"
        ):
            start_worker("127.0.0.1", port, 1)
    assert check_free("127.0.0.1", port) == "127.0.0.1"


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid", "a" * 70])
def test_an_address_of_another_box_is_an_error(host: str) -> None:
    with pytest.raises(BackendError, match=r"cannot listen on .*an address of this box"):
        check_free(host, free_port())


@pytest.mark.parametrize(("port", "num_threads"), [(0, 1), (65536, 1), (50052, 0)])
def test_numbers_outside_their_range_are_refused(port: int, num_threads: int) -> None:
    with pytest.raises(ParameterError):
        start_worker("127.0.0.1", port, num_threads)


def test_a_build_without_rpc_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_rpc, "supports_rpc", lambda: False)
    with pytest.raises(MissingDependencyError, match=r'CMAKE_ARGS="-DGGML_RPC=ON .*pip install'):
        start_worker("127.0.0.1", free_port(), 1)


def test_the_cpu_is_lent_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, accel, gpu, igpu = (LlamaDevice(kind, "", kind, 0, 0) for kind in ("cpu", "accel", "gpu", "igpu"))
    monkeypatch.setattr(llama_rpc, "list_devices", lambda: (accel, cpu))
    assert lent_devices() == (cpu,)
    monkeypatch.setattr(llama_rpc, "list_devices", lambda: (gpu, accel, cpu, igpu))
    assert lent_devices() == (gpu, igpu)


# A verifier on a worker


@pytest.fixture
def worker() -> abc.Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.kill()


def test_a_verifier_on_a_worker_gives_the_same_tokens(worker: Worker, tiny_gguf: Path) -> None:
    options = LlamaOptions(tiny_gguf, num_threads=1)
    with contextlib.closing(LlamaVerifier(options)) as here:
        expected = row_at(here, [5, 9, 2, 7], 3)
        plain = greedy(here, 20)
    with contextlib.closing(IsolatedVerifier(options, [str(worker)])) as there:
        (remote,) = [device for device in there.devices if device.kind == "gpu"]
        assert (remote.name, remote.description) == ("RPC0", str(worker))
        assert remote.memory_bytes > 0
        np.testing.assert_allclose(row_at(there, [5, 9, 2, 7], 3), expected, atol=1e-3)
        assert greedy(there, 20) == plain


def test_only_the_devices_that_were_chosen_are_used(worker: Worker, tiny_gguf: Path) -> None:
    options = LlamaOptions(tiny_gguf, num_threads=1, devices=())
    with contextlib.closing(IsolatedVerifier(options, [str(worker)])) as verifier:
        worker.kill()
        assert len(greedy(verifier, 5)) == 8


def test_a_worker_that_dies_ends_a_request_and_the_next_finds_it_restarted(worker: Worker, tiny_gguf: Path) -> None:
    with contextlib.closing(IsolatedVerifier(LlamaOptions(tiny_gguf, num_threads=1), [str(worker)])) as verifier:
        plain = greedy(verifier, 12)
        tokens = plain[:8]
        worker.kill()
        with pytest.raises(BackendError, match=rf"died \(.*SIGABRT.*Remote RPC server crashed.*workers: {worker}$"):
            greedy(verifier, 1, tokens)
        with pytest.raises(BackendError, match=rf"no worker at {worker}: Connection refused"):
            greedy(verifier, 1, tokens)
        worker.start()
        assert greedy(verifier, 7, tokens) == plain


def test_a_worker_that_hangs_is_missed(worker: Worker, tiny_gguf: Path) -> None:
    options = LlamaOptions(tiny_gguf, num_threads=1)
    with contextlib.closing(IsolatedVerifier(options, [str(worker)])) as verifier:
        assert verifier._child is not None
        verifier._child._patience_s = 0.5
        worker.stop()
        with pytest.raises(BackendError, match=rf"no sign of life for 0\.5 s .*workers: {worker}$"):
            greedy(verifier, 1)


def test_where_a_lower_place_is_given_no_token_is_lost(worker: Worker, tiny_gguf: Path) -> None:
    options, degraded = LlamaOptions(tiny_gguf, num_threads=1), Degraded()
    places = [
        Place("hybrid", lambda: IsolatedVerifier(options, [str(worker)])),
        Place("one device", lambda: LlamaVerifier(options)),
    ]
    with contextlib.closing(LlamaVerifier(options)) as here:
        plain = greedy(here, 15)
    with contextlib.closing(FallbackVerifier(places, degraded)) as verifier:
        tokens = greedy(verifier, 5)
        worker.kill()
        assert greedy(verifier, 10, tokens) == plain
    (step,) = degraded.steps
    assert (step.wanted, step.got) == ("hybrid", "one device")
    assert "no worker at" in step.reason


def test_a_worker_serves_the_next_client_and_tells_others_to_wait(worker: Worker, tiny_gguf: Path) -> None:
    options = LlamaOptions(tiny_gguf, num_threads=1)
    first = IsolatedVerifier(options, [str(worker)])
    with pytest.raises(BackendError, match="one client at a time"):
        check_reachable([worker.endpoint], timeout_s=0.3)
    first.close()
    with contextlib.closing(IsolatedVerifier(options, [str(worker)])) as second:
        assert np.isfinite(row_at(second, [1, 2, 3])).all()


@pytest.mark.model
def test_the_starter_verifier_on_a_worker_gives_the_cpus_rows(worker: Worker, starter_gguf: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 49152, 60).tolist()
    options = LlamaOptions(starter_gguf, num_threads=1, num_ctx=128, use_extra_bufts=False)
    with contextlib.closing(LlamaVerifier(options)) as here:
        expected = row_at(here, tokens, 6)
    with contextlib.closing(IsolatedVerifier(options, [str(worker)])) as there:
        (rows,) = there.score([ScoreRequest(0, tokens, 6)])
        assert float(np.abs(rows - expected).max()) < 0.5
        assert (rows.argmax(axis=1) == expected.argmax(axis=1)).all()
