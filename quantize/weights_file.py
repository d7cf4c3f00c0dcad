"""The file beside the graph that holds its weights. Tensors are quantized and appended a few rows at a time, so memory
never holds more than one slice of the source in float32."""

from __future__ import annotations

import collections.abc as abc
import logging
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray

from quantize.source import Floats, Matrix

FILE_NAME = "model.onnx.data"

# ONNX Runtime maps external data into memory, which wants page-aligned starts.
_ALIGNMENT_BYTES = 4096
_SLICE_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies in the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> onnx.TensorProto:
        """An initializer that refers to it, seen in another shape of the same size if given. Several may."""
        dims = self.shape if shape is None else shape
        kind = onnx.helper.np_dtype_to_tensor_dtype(self.dtype)
        tensor = onnx.TensorProto(name=name, data_type=kind, dims=dims, data_location=onnx.TensorProto.EXTERNAL)
        length = self.dtype.itemsize * int(np.prod(self.shape))
        for key, value in (("location", FILE_NAME), ("offset", self.offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A block-quantized matrix, weight = (value - zero) * scale.

    values (out, blocks, block * bits / 8) and zeros (out, blocks) uint8, scales (out, blocks) float32. The last block
    of a row is filled up with zeros. Without zeros, the zero is the middle of the values' range.
    """

    bits: int
    shape: tuple[int, int]
    values: Place
    scales: Place
    zeros: Place | None

    def initializers(self, name: str, values_shape: tuple[int, ...] | None = None) -> list[onnx.TensorProto]:
        """``name``.values, .scales and, where there are any, .zeros."""
        tensors = [self.values.tensor(f"{name}.values", values_shape), self.scales.tensor(f"{name}.scales")]
        return tensors + ([self.zeros.tensor(f"{name}.zeros")] if self.zeros else [])


class WeightsFile:
    """Appends arrays. Not thread-safe; the caller owns the stream and closes it."""

    def __init__(self, stream: BinaryIO, bits: int, block_size: int) -> None:
        self._stream, self._bits, self._block_size = stream, bits, block_size
        self._quantizer = _quantizer(bits, block_size)

    def array(self, values: NDArray[Any]) -> Place:
        return self.rows([values])

    def rows(self, parts: abc.Iterable[NDArray[Any]]) -> Place:
        """One array, given as parts along its first axis: one at least."""
        offset, num_rows = self._align(), 0
        for part in parts:
            self._stream.write(np.ascontiguousarray(part).data)
            num_rows += len(part)
        return Place(part.dtype, (num_rows, *part.shape[1:]), offset)

    def blocks(self, *matrices: Matrix, bits: int | None = None) -> BlockMatrix:
        """Quantize matrices that read the same input, stacked along their outputs; ``bits`` where not the file's."""
        bits = self._bits if bits is None else bits
        quantizer = self._quantizer if bits == self._bits else _quantizer(bits, self._block_size)
        offset, scales, zeros = self._align(), [], []
        for rows in slices(*matrices):
            values, row_scales, row_zeros = quantizer.qbits_block_quant(self._inputs_first(rows))
            self._stream.write(values.data)
            scales.append(row_scales.reshape(len(rows), -1))  # flat in older versions
            if not _is_symmetric(bits):
                zeros.append(row_zeros.reshape(len(rows), -1))
        all_scales = self.rows(scales)
        all_zeros = None if _is_symmetric(bits) else self.rows(zeros)
        shape = (all_scales.shape[0], *values.shape[1:])
        whole = Place(values.dtype, shape, offset)
        return BlockMatrix(bits, (shape[0], matrices[0].shape[1]), whole, all_scales, all_zeros)

    def _inputs_first(self, rows: Floats) -> Floats:
        """Transposed, with zeros up to whole blocks: the quantizer's own filling means other weights."""
        num_columns = -(-rows.shape[1] // self._block_size) * self._block_size
        filled = np.zeros((num_columns, len(rows)), dtype=np.float32)
        filled[: rows.shape[1]] = rows.T
        return filled

    def _align(self) -> int:
        padding = -self._stream.tell() % _ALIGNMENT_BYTES
        self._stream.write(bytes(padding))
        return self._stream.tell()


def slices(*matrices: Matrix) -> abc.Iterator[Floats]:
    """Their rows in order, a few at a time."""
    for matrix in matrices:
        step = max(1, _SLICE_ELEMENTS // matrix.shape[1])
        for start in range(0, matrix.shape[0], step):
            yield matrix.read(start, min(start + step, matrix.shape[0]))


def _is_symmetric(bits: int) -> bool:
    """With a zero of its own, an 8-bit block holds the 16 or 32 levels of GGUF's 4- and 5-bit types with a minimum
    nearly as they are. At 4 bits a zero was measured to gain nothing."""
    return bits != 8


def _quantizer(bits: int, block_size: int) -> Any:
    """ONNX Runtime's. Its import sets up logging for the whole program, which is not ours to do: undone here."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    from onnxruntime.quantization import matmul_nbits_quantizer as nbits

    root.handlers[:] = handlers
    root.setLevel(level)
    config = nbits.DefaultWeightOnlyQuantConfig(block_size=block_size, is_symmetric=_is_symmetric(bits), bits=bits)
    return nbits.DefaultWeightOnlyQuantizer(config)
