"""The supported architectures, described once: which tensors a layer has, what they are called in a GGUF and in a
Hugging Face checkpoint, and what the graph does with them. Both sources and the ONNX builder read this, nothing else.

Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py and the models' own checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """``name`` is the GGUF's; ``shape`` (out, in) names sizes of Dimensions."""

    name: str
    checkpoint_name: str
    shape: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """
    name            the GGUF's general.architecture
    model_types     config.json's model_type
    layer           the tensors of one layer, without "blk.N." and "model.layers.N."
    pairs_neighbours  whether a GGUF's query and key rows pair neighbours for rotation (a checkpoint's pair halves)
    activation      of the feed-forward gate
    scales_embedding  whether the embedding is multiplied by sqrt(width)
    norm_offset     what a checkpoint's norm weights lack: a GGUF has them with it
    window_pattern  every so many layers one sees the whole context and the others a sliding window; 0: all see it all
    """

    name: str
    model_types: tuple[str, ...]
    layer: tuple[Tensor, ...]
    pairs_neighbours: bool = False
    activation: Activation = "silu"
    scales_embedding: bool = False
    norm_offset: float = 0.0
    window_pattern: int = 0

    def has(self, name: str) -> bool:
        """Whether a layer has that tensor, by its GGUF name."""
        return any(tensor.name == name for tensor in self.layer)


# Outside the layers; the same in every architecture.
GLOBAL = (
    Tensor("token_embd.weight", "model.embed_tokens.weight", ("num_vocab", "width")),
    Tensor("output_norm.weight", "model.norm.weight", ("width",)),
    Tensor("output.weight", "lm_head.weight", ("num_vocab", "width"), optional=True),
)

_ATTENTION = (
    Tensor("attn_norm.weight", "input_layernorm.weight", ("width",)),
    Tensor("attn_q.weight", "self_attn.q_proj.weight", ("queries", "width")),
    Tensor("attn_k.weight", "self_attn.k_proj.weight", ("keys", "width")),
    Tensor("attn_v.weight", "self_attn.v_proj.weight", ("keys", "width")),
    Tensor("attn_output.weight", "self_attn.o_proj.weight", ("width", "queries")),
)
_FEED_FORWARD = (
    Tensor("ffn_gate.weight", "mlp.gate_proj.weight", ("num_hidden", "width")),
    Tensor("ffn_up.weight", "mlp.up_proj.weight", ("num_hidden", "width")),
    Tensor("ffn_down.weight", "mlp.down_proj.weight", ("width", "num_hidden")),
)
_FFN_NORM = (Tensor("ffn_norm.weight", "post_attention_layernorm.weight", ("width",)),)
_QKV_BIAS = (
    Tensor("attn_q.bias", "self_attn.q_proj.bias", ("queries",)),
    Tensor("attn_k.bias", "self_attn.k_proj.bias", ("keys",)),
    Tensor("attn_v.bias", "self_attn.v_proj.bias", ("keys",)),
)
_HEAD_NORMS = (
    Tensor("attn_q_norm.weight", "self_attn.q_norm.weight", ("head_size",)),
    Tensor("attn_k_norm.weight", "self_attn.k_norm.weight", ("head_size",)),
)
# Gemma 3 normalises what attention and feed-forward give, too; its checkpoints use one name differently.
_GEMMA_NORMS = (
    Tensor("post_attention_norm.weight", "post_attention_layernorm.weight", ("width",)),
    Tensor("ffn_norm.weight", "pre_feedforward_layernorm.weight", ("width",)),
    Tensor("post_ffw_norm.weight", "post_feedforward_layernorm.weight", ("width",)),
)
_PLAIN = _ATTENTION + _FFN_NORM + _FEED_FORWARD

LLAMA = Architecture("llama", ("llama", "mistral"), _PLAIN, pairs_neighbours=True)
QWEN2 = Architecture("qwen2", ("qwen2",), _PLAIN + _QKV_BIAS)
QWEN3 = Architecture("qwen3", ("qwen3",), _PLAIN + _HEAD_NORMS)
GEMMA3 = Architecture(
    "gemma3",
    ("gemma3_text", "gemma3"),
    _ATTENTION + _HEAD_NORMS + _GEMMA_NORMS + _FEED_FORWARD,
    activation="gelu_tanh",
    scales_embedding=True,
    norm_offset=1.0,
    window_pattern=6,
)
ARCHITECTURES = {architecture.name: architecture for architecture in (LLAMA, QWEN2, QWEN3, GEMMA3)}
