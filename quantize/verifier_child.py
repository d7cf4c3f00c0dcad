"""The process in which llama.cpp quantizes, started by verifier_process.py: where it aborts, nothing else ends.

Standard input: one line, a JSON object (Request); a second line says go. When it closes the parent has gone, and so
does this process. Standard output: JSON objects, a line each, of one key:

    plan     what would be done: {"tensors": [[name, [sizes], from, to, bytes before, bytes after]],
             "needs_imatrix": bool, "num_fallback": int}
    tensor   index of the tensor that is being converted
    checking  true: the written file is being looked at
    done     true
    failure  lines in which llama.cpp says why it gave up
    error    [class of edgespec.errors, message]
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any, TypedDict

from edgespec.errors import EdgespecError, MissingDependencyError

_LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_ALIGNMENT = 32  # of tensors in a GGUF
_TENSOR = re.compile(r"\[ *(\d+)/ *\d+\] (\S+) +- \[([\d, ]+)\], type = +(\w+), ")
_TARGET = re.compile(r"size = +[\d.]+ MiB(?: -> +[\d.]+ MiB \((\w+)\))?")
_FALLBACKS = re.compile(r"WARNING: (\d+) of \d+ tensor\(s\) required fallback")


class Request(TypedDict):
    """``imatrix`` is a path or None, ``ftype`` a llama_ftype."""

    source: str
    out: str
    ftype: int
    imatrix: str | None
    num_threads: int


def main() -> int:
    request: Request = json.loads(sys.stdin.buffer.readline())
    _leave_no_core()
    try:
        job = _Job(request)
        if not job.plan() or not sys.stdin.buffer.readline():
            return 1
        _die_with_parent()
        return 0 if job.quantize() and job.check() else 1
    except EdgespecError as error:
        _tell("error", [type(error).__name__, str(error)])
        return 1


def _tell(key: str, value: object) -> None:
    print(json.dumps({key: value}), flush=True)


def _die_with_parent() -> None:
    """Works wherever pipes do. ``os.read`` holds no lock that the interpreter would want at its end."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _leave_no_core() -> None:
    """An abort is reported, it is no case for a core dump."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class _Job:
    """One source, planned, quantized and checked. Every method says whether it went well, and tells why not."""

    def __init__(self, request: Request) -> None:
        self._lib, self._log = _library(), _Log()
        self._source, self._out = os.fsencode(request["source"]), os.fsencode(request["out"])
        self._callback = self._lib.llama_log_callback(self._log.add)  # must live as long as llama.cpp may call it
        self._lib.llama_log_set(self._callback, None)
        self._params = self._lib.llama_model_quantize_default_params()
        self._params.ftype, self._params.nthread = request["ftype"], request["num_threads"]
        self._params.allow_requantize = True  # the parent has looked at the plan
        self._kept = _set_imatrix(self._lib, self._params, request["imatrix"])

    def plan(self) -> bool:
        self._params.dry_run = True
        if not self._run():
            return False
        sizes = _type_sizes(self._lib)
        tensors = [_planned(match, sizes) for match in self._log.lines]
        _tell(
            "plan", {"tensors": tensors, "needs_imatrix": self._log.needs_imatrix, "num_fallback": self._log.fallbacks}
        )
        return True

    def quantize(self) -> bool:
        self._params.dry_run = False
        self._log.telling = True
        return self._run()

    def check(self) -> bool:
        """Whether llama.cpp opens what it wrote: it looks at the header, the vocabulary and where each tensor ends."""
        _tell("checking", True)
        params = self._lib.llama_model_default_params()
        params.vocab_only = True
        model = self._lib.llama_model_load_from_file(self._out, params)
        if not model:
            return self._fail()
        self._lib.llama_model_free(model)
        _tell("done", True)
        return True

    def _run(self) -> bool:
        code = self._lib.llama_model_quantize(self._source, self._out, ctypes.byref(self._params))
        return code == 0 or self._fail()

    def _fail(self) -> bool:
        _tell("failure", self._log.errors)
        return False


class _Log:
    """Reads llama.cpp's log: a tensor's line comes in two parts, before and after the work."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.lines: list[tuple[str, str, str, str | None]] = []
        self.needs_imatrix, self.fallbacks, self.telling = False, 0, False
        self._begun: tuple[str, str, str] | None = None

    def add(self, level: int, raw: bytes | None, _: object) -> None:
        text = (raw or b"").decode("utf-8", "replace")
        if level == _LOG_ERROR:
            self.errors += [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
        if begun := _TENSOR.match(text):
            self._begun = begun[2], begun[3], begun[4]
            if self.telling:
                _tell("tensor", int(begun[1]) - 1)
        elif self._begun and (target := _TARGET.match(text)):
            self.lines.append((*self._begun, target[1]))
            self._begun = None
        elif "will require an imatrix" in text:
            self.needs_imatrix = True
        elif fallbacks := _FALLBACKS.search(text):
            self.fallbacks = int(fallbacks[1])


def _planned(line: tuple[str, str, str, str | None], sizes: dict[str, tuple[int, int]]) -> list[object]:
    name, shape, source, target = line
    inputs, *others = (int(size) for size in shape.split(","))
    num_bytes = []
    for kind in (source, target or source):
        block, block_bytes = sizes[kind]
        size = inputs // block * block_bytes
        for other in others:
            size *= other
        num_bytes.append(-(-size // _ALIGNMENT) * _ALIGNMENT)
    return [name, [inputs, *others], source, target or source, *num_bytes]


def _type_sizes(lib: Any) -> dict[str, tuple[int, int]]:
    """ggml's name of a type -> values and bytes of a block."""
    ggml = lib._lib  # llama-cpp-python's handle of libllama, behind which libggml lies
    ggml.ggml_type_name.restype, ggml.ggml_blck_size.restype = ctypes.c_char_p, ctypes.c_int64
    ggml.ggml_type_size.restype = ctypes.c_size_t
    names = {kind: ggml.ggml_type_name(kind) for kind in range(lib.GGML_TYPE_COUNT)}
    return {
        name.decode(): (ggml.ggml_blck_size(kind), ggml.ggml_type_size(kind)) for kind, name in names.items() if name
    }


def _set_imatrix(lib: Any, params: Any, path: str | None) -> object:
    """What ``params`` points to, to be kept."""
    if path is None:
        return None
    from quantize.imatrix import read_imatrix

    matrix = read_imatrix(Path(path))
    entries = (lib.llama_model_imatrix_data * (len(matrix) + 1))()  # the last one stays empty
    for entry, (name, values) in zip(entries, matrix.items(), strict=False):
        entry.name, entry.size = name.encode(), len(values)
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    params.imatrix = entries
    return matrix, entries


def _library() -> Any:
    try:
        import llama_cpp.llama_cpp as lib
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependencyError(f"llama-cpp-python does not load: {error}; install or rebuild it") from error
    lib.llama_backend_init()
    return lib


if __name__ == "__main__":
    sys.exit(main())
