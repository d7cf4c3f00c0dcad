"""What a GGUF says before its weights: metadata and where each tensor lies. Reads that part of the file and no more, so
a vocabulary of 150 thousand tokens takes tens of megabytes and a fraction of a second.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Nothing here is written to.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np

from edgespec.errors import FileAccessError, ModelFormatError, ModelNotFoundError

VERSIONS = (2, 3)

_MAGIC = b"GGUF"
_MAX_TENSOR_DIMENSIONS = 4
_UINT32, _UINT64, _STRING, _ARRAY = 4, 10, 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# What walking bytes that are not what they should be ends in.
PARSE_ERRORS = (ValueError, KeyError, OverflowError, MemoryError, RecursionError, struct.error)


class _UnknownKindError(ValueError):
    """llama.cpp may know a type of weights that the gguf package does not know yet: such a file is whole."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Rows of ``shape`` (the last size is a row's) from ``offset`` in the file on, in the GGUF's type ``kind``."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return int(self.shape[-1] // block_elements * block_bytes)


@dataclass(frozen=True, slots=True)
class Header:
    """
    fields   metadata: numbers, bool, bytes for a string; for an array a list of bytes or an array of numbers
    tensors  by name, in the file's order
    """

    fields: dict[str, Any]
    tensors: dict[str, TensorPlace]

    def tokens(self, path: Path) -> tuple[str, ...]:
        """The vocabulary as the file spells it; bytes that are no UTF-8 become lone surrogates. ``path`` is for the
        message: raises ModelFormatError where there is none."""
        texts = self.fields.get("tokenizer.ggml.tokens")
        if not isinstance(texts, list) or not texts or not isinstance(texts[0], bytes):
            raise ModelFormatError(f"model {path} has no tokenizer.ggml.tokens; use the GGUF of a language model")
        return tuple(text.decode("utf-8", "surrogateescape") for text in texts)


def read_header(path: Path) -> Header:
    """Raises ModelNotFoundError, FileAccessError (no permission), or ModelFormatError (truncated or corrupt: every
    tensor the file promises must be in it)."""
    try:
        if not path.is_file():
            raise ModelNotFoundError(f"model {path} is not there; give the path of a GGUF file")
        with path.open("rb") as stream:
            return parse_header(stream)
    except OSError as error:
        raise FileAccessError(f"model {path} cannot be read: {error.strerror}; check its permissions") from error
    except _UnknownKindError as error:
        raise ModelFormatError(f"model {path}: {error}; use a GGUF of another type, or a newer gguf package") from error
    except PARSE_ERRORS as error:
        raise ModelFormatError(f"model {path} is not a whole GGUF file ({error}); download it again") from error


def parse_header(stream: BinaryIO) -> Header:
    """The same of an open file, read from its start. Raises PARSE_ERRORS."""
    return _Parser(stream).header()


class _Parser:
    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.num_bytes = stream, os.fstat(stream.fileno()).st_size

    def header(self) -> Header:
        if self.take(len(_MAGIC)) != _MAGIC:
            raise ValueError("it does not start with GGUF")
        if (version := self.number(_UINT32)) not in VERSIONS:
            raise ValueError(f"version {version}; readable: {', '.join(map(str, VERSIONS))}")
        num_tensors, num_fields = self.number(_UINT64), self.number(_UINT64)
        fields = dict(self.field() for _ in range(num_fields))
        tensors = dict(self.tensor() for _ in range(num_tensors))
        if (len(fields), len(tensors)) != (num_fields, num_tensors):
            raise ValueError("it has a name twice")
        return Header(fields, self.placed(tensors, fields.get("general.alignment", 32)))

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.num_bytes - self.stream.tell():
            raise ValueError("it ends early")
        return self.stream.read(num_bytes)

    def number(self, kind: int) -> Any:
        code = f"<{_NUMBERS[kind]}"
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> bytes:
        return self.take(self.number(_UINT64))

    def field(self) -> tuple[str, Any]:
        key = self.string().decode("utf-8")
        return key, self.value(self.number(_UINT32))

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number(_UINT32), self.number(_UINT64))
        if kind not in _NUMBERS:
            raise ValueError(f"a field has type {kind}")
        return self.number(kind)

    def array(self, kind: int, length: int) -> Any:
        if kind not in _NUMBERS:
            return [self.value(kind) for _ in range(length)]
        dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
        return np.frombuffer(self.take(length * dtype.itemsize), dtype)

    def tensor(self) -> tuple[str, TensorPlace]:
        name, num_dimensions = self.string().decode("utf-8"), self.number(_UINT32)
        if not 1 <= num_dimensions <= _MAX_TENSOR_DIMENSIONS:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
        sizes = [self.number(_UINT64) for _ in range(num_dimensions)]
        kind = _kind(name, self.number(_UINT32))
        if sizes[0] % gguf.GGML_QUANT_SIZES[kind][0]:
            raise ValueError(f"tensor {name} has rows of {sizes[0]} in type {kind.name}")
        return name, TensorPlace(tuple(reversed(sizes)), kind, self.number(_UINT64))

    def placed(self, tensors: dict[str, TensorPlace], alignment: object) -> dict[str, TensorPlace]:
        """Their offsets counted from the file's start."""
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment}")
        start = -(-self.stream.tell() // alignment) * alignment
        placed = {name: TensorPlace(t.shape, t.kind, start + t.offset) for name, t in tensors.items()}
        if any(t.offset + t.num_rows * t.row_bytes > self.num_bytes for t in placed.values()):
            raise ValueError("it ends early")
        return placed


def _kind(name: str, number: int) -> gguf.GGMLQuantizationType:
    try:
        return gguf.GGMLQuantizationType(number)
    except ValueError as error:
        raise _UnknownKindError(f"tensor {name} is of type {number}, which the gguf package does not know") from error
