"""Why llama.cpp failed: its own log, and the errors made of it. Does not import llama.cpp: the library is handed in."""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path
from typing import Any

from edgespec.errors import BackendError, EdgespecError, ModelFormatError, ParameterError

LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR
NO_PLACE = 1  # llama_decode's code when the KV cache is full
OUT_OF_MEMORY = ("unable to allocate", "failed to allocate", "cannot allocate", "out of memory")


class NativeLog:
    """Keeps the errors llama.cpp logs and silences the rest, while somebody uses it.

    llama.cpp has one log callback per process. The first user installs this one, the last puts the former back. Any
    thread may log.
    """

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        self._lock = threading.Lock()
        self._num_users = 0
        self._errors: list[bytes] = []
        self._callback = lib.llama_log_callback(self._keep)  # must live as long as llama.cpp may call it
        self._former, self._former_data = lib.llama_log_callback(), ctypes.c_void_p()

    def _keep(self, level: int, text: bytes | None, _: object) -> None:
        if level == LOG_ERROR and text and len(self._errors) < 16:
            self._errors.append(text)

    def acquire(self) -> None:
        with self._lock:
            if self._num_users == 0:
                self._lib.llama_log_get(ctypes.byref(self._former), ctypes.byref(self._former_data))
                self._lib.llama_log_set(self._callback, None)
            self._num_users += 1

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                self._lib.llama_log_set(self._former, self._former_data)

    def clear(self) -> None:
        self._errors.clear()

    def reason(self) -> str:
        """The first error since ``clear``, which is the cause; those after it say who gave up because of it."""
        return (self.causes() or ["llama.cpp gave no reason"])[0]

    def causes(self) -> list[str]:
        """The errors since ``clear``, without the functions that logged them."""
        lines = [line.strip() for error in self._errors for line in error.decode("utf-8", "replace").splitlines()]
        causes = [line for line in lines if line and "failed to load model" not in line] or lines
        return [re.sub(r"^\w+: (error loading model: )?", "", cause) for cause in causes]


def load_error(path: Path, reason: str) -> EdgespecError:
    if any(words in reason.lower() for words in OUT_OF_MEMORY):
        return BackendError(f"{path}: {reason}; choose a smaller model, or free memory")
    if "main_gpu" in reason:
        return ParameterError(f"{reason}; choose a GPU that is there")
    return ModelFormatError(f"{path}: llama.cpp cannot load this GGUF: {reason}; download it again or choose another")


def context_error(num_slots: int, num_ctx: int, reason: str) -> BackendError:
    of_the_types = re.search(r"\b[KV] cache\b", reason)
    remedy = "other KV cache types, such as f16" if of_the_types else "a smaller context (num_ctx), or free memory"
    return BackendError(f"no llama.cpp context of {num_slots} x {num_ctx} tokens: {reason}; choose {remedy}")


def decode_error(code: int, num_tokens: int, reason: str) -> BackendError:
    if code == NO_PLACE:
        return BackendError(f"the KV cache has no place for {num_tokens} more tokens; use a larger context (num_ctx)")
    return BackendError(
        f"llama_decode failed with code {code} on {num_tokens} tokens: {reason}; "
        "try again, with a smaller context (num_ctx) if memory is short"
    )
