"""The sizes that decide a model's memory: of a GGUF of any architecture, and of a draft model before it is built."""

from __future__ import annotations

import collections.abc as abc
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.devices.gguf_sizes import Facts, gguf_shape, parts
from edgespec.devices.sizes import ModelShape
from edgespec.errors import ModelFormatError
from quantize.extras import require

if TYPE_CHECKING:
    from quantize.gguf_header import TensorPlace
    from quantize.source import Source

PLAIN_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class GgufInfo:
    """What a GGUF says of itself.

    path          the file; of a split model, its first
    paths         all files of a split model
    tokens        raw vocabulary texts by id
    license, name "" where it does not say
    file_type     what it calls its type ("Q4_K_M"); where it does not, the type of most of its weights ("Q4_K")
    is_quantized  most of its weights are no plain numbers
    """

    path: Path
    paths: tuple[Path, ...]
    architecture: str
    name: str
    license: str
    tokens: tuple[str, ...]
    file_type: str
    is_quantized: bool
    shape: ModelShape


def read_gguf(path: Path) -> GgufInfo:
    """Read the headers of a GGUF, of all its files where it is split.

    Raises ModelNotFoundError, FileAccessError, or ModelFormatError (truncated, corrupt, no language model).
    """
    require("gguf")
    from quantize.gguf_header import read_header

    header = read_header(path)
    paths = _all_parts(path, header.fields.get("split.count", 1))
    tensors = dict(header.tensors)
    for part in paths[1:]:
        tensors |= read_header(part).tensors
    facts, tokens = Facts(path, header.fields), header.tokens(path)
    most, num_bytes = _most_common_type(tensors), sum(part.stat().st_size for part in paths)
    kind = _file_type(header.fields.get("general.file_type")) or most
    shape = gguf_shape(facts, {name: _bytes(place) for name, place in tensors.items()}, len(tokens), num_bytes, kind)
    name, license_ = facts.text("general.name"), facts.text("general.license")
    return GgufInfo(path, paths, facts.architecture, name, license_, tokens, kind, most not in PLAIN_TYPES, shape)


def _all_parts(path: Path, count: object) -> tuple[Path, ...]:
    """The file says how many there are, its name how the others are called."""
    if not isinstance(count, int) or count < 2:
        return (path,)
    found = parts(path)
    if len(found) != count:
        raise ModelFormatError(
            f"model {path} is one of {count} files; give the first, named NAME-00001-of-{count:05}.gguf"
        )
    return found


def _bytes(place: TensorPlace) -> int:
    return place.num_rows * place.row_bytes


def _most_common_type(tensors: abc.Mapping[str, TensorPlace]) -> str:
    sizes: Counter[str] = Counter()
    for place in tensors.values():
        sizes[place.kind.name] += _bytes(place)
    return sizes.most_common(1)[0][0] if sizes else "none"


def _file_type(number: object) -> str:
    """By llama.cpp's number for it; "" where the file does not say, or guessed."""
    from quantize.verifier import TYPES

    names = {known: name for name, known in TYPES.items()}
    return names.get(number, "") if isinstance(number, int) else ""


def draft_shape(source: Source, bits: int, block_size: int, num_layers: int = 0, num_head_vocab: int = 0) -> ModelShape:
    """What ``build_draft`` would make of a source: its sizes, and those of its file to some kilobytes.

    num_layers, num_head_vocab  layers kept and ids proposed; 0 for all
    """
    from quantize.onnx_builder import FULL_PRECISION, num_ctx

    d, layers = source.dimensions, num_layers or source.dimensions.num_layers
    num_vocab = num_head_vocab or d.num_vocab
    embedding_bytes = _block_bytes(d.num_vocab, d.width, bits, block_size)
    shared = source.tied and not num_head_vocab and bits != FULL_PRECISION
    output_bytes = 0 if shared else _block_bytes(num_vocab, d.width, bits, block_size)
    shapes = [d.shape(tensor) for tensor in source.architecture.layer]
    layer_bytes = sum(4 * s[0] if len(s) == 1 else _block_bytes(s[0], s[1], bits, block_size) for s in shapes)
    num_ropes = 2 if d.window_rope else 1
    rotation_bytes = num_ropes * 4 * num_ctx(d) * d.head_size  # cosines and sines of every position
    others = 4 * d.width + rotation_bytes + embedding_bytes + output_bytes
    return ModelShape(
        num_kv_heads=(d.num_kv_heads,) * layers,
        num_heads=d.num_heads,
        head_size_k=d.head_size,
        head_size_v=d.head_size,
        width=d.width,
        num_hidden=d.num_hidden,
        num_vocab=num_vocab,
        num_ctx=num_ctx(d),
        weights_bytes=layers * layer_bytes + others,
        embedding_bytes=embedding_bytes,
        output_bytes=output_bytes,
        window=d.window > 0,
        kind=f"int{bits}",
    )


def _block_bytes(num_rows: int, num_columns: int, bits: int, block_size: int) -> int:
    """Values, a float32 scale per block, and at 8 bits a zero."""
    from quantize.onnx_builder import FULL_PRECISION

    if bits == FULL_PRECISION:
        return 4 * num_rows * num_columns
    return num_rows * -(-num_columns // block_size) * (block_size * bits // 8 + 4 + (bits == 8))
