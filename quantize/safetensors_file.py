"""One .safetensors file: its header checked, its tensors read a few rows at a time.

Format: https://huggingface.co/docs/safetensors. Read directly, not through a memory map: what was read does not stay in
the process's memory, and a file that shrinks in the meantime is an error, not a crash. Nothing here is written to.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import FileAccessError, ModelFormatError, ModelNotFoundError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

# How the bytes are read; a BF16 is the upper half of a float32.
DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies. ``dtype`` is the format's name of it, and may be one that cannot be read."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self, start: int, num: int) -> Floats:
        """``num`` elements from number ``start`` on, as a new float32 array (num,). Raises FileAccessError, or
        ModelFormatError when they are not there any more or not all finite."""
        dtype = DTYPES[self.dtype]
        try:
            stored = np.fromfile(self.path, dtype, num, offset=self.offset + start * dtype.itemsize)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if stored.size != num:
            raise ModelFormatError(f"{self.path} ends within tensor {self.name}; download it again")
        if self.dtype == "BF16":
            stored = (stored.astype("<u4") << 16).view("<f4")
        values: Floats = stored.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise ModelFormatError(f"{self.path}: {self.name} is not all finite numbers; download the model again")
        return values


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Rows of a two-dimensional tensor, all of them where ``rows`` is None. See source.Matrix."""

    tensor: StoredTensor
    rows: NDArray[np.int64] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        num_rows, num_columns = self.tensor.shape
        return (num_rows if self.rows is None else len(self.rows)), num_columns

    def read(self, start: int, stop: int) -> Floats:
        """See Matrix.read. Neighbouring rows are read together."""
        columns = self.shape[1]
        if self.rows is None:
            return self.tensor.read(start * columns, (stop - start) * columns).reshape(-1, columns)
        rows = self.rows[start:stop]
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        parts = [self.tensor.read(int(run[0]) * columns, run.size * columns) for run in runs if run.size]
        return np.concatenate([*parts, np.empty(0, np.float32)]).reshape(-1, columns)

    def take(self, rows: NDArray[np.int64]) -> StoredMatrix:
        return StoredMatrix(self.tensor, rows if self.rows is None else self.rows[rows])


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The file's tensors by name; each lies whole within the file.

    Raises ModelNotFoundError, FileAccessError, or ModelFormatError for a file that is truncated or no safetensors.
    """
    try:
        if not path.is_file():
            raise ModelNotFoundError(f"weights {path} are not there; download the model again")
        with path.open("rb") as stream:
            num_bytes = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(MAX_HEADER_BYTES, num_bytes - 8):
                raise ModelFormatError(f"{path} is not a whole safetensors file; download it again")
            header = stream.read(length)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        return {name: _tensor(path, name, entry, 8 + length, num_bytes) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not a whole safetensors file ({short(error)}); download it again") from error


def _tensor(path: Path, name: str, entry: Any, data: int, num_bytes: int) -> StoredTensor:
    """Raises ValueError, TypeError or KeyError when the entry does not describe bytes of the file."""
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or any(type(size) is not int or size < 0 for size in (*shape, begin, end)):
        raise ValueError(f"tensor {short(name)} is described by {entry}")
    if not begin <= end <= num_bytes - data:
        raise ValueError(f"tensor {short(name)} ends after the file")
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"tensor {short(name)} of {dtype} {shape} has {end - begin} bytes")
    return StoredTensor(path, name, dtype, tuple(shape), data + begin)


def short(value: object) -> str:
    """What a file says, fit for a message of one line."""
    text = " ".join(str(value).split())
    return text if len(text) <= 100 else f"{text[:100]}…"


def unreadable(path: Path, error: OSError) -> FileAccessError:
    return FileAccessError(f"{path} cannot be read: {error.strerror or error}; check what it is and its permissions")
