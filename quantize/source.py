"""What the ONNX builder needs of a model, whatever file format it comes in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import FileAccessError, ModelFormatError
from quantize.architecture import GLOBAL, Architecture, Tensor
from quantize.extras import require
from quantize.rope import Rope

Floats = NDArray[np.float32]

MAX_HEAD_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The sizes of a decoder.

    attention_scale  what query-key products are multiplied by
    rope             rotation of the layers that see the whole context
    window           tokens a sliding-window layer sees, itself included; 0 where there is none
    window_rope      rotation of those layers
    window_layers    which layers they are
    """

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_hidden: int
    num_vocab: int
    num_ctx: int
    norm_epsilon: float
    attention_scale: float
    rope: Rope
    window: int = 0
    window_rope: Rope | None = None
    window_layers: frozenset[int] = frozenset()

    @property
    def queries(self) -> int:
        return self.num_heads * self.head_size

    @property
    def keys(self) -> int:
        return self.num_kv_heads * self.head_size

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(int(getattr(self, size)) for size in tensor.shape)


class Matrix(Protocol):
    """A weight matrix (out, in) that stays on disk, as it is stored, until rows of it are asked for."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def read(self, start: int, stop: int) -> Floats:
        """Rows start to stop as a new float32 array (rows, in). Raises ModelFormatError unless all are finite."""
        ...

    def take(self, rows: NDArray[np.int64]) -> Matrix:
        """The given rows, in that order."""
        ...


class Source(Protocol):
    """An opened model. Tensors go by their GGUF names. Nothing is written to; one thread at a time.

    path            the GGUF, or the checkpoint's folder
    tokens          raw vocabulary texts by id, num_vocab of them; "" or a padding name where an id has no text
    tied            whether the output head is the embedding table
    pairs_neighbours  how query and key rows are laid out for rotation: neighbours, or halves of a head
    """

    @property
    def path(self) -> Path: ...
    @property
    def architecture(self) -> Architecture: ...
    @property
    def dimensions(self) -> Dimensions: ...
    @property
    def tokens(self) -> tuple[str, ...]: ...
    @property
    def tied(self) -> bool: ...
    @property
    def pairs_neighbours(self) -> bool: ...

    def matrix(self, name: str) -> Matrix: ...

    def vector(self, name: str) -> Floats: ...

    def sha256(self) -> str:
        """Of the file; of a folder's weight files and config.json, names included, in the order of their names."""
        ...


def tensors(architecture: Architecture, num_layers: int) -> dict[str, tuple[str, Tensor]]:
    """Every tensor of a model: its GGUF name -> (its checkpoint name, its description)."""
    found: dict[str, tuple[str, Tensor]] = {tensor.name: (tensor.checkpoint_name, tensor) for tensor in GLOBAL}
    for i in range(num_layers):
        for tensor in architecture.layer:
            found[f"blk.{i}.{tensor.name}"] = (f"model.layers.{i}.{tensor.checkpoint_name}", tensor)
    return found


def check_heads(model: str, num_heads: int, num_kv_heads: int, head_size: int) -> None:
    """Raise ModelFormatError unless ONNX Runtime's GroupQueryAttention can do them: it rotates whole heads of a
    multiple of 16, and shares key heads evenly. ``model`` begins the message."""
    if head_size % 16 or head_size > MAX_HEAD_SIZE:
        raise ModelFormatError(
            f"{model} has head size {head_size}; supported: multiples of 16 up to {MAX_HEAD_SIZE}; use another model"
        )
    if num_heads % num_kv_heads:
        raise ModelFormatError(
            f"{model} has number of key heads {num_kv_heads}; supported: divisors of its {num_heads} heads; "
            "use another model"
        )


def file_sha256(path: Path) -> str:
    """Raises FileAccessError."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise FileAccessError(f"{path} cannot be read: {error.strerror or error}; check its permissions") from error
    return digest.hexdigest()


def open_source(path: Path) -> Source:
    """The Source of a GGUF file, or of a folder with config.json and safetensors.

    Raises ModelNotFoundError, FileAccessError, ModelFormatError (truncated, corrupt, unsupported), or
    MissingDependencyError.
    """
    if path.is_dir():
        from quantize.safetensors_source import open_checkpoint

        return open_checkpoint(path)
    require("gguf")
    from quantize.gguf_source import open_gguf

    return open_gguf(path)
