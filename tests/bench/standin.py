"""A stand-in for a big verifier: a small model widened by zeros until it costs as much as a big one.

    python -m tests.bench.standin SOURCE.gguf OUT.gguf

The text that comes out is the source's, the time it takes is that of the new shape (1.4 billion parameters by default
from SmolLM2-135M), so speed-ups can be measured on real text where no big model is at hand. Say "stand-in" beside every
figure measured on it.

Why the text stays the same, for the ``llama`` architecture and a width that grows from E to E2:

- Every vector keeps its E values and gets E2 - E zeros; zero rows and columns of the matrices keep them zero.
- RMS norm divides by sqrt(sum / E2 + eps2). With eps2 = eps E / E2 that is the old divisor times sqrt(E / E2), which
  the norm's weights, scaled by sqrt(E / E2), undo.
- The head size stays, so rotation and attention scale stay. Query head h reads KV head h // (heads per KV head); as
  that number may grow, the old heads move to where their KV head is theirs still. New heads have zero values.
- An extra layer is a copy of an old one whose two output projections are zero: it costs its time and adds nothing.
"""

from __future__ import annotations

import argparse
import collections.abc as abc
import contextlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.errors import EdgespecError, ModelFormatError, ModelNotFoundError, ParameterError

Floats = NDArray[np.float32]
QuantType = gguf.GGMLQuantizationType

FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
NORMS = {"attn_norm", "ffn_norm", "output_norm"}
MATRICES = {  # what a matrix puts out and takes in
    "token_embd": ("vocab", "width"),
    "output": ("vocab", "width"),
    "attn_q": ("heads", "width"),
    "attn_k": ("kv_heads", "width"),
    "attn_v": ("kv_heads", "width"),
    "attn_output": ("width", "heads"),
    "ffn_gate": ("hidden", "width"),
    "ffn_up": ("hidden", "width"),
    "ffn_down": ("width", "hidden"),
}
LAYER_OUTPUTS = {"attn_output", "ffn_down"}
TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<kind>\w+)\.weight")


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-architecture model; hidden is the width inside the feed-forward part."""

    width: int
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_vocab: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


class Tensor(NamedTuple):
    """One tensor to write: ``source`` widened, or zeros of that shape when ``silent``."""

    name: str
    kind: str
    source: gguf.ReaderTensor
    silent: bool


def widen(source: Path, target: Path, *, width: int, hidden: int, num_layers: int = 0, quant: str = "Q8_0") -> Shape:
    """Write the stand-in, whole or not at all, a tensor at a time; returns its shape. Progress goes to stderr.

    num_layers  0 keeps the source's
    quant       a key of FILE_TYPES, for the matrices; norms are float32
    Raises ModelNotFoundError, ModelFormatError for a source that is no plain Llama, ParameterError for sizes below the
    source's or that the format cannot hold.
    """
    reader = _open(source)
    old = _shape(reader)
    new = _grown(old, width, hidden, num_layers or old.num_layers)
    tensors = _plan(reader, old, new)
    partial = target.with_name(target.name + ".part")
    try:
        _write(partial, reader, tensors, old, new, quant)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return new


def _open(path: Path) -> gguf.GGUFReader:
    if not path.is_file():
        raise ModelNotFoundError(f"no such GGUF: {path}; give the path of a Llama-architecture model")
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    if architecture != "llama":
        raise ModelFormatError(f"architecture: got {architecture}; allowed: llama; its algebra is all this tool knows")
    return reader


def _shape(reader: gguf.GGUFReader) -> Shape:
    def size(key: str, default: int | None = None) -> int:
        field = reader.get_field(f"llama.{key}")
        value = default if field is None else field.contents()
        if not isinstance(value, int):
            raise ModelFormatError(f"llama.{key}: got {value!r}; this tool needs one whole number there")
        return value

    width, num_heads = size("embedding_length"), size("attention.head_count")
    return Shape(
        width=width,
        hidden=size("feed_forward_length"),
        num_layers=size("block_count"),
        num_heads=num_heads,
        num_kv_heads=size("attention.head_count_kv", num_heads),
        head_size=size("attention.key_length", width // num_heads),
        num_vocab=len(reader.fields["tokenizer.ggml.tokens"].data),
    )


def _grown(old: Shape, width: int, hidden: int, num_layers: int) -> Shape:
    """The shape asked for, with heads to fill the width and at least as many of them per KV head as before."""
    asked = [("width", width, old.width), ("hidden", hidden, old.hidden), ("layers", num_layers, old.num_layers)]
    for name, value, least in asked:
        if value < least:
            raise ParameterError(f"{name}: got {value}; the source has {least}, give that or more")
    if width % 32 or hidden % 32 or width % old.head_size:
        raise ParameterError(
            f"width {width}, hidden {hidden}: both must be multiples of 32 (a quantization block), "
            f"width also of {old.head_size} (a head)"
        )
    num_heads = width // old.head_size
    groups = [group for group in range(old.group, num_heads + 1) if num_heads % group == 0]
    num_kv_heads = num_heads // groups[0] if groups else 0
    if num_kv_heads < old.num_kv_heads:
        raise ParameterError(
            f"width: got {width}, {num_heads} heads, which cannot be shared out to {old.num_kv_heads} KV heads or more "
            f"with {old.group} heads or more each; try {old.num_kv_heads * old.group * old.head_size * 2}"
        )
    return Shape(width, hidden, num_layers, num_heads, num_kv_heads, old.head_size, old.num_vocab)


def _plan(reader: gguf.GGUFReader, old: Shape, new: Shape) -> list[Tensor]:
    plan = []
    for tensor in reader.tensors:
        match = TENSOR_NAME.fullmatch(tensor.name)
        kind = match["kind"] if match else ""
        if match is None or kind not in {*NORMS, *MATRICES, "rope_freqs"}:
            raise ModelFormatError(f"tensor {tensor.name}: not part of a plain Llama model; use another source")
        first = match["layer"]
        if first is None:
            plan.append(Tensor(tensor.name, kind, tensor, silent=False))
            continue
        for layer in range(int(first), new.num_layers, old.num_layers):
            silent = layer >= old.num_layers and kind in LAYER_OUTPUTS
            plan.append(Tensor(f"blk.{layer}.{kind}.weight", kind, tensor, silent))
    return plan


def _places(axis: str, old: Shape, new: Shape) -> tuple[int, NDArray[np.int64]]:
    """The new length of an axis, and where its old entries go."""
    head = np.arange(old.num_heads)
    moved = head // old.group * new.group + head % old.group
    size = old.head_size
    return {
        "vocab": (new.num_vocab, np.arange(old.num_vocab)),
        "width": (new.width, np.arange(old.width)),
        "hidden": (new.hidden, np.arange(old.hidden)),
        "heads": (new.num_heads * size, (moved[:, None] * size + np.arange(size)).ravel()),
        "kv_heads": (new.num_kv_heads * size, np.arange(old.num_kv_heads * size)),
    }[axis]


def _new_shape(tensor: Tensor, old: Shape, new: Shape) -> tuple[int, ...]:
    if tensor.kind in MATRICES:
        return tuple(_places(axis, old, new)[0] for axis in MATRICES[tensor.kind])
    return (new.width,) if tensor.kind in NORMS else tuple(tensor.source.data.shape)


def _widened(tensor: Tensor, old: Shape, new: Shape) -> Floats:
    widened = np.zeros(_new_shape(tensor, old, new), dtype=np.float32)
    if tensor.silent:
        return widened
    values = gguf.dequantize(tensor.source.data, tensor.source.tensor_type)
    if tensor.kind in MATRICES:
        rows, columns = (_places(axis, old, new)[1] for axis in MATRICES[tensor.kind])
        widened[np.ix_(rows, columns)] = values
    elif tensor.kind in NORMS:
        widened[: old.width] = values * np.sqrt(old.width / new.width)
    else:
        widened[:] = values
    return widened


def _write(
    path: Path, reader: gguf.GGUFReader, tensors: abc.Sequence[Tensor], old: Shape, new: Shape, quant: str
) -> None:
    types = [QuantType[quant] if tensor.kind in MATRICES else QuantType.F32 for tensor in tensors]
    with contextlib.closing(gguf.GGUFWriter(path, "llama")) as writer:
        _add_metadata(writer, reader, old, new, quant)
        for tensor, kind in zip(tensors, types, strict=True):
            _announce(writer, tensor.name, _new_shape(tensor, old, new), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, (tensor, kind) in enumerate(zip(tensors, types, strict=True), start=1):
            writer.write_tensor_data(gguf.quantize(_widened(tensor, old, new), kind))
            if done % 50 == 0 or done == len(tensors):
                print(f"{done} of {len(tensors)} tensors", file=sys.stderr)


def _announce(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: QuantType) -> None:
    dtype = {QuantType.F32: np.float32, QuantType.F16: np.float16}.get(kind, np.uint8)
    stored = gguf.quant_shape_to_byte_shape(shape, kind) if dtype is np.uint8 else shape
    num_bytes = int(np.prod(stored)) * np.dtype(dtype).itemsize
    writer.add_tensor_info(name, stored, np.dtype(dtype), num_bytes, kind)


def _add_metadata(writer: gguf.GGUFWriter, reader: gguf.GGUFReader, old: Shape, new: Shape, quant: str) -> None:
    epsilon = reader.fields["llama.attention.layer_norm_rms_epsilon"].contents()
    changed = {
        "llama.embedding_length": new.width,
        "llama.feed_forward_length": new.hidden,
        "llama.block_count": new.num_layers,
        "llama.attention.head_count": new.num_heads,
        "llama.attention.head_count_kv": new.num_kv_heads,
        "llama.attention.key_length": new.head_size,
        "llama.attention.value_length": new.head_size,
    }
    for key, value in changed.items():
        writer.add_uint32(key, value)
    writer.add_layer_norm_rms_eps(epsilon * old.width / new.width)
    writer.add_file_type(FILE_TYPES[quant])
    replaced = {*changed, "llama.attention.layer_norm_rms_epsilon", "general.file_type", "general.size_label"}
    _copy_metadata(writer, reader, without={*replaced, "general.architecture"})


def _copy_metadata(writer: gguf.GGUFWriter, reader: gguf.GGUFReader, without: abc.Set[str]) -> None:
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in without:
            continue  # GGUF.* is how the reader presents the file's own header
        value: Any = field.contents()
        if field.name == "general.name":
            value = f"{value} (stand-in)"
        sub_type = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=sub_type)


def main(arguments: abc.Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.standin", description="Widen a Llama GGUF by zeros.")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--width", type=int, default=2048, help="embedding width (default: 2048)")
    parser.add_argument("--ffn", type=int, default=5376, help="feed-forward width (default: 5376)")
    parser.add_argument("--layers", type=int, default=0, help="number of layers (default: the source's)")
    parser.add_argument("--type", choices=FILE_TYPES, default="Q8_0", help="type of the matrices (default: Q8_0)")
    options = parser.parse_args(arguments)
    try:
        shape = widen(
            options.source,
            options.target,
            width=options.width,
            hidden=options.ffn,
            num_layers=options.layers,
            quant=options.type,
        )
    except EdgespecError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{options.target}: {shape}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
