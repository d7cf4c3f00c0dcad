"""A child process that answers messages: how it is started, waited for, and missed when it dies."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile

from edgespec.core.sequence import Cancelled, never
from edgespec.errors import BackendError
from edgespec.verifiers.child import FOLDER, environment, how_it_ended, last_line
from edgespec.verifiers.isolated_wire import HEAD, Kind, SharedMemory, receive_exactly

logger = logging.getLogger("edgespec")

COMMAND = (sys.executable, "-m", "edgespec.verifiers.isolated_child")
POLL_S = 0.05  # how often a wait looks at ``cancelled`` and at the signs of life
END_S = 2.0
CANCELLED_S = 10.0  # of silence are enough where nobody waits for the answer any more
SAID_BYTES = 4096  # how much of its last words is read


class ChildProcess:
    """One thread may use it. After any exception of ``ask`` it may be in the middle of an answer, and is killed.

    memory  what both processes map
    """

    def __init__(self, patience_s: float) -> None:
        """Raises BackendError where no process can be started."""
        self._patience_s = patience_s
        self._ended = False
        with contextlib.ExitStack() as undo:
            try:
                self._start(undo)
            except OSError as error:
                reason = error.strerror or error
                raise BackendError(f"cannot start the verifier's process: {reason}; free memory, try again") from error
            self._files = undo.pop_all()

    def _start(self, undo: contextlib.ExitStack) -> None:
        self.memory = SharedMemory()
        undo.callback(self.memory.close_file)
        self._said = undo.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (that is one)
        ours, theirs = socket.socketpair()
        self._connection = undo.enter_context(ours)
        with theirs:
            self._process = subprocess.Popen(
                [*COMMAND, str(theirs.fileno()), str(self.memory.file)],
                stdin=subprocess.PIPE,  # its end tells the child that this process is gone
                stdout=self._said,
                stderr=self._said,
                pass_fds=(theirs.fileno(), self.memory.file),
                env=environment(),
                cwd=FOLDER,
                start_new_session=True,  # a Ctrl-C is meant for the parent
            )
        if self._process.stdin is not None:
            undo.enter_context(self._process.stdin)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, kind: Kind, payload: bytes, cancelled: Cancelled = never) -> tuple[Kind, bytes]:
        """Send a message and wait for the answer; what the child logs is logged here.

        Raises BackendError when the child dies, or gives no sign of life for ``patience_s``; once cancelled, for
        CANCELLED_S at most.
        """
        self.memory.cancel(False)
        try:
            return self._ask(kind, payload, cancelled)
        except TimeoutError:
            self._process.kill()
            raise self._silent(self._patience_s) from None
        except (EOFError, OSError):
            raise self._died() from None
        except BaseException:
            self._process.kill()
            raise

    def _ask(self, kind: Kind, payload: bytes, cancelled: Cancelled) -> tuple[Kind, bytes]:
        self._connection.settimeout(self._patience_s)
        self._connection.sendall(HEAD.pack(kind, len(payload)) + payload)
        while True:
            answer, content = self._receive(cancelled)
            if answer != Kind.LOG:
                return answer, content
            logger.log(*json.loads(content))

    def end(self) -> None:
        """End the process, by force where it must be; a second call does nothing. What was mapped stays valid."""
        if self._ended:
            return
        self._ended = True
        self._files.close()  # it hears that, whatever it is doing
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._process.kill()
        self._process.wait()

    def _receive(self, cancelled: Cancelled) -> tuple[Kind, bytes]:
        head = self._first_bytes(cancelled)
        self._connection.settimeout(self._patience_s)
        head += receive_exactly(self._connection, HEAD.size - len(head))
        kind, num_bytes = HEAD.unpack(head)
        return Kind(kind), receive_exactly(self._connection, num_bytes)

    def _first_bytes(self, cancelled: Cancelled) -> bytes:
        """Waits are counted, not timed: a clock that jumps, or a stop of both processes, is nobody's silence."""
        beats, num_silent, patience_s = self.memory.beats, 0, self._patience_s
        self._connection.settimeout(POLL_S)
        while num_silent * POLL_S < patience_s:
            try:
                data = self._connection.recv(HEAD.size)
            except TimeoutError:
                num_silent += 1
            else:
                if data:
                    return data
                raise EOFError
            if cancelled():
                self.memory.cancel()
                patience_s = min(patience_s, CANCELLED_S)
            if self.memory.beats != beats:
                beats, num_silent = self.memory.beats, 0
        raise self._silent(patience_s)

    def _silent(self, seconds: float) -> BackendError:
        return BackendError(
            f"the verifier's process gave no sign of life for {seconds:g} s and was ended; "
            "check its device and its workers, and try again"
        )

    def _died(self) -> BackendError:
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return BackendError(f"the verifier's process died ({', '.join([how_it_ended(code), *self._last_words()])})")

    def _last_words(self) -> list[str]:
        """The last line it said, without the place in llama.cpp's source that said it."""
        num_bytes = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(num_bytes - SAID_BYTES, 0))
        return [re.sub(r"^\S+\.\w+:\d+: ", "", line) for line in last_line(self._said.read())]
