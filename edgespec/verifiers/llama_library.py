"""llama.cpp as llama-cpp-python holds it: loaded once per process, when somebody first needs it."""

from __future__ import annotations

import collections.abc as abc
import ctypes
import os
from functools import cache
from typing import Any

from edgespec.errors import MissingDependencyError
from edgespec.verifiers.native_log import NativeLog


@cache
def library() -> Any:
    """llama_cpp's low-level module. Raises MissingDependencyError where it is not installed or does not load."""
    try:
        import llama_cpp.llama_cpp as lib
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependencyError(f"llama-cpp-python does not load: {error}; install or rebuild it") from error
    lib.llama_backend_init()
    return lib


def native(name: str, arguments: abc.Sequence[Any], result: Any) -> Any:
    """A function of ggml that llama-cpp-python does not declare. Raises AttributeError where the build has none.

    It comes from the handle llama-cpp-python holds: another copy of the library would have devices of its own.
    """
    return ctypes.CFUNCTYPE(result, *arguments)((name, library()._lib))


@cache
def native_log() -> NativeLog:
    return NativeLog(library())


@cache
def explain_aborts() -> Any:
    """From now on ggml's last words before it aborts are one line on standard error: what it says itself, then the
    error logged before, which names the cause. For a process whose death somebody reads of."""

    def explain(message: bytes | None) -> None:
        words = [" ".join((message or b"").decode("utf-8", "replace").split()), *native_log().causes()[:1]]
        os.write(2, f"{'; '.join(words)}\n".encode())

    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    native("ggml_set_abort_callback", [callback], ctypes.c_void_p)(kept := callback(explain))
    return kept  # by the cache, as long as ggml may call it
