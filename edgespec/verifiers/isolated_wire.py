"""What an isolated verifier and its child say to each other: messages over a socket, rows through shared memory.

Both ends are this package in the same version, so numbers go in the machine's own order. Nothing is unpickled.
"""

from __future__ import annotations

import array
import collections.abc as abc
import enum
import json
import mmap
import os
import socket
import struct
import tempfile
from typing import Any

import numpy as np

from edgespec.verifiers.base import Rows, ScoreRequest

# Of the LlamaVerifier, and of whoever stands for it.
PROPERTIES = ("num_vocab", "num_ctx", "num_slots", "num_ctx_train", "description")
HEAD = struct.Struct("=BI")  # kind, bytes that follow


class Kind(enum.IntEnum):
    """Asked by the parent: OPEN {options, workers}, SCORE (see pack_requests), THREADS [arguments of set_threads].
    Answered by the child: DONE (what OPEN asks: the verifier's properties, max_rows, devices; what SCORE asks lies in
    the shared memory), INTERRUPTED, FAILED {error, message}; before any of them, LOG [level, message].
    """

    OPEN = 1
    SCORE = 2
    THREADS = 3
    DONE = 4
    INTERRUPTED = 5
    FAILED = 6
    LOG = 7


def send(connection: socket.socket, kind: Kind, payload: bytes = b"") -> None:
    connection.sendall(HEAD.pack(kind, len(payload)) + payload)


def send_json(connection: socket.socket, kind: Kind, content: Any) -> None:
    send(connection, kind, json.dumps(content).encode())


def receive(connection: socket.socket) -> tuple[Kind, bytes]:
    """The next message. Raises EOFError when the other side is gone."""
    kind, num_bytes = HEAD.unpack(receive_exactly(connection, HEAD.size))
    return Kind(kind), receive_exactly(connection, num_bytes)


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = connection.recv(min(num_bytes - len(data), 2**20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def pack_requests(requests: abc.Sequence[ScoreRequest], num_kept: abc.Sequence[int]) -> bytes:
    """Requests as int32: how many; for each its slot, number of rows, tokens kept of the slot's former list, tokens
    that are new; then the new tokens of all."""
    numbers = array.array("i", [len(requests)])
    for request, kept in zip(requests, num_kept, strict=True):
        numbers.extend((request.slot, request.num_rows, kept, len(request.tokens) - kept))
    for request, kept in zip(requests, num_kept, strict=True):
        numbers.extend(request.tokens[kept:])
    return numbers.tobytes()


def unpack_requests(payload: bytes, held: list[list[int]]) -> list[ScoreRequest]:
    """The requests of a message; ``held``, the former token list of each slot, is brought up to date."""
    numbers = array.array("i", payload).tolist()
    start, requests = 1 + 4 * numbers[0], []
    for i in range(1, start, 4):
        slot, num_rows, kept, num_new = numbers[i : i + 4]
        held[slot][kept:] = numbers[start : start + num_new]
        start += num_new
        requests.append(ScoreRequest(slot, held[slot], num_rows))
    return requests


class SharedMemory:
    """Memory that both processes map: a page of signs, then the rows.

    An anonymous file whose descriptor is handed down: it has no name anybody could leave behind, and it is gone with
    the last process that holds it, however that ends.
    """

    PAGE = mmap.ALLOCATIONGRANULARITY
    BEAT, CANCEL = 0, 64  # bytes in cache lines of their own: each has one writer

    def __init__(self, file: int | None = None) -> None:
        """``file`` is the descriptor that was handed down; None makes a new one."""
        self.file = _anonymous_file(self.PAGE) if file is None else file
        self._signs = mmap.mmap(self.file, self.PAGE)

    @property
    def beats(self) -> int:
        """Changes with every ``beat``."""
        return self._signs[self.BEAT]

    def beat(self) -> None:
        """The child's sign of life."""
        self._signs[self.BEAT] = (self._signs[self.BEAT] + 1) & 0xFF

    @property
    def cancelled(self) -> bool:
        return bool(self._signs[self.CANCEL])

    def cancel(self, value: bool = True) -> None:
        """The parent's wish that the score under way be given up."""
        self._signs[self.CANCEL] = value

    def reserve(self, num_rows: int, num_vocab: int) -> None:
        """Make the file as large as the rows need, in the child. Memory is taken as rows are written."""
        os.ftruncate(self.file, self.PAGE + 4 * num_rows * num_vocab)

    def rows(self, num_rows: int, num_vocab: int) -> Rows:
        """A view of the rows, valid as long as it is referred to."""
        memory = mmap.mmap(self.file, 4 * num_rows * num_vocab, offset=self.PAGE)
        return np.frombuffer(memory, np.float32).reshape(num_rows, num_vocab)

    def close_file(self) -> None:
        """What is mapped stays."""
        os.close(self.file)


def _anonymous_file(num_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("edgespec-rows", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as named_nowhere:
            file = os.dup(named_nowhere.fileno())
    os.ftruncate(file, num_bytes)
    return file
