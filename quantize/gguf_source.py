"""A GGUF as a Source: its dimensions, its vocabulary, and its weights as float32, a few rows at a time.

Metadata keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, read as llama.cpp reads them.
"""

from __future__ import annotations

import collections.abc as abc
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.devices.gguf_sizes import MAX_LAYERS, MAX_SIZE
from edgespec.errors import FileAccessError, ModelFormatError
from quantize.architecture import ARCHITECTURES, GEMMA3, LLAMA, Architecture
from quantize.gguf_header import Header, TensorPlace, read_header
from quantize.rope import Rope, divided_rope, linear_rope, plain_rope, yarn_rope
from quantize.source import Dimensions, Floats, check_heads, file_sha256, tensors

SUPPORTED_ROPE_SCALING = ("none", "linear", "yarn")

# Llama 3's divisors, one for each rotated pair; llama.cpp reads them for one architecture.
_ROPE_DIVISORS = "rope_freqs.weight"

# llama.cpp knows Gemma 3 27B, whose attention scale differs, by its number of layers.
_NUM_LAYERS_27B = 62

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GgufMatrix:
    """A Matrix; ``rows`` are those it has of the file's, None for all."""

    path: Path
    place: TensorPlace
    rows: NDArray[np.int64] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        num_rows = self.place.num_rows if self.rows is None else len(self.rows)
        return num_rows, self.place.shape[-1]

    def read(self, start: int, stop: int) -> Floats:
        """Mapped for this call only: pages of a file that stay mapped count as memory in use."""
        chosen = slice(start, stop) if self.rows is None else self.rows[start:stop]
        shape = (self.place.num_rows, self.place.row_bytes)
        try:
            mapped = np.memmap(self.path, np.uint8, "r", self.place.offset, shape)
        except (OSError, ValueError) as error:  # it was whole when its header was read
            raise FileAccessError(f"model {self.path} changed while it was read; try again") from error
        return _decode(np.array(mapped[chosen]), self.place.kind)

    def take(self, rows: NDArray[np.int64]) -> GgufMatrix:
        return replace(self, rows=rows if self.rows is None else self.rows[rows])


@dataclass(frozen=True, slots=True)
class GgufSource:
    """One opened file; see quantize.source.Source."""

    path: Path
    architecture: Architecture
    dimensions: Dimensions
    tokens: tuple[str, ...]
    places: dict[str, TensorPlace]

    @property
    def tied(self) -> bool:
        return "output.weight" not in self.places

    @property
    def pairs_neighbours(self) -> bool:
        return self.architecture.pairs_neighbours

    def matrix(self, name: str) -> GgufMatrix:
        return GgufMatrix(self.path, self.places[name])

    def vector(self, name: str) -> Floats:
        return _vector(self.path, self.places[name])

    def sha256(self) -> str:
        return file_sha256(self.path)


def open_gguf(path: Path) -> GgufSource:
    """Read the header and check that everything the graph needs is there, with the right shape, and nothing else.

    Raises ModelNotFoundError, FileAccessError (no permission), or ModelFormatError (truncated, corrupt, unsupported).
    """
    header = read_header(path)
    count = header.fields.get("split.count", 1)
    if isinstance(count, int) and count > 1:
        raise ModelFormatError(f"model {path} is one of several files; join them with llama.cpp's llama-gguf-split")
    metadata = _Metadata(path, _architecture(path, header), header.fields)
    divisors = None
    if _ROPE_DIVISORS in header.tensors and metadata.architecture is LLAMA:
        divisors = metadata.divisors(header.tensors.pop(_ROPE_DIVISORS))
    tokens = header.tokens(path)
    dimensions = metadata.dimensions(len(tokens), divisors)
    _check_tensors(path, header.tensors, metadata.architecture, dimensions)
    return GgufSource(path, metadata.architecture, dimensions, tokens, header.tensors)


def _architecture(path: Path, header: Header) -> Architecture:
    name = _Metadata(path, LLAMA, header.fields).value("general.architecture", str)
    if name not in ARCHITECTURES:
        raise _refusal(path, "architecture", name, tuple(ARCHITECTURES))
    return ARCHITECTURES[name]


def _refusal(path: Path, what: str, got: object, allowed: abc.Iterable[object]) -> ModelFormatError:
    names = ", ".join(map(str, allowed))
    return ModelFormatError(f"model {path} has {what} {got}; supported: {names}; use another GGUF")


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Checked access to a header's fields; ``get`` and what is built on it prefix keys with the architecture."""

    path: Path
    architecture: Architecture
    fields: abc.Mapping[str, Any]

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self.fields.get(key, default)
        if isinstance(value, bytes):
            value = value.decode("utf-8", errors="replace")
        if isinstance(value, int) and kind is float:
            value = float(value)
        if not isinstance(value, kind):
            got = f"a list of {len(value)}" if isinstance(value, (list, np.ndarray)) else repr(value)
            raise ModelFormatError(f"model {self.path}: {key} is {got}; expected {kind.__name__}, use another GGUF")
        return value

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        return self.value(f"{self.architecture.name}.{key}", kind, default)

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        if not 1 <= (value := self.get(key, int, default)) <= most:
            raise self.wrong(key, value, f"1 to {most}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key, float, default)
        if not (0.0 < value < math.inf):
            raise self.wrong(key, value, "above 0")
        return value

    def wrong(self, key: str, value: object, expected: str) -> ModelFormatError:
        key = f"{self.architecture.name}.{key}"
        return ModelFormatError(f"model {self.path}: {key} is {value}; expected {expected}, use another GGUF")

    # -------------------------------------------------------------------------------------------------- dimensions

    def dimensions(self, num_vocab: int, divisors: Floats | None) -> Dimensions:
        self.check_supported()
        num_heads, num_layers = self.size("attention.head_count"), self.size("block_count", most=MAX_LAYERS)
        window_layers = self.window_layers(num_layers)
        return Dimensions(
            num_layers=num_layers,
            width=self.size("embedding_length"),
            num_heads=num_heads,
            num_kv_heads=self.size("attention.head_count_kv", num_heads),
            head_size=self.head_size(),
            num_hidden=self.size("feed_forward_length"),
            num_vocab=num_vocab,
            num_ctx=self.size("context_length"),
            norm_epsilon=self.positive("attention.layer_norm_rms_epsilon"),
            attention_scale=self.attention_scale(),
            rope=self.rope(divisors),
            window=self.get("attention.sliding_window", int) if window_layers else 0,
            window_rope=self.window_rope() if window_layers else None,
            window_layers=window_layers,
        )

    def check_supported(self) -> None:
        scaling = self.get("rope.scaling.type", str, "linear")
        if scaling not in SUPPORTED_ROPE_SCALING:
            raise _refusal(self.path, "rope scaling", scaling, SUPPORTED_ROPE_SCALING)
        if (cap := self.get("final_logit_softcapping", float, 0.0)) != 0.0:
            raise self.wrong("final_logit_softcapping", cap, "none")
        if not self.get("attention.causal", bool, True):
            raise self.wrong("attention.causal", "false", "true")
        self.check_heads()

    def head_size(self) -> int:
        return self.size("attention.key_length", self.size("embedding_length") // self.size("attention.head_count"))

    def check_heads(self) -> None:
        """All alike, and such as the graph can do."""
        head_size, num_heads = self.head_size(), self.size("attention.head_count")
        check_heads(f"model {self.path}", num_heads, self.size("attention.head_count_kv", num_heads), head_size)
        windowed = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
        for key in ("attention.value_length", "rope.dimension_count", *windowed):
            if (value := self.size(key, head_size)) != head_size:
                raise _refusal(self.path, f"{self.architecture.name}.{key}", value, (head_size,))

    def attention_scale(self) -> float:
        if self.architecture is GEMMA3 and self.size("block_count") == _NUM_LAYERS_27B:
            return float((self.size("embedding_length") // self.size("attention.head_count")) ** -0.5)
        return float(self.head_size() ** -0.5)

    def window_layers(self, num_layers: int) -> frozenset[int]:
        """The file may say which, by a list or a period; the architecture says it otherwise."""
        period, key = self.architecture.window_pattern, "attention.sliding_window_pattern"
        if not period or self.get("attention.sliding_window", int, 0) <= 0:
            return frozenset()
        stated = self.fields.get(f"{self.architecture.name}.{key}")
        if isinstance(stated, np.ndarray):
            if len(stated) != num_layers:
                raise self.wrong(key, f"a list of {len(stated)}", f"one value for each of {num_layers} layers")
            return frozenset(np.flatnonzero(stated).tolist())
        if (period := self.get(key, int, period)) < 0:
            raise self.wrong(key, period, "0 or more")
        return frozenset(i for i in range(num_layers) if period == 0 or i % period != period - 1)

    # -------------------------------------------------------------------------------------------------------- rope

    def rope(self, divisors: Floats | None) -> Rope:
        """llama.cpp multiplies vectors by rope.scaling.attn_factor under any scaling, and uses YaRN's own betas."""
        size, base, factor = self.head_size(), self.positive("rope.freq_base", 10000.0), self.rope_factor()
        scaling = self.get("rope.scaling.type", str, "linear")
        if scaling == "yarn":
            self.check_yarn(base, factor)
            original = self.size("rope.scaling.original_context_length", self.size("context_length"))
            rope = yarn_rope(size, base, factor, original)
        else:  # "none" ignores the factor
            rope = plain_rope(size, base) if scaling == "none" else linear_rope(size, base, factor)
        if divisors is not None:
            rope = divided_rope(rope, divisors)
        return Rope(rope.frequencies, rope.magnitude * self.attn_factor())

    def check_yarn(self, base: float, factor: float) -> None:
        """Pairs that all turn alike have no ramp; a context that shrinks would lengthen a window's vectors, too."""
        if base <= 1.0:
            raise self.wrong("rope.freq_base", base, "above 1 with YaRN")
        if factor < 1.0:
            raise self.wrong("rope.scaling.factor", factor, "1 or more with YaRN")

    def window_rope(self) -> Rope:
        """Its base is another, and it is never scaled."""
        rope = plain_rope(self.head_size(), self.positive("rope.freq_base_swa", 10000.0))
        return Rope(rope.frequencies, self.attn_factor())

    def rope_factor(self) -> float:
        """0 means 1, and an older key is the fallback."""
        older = self.get("rope.scale_linear", float, 0.0)
        if self.get("rope.scaling.factor", float, older) == 0.0:
            return 1.0
        return self.positive("rope.scaling.factor", older)

    def attn_factor(self) -> float:
        return self.positive("rope.scaling.attn_factor", 1.0)

    def divisors(self, place: TensorPlace) -> Floats:
        expected = (self.head_size() // 2,)
        if place.shape != expected:
            raise _misshapen(self.path, _ROPE_DIVISORS, place.shape, expected)
        values = _vector(self.path, place)
        if not (values > 0.0).all():
            raise ModelFormatError(f"model {self.path}: {_ROPE_DIVISORS} has values of 0 or less; use another GGUF")
        return values


def _vector(path: Path, place: TensorPlace) -> Floats:
    return GgufMatrix(path, place).read(0, 1).reshape(place.shape)


def _decode(raw: NDArray[np.uint8], kind: gguf.GGMLQuantizationType) -> Floats:
    try:
        values = np.asarray(gguf.dequantize(raw, kind), dtype=np.float32)
    except NotImplementedError as error:
        raise ModelFormatError(f"weights of type {kind.name} cannot be read; use a GGUF of another type") from error
    if not np.isfinite(values).all():
        raise ModelFormatError("the source's weights are not all finite numbers; download the model again")
    return values


def _misshapen(path: Path, name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> ModelFormatError:
    return ModelFormatError(f"model {path}: tensor {name} is {got}; expected {expected}, use another GGUF")


def _check_tensors(
    path: Path, places: abc.Mapping[str, TensorPlace], architecture: Architecture, dimensions: Dimensions
) -> None:
    known = tensors(architecture, dimensions.num_layers)
    for name, (_, tensor) in known.items():
        if name not in places:
            if tensor.optional:
                continue
            raise ModelFormatError(f"model {path} has no tensor {name}; the file is incomplete, download it again")
        if (got := places[name].shape) != (expected := dimensions.shape(tensor)):
            raise _misshapen(path, name, got, expected)
    if unknown := sorted(places.keys() - known.keys()):  # a bias or an expert: leaving it out would be another model
        raise ModelFormatError(f"model {path} has a tensor {unknown[0]}, which is not supported; use another GGUF")
