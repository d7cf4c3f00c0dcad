"""Messages and shared memory between an isolated verifier and its child, both ends in one process."""

from __future__ import annotations

import os
import random
import socket

import numpy as np
import pytest

from edgespec.core.prefix import num_common
from edgespec.verifiers.base import ScoreRequest
from edgespec.verifiers.isolated_wire import HEAD, Kind, SharedMemory, pack_requests, receive, send, unpack_requests


def test_requests_arrive_whole_whatever_was_held_before() -> None:
    rng = random.Random(0)
    ours: list[list[int]] = [[], [], []]
    theirs: list[list[int]] = [[], [], []]
    for _ in range(300):
        requests = []
        for slot in rng.sample(range(3), rng.randint(1, 3)):
            kept = rng.randint(0, len(ours[slot]))
            tokens = ours[slot][:kept] + [rng.randrange(4) for _ in range(rng.randint(0 if kept else 1, 5))]
            requests.append(ScoreRequest(slot, tokens, rng.randint(1, len(tokens))))
        num_kept = [num_common(ours[request.slot], list(request.tokens)) for request in requests]
        message = pack_requests(requests, num_kept)
        for request in requests:
            ours[request.slot] = list(request.tokens)
        got = unpack_requests(message, theirs)
        assert [(r.slot, list(r.tokens), r.num_rows) for r in got] == [
            (r.slot, list(r.tokens), r.num_rows) for r in requests
        ]
    assert theirs == ours


def test_a_message_arrives_in_pieces() -> None:
    one, other = socket.socketpair()
    with one, other:
        content = bytes(range(256)) * 20
        head = HEAD.pack(Kind.SCORE, len(content))
        for part in (head[:2], head[2:] + content[:10], content[10:]):
            one.sendall(part)
        assert receive(other) == (Kind.SCORE, content)
        send(one, Kind.DONE)
        assert receive(other) == (Kind.DONE, b"")
        one.sendall(head[:3])
        one.close()
        with pytest.raises(EOFError):
            receive(other)


def test_both_sides_see_the_same_memory() -> None:
    ours = SharedMemory()
    theirs = SharedMemory(os.dup(ours.file))
    theirs.reserve(3, 5)
    rows = ours.rows(3, 5)
    theirs.rows(3, 5)[:] = np.arange(15).reshape(3, 5)
    beats, cancelled = ours.beats, theirs.cancelled
    theirs.beat()
    ours.cancel()
    assert (ours.beats, theirs.cancelled) != (beats, cancelled)
    assert theirs.cancelled
    ours.cancel(False)
    assert not theirs.cancelled
    for memory in (ours, theirs):
        memory.close_file()
    assert rows.tolist() == np.arange(15.0).reshape(3, 5).tolist()  # mapped memory outlives its descriptor


def test_signs_of_life_never_run_out() -> None:
    memory = SharedMemory()
    for _ in range(600):
        before = memory.beats
        memory.beat()
        assert memory.beats != before
    memory.close_file()


def test_without_anonymous_files_an_unlinked_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    memory = SharedMemory()
    assert os.fstat(memory.file).st_nlink == 0
    memory.reserve(2, 2)
    memory.rows(2, 2)[:] = 1
    memory.close_file()
