"""Tiny real models, made in milliseconds: a GGUF of any supported architecture, and a decoder ONNX with llama weights.

All speak one vocabulary: three special tokens, the 256 bytes of a byte-level BPE, a few merges, and padding tokens up
to ``num_vocab``. The weights depend on the config only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

END_OF_TEXT, IM_START, IM_END = 0, 1, 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "Ġt he", "i n", "e r", "a n", "o n", "Ġ a", "Ġa n", "Ġan d", "r e", "Ġ s", "l l", "in g", "Ġ w")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class TinyConfig:
    """``noise`` > 0 disturbs the weights by that fraction: a draft model that agrees with the undisturbed in part."""

    architecture: str = "llama"  # or qwen2, qwen3, gemma3
    num_vocab: int = 320
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    num_hidden: int = 128
    num_ctx: int = 256
    seed: int = 0
    noise: float = 0.0
    tied: bool = False  # whether the output head is the embedding table
    q8_0: bool = False  # store the matrices as Q8_0 instead of f32
    key_length: int = 0  # the head size, where it is not width / num_heads
    window: int = 0  # gemma3: tokens a sliding-window layer sees
    rope_base: float = 10000.0
    rope_base_swa: float = 10000.0  # of sliding-window layers
    rope_linear: float = 1.0  # linear rope scaling: positions are divided by it
    rope_yarn: float = 1.0  # YaRN's factor
    rope_original_ctx: int = 0  # the context YaRN stretches; 0: num_ctx
    rope_attn_factor: float = 1.0  # what rotated vectors are multiplied by, beside what the scaling does
    rope_freqs: tuple[float, ...] = ()  # rope_freqs.weight: frequencies are divided by these, head_size / 2 of them

    @property
    def head_size(self) -> int:
        return self.key_length or self.width // self.num_heads


def token_strings(num_vocab: int = 320) -> list[str]:
    """The raw vocabulary, as a GGUF spells it."""
    tokens = [*SPECIAL_TOKENS, *_byte_characters(), *(merge.replace(" ", "") for merge in MERGES)]
    return tokens + [f"[PAD{i}]" for i in range(len(tokens), num_vocab)]


def _byte_characters() -> list[str]:
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def weights(config: TinyConfig) -> dict[str, Floats]:
    """GGUF tensor names, without ".weight", to float32 arrays (out, in), q and k in rotate-half order, rounded as the
    GGUF stores them. Gemma's norm weights are a GGUF's: a checkpoint's are 1 less.
    """
    c, queries, keys = config, config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (c.num_vocab, c.width)}
    for i in range(c.num_layers):
        shapes |= {f"blk.{i}.attn_q": (queries, c.width), f"blk.{i}.attn_output": (c.width, queries)}
        shapes |= {f"blk.{i}.attn_k": (keys, c.width), f"blk.{i}.attn_v": (keys, c.width)}
        shapes |= {f"blk.{i}.ffn_gate": (c.num_hidden, c.width), f"blk.{i}.ffn_up": (c.num_hidden, c.width)}
        shapes |= {f"blk.{i}.ffn_down": (c.width, c.num_hidden)}
        shapes |= {f"blk.{i}.attn_norm": (c.width,), f"blk.{i}.ffn_norm": (c.width,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in _own_tensors(c).items()}
    shapes |= {"output_norm": (c.width,)} if c.tied else {"output_norm": (c.width,), "output": (c.num_vocab, c.width)}
    random, noise = np.random.default_rng(c.seed), np.random.default_rng(c.seed + 1000)
    return {name: _weight(shape, c, random, noise) for name, shape in shapes.items()}


def _own_tensors(config: TinyConfig) -> dict[str, tuple[int, ...]]:
    """What a layer has beyond a llama's."""
    c, keys = config, config.num_kv_heads * config.head_size
    if c.architecture == "qwen2":
        return {"attn_q.bias": (c.num_heads * c.head_size,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
    own: dict[str, tuple[int, ...]] = {}
    if c.architecture in ("qwen3", "gemma3"):
        own |= {"attn_q_norm": (c.head_size,), "attn_k_norm": (c.head_size,)}
    if c.architecture == "gemma3":
        own |= {"post_attention_norm": (c.width,), "post_ffw_norm": (c.width,)}
    return own


def _weight(
    shape: tuple[int, ...], config: TinyConfig, random: np.random.Generator, noise: np.random.Generator
) -> Floats:
    if len(shape) == 1:
        return (1 + 0.1 * random.standard_normal(shape)).astype(np.float32)
    values = random.standard_normal(shape) + config.noise * noise.standard_normal(shape)
    values = (values * 1.5 / np.sqrt(shape[1])).astype(np.float32)
    return _q8_0_round_trip(values) if config.q8_0 else values


def _q8_0_round_trip(values: Floats) -> Floats:
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    return np.asarray(gguf.dequantize(gguf.quantize(values, q8_0), q8_0), dtype=np.float32)


# ---------------------------------------------------------------------------------------------------------------- GGUF


def write_gguf(path: Path, config: TinyConfig = TinyConfig()) -> Path:
    """A GGUF that llama.cpp loads, tokenizes with and decodes."""
    writer = gguf.GGUFWriter(path, config.architecture)
    _add_metadata(writer, config)
    _add_tokenizer(writer, config)
    for name, values in weights(config).items():
        _add_tensor(writer, name, values, config)
    if config.rope_freqs:
        writer.add_tensor("rope_freqs.weight", np.asarray(config.rope_freqs, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, config: TinyConfig) -> None:
    writer.add_name("tiny")
    writer.add_vocab_size(config.num_vocab)
    writer.add_context_length(config.num_ctx)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.num_hidden)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_rope_freq_base(config.rope_base)
    if config.key_length:
        writer.add_key_length(config.key_length)
        writer.add_value_length(config.key_length)
    if config.window:
        writer.add_sliding_window(config.window)
        writer.add_float32(f"{config.architecture}.rope.freq_base_swa", config.rope_base_swa)
    _add_rope_scaling(writer, config)


def _add_rope_scaling(writer: gguf.GGUFWriter, config: TinyConfig) -> None:
    if config.rope_linear != 1.0:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_linear)
    if config.rope_yarn != 1.0:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_yarn)
    if config.rope_original_ctx:
        writer.add_rope_scaling_orig_ctx_len(config.rope_original_ctx)
    if config.rope_attn_factor != 1.0:
        writer.add_rope_scaling_attn_factors(config.rope_attn_factor)


def _add_tokenizer(writer: gguf.GGUFWriter, config: TinyConfig) -> None:
    tokens = token_strings(config.num_vocab)
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS) + [gguf.TokenType.NORMAL] * (256 + len(MERGES))
    kinds += [gguf.TokenType.UNUSED] * (len(tokens) - len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(IM_START)
    writer.add_eos_token_id(IM_END)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: Floats, config: TinyConfig) -> None:
    if config.architecture == "llama" and name.endswith(("attn_q", "attn_k")):  # it pairs neighbours for rotation
        values = values.reshape(-1, 2, config.head_size // 2, config.width).swapaxes(1, 2).reshape(values.shape)
    full_name = name if name.endswith(".bias") else f"{name}.weight"
    if config.q8_0 and values.ndim == 2:
        q8_0 = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(full_name, gguf.quantize(values, q8_0), raw_dtype=q8_0)
    else:
        writer.add_tensor(full_name, values)


# ---------------------------------------------------------------------------------------------------------------- ONNX


def write_usual_onnx(folder: Path, config: TinyConfig = TinyConfig()) -> Path:
    """See tests.tiny_onnx."""
    from tests.tiny_onnx import write_usual_onnx as write

    return write(folder, config)
