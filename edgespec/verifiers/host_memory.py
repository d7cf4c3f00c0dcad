"""Arrays in memory that a device reads and writes directly: page-locked where the verifier sits on a GPU."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from edgespec.verifiers.llama_library import native

ALIGNMENT = 64  # bytes: a cache line, and as wide as vector registers get


class HostMemory:
    """Makes numpy arrays for one verifier and frees them together. One thread, the verifier's.

    On a GPU they lie in the device's own host buffer type, so that copies need no detour through the driver's buffers.
    Without a device, on one that has no such memory (CPU, RPC), or when the system locks no more of it: plain memory,
    used alike.
    """

    def __init__(self, device: str | None = None) -> None:
        """``device`` is the name llama.cpp lists it by, None: plain memory."""
        self._buffer_type: int | None = None if device is None else host_buffer_type(device)
        self._buffers: list[int] = []
        self._num_plain = 0

    @property
    def is_page_locked(self) -> bool:
        """Whether every array made so far is; False before the first."""
        return bool(self._buffers) and not self._num_plain

    def array(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Zeros that begin at a multiple of 64 bytes. Not to be used after ``close``."""
        kind = np.dtype(dtype)
        num_bytes = max(math.prod(shape if isinstance(shape, tuple) else (shape,)) * kind.itemsize, 1)
        memory = self._locked(num_bytes + ALIGNMENT)
        if memory is None:
            self._num_plain += 1
            memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        array = np.ndarray(shape, kind, memory[start : start + num_bytes].data)
        array.fill(0)
        return array

    def close(self) -> None:
        """Free the page-locked memory; a second call does nothing."""
        while self._buffers:
            native("ggml_backend_buffer_free", [ctypes.c_void_p], None)(self._buffers.pop())

    def _locked(self, num_bytes: int) -> NDArray[np.uint8] | None:
        if self._buffer_type is None:
            return None
        arguments = [ctypes.c_void_p, ctypes.c_size_t]
        buffer = native("ggml_backend_buft_alloc_buffer", arguments, ctypes.c_void_p)(self._buffer_type, num_bytes)
        if not buffer:
            return None
        self._buffers.append(buffer)
        if _pointer_of("ggml_backend_buffer_get_type", buffer) != self._buffer_type:
            self._num_plain += 1  # llama.cpp's own way out when no more can be locked
        address = _pointer_of("ggml_backend_buffer_get_base", buffer)
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def host_buffer_type(device: str) -> int | None:
    """The ``ggml_backend_buffer_type_t`` for memory of the host that this device reaches; None where it has none."""
    handle = native("ggml_backend_dev_by_name", [ctypes.c_char_p], ctypes.c_void_p)(device.encode())
    if not handle:
        return None
    found: int | None = _pointer_of("ggml_backend_dev_host_buffer_type", handle)
    return found


def _pointer_of(name: str, handle: int) -> Any:
    """Ask something of a buffer or a device; the answer is a pointer."""
    return native(name, [ctypes.c_void_p], ctypes.c_void_p)(handle)
