"""Importance matrices: how much each input of a weight matrix matters, as ``llama-imatrix`` writes them.

Two formats: a GGUF (general.type "imatrix", tensors NAME.in_sum2 and NAME.counts), and the older binary one (.dat,
.imatrix): entries of name, number of calls, and sums that are already divided once. See tools/imatrix in llama.cpp.
"""

from __future__ import annotations

import collections.abc as abc
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import FileAccessError, ModelFormatError, ModelNotFoundError
from quantize.extras import require

if TYPE_CHECKING:
    from quantize.gguf_header import TensorPlace

Floats = NDArray[np.float32]
Shapes = abc.Mapping[str, tuple[int, ...]]

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_ENTRIES, _MAX_NAME = 2**20, 2**10


def read_imatrix(path: Path) -> dict[str, Floats]:
    """Tensor name -> one weight per input (of each expert, one after the other), float32, finite, 0 or more.

    Raises ModelNotFoundError, FileAccessError, or ModelFormatError for a file that is neither of the two formats.
    """
    try:
        with path.open("rb") as stream:
            is_gguf = stream.read(4) == b"GGUF"
            stream.seek(0)
            found = _read_gguf(stream) if is_gguf else _read_legacy(stream)
    except FileNotFoundError:
        raise ModelNotFoundError(f"no importance matrix at {path}; check the path") from None
    except OSError as error:
        raise FileAccessError(f"{path} cannot be read: {error.strerror or error}; check its permissions") from error
    except (ValueError, KeyError, MemoryError) as error:
        raise ModelFormatError(
            f"{path} is no importance matrix ({error or type(error).__name__}); make one with llama-imatrix, or get it "
            "again"
        ) from error
    for name, values in found.items():
        if not np.isfinite(values).all() or values.min(initial=0.0) < 0:
            raise ModelFormatError(f"{path}: {name} has values that are no weights; make the matrix again")
    return found


def check_imatrix(path: Path, matrix: abc.Mapping[str, Floats], shapes: Shapes) -> None:
    """Raise ModelFormatError unless the matrix belongs to a model with these tensors, (in, out, experts) each."""
    known = [name for name in matrix if name in shapes]
    if not known:
        example = next(iter(matrix), "nothing")
        raise ModelFormatError(f"{path} is of another model: it has {example}, which this one has not; choose its own")
    for name in known:
        inputs, _, experts = (*shapes[name], 1, 1)[:3]
        # Embedding tables are looked up, not multiplied with: what a matrix says of them depends on who wrote it.
        if len(matrix[name]) != inputs * experts and "token_embd" not in name:
            raise ModelFormatError(
                f"{path} is of another model: {name} has {len(matrix[name])} inputs there and {inputs * experts} here; "
                "choose the matrix of this model"
            )


def _read_gguf(stream: BinaryIO) -> dict[str, Floats]:
    """Sums over tokens, divided by how many there were; an expert that saw none counts evenly."""
    require("gguf")
    from quantize.gguf_header import PARSE_ERRORS, parse_header

    try:
        tensors = {name: _floats(stream, name, place) for name, place in parse_header(stream).tensors.items()}
    except PARSE_ERRORS as error:
        raise ValueError(error or type(error).__name__) from error
    found: dict[str, Floats] = {}
    for name, sums in tensors.items():
        if name.endswith(_SUMS):
            name = name.removesuffix(_SUMS)
            counts = tensors[name + _COUNTS].reshape(-1, 1)
            means = sums.reshape(len(counts), -1) / np.maximum(counts, 1)
            found[name] = np.where(counts > 0, means, 1).astype(np.float32).ravel()
    if not found:
        raise ValueError(f"no tensor NAME{_SUMS} among {len(tensors)}")
    return found


def _floats(stream: BinaryIO, name: str, place: TensorPlace) -> Floats:
    if place.kind.name != "F32":
        raise ValueError(f"{name} is {place.kind.name}, F32 expected")
    stream.seek(place.offset)
    content = _exactly(stream, place.num_rows * place.row_bytes)
    return np.frombuffer(content, "<f4").reshape(place.shape)


def _read_legacy(stream: BinaryIO) -> dict[str, Floats]:
    """int32 entries; each: int32 length, name, int32 calls, int32 size, float32 values. What follows is not needed."""
    found: dict[str, Floats] = {}
    for _ in range(_int(stream, 1, _MAX_ENTRIES)):
        name = _exactly(stream, _int(stream, 1, _MAX_NAME)).decode("utf-8")
        calls, size = _int(stream, 0), _int(stream, 1)
        values = np.frombuffer(_exactly(stream, 4 * size), dtype="<f4")
        found[name] = (values / max(calls, 1)).astype(np.float32)
    return found


def _int(stream: BinaryIO, low: int, high: int = 2**31 - 1) -> int:
    value = int.from_bytes(_exactly(stream, 4), "little", signed=True)
    if not low <= value <= high:
        raise ValueError(f"a count of {value}")
    return value


def _exactly(stream: BinaryIO, num_bytes: int) -> bytes:
    content = stream.read(num_bytes)
    if len(content) < num_bytes:
        raise ValueError("it ends too early")
    return content
