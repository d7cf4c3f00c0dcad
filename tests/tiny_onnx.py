"""A tiny llama-architecture decoder as an ONNX file in the usual format, with the weights of tests.tiny."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.tiny import MERGES, SPECIAL_TOKENS, TinyConfig, token_strings, weights


def write_usual_onnx(folder: Path, config: TinyConfig) -> Path:
    """``model.onnx`` as exporters write it, ``config.json`` and ``tokenizer.json`` beside it; returns the model's path.

    input_ids (batch, length), attention_mask (batch, past + length), position_ids (batch, length), all int64, and
    past_key_values.N.key/value (batch, num_kv_heads, past, head_size) float32 give logits (batch, length, num_vocab)
    and present.N.key/value (batch, num_kv_heads, past + length, head_size). Plain operators only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(_UsualGraph(config).model(), folder / "model.onnx")
    (folder / "config.json").write_text(json.dumps(_hf_config(config), indent=2), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(_hf_tokenizer(), ensure_ascii=False), encoding="utf-8")
    return folder / "model.onnx"


def _hf_config(config: TinyConfig) -> dict[str, Any]:
    heads = {"num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads}
    sizes = {"hidden_size": config.width, "num_hidden_layers": config.num_layers, "vocab_size": config.num_vocab}
    return {"model_type": "llama", "max_position_embeddings": config.num_ctx, **heads, **sizes}


def _hf_tokenizer() -> dict[str, Any]:
    """Special tokens are listed apart and padding is absent, as in published tokenizers."""
    tokens = token_strings(0)
    vocab = {token: i for i, token in enumerate(tokens) if i >= len(SPECIAL_TOKENS)}
    added = [{"id": i, "content": token, "special": True} for i, token in enumerate(SPECIAL_TOKENS)]
    return {"version": "1.0", "added_tokens": added, "model": {"type": "BPE", "vocab": vocab, "merges": list(MERGES)}}


class _UsualGraph:
    """Collects nodes and initializers; every method returns the name of the value it makes."""

    def __init__(self, config: TinyConfig) -> None:
        self.config, self.weights = config, weights(config)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def model(self) -> onnx.ModelProto:
        c = self.config
        caches = [f"{i}.{part}" for i in range(c.num_layers) for part in ("key", "value")]
        inputs = [_info("input_ids", int, "batch", "length"), _info("attention_mask", int, "batch", "total")]
        inputs += [_info("position_ids", int, "batch", "length")]
        inputs += [
            _info(f"past_key_values.{name}", float, "batch", c.num_kv_heads, "past", c.head_size) for name in caches
        ]
        outputs = [_info("logits", float, "batch", "length", c.num_vocab)]
        outputs += [_info(f"present.{name}", float, "batch", c.num_kv_heads, "total", c.head_size) for name in caches]
        self.decoder()
        graph = helper.make_graph(self.nodes, "tiny", inputs, outputs, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        out = out or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [out], **attributes))
        return out

    def constant(self, values: Any, dtype: type = np.float32) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(onnx.numpy_helper.from_array(np.asarray(values, dtype=dtype), name))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def linear(self, x: str, name: str) -> str:
        return self.op("MatMul", x, self.constant(self.weights[name].T))

    def norm(self, x: str, name: str) -> str:
        mean = self.op("ReduceMean", self.op("Mul", x, x), axes=[-1])
        root = self.op("Sqrt", self.op("Add", mean, self.constant(1e-5)))
        return self.op("Mul", self.op("Div", x, root), self.constant(self.weights[name]))

    def decoder(self) -> None:
        x = self.op("Gather", self.constant(self.weights["token_embd"]), "input_ids")
        mask, (cos, sin) = self.mask(), self.rotation()
        for i in range(self.config.num_layers):
            x = self.op("Add", x, self.attention(self.norm(x, f"blk.{i}.attn_norm"), i, mask, cos, sin))
            x = self.op("Add", x, self.feed_forward(self.norm(x, f"blk.{i}.ffn_norm"), i))
        head = self.constant(self.weights["token_embd" if self.config.tied else "output"].T)
        self.op("MatMul", self.norm(x, "output_norm"), head, out="logits")

    def rotation(self) -> tuple[str, str]:
        c = self.config
        frequencies = c.rope_base ** (-np.arange(0, c.head_size, 2) / c.head_size) / c.rope_linear
        frequencies = frequencies / (np.asarray(c.rope_freqs) if c.rope_freqs else 1.0)
        positions = self.op("Cast", self.op("Unsqueeze", "position_ids", self.ints(1, 3)), to=TensorProto.FLOAT)
        angles = self.op("Mul", positions, self.constant(np.concatenate([frequencies, frequencies])))
        return self.op("Cos", angles), self.op("Sin", angles)

    def rotate(self, x: str, cos: str, sin: str) -> str:
        half, end, axis = self.config.head_size // 2, self.config.head_size, self.ints(3)
        bounds = [self.ints(bound) for bound in (0, half, end)]
        low, high = (self.op("Slice", x, bounds[i], bounds[i + 1], axis) for i in (0, 1))
        turned = self.op("Concat", self.op("Neg", high), low, axis=-1)
        return self.op("Add", self.op("Mul", x, cos), self.op("Mul", turned, sin))

    def mask(self) -> str:
        """(batch, 1, 1, length, total): 0 where a query sees a key, -1e9 elsewhere."""
        zero, one = self.constant(0, np.int64), self.constant(1, np.int64)
        total = self.op("Gather", self.op("Shape", "attention_mask"), one)
        past = self.op("Sub", total, self.op("Gather", self.op("Shape", "input_ids"), one))
        queries = self.op("Unsqueeze", self.op("Range", past, total, one), one)
        causal = self.op("LessOrEqual", self.op("Range", zero, total, one), queries)
        valid = self.op("Unsqueeze", self.op("Cast", "attention_mask", to=TensorProto.BOOL), self.ints(1, 2, 3))
        return self.op("Where", self.op("And", valid, causal), self.constant(0.0), self.constant(-1e9))

    def heads(self, x: str, num_heads: int) -> str:
        shape = self.ints(0, 0, num_heads, self.config.head_size)
        return self.op("Transpose", self.op("Reshape", x, shape), perm=[0, 2, 1, 3])

    def attention(self, x: str, i: int, mask: str, cos: str, sin: str) -> str:
        c, groups = self.config, self.config.num_heads // self.config.num_kv_heads
        query = self.rotate(self.heads(self.linear(x, f"blk.{i}.attn_q"), c.num_heads), cos, sin)
        key = self.rotate(self.heads(self.linear(x, f"blk.{i}.attn_k"), c.num_kv_heads), cos, sin)
        value = self.heads(self.linear(x, f"blk.{i}.attn_v"), c.num_kv_heads)
        key = self.op("Concat", f"past_key_values.{i}.key", key, out=f"present.{i}.key", axis=2)
        value = self.op("Concat", f"past_key_values.{i}.value", value, out=f"present.{i}.value", axis=2)
        query = self.op("Reshape", query, self.ints(0, c.num_kv_heads, groups, -1, c.head_size))
        key = self.op("Transpose", self.op("Unsqueeze", key, self.ints(2)), perm=[0, 1, 2, 4, 3])
        scores = self.op("Mul", self.op("MatMul", query, key), self.constant(c.head_size**-0.5))
        chances = self.op("Softmax", self.op("Add", scores, mask), axis=-1)
        mixed = self.op("MatMul", chances, self.op("Unsqueeze", value, self.ints(2)))
        mixed = self.op("Reshape", mixed, self.ints(0, c.num_heads, -1, c.head_size))
        joined = self.op("Reshape", self.op("Transpose", mixed, perm=[0, 2, 1, 3]), self.ints(0, 0, -1))
        return self.linear(joined, f"blk.{i}.attn_output")

    def feed_forward(self, x: str, i: int) -> str:
        gate = self.linear(x, f"blk.{i}.ffn_gate")
        gate = self.op("Mul", gate, self.op("Sigmoid", gate))
        return self.linear(self.op("Mul", gate, self.linear(x, f"blk.{i}.ffn_up")), f"blk.{i}.ffn_down")


def _info(name: str, kind: type, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.INT64 if kind is int else TensorProto.FLOAT, list(shape))
