"""llama.cpp as llama-cpp-python holds it: loaded once per process, when somebody first needs it."""

from __future__ import annotations

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


@cache
def native_log() -> NativeLog:
    return NativeLog(library())
