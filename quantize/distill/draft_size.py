"""How large a draft is going to be, before hours are spent on it."""

from __future__ import annotations

import collections.abc as abc
import json

from quantize.onnx_builder import num_ctx
from quantize.source import Dimensions, Source

_SCALE_BYTES, _ID_BYTES, _PAGE_BYTES = 4, 8, 4096


def draft_bytes(
    source: Source, layers: abc.Sequence[int], num_head: int | None, bits: int, embedding_bits: int, block_size: int
) -> int:
    """Of the folder that ``build_draft_of`` makes of these layers: weights, rotation tables, tokens and ids. Norms and
    the graph's own description, some kilobytes, are not counted.

    num_head  ids that its head speaks; None: the whole vocabulary
    """
    d = source.dimensions
    matrices = [(d.queries + 2 * d.keys, d.width), (d.width, d.queries)]
    matrices += [(d.num_hidden, d.width), (d.num_hidden, d.width), (d.width, d.num_hidden)]
    matrices *= len(layers)
    if num_head is not None or not source.tied or bits != embedding_bits:
        matrices.append((num_head or d.num_vocab, d.width))  # else the embedding is the head, too
    weights = sum(_matrix_bytes(*shape, bits, block_size) for shape in matrices)
    weights += _matrix_bytes(d.num_vocab, d.width, embedding_bits, block_size)
    return weights + _rotations_bytes(d, layers) + len(json.dumps(source.tokens)) + _ID_BYTES * (num_head or 0)


def _matrix_bytes(num_rows: int, num_columns: int, bits: int, block_size: int) -> int:
    """Of values, scales and, where they have 8 bits, zeros. The last block of a row is a whole one; arrays begin on
    pages."""
    num_blocks = num_rows * -(-num_columns // block_size)
    of_a_block = (block_size * bits // 8, _SCALE_BYTES, int(bits == 8))
    return sum(-(-num_blocks * size // _PAGE_BYTES) * _PAGE_BYTES for size in of_a_block)


def _rotations_bytes(d: Dimensions, layers: abc.Sequence[int]) -> int:
    """Cosines and sines of every position, float32; layers that rotate alike share them."""
    ropes = [d.window_rope if layer in d.window_layers else d.rope for layer in layers]
    sizes = {(rope.frequencies.tobytes(), rope.magnitude): rope.frequencies.size for rope in ropes if rope}
    return 2 * 4 * num_ctx(d) * sum(sizes.values())
