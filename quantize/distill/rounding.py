"""Weights as a draft of 4 bits will have them, so that a student learns with what it is going to be."""

from __future__ import annotations

import collections.abc as abc
import contextlib

import torch
from torch import Tensor, nn
from torch.nn import functional

BITS = 4
_LOWEST, _HIGHEST = -(2 ** (BITS - 1)), 2 ** (BITS - 1) - 1


def rounded(rows: Tensor, block_size: int) -> Tensor:
    """Rows of float32 after ONNX Runtime's symmetric quantizer for 4 bits, bit for bit: of each block the value that is
    furthest from 0 becomes -8 steps. Rounding again changes nothing."""
    num_columns = rows.shape[1]
    blocks: Tensor = functional.pad(rows, (0, -num_columns % block_size)).view(len(rows), -1, block_size)
    most, least = blocks.amax(-1, keepdim=True), blocks.amin(-1, keepdim=True)
    step: Tensor = torch.where(most.abs() > least.abs(), most, least) / _LOWEST
    steps: Tensor = (blocks * torch.where(step == 0.0, step, 1.0 / step)).round().clamp(_LOWEST, _HIGHEST)
    return (steps * step).reshape(len(rows), -1)[:, :num_columns]


@contextlib.contextmanager
def rounded_weights(student: nn.Module, block_size: int = 32) -> abc.Iterator[None]:
    """Inside, all trained matrices are rounded; after it they are again what they were, with the gradients that a
    forward and a backward inside left them, as if rounding changed nothing (the straight-through estimator: Bengio,
    Leonard, Courville, arXiv 1308.3432). Enter it before autocast, which remembers weights; step after it.
    """
    matrices = [parameter for parameter in student.parameters() if parameter.ndim == 2]
    exact = [matrix.data for matrix in matrices]
    try:
        for matrix in matrices:
            matrix.data = rounded(matrix.data, block_size)
        yield
    finally:
        for matrix, values in zip(matrices, exact, strict=True):
            matrix.data = values
