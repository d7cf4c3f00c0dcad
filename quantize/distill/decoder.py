"""A decoder in torch, made from any Source: a teacher with all its layers, or a student with a few of them.

It computes what the graph of ``quantize.onnx_builder`` computes, from the same description of the architectures.
"""

from __future__ import annotations

import collections.abc as abc
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from edgespec.errors import ParameterError
from quantize.architecture import Architecture
from quantize.distill.attention import Sight, attend, attend_cached
from quantize.distill.cache import Cache, Places
from quantize.distill.rounding import BITS, rounded
from quantize.source import Dimensions, Matrix, Source

Ids = NDArray[np.int64]

_ELEMENTS_AT_ONCE = 1 << 22


class Decoder(nn.Module):
    """Token ids in, hidden states out, and logits of hidden states.

    architecture, dimensions  as a Source has them; of the layers that are here, numbered from 0
    layers                    trained, as are ``output_norm`` and ``head``
    embedding                 (num_vocab, width), never trained and not in the state_dict: the source has it
    head                      (num_head, width), or None where the output head is the embedding

    Query and key rows pair the halves of a head for rotation, whatever the source does. Matrices have the dtype that
    was asked for (autocast may use them in its own); vectors, the residual stream and the norms are float32. Parameters
    want gradients: run a teacher under ``torch.inference_mode()``.
    """

    embedding: Tensor

    def __init__(
        self,
        architecture: Architecture,
        dimensions: Dimensions,
        embedding: Tensor,
        layers: abc.Iterable[Layer],
        output_norm: Tensor,
        head: Tensor | None,
    ) -> None:
        super().__init__()
        self.architecture, self.dimensions = architecture, dimensions
        self.register_buffer("embedding", embedding, persistent=False)
        self.layers = nn.ModuleList(layers)
        self.output_norm = nn.Parameter(output_norm)
        self.head = None if head is None else nn.Parameter(head)

    @classmethod
    def of(
        cls,
        source: Source,
        layers: abc.Sequence[int] | None = None,
        *,
        head: Ids | None = None,
        embedding_bits: int | None = None,
        block_size: int = 32,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Decoder:
        """
        layers  which of the source's, in order; all by default
        head    ascending token ids: the output head is a matrix of its own that begins as their rows; None: the whole
                vocabulary, tied where the source ties
        embedding_bits, block_size  4: the embedding is rounded as ``build_draft_of`` will; None: as the source has it
        dtype   of the matrices

        Raises ParameterError for layers or ids that the source does not have, and what reading it raises.
        """
        d = source.dimensions
        kept = tuple(range(d.num_layers) if layers is None else layers)
        _check(d, kept, head)
        if embedding_bits not in (None, BITS):
            raise ParameterError(f"embedding_bits: got {embedding_bits}; allowed: {BITS}, or none")
        block_size = 0 if embedding_bits is None else block_size
        output = source.matrix("token_embd.weight" if source.tied else "output.weight")
        is_tied = source.tied and head is None
        decoder = cls(
            source.architecture,
            kept_dimensions(d, kept),
            _matrix(source.matrix("token_embd.weight"), dtype, block_size),
            [Layer.of(source, layer, dtype) for layer in kept],
            torch.from_numpy(source.vector("output_norm.weight")),
            None if is_tied else _matrix(output if head is None else output.take(head), dtype),
        )
        return decoder.to(device)

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrices."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def forward(
        self, tokens: Tensor, cache: Cache | None = None, counts: Tensor | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the output norm, (batch, length, width) in ``dtype``, of tokens (batch, length) int64.

        cache   tokens follow what it holds of their row and are appended; without one they are whole texts
        counts  (batch,) how many tokens of each row count; those after them are padding, which the cache does not keep
                and whose hidden states mean nothing. Without a cache it is not needed: padding after a text changes
                nothing in it
        rows    (batch,) the cache's rows that these are, each once; all by default

        Raises ValueError when the cache has no room. One thread at a time.
        """
        length = tokens.shape[1]
        places = None if cache is None else cache.places(length, counts, rows)
        kinds = {i in self.dimensions.window_layers for i in range(self.dimensions.num_layers)}
        like = torch.empty(0, dtype=_compute_dtype(self.embedding), device=self.device)
        sights = {kind: Sight.of(self.dimensions, kind, length, places, like) for kind in kinds}
        x = functional.embedding(tokens, self.embedding).float()
        if self.architecture.scales_embedding:
            x = x * self.dimensions.width**0.5
        for number, layer in enumerate(self.layers):
            x = layer(x, number, sights[number in self.dimensions.window_layers], cache, places)
        if cache is not None and places is not None:
            cache.commit(places)
        return _norm(x, self.output_norm, self.dimensions.norm_epsilon).to(self.dtype)

    def layer(self, number: int) -> Layer:
        layer = self.layers[number]
        assert isinstance(layer, Layer)
        return layer

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., num_head), or of the whole vocabulary, of hidden states (..., width)."""
        return functional.linear(hidden, self.embedding if self.head is None else self.head)


def kept_dimensions(dimensions: Dimensions, layers: abc.Sequence[int]) -> Dimensions:
    """Those of a model that has only these layers, numbered from 0."""
    windows = frozenset(place for place, layer in enumerate(layers) if layer in dimensions.window_layers)
    return replace(dimensions, num_layers=len(layers), window_layers=windows)


def _check(dimensions: Dimensions, layers: abc.Sequence[int], head: Ids | None) -> None:
    known = range(dimensions.num_layers)
    if not layers or len(set(layers)) < len(layers) or not set(layers) <= set(known):
        raise ParameterError(f"layers: got {list(layers)}; allowed: one or more of 0 to {known[-1]}, each once")
    if head is not None and (not head.size or head[0] < 0 or head[-1] >= dimensions.num_vocab):
        raise ParameterError(f"head: got {head.size} ids; allowed: one or more of 0 to {dimensions.num_vocab - 1}")
    if head is not None and (np.diff(head) <= 0).any():
        raise ParameterError("head: got ids in no order, or twice; allowed: ascending ones; sort them")


# --------------------------------------------------------------------------------------------------------------- layer


class Layer(nn.Module):
    """One layer; what its architecture does not have is None. Matrices that read the same input are one: attn_qkv
    (queries + 2 keys, width) and ffn_gate_up (2 num_hidden, width)."""

    def __init__(self, architecture: Architecture, dimensions: Dimensions, values: abc.Mapping[str, Tensor]) -> None:
        super().__init__()
        self.architecture, self.dimensions = architecture, dimensions
        self.attn_norm, self.ffn_norm = (nn.Parameter(values[name]) for name in ("attn_norm", "ffn_norm"))
        self.attn_qkv, self.attn_output = (nn.Parameter(values[name]) for name in ("attn_qkv", "attn_output"))
        self.ffn_gate_up, self.ffn_down = (nn.Parameter(values[name]) for name in ("ffn_gate_up", "ffn_down"))
        own = ("attn_qkv_bias", "attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm")
        for name in own:
            self.register_parameter(name, nn.Parameter(values[name]) if name in values else None)

    attn_qkv_bias: nn.Parameter | None
    attn_q_norm: nn.Parameter | None
    attn_k_norm: nn.Parameter | None
    post_attention_norm: nn.Parameter | None
    post_ffw_norm: nn.Parameter | None

    @classmethod
    def of(cls, source: Source, number: int, dtype: torch.dtype) -> Layer:
        d, prefix, has = source.dimensions, f"blk.{number}.", source.architecture.has

        def heads(values: Tensor) -> Tensor:
            return _halves(values, d.head_size) if source.pairs_neighbours else values

        def matrix(name: str) -> Tensor:
            return _matrix(source.matrix(f"{prefix}{name}.weight"), dtype)

        def vector(name: str) -> Tensor:
            return torch.from_numpy(source.vector(f"{prefix}{name}"))

        values = {name: matrix(name) for name in ("attn_output", "ffn_down")}
        values["attn_qkv"] = torch.cat([heads(matrix("attn_q")), heads(matrix("attn_k")), matrix("attn_v")])
        values["ffn_gate_up"] = torch.cat([matrix("ffn_gate"), matrix("ffn_up")])
        norms = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
        values |= {name: vector(f"{name}.weight") for name in norms if has(f"{name}.weight")}
        if has("attn_q_norm.weight"):
            values |= {name: heads(vector(f"{name}.weight")) for name in ("attn_q_norm", "attn_k_norm")}
        if has("attn_q.bias"):
            biases = [heads(vector("attn_q.bias")), heads(vector("attn_k.bias")), vector("attn_v.bias")]
            values["attn_qkv_bias"] = torch.cat(biases)
        return cls(source.architecture, d, values)

    def tensors(self) -> dict[str, Tensor]:
        """By their GGUF names, without "blk.N."."""
        d = self.dimensions
        found: dict[str, Tensor] = {"attn_output.weight": self.attn_output, "ffn_down.weight": self.ffn_down}
        sizes, parts = [d.queries, d.keys, d.keys], ("attn_q", "attn_k", "attn_v")
        found |= dict(zip((f"{part}.weight" for part in parts), torch.split(self.attn_qkv, sizes), strict=True))
        if self.attn_qkv_bias is not None:
            found |= dict(zip((f"{part}.bias" for part in parts), torch.split(self.attn_qkv_bias, sizes), strict=True))
        found |= dict(zip(("ffn_gate.weight", "ffn_up.weight"), torch.chunk(self.ffn_gate_up, 2), strict=True))
        names = (tensor.name for tensor in self.architecture.layer if tensor.name.endswith("norm.weight"))
        return found | {name: getattr(self, name.removesuffix(".weight")) for name in names}

    def forward(self, x: Tensor, number: int, sight: Sight, cache: Cache | None, places: Places | None) -> Tensor:
        """The residual stream, (batch, length, width) float32, after this layer, which is the cache's ``number``."""
        mixed = self.attention(self.norm(x, self.attn_norm), number, sight, cache, places)
        x = x + self.norm(mixed, self.post_attention_norm)
        return x + self.norm(self.feed_forward(self.norm(x, self.ffn_norm)), self.post_ffw_norm)

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else _norm(x, weight, self.dimensions.norm_epsilon)

    def attention(self, x: Tensor, number: int, sight: Sight, cache: Cache | None, places: Places | None) -> Tensor:
        queries, keys, values = self.queries_keys_values(x, sight)
        scale = self.dimensions.attention_scale
        if cache is not None and places is not None:
            cache.append(number, keys, values, places)
            if sight.mask is not None:
                mixed = attend_cached(queries, *cache.read(number, places), sight.mask, scale)
                return _linear(mixed, self.attn_output)
        return _linear(attend(queries, keys, values, sight.window, scale), self.attn_output)

    def queries_keys_values(self, x: Tensor, sight: Sight) -> tuple[Tensor, Tensor, Tensor]:
        """Each (batch, length, heads, head size), rotated."""
        d = self.dimensions
        heads = _linear(x, self.attn_qkv, self.attn_qkv_bias).view(*x.shape[:2], -1, d.head_size)
        if self.attn_q_norm is None:
            turned, values = torch.split(heads, [d.num_heads + d.num_kv_heads, d.num_kv_heads], dim=2)
            queries, keys = torch.split(sight.rotate(turned), [d.num_heads, d.num_kv_heads], dim=2)
            return queries, keys, values
        queries, keys, values = torch.split(heads, [d.num_heads, d.num_kv_heads, d.num_kv_heads], dim=2)
        queries, keys = self.norm(queries, self.attn_q_norm), self.norm(keys, self.attn_k_norm)
        return sight.rotate(queries.to(heads.dtype)), sight.rotate(keys.to(heads.dtype)), values

    def feed_forward(self, x: Tensor) -> Tensor:
        gate, up = _linear(x, self.ffn_gate_up).chunk(2, dim=-1)
        if self.architecture.activation == "gelu_tanh":
            return _linear(functional.gelu(gate, approximate="tanh") * up, self.ffn_down)
        return _linear(functional.silu(gate) * up, self.ffn_down)


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """In float32. Zhang and Sennrich, arXiv 1910.07467."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    dtype = _compute_dtype(weight)
    return functional.linear(x.to(dtype), weight, None if bias is None else bias.to(dtype))


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """What products with it are computed in."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


# ------------------------------------------------------------------------------------------------------------- reading


def _matrix(matrix: Matrix, dtype: torch.dtype, block_size: int = 0) -> Tensor:
    """Read a few rows at a time: float32 of a whole one may be more than there is memory for. Rounded to 4 bits in
    blocks, unless those have no size."""
    whole = torch.empty(matrix.shape, dtype=dtype)
    step = max(1, _ELEMENTS_AT_ONCE // matrix.shape[1])
    for start in range(0, matrix.shape[0], step):
        stop = min(start + step, matrix.shape[0])
        rows = torch.from_numpy(matrix.read(start, stop))
        whole[start:stop] = rounded(rows, block_size) if block_size else rows
    return whole


def _halves(values: Tensor, head_size: int) -> Tensor:
    """Rows of heads (or one vector's values) whose rotated pairs are neighbours, so ordered that each pair's two are in
    the two halves of their head."""
    pairs = values.reshape(-1, head_size // 2, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
