"""The devices llama.cpp can use, as it lists them itself."""

from __future__ import annotations

import collections.abc as abc
import ctypes
from dataclasses import dataclass
from typing import Any

from edgespec.errors import ParameterError
from edgespec.verifiers.llama_library import native, native_log

KINDS = ("cpu", "gpu", "igpu", "accel", "meta")  # enum ggml_backend_dev_type
GPU_KINDS = ("gpu", "igpu")  # those that layers are put on
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


def handles(names: abc.Sequence[str]) -> list[int]:
    """The ``ggml_backend_dev_t`` of devices by the names list_devices gives. Raises ParameterError for an unknown."""
    by_name = native("ggml_backend_dev_by_name", [ctypes.c_char_p], ctypes.c_void_p)
    found = {name: by_name(name.encode()) for name in names}
    for name in (name for name, handle in found.items() if not handle):
        known = ", ".join(device.name for device in list_devices())
        raise ParameterError(f"device: got {name!r}; llama.cpp has here: {known}")
    return list(found.values())


def gpu_names() -> list[str]:
    """Names of the devices llama.cpp puts layers on, in its order. No device is asked for its memory: quick."""
    calls = {name: _call(name) for name in _SIGNATURES}
    found = [calls["ggml_backend_dev_get"](i) for i in range(calls["ggml_backend_dev_count"]())]
    gpus = [handle for handle in found if calls["ggml_backend_dev_type"](handle) in map(KINDS.index, GPU_KINDS)]
    return [_text(calls["ggml_backend_dev_name"](handle)) for handle in gpus]


def _call(name: str) -> Any:
    return native(name, *_SIGNATURES[name])


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
