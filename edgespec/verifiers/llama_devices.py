"""The devices llama.cpp can use, as it lists them itself."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from edgespec.verifiers.llama_library import library, native_log

KINDS = ("cpu", "gpu", "igpu", "accel", "meta")  # enum ggml_backend_dev_type
# What llama-cpp-python does not declare. Symbols come from the handle it holds: another copy of the library would have
# a list of its own.
_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "ggml_backend_dev_count": ([], ctypes.c_size_t),
    "ggml_backend_dev_get": ([ctypes.c_size_t], ctypes.c_void_p),
    "ggml_backend_dev_name": ([ctypes.c_void_p], ctypes.c_char_p),
    "ggml_backend_dev_description": ([ctypes.c_void_p], ctypes.c_char_p),
    "ggml_backend_dev_type": ([ctypes.c_void_p], ctypes.c_int),
    "ggml_backend_dev_memory": ([ctypes.c_void_p, *[ctypes.POINTER(ctypes.c_size_t)] * 2], None),
}


@dataclass(frozen=True, slots=True)
class LlamaDevice:
    """One device.

    name, description  as "CUDA0" and "NVIDIA GeForce RTX 3060"
    kind         "cpu", "gpu", "igpu" (shares the main memory), "accel" (helps the CPU) or "meta" (made of others)
    free_bytes, memory_bytes  what is free now, and all; 0 where the device does not say
    """

    name: str
    description: str
    kind: str
    free_bytes: int
    memory_bytes: int


def list_devices() -> tuple[LlamaDevice, ...]:
    """Every device of every backend this build of llama.cpp has, in its order. Raises MissingDependencyError."""
    native_log().acquire()  # a backend that looks for its devices talks
    try:
        calls = {name: _call(name) for name in _SIGNATURES}
        handles = [calls["ggml_backend_dev_get"](i) for i in range(calls["ggml_backend_dev_count"]())]
        return tuple(_device(calls, handle) for handle in handles)
    finally:
        native_log().release()


def _call(name: str) -> Any:
    arguments, result = _SIGNATURES[name]
    prototype = ctypes.CFUNCTYPE(result, *arguments)
    return prototype((name, library()._lib))


def _device(calls: dict[str, Any], handle: int) -> LlamaDevice:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    calls["ggml_backend_dev_memory"](handle, ctypes.byref(free), ctypes.byref(total))
    kind = calls["ggml_backend_dev_type"](handle)
    return LlamaDevice(
        _text(calls["ggml_backend_dev_name"](handle)),
        _text(calls["ggml_backend_dev_description"](handle)),
        KINDS[kind] if 0 <= kind < len(KINDS) else f"unknown {kind}",
        free.value,
        total.value,
    )


def _text(data: bytes | None) -> str:
    return " ".join((data or b"").decode("utf-8", "replace").split())
