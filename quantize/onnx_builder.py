"""Builds the ONNX graph of a draft model from a source of any supported architecture.

Opset 17 with ONNX Runtime's com.microsoft operators, IR version 8: the graph uses nothing newer. Inputs and outputs are
in README.md. Operators: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgespec.errors import ParameterError
from quantize.rope import Rope
from quantize.source import Dimensions, Matrix, Source
from quantize.weights_file import BlockMatrix, WeightsFile, slices

OPSET, IR_VERSION = 17, 8
FULL_PRECISION = 32
ALLOWED_BITS = (4, 8, FULL_PRECISION)
ALLOWED_BLOCK_SIZES = (16, 32, 64, 128)

# Some sources claim a million; a draft model's rotation tables and caches should not.
MAX_CTX = 131072

# Activations are rounded to 8 bits per block inside MatMulNBits; with integer dot products that is the fast path.
_INT8_ACTIVATIONS = 4

_ROTATION_ROWS = 4096  # positions at a time, while making rotation tables

_MICROSOFT_OPERATORS = (
    "FastGelu",
    "GatherBlockQuantized",
    "GroupQueryAttention",
    "MatMulNBits",
    "SkipSimplifiedLayerNormalization",
)

Attributes = abc.Mapping[str, int | float | list[int]]
NONE: Attributes = {}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to make of a source: the weights' width, the layers to keep in order, the verifier ids the head speaks.

    ``head`` None keeps the whole vocabulary; otherwise its ids are ascending and unique. ``embedding_bits`` None: as
    the other weights.
    """

    bits: int
    block_size: int
    layers: tuple[int, ...]
    head: NDArray[np.int64] | None = None
    embedding_bits: int | None = None

    @property
    def table_bits(self) -> int:
        """Of the embedding."""
        return self.bits if self.embedding_bits is None else self.embedding_bits


def num_ctx(dimensions: Dimensions) -> int:
    """Most tokens the draft model can hold."""
    return min(dimensions.num_ctx, MAX_CTX)


def check_recipe(recipe: Recipe, dimensions: Dimensions) -> None:
    """Raises ParameterError unless the source can be made into that."""
    _check_choice("bits", recipe.bits, ALLOWED_BITS)
    _check_choice("embedding_bits", recipe.table_bits, ALLOWED_BITS)
    if not recipe.bits == recipe.table_bits == FULL_PRECISION:
        _check_choice("block_size", recipe.block_size, ALLOWED_BLOCK_SIZES)
    layers, known = recipe.layers, range(dimensions.num_layers)
    if not layers or len(set(layers)) < len(layers) or not set(layers) <= set(known):
        raise ParameterError(f"layers: got {list(layers)}; allowed: one or more of 0 to {known[-1]}, each once")
    head = recipe.head
    if head is not None and (not head.size or head[0] < 0 or head[-1] >= dimensions.num_vocab):
        raise ParameterError(f"head: got {head.size} ids; allowed: one or more of 0 to {dimensions.num_vocab - 1}")


def _check_choice(name: str, got: int, allowed: abc.Sequence[int]) -> None:
    if got not in allowed:
        raise ParameterError(f"{name}: got {got}; allowed: {', '.join(map(str, allowed))}")


def build_model(
    source: Source, recipe: Recipe, weights: WeightsFile, progress: abc.Callable[[float], None]
) -> onnx.ModelProto:
    """The model, its weights appended to ``weights``. ``progress`` is told the finished fraction of the work."""
    graph = _Graph(source, recipe, weights)
    num_steps = len(recipe.layers) + 2
    x = graph.embedding()
    progress(1 / num_steps)
    residual = ""
    for place, layer in enumerate(recipe.layers):
        x, residual = graph.layer(x, residual, place, layer)
        progress((place + 2) / num_steps)
    graph.head(x, residual)
    progress(1.0)
    return graph.model()


def _transposed(matrices: abc.Sequence[Matrix]) -> NDArray[np.float32]:
    """(in, all their outputs)."""
    whole = np.empty((matrices[0].shape[1], sum(matrix.shape[0] for matrix in matrices)), dtype=np.float32)
    start = 0
    for rows in slices(*matrices):
        whole[:, start : start + len(rows)] = rows.T
        start += len(rows)
    return whole


def _rotation_rows(rope: Rope, num_rows: int, turn: abc.Callable[[Any], Any]) -> abc.Iterator[NDArray[np.float32]]:
    """``turn`` (cosine or sine) of every position's angles, (num_rows, pairs)."""
    for start in range(0, num_rows, _ROTATION_ROWS):
        positions = np.arange(start, min(start + _ROTATION_ROWS, num_rows), dtype=np.float64)
        yield (turn(np.outer(positions, rope.frequencies)) * rope.magnitude).astype(np.float32)


def _window_size(window: int) -> int:
    """What GroupQueryAttention calls a window in which a token sees ``window`` tokens: before 1.24 it did not count the
    token itself."""
    version = tuple(map(int, onnxruntime.__version__.split(".")[:2]))
    return window if version >= (1, 24) else window - 1


class _Graph:
    """Collects nodes and initializers; methods take names of values and return names of values."""

    def __init__(self, source: Source, recipe: Recipe, weights: WeightsFile) -> None:
        self.source, self.recipe, self.weights = source, recipe, weights
        self.architecture, self.dimensions = source.architecture, source.dimensions
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.table: BlockMatrix | None = None  # the quantized embedding, which a tied head reads too
        self.rotations: dict[tuple[bytes, float], tuple[str, str]] = {}

    def op(
        self, kind: str, inputs: abc.Sequence[str], attributes: Attributes = NONE, outputs: abc.Sequence[str] = ()
    ) -> str:
        """Add a node; the first of its outputs is returned."""
        names = outputs or [f"{kind}_{len(self.nodes)}"]
        domain = "com.microsoft" if kind in _MICROSOFT_OPERATORS else ""
        self.nodes.append(helper.make_node(kind, inputs, names, domain=domain, **attributes))
        return names[0]

    def constant(self, name: str, values: NDArray[Any]) -> str:
        small = values.nbytes < 1024  # the graph's own shape inference needs to see these
        made = onnx.numpy_helper.from_array(values, name) if small else self.weights.array(values).tensor(name)
        self.initializers.append(made)
        return name

    def ints(self, *values: int) -> str:
        return self.constant(f"ints_{len(self.initializers)}", np.array(values, dtype=np.int64))

    def rotation(self, rope: Rope) -> tuple[str, str]:
        """Cosines and sines of every position; layers that rotate alike share them."""
        key = (rope.frequencies.tobytes(), rope.magnitude)
        if key not in self.rotations:
            names = [f"rotary.{len(self.rotations)}.{part}" for part in ("cos", "sin")]
            for name, turn in zip(names, (np.cos, np.sin), strict=True):
                rows = _rotation_rows(rope, num_ctx(self.dimensions), turn)
                self.initializers.append(self.weights.rows(rows).tensor(name))
            self.rotations[key] = names[0], names[1]
        return self.rotations[key]

    # ----------------------------------------------------------------------------------------------------- weights

    def linear(self, x: str, name: str, *matrices: Matrix, bias: str = "") -> str:
        """x times the matrices, stacked along their outputs, plus the bias if one is named."""
        if self.recipe.bits != FULL_PRECISION:
            return self.block_linear(x, name, self.weights.blocks(*matrices), bias)
        product = self.op("MatMul", [x, self.constant(name, _transposed(matrices))])
        return self.op("Add", [product, bias]) if bias else product

    def block_linear(self, x: str, name: str, matrix: BlockMatrix, bias: str = "") -> str:
        tensors = matrix.initializers(name)
        self.initializers += tensors
        inputs = [x, *(tensor.name for tensor in tensors)]
        if bias:
            inputs += [""] * (5 - len(inputs)) + [bias]  # its place is the sixth
        sizes = {"N": matrix.shape[0], "K": matrix.shape[1]}
        packing = {"bits": matrix.bits, "block_size": self.recipe.block_size, "accuracy_level": _INT8_ACTIVATIONS}
        return self.op("MatMulNBits", inputs, sizes | packing)

    def embedding(self) -> str:
        matrix, scale = self.source.matrix("token_embd.weight"), self.dimensions.width**0.5
        x = self.full_embedding(matrix) if self.recipe.table_bits == FULL_PRECISION else self.block_embedding(matrix)
        if not self.architecture.scales_embedding:
            return x
        return self.op("Mul", [x, self.constant("embedding.scale", np.array(scale, dtype=np.float32))])

    def full_embedding(self, matrix: Matrix) -> str:
        self.initializers.append(self.weights.rows(slices(matrix)).tensor("embedding"))
        return self.op("Gather", ["embedding", "input_ids"])

    def block_embedding(self, matrix: Matrix) -> str:
        self.table = self.weights.blocks(matrix, bits=self.recipe.table_bits)
        flat = (matrix.shape[0], self.table.values.shape[1] * self.table.values.shape[2])
        values, *others = self.table.initializers("embedding", flat)
        self.initializers += [values, *others]
        inputs = [values.name, "input_ids", *(tensor.name for tensor in others)]
        packing = {"bits": self.table.bits, "block_size": self.recipe.block_size, "quantize_axis": 1}
        x, width = self.op("GatherBlockQuantized", inputs, packing), self.dimensions.width
        if width % self.recipe.block_size == 0:
            return x
        return self.op("Slice", [x, self.ints(0), self.ints(width), self.ints(-1)])  # without the last block's filling

    # ------------------------------------------------------------------------------------------------------ layers

    def norm(self, x: str, residual: str, name: str) -> tuple[str, str]:
        """The normalised sum of x and the residual stream, and that sum (the new residual stream)."""
        if not residual:
            return self.own_norm(x, name), x
        weight, total = self.constant(name, self.source.vector(name)), f"{name}.residual"
        outputs, epsilon = [f"{name}.output", "", "", total], self.dimensions.norm_epsilon
        return self.op("SkipSimplifiedLayerNormalization", [x, residual, weight], {"epsilon": epsilon}, outputs), total

    def own_norm(self, x: str, name: str) -> str:
        weight = self.constant(name, self.source.vector(name))
        attributes = {"axis": -1, "epsilon": self.dimensions.norm_epsilon}
        return self.op("SimplifiedLayerNormalization", [x, weight], attributes)

    def layer(self, x: str, residual: str, place: int, layer: int) -> tuple[str, str]:
        """One decoder layer whose cache is number ``place``; returns what it adds and the residual stream."""
        name = f"blk.{layer}"
        x, residual = self.norm(x, residual, f"{name}.attn_norm.weight")
        x = self.own_norm_if_any(self.attention(x, place, layer), name, "post_attention_norm.weight")
        x, residual = self.norm(x, residual, f"{name}.ffn_norm.weight")
        return self.own_norm_if_any(self.feed_forward(x, name), name, "post_ffw_norm.weight"), residual

    def own_norm_if_any(self, x: str, name: str, norm: str) -> str:
        return self.own_norm(x, f"{name}.{norm}") if self.architecture.has(norm) else x

    def attention(self, x: str, place: int, layer: int) -> str:
        name, d = f"blk.{layer}", self.dimensions
        rope = d.window_rope if layer in d.window_layers else d.rope
        assert rope is not None
        parts = ("key", "value")
        past, present = ([f"{name}.{place}.{part}" for part in parts] for name in ("past_key_values", "present"))
        counters = ["seqlens_k", "total_sequence_length"]
        inputs = [*self.queries_keys_values(x, name), *past, *counters, *self.rotation(rope)]
        attributes: Attributes = {
            "do_rotary": 1,
            "rotary_interleaved": int(self.source.pairs_neighbours),
            "num_heads": d.num_heads,
            "kv_num_heads": d.num_kv_heads,
            "scale": d.attention_scale,
            "local_window_size": _window_size(d.window) if layer in d.window_layers else -1,
        }
        mixed = self.op("GroupQueryAttention", inputs, attributes, [f"{name}.attn", *present])
        return self.linear(mixed, f"{name}.attn_output", self.source.matrix(f"{name}.attn_output.weight"))

    def queries_keys_values(self, x: str, name: str) -> list[str]:
        """One packed value and two empty names, unless heads are normalised one by one."""
        matrices, bias = [self.source.matrix(f"{name}.attn_{part}.weight") for part in "qkv"], ""
        if self.architecture.has("attn_q.bias"):
            biases = [self.source.vector(f"{name}.attn_{part}.bias") for part in "qkv"]
            bias = self.constant(f"{name}.attn_qkv.bias", np.concatenate(biases))
        packed, d = self.linear(x, f"{name}.attn_qkv", *matrices, bias=bias), self.dimensions
        if not self.architecture.has("attn_q_norm.weight"):
            return [packed, "", ""]
        outputs = [f"{name}.attn_{part}" for part in "qkv"]
        self.op("Split", [packed, self.ints(d.queries, d.keys, d.keys)], {"axis": -1}, outputs)
        return [self.head_norm(outputs[0], d.num_heads), self.head_norm(outputs[1], d.num_kv_heads), outputs[2]]

    def head_norm(self, x: str, num_heads: int) -> str:
        heads = self.op("Reshape", [x, self.ints(0, 0, num_heads, self.dimensions.head_size)])
        return self.op("Reshape", [self.own_norm(heads, f"{x}_norm.weight"), self.ints(0, 0, -1)])

    def feed_forward(self, x: str, name: str) -> str:
        gate, up, down = (self.source.matrix(f"{name}.ffn_{part}.weight") for part in ("gate", "up", "down"))
        gated = self.activation(self.linear(x, f"{name}.ffn_gate", gate))
        hidden = self.op("Mul", [gated, self.linear(x, f"{name}.ffn_up", up)])
        return self.linear(hidden, f"{name}.ffn_down", down)

    def activation(self, x: str) -> str:
        if self.architecture.activation == "gelu_tanh":
            return self.op("FastGelu", [x])
        return self.op("Mul", [x, self.op("Sigmoid", [x])])

    def head(self, x: str, residual: str) -> None:
        """Logits of the last position only: a draft needs no others."""
        x, _ = self.norm(x, residual, "output_norm.weight")
        last = self.op("Slice", [x, self.ints(-1), self.ints(np.iinfo(np.int64).max), self.ints(1)])
        matrix = self.source.matrix("token_embd.weight" if self.source.tied else "output.weight")
        rows = self.recipe.head
        if self.table and self.table.bits == self.recipe.bits and self.source.tied and rows is None:
            logits = self.block_linear(last, "head", self.table)
        else:
            logits = self.linear(last, "head", matrix if rows is None else matrix.take(rows))
        self.op("Identity", [logits], outputs=["logits"])

    # ------------------------------------------------------------------------------------------------------- model

    def model(self) -> onnx.ModelProto:
        d, num_layers = self.dimensions, len(self.recipe.layers)
        num_head_vocab = d.num_vocab if self.recipe.head is None else len(self.recipe.head)
        caches = [f"{i}.{part}" for i in range(num_layers) for part in ("key", "value")]
        cache = _Type(TensorProto.FLOAT, ("batch", d.num_kv_heads, "max_length", d.head_size))
        inputs = {"input_ids": _Type(TensorProto.INT64, ("batch", "length"))}
        inputs |= {"seqlens_k": _Type(TensorProto.INT32, ("batch",))}
        inputs |= {"total_sequence_length": _Type(TensorProto.INT32, ())}
        inputs |= {f"past_key_values.{name}": cache for name in caches}
        outputs = {"logits": _Type(TensorProto.FLOAT, ("batch", 1, num_head_vocab))}
        outputs |= {f"present.{name}": cache for name in caches}
        graph = helper.make_graph(self.nodes, "draft", _infos(inputs), _infos(outputs), self.initializers)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="edgespec")


class _Type(NamedTuple):
    kind: int
    shape: tuple[int | str, ...]


def _infos(values: dict[str, _Type]) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in values.items()]
