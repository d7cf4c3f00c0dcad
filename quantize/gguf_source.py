"""Reads a llama-architecture GGUF: its dimensions, its vocabulary, and its weights as float32, a few rows at a time.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Nothing here is written to.
"""

from __future__ import annotations

import collections.abc as abc
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.errors import FileAccessError, ModelFormatError, ModelNotFoundError

SUPPORTED_ARCHITECTURES = ("llama",)
SUPPORTED_ROPE_SCALING = ("none", "linear")

Floats = NDArray[np.float32]
T = TypeVar("T")

# What the reader raises when it walks bytes that are not what they should be.
_PARSE_ERRORS = (ValueError, IndexError, KeyError, TypeError, OverflowError, AssertionError, MemoryError, struct.error)


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The sizes of a llama-architecture decoder; ``rope_scale`` divides positions (linear scaling)."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_hidden: int
    num_vocab: int
    num_ctx: int
    norm_epsilon: float
    rope_base: float
    rope_scale: float

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the graph, (out, in); ``output.weight`` and ``rope_freqs.weight`` may be missing."""
        queries, keys = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.num_vocab, self.width)}
        for layer in (f"blk.{i}" for i in range(self.num_layers)):
            shapes |= {f"{layer}.attn_q.weight": (queries, self.width), f"{layer}.attn_k.weight": (keys, self.width)}
            shapes |= {
                f"{layer}.attn_v.weight": (keys, self.width),
                f"{layer}.attn_output.weight": (self.width, queries),
            }
            shapes |= {f"{layer}.{part}.weight": (self.num_hidden, self.width) for part in ("ffn_gate", "ffn_up")}
            shapes |= {f"{layer}.ffn_down.weight": (self.width, self.num_hidden)}
            shapes |= {f"{layer}.{part}.weight": (self.width,) for part in ("attn_norm", "ffn_norm")}
        shapes |= {"output_norm.weight": (self.width,), "output.weight": (self.num_vocab, self.width)}
        return shapes | {"rope_freqs.weight": (self.head_size // 2,)}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix (out, in) that stays on disk, in its own quantization, until rows of it are asked for."""

    shape: tuple[int, int]
    raw: NDArray[Any]
    kind: Any

    def read(self, start: int, stop: int) -> Floats:
        """Rows start to stop as a new float32 array (rows, in)."""
        return _decode(self.raw[start:stop], self.kind)

    def take(self, rows: NDArray[np.int64]) -> Matrix:
        """The given rows, in that order."""
        return Matrix((len(rows), self.shape[1]), self.raw[rows], self.kind)


@dataclass(frozen=True, slots=True)
class GgufSource:
    """One opened file. Query and key rows are kept in the file's order, which pairs neighbours for rotation."""

    path: Path
    dimensions: Dimensions
    tokens: tuple[str, ...]
    tensors: dict[str, Any]

    def matrix(self, name: str) -> Matrix:
        tensor = self.tensors[name]
        rows, columns = _shape(tensor)
        return Matrix((rows, columns), tensor.data, tensor.tensor_type)

    def vector(self, name: str) -> Floats:
        tensor = self.tensors[name]
        return _decode(tensor.data, tensor.tensor_type)

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding table."""
        return "output.weight" not in self.tensors

    def rope_frequencies(self) -> NDArray[np.float64]:
        """Radians per position for each rotated pair, (head_size / 2,), scaled as the file asks."""
        size, base = self.dimensions.head_size, self.dimensions.rope_base
        frequencies = base ** (-np.arange(0, size, 2, dtype=np.float64) / size) / self.dimensions.rope_scale
        if "rope_freqs.weight" in self.tensors:  # Llama 3: one divisor per frequency
            frequencies = frequencies / self.vector("rope_freqs.weight")
        return frequencies


def open_gguf(path: Path) -> GgufSource:
    """Map the file and check that everything the graph needs is there, with the right shape.

    Raises ModelNotFoundError, FileAccessError (no permission), or ModelFormatError (truncated, corrupt, unsupported).
    """
    reader = _read(path)
    metadata = _Metadata(path, reader.fields)
    dimensions = metadata.dimensions()
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    _check_tensors(path, tensors, dimensions.shapes())
    return GgufSource(path, dimensions, metadata.tokens(), tensors)


def _read(path: Path) -> Any:
    try:
        if not path.is_file():
            raise ModelNotFoundError(f"model {path} is not there; give the path of a GGUF file")
        return gguf.GGUFReader(path)
    except OSError as error:
        raise FileAccessError(f"model {path} cannot be read: {error.strerror}; check its permissions") from error
    except _PARSE_ERRORS as error:
        raise ModelFormatError(f"model {path} is not a whole GGUF file ({error}); download it again") from error


@dataclass(frozen=True, slots=True)
class _Metadata:
    path: Path
    fields: abc.Mapping[str, Any]

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        field = self.fields.get(key)
        if field is None and default is not None:
            return default
        value = None if field is None else _scalar(field)
        if isinstance(value, int) and kind is float:
            value = float(value)
        if not isinstance(value, kind):
            raise ModelFormatError(f"model {self.path}: {key} is {value!r}; expected {kind.__name__}, use another GGUF")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(f"llama.{key}", int, default)
        if value < 1:
            raise ModelFormatError(f"model {self.path}: llama.{key} is {value}; expected 1 or more, use another GGUF")
        return value

    def dimensions(self) -> Dimensions:
        self.check_supported()
        num_heads = self.size("attention.head_count")
        return Dimensions(
            num_layers=self.size("block_count"),
            width=self.size("embedding_length"),
            num_heads=num_heads,
            num_kv_heads=self.size("attention.head_count_kv", num_heads),
            head_size=self.head_size(),
            num_hidden=self.size("feed_forward_length"),
            num_vocab=len(self.array("tokenizer.ggml.tokens")),
            num_ctx=self.size("context_length"),
            norm_epsilon=self.positive("attention.layer_norm_rms_epsilon"),
            rope_base=self.positive("rope.freq_base", 10000.0),
            rope_scale=self.rope_scale(),
        )

    def check_supported(self) -> None:
        architecture = self.get("general.architecture", str)
        if architecture not in SUPPORTED_ARCHITECTURES:
            self.refuse("architecture", architecture, SUPPORTED_ARCHITECTURES)
        scaling = self.get("llama.rope.scaling.type", str, "linear")
        if scaling not in SUPPORTED_ROPE_SCALING:
            self.refuse("rope scaling", scaling, SUPPORTED_ROPE_SCALING)
        self.check_heads()

    def head_size(self) -> int:
        return self.size("attention.key_length", self.size("embedding_length") // self.size("attention.head_count"))

    def check_heads(self) -> None:
        """ONNX Runtime's GroupQueryAttention rotates whole heads of a multiple of 16 and shares key heads evenly."""
        head_size, num_heads = self.head_size(), self.size("attention.head_count")
        num_kv_heads = self.size("attention.head_count_kv", num_heads)
        if head_size % 16:
            self.refuse("head size", head_size, ("multiples of 16",))
        if num_heads % num_kv_heads:
            self.refuse("number of key heads", num_kv_heads, (f"divisors of its {num_heads} heads",))
        for key in ("attention.value_length", "rope.dimension_count"):
            if (value := self.size(key, head_size)) != head_size:
                self.refuse(f"llama.{key}", value, (head_size,))

    def refuse(self, what: str, got: object, allowed: abc.Sequence[object]) -> None:
        names = ", ".join(map(str, allowed))
        raise ModelFormatError(f"model {self.path} has {what} {got}; supported: {names}; use another GGUF")

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(f"llama.{key}", float, default)
        if not (0.0 < value < math.inf):
            raise ModelFormatError(f"model {self.path}: llama.{key} is {value}; expected above 0, use another GGUF")
        return value

    def rope_scale(self) -> float:
        """How llama.cpp reads it: ``none`` ignores the factor, 0 means 1, and an older key is the fallback."""
        if self.get("llama.rope.scaling.type", str, "linear") == "none":
            return 1.0
        older = self.get("llama.rope.scale_linear", float, 1.0)
        return self.get("llama.rope.scaling.factor", float, older) or 1.0

    def array(self, key: str) -> list[int]:
        """Where the parts of an array field are."""
        field = self.fields.get(key)
        if field is None or not field.data:
            raise ModelFormatError(f"model {self.path} has no {key}; expected a vocabulary, use another GGUF")
        return list(field.data)

    def tokens(self) -> tuple[str, ...]:
        """The vocabulary as the file spells it; bytes that are no UTF-8 become lone surrogates."""
        parts = self.fields["tokenizer.ggml.tokens"].parts
        texts = (bytes(parts[i]) for i in self.array("tokenizer.ggml.tokens"))
        return tuple(text.decode("utf-8", errors="surrogateescape") for text in texts)


def _scalar(field: Any) -> int | float | str | None:
    """The value of a field that holds one; None for an array."""
    kind, part = field.types[0], field.parts[field.data[0]]
    if kind == gguf.GGUFValueType.ARRAY:
        return None
    if kind == gguf.GGUFValueType.STRING:
        return bytes(part).decode("utf-8", errors="replace")
    value: int | float = part[0].item()
    return value


def _decode(raw: NDArray[Any], kind: Any) -> Floats:
    try:
        values = np.array(gguf.dequantize(np.ascontiguousarray(raw), kind), dtype=np.float32)
    except NotImplementedError as error:
        raise ModelFormatError(f"weights of type {kind.name} cannot be read; use a GGUF of another type") from error
    if not np.isfinite(values).all():
        raise ModelFormatError("the source's weights are not all finite numbers; download the model again")
    return values


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _check_tensors(path: Path, tensors: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if name not in tensors:
            if name in ("output.weight", "rope_freqs.weight"):
                continue
            raise ModelFormatError(f"model {path} has no tensor {name}; the file is incomplete, download it again")
        if _shape(tensors[name]) != shape:
            got = _shape(tensors[name])
            raise ModelFormatError(f"model {path}: tensor {name} is {got}; expected {shape}, use another GGUF")
    if unknown := sorted(tensors.keys() - shapes.keys()):  # a bias or an expert: leaving it out would be another model
        raise ModelFormatError(f"model {path} has a tensor {unknown[0]}, which is not supported; use another GGUF")
