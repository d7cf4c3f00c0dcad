"""llama.cpp's RPC: a worker lends its devices, a client adds them to its own and spreads a model over them.

The protocol is llama.cpp's: IPv4, neither encrypted nor authenticated, one client of a worker at a time. A client whose
worker goes away is aborted by the library, so clients belong into a process of their own (verifiers/isolated.py).
"""

from __future__ import annotations

import collections.abc as abc
import ctypes
import os
import re
import socket
import struct
from dataclasses import dataclass

from edgespec.core.check import check_int
from edgespec.errors import BackendError, MissingDependencyError, ParameterError
from edgespec.verifiers.canary import rebuild_command
from edgespec.verifiers.llama_devices import GPU_KINDS, LlamaDevice, handles, list_devices
from edgespec.verifiers.llama_library import library, native

MAX_WORKERS = 16  # GGML_RPC_MAX_SERVERS
MAX_PORT = 2**16 - 1
TIMEOUT_S = 10.0  # a worker that lost its client first finishes what that one had asked for
# The first message of a connection: command, length, what the client can do (nothing beyond TCP).
HELLO = struct.pack("<BQ24x", 14, 24)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """``host:port`` with a name or an IPv4 address. Raises ParameterError for anything else."""
    found = re.fullmatch(r"([A-Za-z0-9_.-]+):([0-9]{1,5})", text)
    if found is None or not 1 <= int(found[2]) <= MAX_PORT:
        reason = "llama.cpp's RPC speaks IPv4 only; " if text.startswith("[") or text.count(":") > 1 else ""
        raise ParameterError(
            f"worker: got {text!r}; {reason}allowed: host:port with a name or an IPv4 address, such as 127.0.0.1:50052"
        )
    return Endpoint(found[1], int(found[2]))


def parse_endpoints(texts: abc.Iterable[str]) -> tuple[Endpoint, ...]:
    """Workers in their order, at most 16, each once. Raises ParameterError."""
    endpoints = tuple(parse_endpoint(text) for text in texts)
    check_int("number of workers", len(endpoints), 0, MAX_WORKERS)
    for endpoint in endpoints:
        if endpoints.count(endpoint) > 1:
            raise ParameterError(f"worker: got {endpoint} twice; allowed: each once")
    return endpoints


def supports_rpc() -> bool:
    """Whether this build of llama.cpp can lend and use devices over the network."""
    return bool(library().llama_supports_rpc())


def check_supported() -> None:
    """Raise MissingDependencyError, with the command that mends it, where ``supports_rpc`` says no."""
    if not supports_rpc():
        raise MissingDependencyError(
            f"llama-cpp-python is built without RPC, which workers need; rebuild it: {rebuild_command('-DGGML_RPC=ON')}"
        )


# The client's side


def check_reachable(endpoints: abc.Iterable[Endpoint], timeout_s: float = TIMEOUT_S) -> None:
    """Raise BackendError unless something answers at each endpoint, ParameterError where two of them are one worker:
    it would wait for itself. Plain sockets: nothing of llama.cpp is touched."""
    found: dict[object, Endpoint] = {}
    for endpoint in endpoints:
        try:
            first = found.setdefault(_greet(endpoint, timeout_s), endpoint)
        except _SilentError:
            raise BackendError(
                f"the worker at {endpoint} accepts connections and then says nothing for {timeout_s:g} s; it serves "
                "one client at a time: end the other, or start one more worker on another port"
            ) from None
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have, such as a..b
            start = f"edgespec worker --host {endpoint.host} --port {endpoint.port}"
            reason = "no answer in time" if isinstance(error, TimeoutError) else getattr(error, "strerror", 0) or error
            raise BackendError(f"no worker at {endpoint}: {reason}; start it there: {start}") from error
        if first is not endpoint:
            raise ParameterError(f"worker: got {first} and {endpoint}, which are the same; allowed: each once")


class _SilentError(Exception):
    pass


def _greet(endpoint: Endpoint, timeout_s: float) -> object:
    """Connect and wait for any answer: of what it says llama.cpp itself is the judge. Gives the address it has."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect((endpoint.host, endpoint.port))
        address: object = connection.getpeername()
        connection.sendall(HELLO)
        try:
            connection.recv(1)
        except TimeoutError:
            raise _SilentError from None
        return address


def add_workers(endpoints: abc.Iterable[Endpoint]) -> None:
    """Make the workers' devices this process's; to be called before a model is loaded, once.

    Raises MissingDependencyError, BackendError. Where a worker is not there the library aborts this process, now or
    whenever it goes away.
    """
    check_supported()
    add = native("ggml_backend_rpc_add_server", [ctypes.c_char_p], ctypes.c_void_p)
    register = native("ggml_backend_register", [ctypes.c_void_p], None)
    for endpoint in endpoints:
        registry = add(str(endpoint).encode())
        if not registry:
            raise BackendError(f"the worker at {endpoint} lends no device; start it on a box that has one")
        register(registry)


# The worker's side


def lent_devices() -> tuple[LlamaDevice, ...]:
    """What a worker started here lends: every GPU, or the CPU where there is none."""
    devices = list_devices()
    gpus = tuple(device for device in devices if device.kind in GPU_KINDS)
    return gpus or tuple(device for device in devices if device.kind == "cpu")


def check_free(host: str, port: int) -> str:
    """The IPv4 address to listen on. Raises BackendError where nobody can, with the system's reason."""
    try:
        address = socket.gethostbyname(host)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            if os.name == "posix":  # as the library does: no waiting for the connections of a worker that just ended
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(1)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BackendError(
            f"cannot listen on {host}:{port}: {reason}; choose another port, or an address of this box"
        ) from error
    return address


def start_worker(host: str, port: int, num_threads: int) -> None:
    """Serve one client after the other until the process ends. Blocks; call it where nothing else is to be done.

    num_threads  of the CPU device, where that is what is lent

    llama.cpp itself tells of its clients on standard output, and of what fails on standard error.
    Raises MissingDependencyError, ParameterError, BackendError (the port is taken, a device does not start).
    """
    check_supported()
    check_int("port", port, 1, MAX_PORT)
    check_int("num_threads", num_threads, 1, 1024)
    address = check_free(host, port)
    lent = handles([device.name for device in lent_devices()])
    types = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    serve = native("ggml_backend_rpc_start_server", types, None)
    serve(f"{address}:{port}".encode(), None, num_threads, len(lent), (ctypes.c_void_p * len(lent))(*lent))
    raise BackendError(f"the worker at {host}:{port} stopped, for the reason llama.cpp gave above; start it again")
