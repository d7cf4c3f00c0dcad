"""A GGUF's header by llama.cpp's own reader: what the file says of itself, and how large its tensors are."""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.verifiers.llama_library import native, native_log
from edgespec.verifiers.native_log import load_error

_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
_TOKENS = "tokenizer.ggml.tokens"


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


_HANDLE, _INDEX = ctypes.c_void_p, ctypes.c_int64
# What llama-cpp-python does not declare (gguf.h). A getter aborts the process when the value is of another type.
_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "gguf_init_from_file": ([ctypes.c_char_p, _InitParams], _HANDLE),
    "gguf_free": ([_HANDLE], None),
    "gguf_get_n_kv": ([_HANDLE], ctypes.c_int64),
    "gguf_get_key": ([_HANDLE, _INDEX], ctypes.c_char_p),
    "gguf_get_kv_type": ([_HANDLE, _INDEX], ctypes.c_int),
    "gguf_get_val_str": ([_HANDLE, _INDEX], ctypes.c_char_p),
    "gguf_get_val_data": ([_HANDLE, _INDEX], ctypes.c_void_p),
    "gguf_get_arr_type": ([_HANDLE, _INDEX], ctypes.c_int),
    "gguf_get_arr_n": ([_HANDLE, _INDEX], ctypes.c_size_t),
    "gguf_get_arr_data": ([_HANDLE, _INDEX], ctypes.c_void_p),
    "gguf_get_n_tensors": ([_HANDLE], ctypes.c_int64),
    "gguf_get_tensor_name": ([_HANDLE, _INDEX], ctypes.c_char_p),
    "gguf_get_tensor_size": ([_HANDLE, _INDEX], ctypes.c_size_t),
}


@dataclass(frozen=True, slots=True)
class Header:
    """
    fields        metadata: numbers, bool, bytes for a string, an array of numbers; lists of strings are left out
    tensor_bytes  of each tensor, by its name
    num_vocab     tokens in its vocabulary; 0 where it has none
    """

    fields: dict[str, Any]
    tensor_bytes: dict[str, int]
    num_vocab: int


def read_header(path: Path) -> Header:
    """Takes milliseconds and reads no weights. Any thread.

    Raises ModelFormatError when llama.cpp cannot read it, MissingDependencyError.
    """
    call, log = _Calls(), native_log()
    log.acquire()
    try:
        log.clear()
        handle = call("gguf_init_from_file", os.fsencode(path), _InitParams(True, None))
        if not handle:
            raise load_error(path, log.reason())
        with contextlib.ExitStack() as undo:
            undo.callback(call, "gguf_free", handle)
            return _Opened(call, handle).header()
    finally:
        log.release()


class _Calls:
    """ggml's functions by name."""

    def __init__(self) -> None:
        self._functions = {name: native(name, *signature) for name, signature in _SIGNATURES.items()}

    def __call__(self, name: str, *arguments: Any) -> Any:
        return self._functions[name](*arguments)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A file while it is open."""

    call: _Calls
    handle: int

    def get(self, name: str, *index: int) -> Any:
        return self.call(f"gguf_get_{name}", self.handle, *index)

    def header(self) -> Header:
        keys = {self.get("key", i).decode("utf-8", "replace"): i for i in range(self.get("n_kv"))}
        values = {key: self.value(i) for key, i in keys.items()}
        sizes = {
            self.get("tensor_name", i).decode("utf-8", "replace"): self.get("tensor_size", i)
            for i in range(self.get("n_tensors"))
        }
        fields = {key: value for key, value in values.items() if value is not None}
        return Header(fields, sizes, self.num_texts(keys.get(_TOKENS)))

    def value(self, index: int) -> Any:
        """None for a list of strings."""
        kind = self.get("kv_type", index)
        if kind == _STRING:
            return self.get("val_str", index)
        if kind == _ARRAY:
            kind, length = self.get("arr_type", index), self.get("arr_n", index)
            return None if kind == _STRING else self.numbers(self.get("arr_data", index), kind, length)
        return self.numbers(self.get("val_data", index), kind, 1)[0].item()

    def numbers(self, address: int | None, kind: int, length: int) -> Any:
        """A copy: the file's own goes when it is closed."""
        dtype = np.dtype(_NUMBERS[kind])
        data = ctypes.string_at(address, length * dtype.itemsize) if address and length else b""
        return np.frombuffer(data, dtype)

    def num_texts(self, index: int | None) -> int:
        if index is None or self.get("kv_type", index) != _ARRAY or self.get("arr_type", index) != _STRING:
            return 0
        return int(self.get("arr_n", index))
