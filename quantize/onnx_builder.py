"""Builds the ONNX graph of a draft model from a llama-architecture source.

Opset 17 with ONNX Runtime's com.microsoft operators, IR version 8: the graph uses nothing newer. Inputs and outputs are
in README.md. Operators: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgespec.errors import ParameterError
from quantize.gguf_source import Dimensions, GgufSource, Matrix
from quantize.weights_file import BlockMatrix, WeightsFile

OPSET, IR_VERSION = 17, 8
FULL_PRECISION = 32
ALLOWED_BITS = (4, 8, FULL_PRECISION)
ALLOWED_BLOCK_SIZES = (16, 32, 64, 128)

# Some sources claim a million; a draft model's rotation tables and caches should not.
MAX_CTX = 131072

# Activations are rounded to 8 bits per block inside MatMulNBits; with integer dot products that is the fast path.
_INT8_ACTIVATIONS = 4


_MICROSOFT_OPERATORS = (
    "GatherBlockQuantized",
    "GroupQueryAttention",
    "MatMulNBits",
    "SkipSimplifiedLayerNormalization",
)

Attributes = abc.Mapping[str, int | float]
NONE: Attributes = {}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to make of a source: the weights' width, the layers to keep in order, the verifier ids the head speaks.

    ``head`` None keeps the whole vocabulary; otherwise its ids are ascending and unique.
    """

    bits: int
    block_size: int
    layers: tuple[int, ...]
    head: NDArray[np.int64] | None = None


def num_ctx(dimensions: Dimensions) -> int:
    """Most tokens the draft model can hold."""
    return min(dimensions.num_ctx, MAX_CTX)


def check_recipe(recipe: Recipe, dimensions: Dimensions) -> None:
    """Raises ParameterError unless the source can be made into that."""
    _check_choice("bits", recipe.bits, ALLOWED_BITS)
    d = dimensions
    inputs = {d.width, d.num_hidden, d.num_heads * d.head_size}
    fitting = [size for size in ALLOWED_BLOCK_SIZES if all(columns % size == 0 for columns in inputs)]
    if recipe.bits != FULL_PRECISION:
        _check_choice("block_size", recipe.block_size, fitting)
    layers, known = recipe.layers, range(d.num_layers)
    if not layers or len(set(layers)) < len(layers) or not set(layers) <= set(known):
        raise ParameterError(f"layers: got {list(layers)}; allowed: one or more of 0 to {known[-1]}, each once")
    head = recipe.head
    if head is not None and (not head.size or head[0] < 0 or head[-1] >= d.num_vocab):
        raise ParameterError(f"head: got {head.size} ids; allowed: one or more of 0 to {d.num_vocab - 1}")


def _check_choice(name: str, got: int, allowed: abc.Sequence[int]) -> None:
    if got not in allowed:
        raise ParameterError(f"{name}: got {got}; allowed for this model: {', '.join(map(str, allowed)) or 'none'}")


def build_model(
    source: GgufSource, recipe: Recipe, weights: WeightsFile, progress: abc.Callable[[float], None]
) -> onnx.ModelProto:
    """The model, its weights appended to ``weights``. ``progress`` is told the finished fraction of the work."""
    graph = _Graph(source, recipe, weights)
    num_steps = len(recipe.layers) + 2
    x = graph.embedding()
    progress(1 / num_steps)
    residual = ""
    for place, layer in enumerate(recipe.layers):
        x, residual = graph.layer(x, residual, place, f"blk.{layer}")
        progress((place + 2) / num_steps)
    graph.head(x, residual)
    progress(1.0)
    return graph.model()


class _Graph:
    """Collects nodes and initializers; methods take names of values and return names of values."""

    def __init__(self, source: GgufSource, recipe: Recipe, weights: WeightsFile) -> None:
        self.source, self.recipe, self.weights = source, recipe, weights
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.table: BlockMatrix | None = None  # the quantized embedding, which a tied head reads too
        self.rotation = self.rotation_caches()

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

    def rotation_caches(self) -> tuple[str, str]:
        positions = np.arange(num_ctx(self.source.dimensions), dtype=np.float64)
        angles = np.outer(positions, self.source.rope_frequencies())
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        return self.constant("rotary.cos", cos), self.constant("rotary.sin", sin)

    # ----------------------------------------------------------------------------------------------------- weights

    def linear(self, x: str, name: str, *matrices: Matrix) -> str:
        """x times the matrices, stacked along their outputs."""
        if self.recipe.bits != FULL_PRECISION:
            return self.block_linear(x, name, self.weights.blocks(*matrices))
        whole = np.concatenate([matrix.read(0, matrix.shape[0]) for matrix in matrices])
        return self.op("MatMul", [x, self.constant(name, np.ascontiguousarray(whole.T))])

    def block_linear(self, x: str, name: str, matrix: BlockMatrix) -> str:
        bits, block_size = self.recipe.bits, self.recipe.block_size
        tensors = matrix.initializers(name)
        self.initializers += tensors
        sizes = {"N": matrix.shape[0], "K": matrix.shape[1], "bits": bits, "block_size": block_size}
        attributes = {"accuracy_level": _INT8_ACTIVATIONS, **sizes}
        return self.op("MatMulNBits", [x, *(tensor.name for tensor in tensors)], attributes)

    def embedding(self) -> str:
        matrix = self.source.matrix("token_embd.weight")
        if self.recipe.bits == FULL_PRECISION:
            return self.op("Gather", [self.constant("embedding", matrix.read(0, matrix.shape[0])), "input_ids"])
        self.table = self.weights.blocks(matrix)
        flat = (matrix.shape[0], self.table.values.shape[1] * self.table.values.shape[2])
        values, *others = self.table.initializers("embedding", flat)
        self.initializers += [values, *others]
        inputs = [values.name, "input_ids", *(tensor.name for tensor in others)]
        packing = {"bits": self.recipe.bits, "block_size": self.recipe.block_size, "quantize_axis": 1}
        return self.op("GatherBlockQuantized", inputs, packing)

    # ------------------------------------------------------------------------------------------------------ layers

    def norm(self, x: str, residual: str, name: str) -> tuple[str, str]:
        """The normalised sum of x and the residual stream, and that sum (the new residual stream)."""
        weight, epsilon = self.constant(name, self.source.vector(name)), self.source.dimensions.norm_epsilon
        if not residual:
            return self.op("SimplifiedLayerNormalization", [x, weight], {"axis": -1, "epsilon": epsilon}), x
        total = f"{name}.residual"
        outputs = [f"{name}.output", "", "", total]
        return self.op("SkipSimplifiedLayerNormalization", [x, residual, weight], {"epsilon": epsilon}, outputs), total

    def layer(self, x: str, residual: str, place: int, name: str) -> tuple[str, str]:
        """One decoder layer whose cache is number ``place``; returns what it adds and the residual stream."""
        x, residual = self.norm(x, residual, f"{name}.attn_norm.weight")
        x, residual = self.norm(self.attention(x, place, name), residual, f"{name}.ffn_norm.weight")
        return self.feed_forward(x, name), residual

    def attention(self, x: str, place: int, name: str) -> str:
        matrices = [self.source.matrix(f"{name}.attn_{part}.weight") for part in "qkv"]
        packed, d = self.linear(x, f"{name}.attn_qkv", *matrices), self.source.dimensions
        parts = ("key", "value")
        past, present = ([f"{name}.{place}.{part}" for part in parts] for name in ("past_key_values", "present"))
        inputs = [packed, "", "", *past, "seqlens_k", "total_sequence_length", *self.rotation]
        heads = {"num_heads": d.num_heads, "kv_num_heads": d.num_kv_heads}
        attributes = {"do_rotary": 1, "rotary_interleaved": 1, **heads}  # the file's query and key rows pair neighbours
        mixed = self.op("GroupQueryAttention", inputs, attributes, [f"{name}.attn", *present])
        return self.linear(mixed, f"{name}.attn_output", self.source.matrix(f"{name}.attn_output.weight"))

    def feed_forward(self, x: str, name: str) -> str:
        gate, up, down = (self.source.matrix(f"{name}.ffn_{part}.weight") for part in ("gate", "up", "down"))
        gated = self.linear(x, f"{name}.ffn_gate", gate)
        gated = self.op("Mul", [gated, self.op("Sigmoid", [gated])])
        hidden = self.op("Mul", [gated, self.linear(x, f"{name}.ffn_up", up)])
        return self.linear(hidden, f"{name}.ffn_down", down)

    def head(self, x: str, residual: str) -> None:
        """Logits of the last position only: a draft needs no others."""
        x, _ = self.norm(x, residual, "output_norm.weight")
        names = ["last.start", "last.end", "last.axis"]
        for name, value in zip(names, (-1, np.iinfo(np.int64).max, 1), strict=True):
            self.constant(name, np.array([value], dtype=np.int64))
        last, rows = self.op("Slice", [x, *names]), self.recipe.head
        matrix = self.source.matrix("token_embd.weight" if self.source.tied else "output.weight")
        if self.table and self.source.tied and rows is None:
            logits = self.block_linear(last, "head", self.table)
        else:
            logits = self.linear(last, "head", matrix if rows is None else matrix.take(rows))
        self.op("Identity", [logits], outputs=["logits"])

    # ------------------------------------------------------------------------------------------------------- model

    def model(self) -> onnx.ModelProto:
        d, num_layers = self.source.dimensions, len(self.recipe.layers)
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
