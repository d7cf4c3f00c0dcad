"""The process that quantizes, seen from outside: it is told what to do, tells what it does, and dies with this one."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from edgespec import errors
from edgespec.errors import BackendError, FileAccessError, ModelFormatError
from quantize.draft import Progress

CHILD = (sys.executable, "-m", "quantize.verifier_child")
# Its environment is this process's, without what makes Python itself talk, wait or fail.
_DROPPED = ("PYTHONINSPECT", "PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONVERBOSE")
# GPUs would only be set up for nothing, and ggml would call a debugger before it aborts.
_SET = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "HIP_VISIBLE_DEVICES": "-1",
    "GGML_VK_VISIBLE_DEVICES": "",
    "GGML_NO_BACKTRACE": "1",
}
_PLAIN = ("f32", "f16", "bf16")
_OUT_OF_MEMORY = ("bad_alloc", "unable to allocate", "failed to allocate", "cannot allocate", "out of memory")
_EARLY, _LATE = 0.02, 0.97  # fractions of progress between which tensors are converted


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One line of llama.cpp's plan; bytes are padded as in the file."""

    name: str
    shape: tuple[int, ...]
    source: str
    target: str
    source_bytes: int
    target_bytes: int

    @property
    def requantized(self) -> bool:
        return self.source not in _PLAIN and self.source != self.target


@dataclass(frozen=True, slots=True)
class Plan:
    tensors: tuple[PlannedTensor, ...]
    needs_imatrix: bool
    num_fallback: int

    @classmethod
    def of(cls, content: dict[str, Any]) -> Plan:
        tensors = tuple(PlannedTensor(name, tuple(shape), *rest) for name, shape, *rest in content["tensors"])
        return cls(tensors, content["needs_imatrix"], content["num_fallback"])


@dataclass(frozen=True, slots=True)
class Job:
    """``ftype`` is a llama_ftype, ``imatrix`` an importance matrix."""

    source: Path
    ftype: int
    imatrix: Path | None
    num_threads: int

    def request(self, out: Path) -> bytes:
        """Links are not followed: the parts of a split model go by their names."""
        imatrix = None if self.imatrix is None else str(self.imatrix.absolute())
        content = {"source": str(self.source.absolute()), "out": str(out.absolute()), "ftype": self.ftype}
        return json.dumps(content | {"imatrix": imatrix, "num_threads": self.num_threads}).encode("ascii") + b"\n"


@contextlib.contextmanager
def started(job: Job, out: Path) -> abc.Iterator[Child]:
    """A child that will write ``out``, and does not outlive the block, nor this process. Raises BackendError."""
    with tempfile.TemporaryFile() as stderr, _process(stderr) as process:
        try:
            yield Child(process, stderr, job, out)
        finally:
            process.kill()
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]


def _process(stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            CHILD,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=_environment(),
            cwd=Path(__file__).parents[1],
            start_new_session=True,  # a Ctrl-C is for this process, which then ends the child
        )
    except OSError as error:
        raise BackendError(f"{CHILD[0]} does not start: {error.strerror or error}; check this Python") from error


class Child:
    """Plans first; converts when it is told to. Methods raise what llama.cpp, or its end, comes to."""

    def __init__(self, process: subprocess.Popen[bytes], stderr: IO[bytes], job: Job, out: Path) -> None:
        self._process, self._stderr, self._job, self._out = process, stderr, job, out

    def plan(self) -> Plan:
        self._send(self._job.request(self._out))
        return Plan.of(self._receive()["plan"])

    def convert(self, plan: Plan, report: Progress) -> None:
        """Returns when the file is written and llama.cpp has looked at it."""
        done = _fractions(plan)
        self._send(b"go\n")
        while "done" not in (message := self._receive()):
            if "checking" in message:
                report("checking", _LATE)
            else:
                report("quantizing", done[message["tensor"]])

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died, and what it said tells more
            self._process.stdin.write(line)  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def _receive(self) -> dict[str, Any]:
        """The next message. Raises what the child reports, and BackendError when it has ended without one."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = _message(line)
            if "error" in message:
                name, text = message["error"]
                raise getattr(errors, name)(text)
            if "failure" in message:
                raise self._refusal(message["failure"])
            if message:
                return message
        raise self._death()

    def _refusal(self, lines: list[str]) -> errors.EdgespecError:
        """What llama.cpp's own lines come to: the first says why, those after it who gave up."""
        causes = [line for line in lines if not re.search("failed to (load|quantize): ?failed", line)] or lines
        reason = re.sub(
            r"^(\w+: )?(failed to quantize: |error loading model: )?", "", causes[0] if causes else "unknown"
        )
        job = self._job
        if "iostream error" in reason:
            return FileAccessError(f"no more can be written to {self._out.parent}; free space or write elsewhere")
        if any(words in reason.lower() for words in _OUT_OF_MEMORY):
            return BackendError(f"{job.source} cannot be quantized: {reason}; free memory and try again")
        if reason.startswith("Missing importance matrix"):
            return ModelFormatError(f"{job.imatrix}: {reason[0].lower()}{reason[1:]}; make it on more text")
        return ModelFormatError(
            f"{job.source}: llama.cpp cannot quantize this GGUF: {reason}; download it again or choose another"
        )

    def _death(self) -> BackendError:
        code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").split("\n")
        said = next((f", saying {line.strip()!r}" for line in reversed(lines) if line.strip()), "")
        return BackendError(
            f"llama.cpp's process for {self._job.source} ended with {_ending(code)}{said}; try again, with more free "
            "memory if it was killed, or choose another GGUF"
        )


def _fractions(plan: Plan) -> list[float]:
    """How much is done when each tensor's turn comes: by size, a table may be a hundred times a layer's matrix."""
    sizes = [tensor.source_bytes + tensor.target_bytes for tensor in plan.tensors]
    total = sum(sizes) or 1
    return [_EARLY + (_LATE - _EARLY) * before / total for before in itertools.accumulate(sizes, initial=0)]


def _message(line: bytes) -> dict[str, Any]:
    """Empty for what somebody else writes to standard output."""
    try:
        content = json.loads(line)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def _environment() -> dict[str, str]:
    """The child finds what this process would import, from wherever it is started."""
    kept = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    path = os.pathsep.join(str(Path(place).resolve()) for place in sys.path if place)
    return kept | _SET | {"PYTHONPATH": path}
