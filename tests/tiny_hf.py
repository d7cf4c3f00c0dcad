"""The tiny models of tests/tiny.py as Hugging Face checkpoint folders, for tests of what reads those.

Weights are written by the ``safetensors`` package, so the reader is checked against somebody else's writer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from quantize.architecture import ARCHITECTURES
from quantize.source import tensors
from tests import tiny
from tests.tiny import CHAT_TEMPLATE, IM_END, MERGES, SPECIAL_TOKENS, TinyConfig, token_strings

Array = NDArray[Any]
Dtype = Literal["F32", "F16", "BF16"]

_PLAIN = TinyConfig()
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}


def write_checkpoint(
    folder: Path, config: TinyConfig = _PLAIN, *, dtype: Dtype = "F32", num_shards: int = 1, **changes: Any
) -> Path:
    """config.json, tokenizer.json, tokenizer_config.json and the weights, in one file or with an index; returns the
    folder. ``changes`` are set in config.json; None removes a key."""
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, {name: value.astype(DTYPES[dtype]) for name, value in arrays(config).items()}, num_shards)
    content = {key: value for key, value in (hf_config(config) | changes).items() if value is not None}
    write_json(folder / "config.json", content)
    write_json(folder / "tokenizer.json", hf_tokenizer())
    write_json(folder / "tokenizer_config.json", {"chat_template": CHAT_TEMPLATE, "eos_token": SPECIAL_TOKENS[IM_END]})
    return folder


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def change_json(path: Path, **changes: Any) -> None:
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | changes)


def write_weights(folder: Path, values: dict[str, Array], num_shards: int = 1) -> None:
    if num_shards == 1:
        save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names: list[str] = list(values)
    places: dict[str, str] = {}
    for i in range(num_shards):
        shard = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        own = names[i::num_shards]
        save_file({name: values[name] for name in own}, folder / shard)
        places |= dict.fromkeys(own, shard)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})


def arrays(config: TinyConfig) -> dict[str, Array]:
    """The weights by their checkpoint names: query and key rows in rotate-half order, norms without their offset."""
    architecture = ARCHITECTURES[config.architecture]
    names = tensors(architecture, config.num_layers)
    found: dict[str, Array] = {}
    for name, values in tiny.weights(config).items():
        full = name if name in names else f"{name}.weight"
        offset = architecture.norm_offset if full.endswith("norm.weight") else 0.0
        found[names[full][0]] = np.asarray(values - np.float32(offset))
    return found


def hf_config(config: TinyConfig) -> dict[str, Any]:
    """As transformers 4 writes it."""
    sizes = {
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.num_hidden,
        "vocab_size": config.num_vocab,
        "max_position_embeddings": config.num_ctx,
    }
    content = {"model_type": _MODEL_TYPES[config.architecture], **sizes}
    content |= {"rms_norm_eps": 1e-5, "rope_theta": config.rope_base, "tie_word_embeddings": config.tied}
    if config.rope_linear != 1.0:
        content["rope_scaling"] = {"type": "linear", "factor": config.rope_linear}
    if config.rope_yarn != 1.0:
        original = config.rope_original_ctx or config.num_ctx
        scaling = {"rope_type": "yarn", "factor": config.rope_yarn, "original_max_position_embeddings": original}
        content["rope_scaling"] = scaling
    if config.architecture == "gemma3":
        content |= {"sliding_window": config.window, "rope_local_base_freq": config.rope_base_swa}
        content |= {"query_pre_attn_scalar": config.head_size}
    return content


def hf_tokenizer() -> dict[str, Any]:
    """The GGUF's vocabulary without its padding, as the ``tokenizers`` package reads it."""
    tokens = token_strings(0)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": i, "content": token, **flags} for i, token in enumerate(SPECIAL_TOKENS)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": list(MERGES)}
    steps = {"normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **steps, "model": model}
