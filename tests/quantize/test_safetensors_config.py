"""A checkpoint's config.json: what is wrong or unsupported is refused in one clear line."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import ModelFormatError
from quantize.safetensors_source import open_checkpoint
from tests.tiny import TinyConfig
from tests.tiny_hf import change_json, hf_config, write_checkpoint, write_json

GEMMA = TinyConfig(architecture="gemma3", key_length=32, num_layers=6, window=8, tied=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type mamba; supported: llama, mistral, qwen2, qwen3, gemma3_text, gemma3"),
        ({"model_type": None}, "model_type None; supported: llama"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"hidden_size": None}, "hidden_size is missing; expected a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected a whole number from 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; expected"),
        ({"num_attention_heads": 4.0}, "num_attention_heads is 4.0; expected a whole number"),
        ({"num_attention_heads": True}, "num_attention_heads is True; expected a whole number"),
        ({"vocab_size": "320"}, "vocab_size is 320; expected a whole number"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; expected a number above 0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; expected a number above 1"),
        ({"rope_theta": 10**400}, "rope_theta is 1000000000"),
        ({"rope_theta": "fast"}, "rope_theta is fast; expected a number"),
        ({"head_dim": 24}, "head size 24; supported: multiples of 16"),
        ({"head_dim": 2**31 - 16}, "head size 2147483632; supported: multiples of 16 up to 4096"),
        ({"head_dim": None, "num_attention_heads": 5}, "hidden_size 64; supported: multiples of its 5 heads"),
        ({"num_key_value_heads": 3}, "number of key heads 3; supported: divisors of its 4 heads"),
        ({"attention_bias": True}, "attention_bias True; supported: null or false"),
        ({"mlp_bias": True}, "mlp_bias True; supported: null or false"),
        ({"hidden_act": "gelu"}, "hidden_act gelu; supported: silu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5; supported: 1"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized weights, gptq; supported: F32, F16, BF16"),
        ({"quantization_config": "yes"}, "quantization_config is yes; expected an object"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; expected true or false"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "scaling dynamic; supported: default, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling longrope; supported"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope scaling"),
        ({"rope_scaling": "linear"}, "rope_scaling is linear; expected an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing; expected a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0; expected a number above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate false; supported: true"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}}, "rope parameter mscale; supported: none"),
        ({"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}, "rope parameter mrope_section"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor is 4; expected a number above 4",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor is missing"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
        ({"rope_parameters": {"full_attention": 3}}, "full_attention is 3; expected an object"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types .*; supported: full_attention or sliding_attention for each",
        ),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window is missing"),
        ({"text_config": [1]}, "text_config is .*; expected an object"),
    ],
    ids=str,
)
def test_configs_that_are_wrong_or_unsupported(changes: dict[str, Any], message: str, folder: Path) -> None:
    change_json(folder / "config.json", **changes)
    refused(folder, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0; supported: null or false"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"hidden_activation": "gelu"}, "hidden_activation gelu; supported: gelu_pytorch_tanh"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ({"sliding_window": 0}, "sliding_window is 0; expected"),
    ],
    ids=str,
)
def test_gemmas_that_are_wrong_or_unsupported(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", GEMMA)
    change_json(folder / "config.json", **changes)
    refused(folder, message)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"llama"', "[" * 100_000, "\xff", "1" * 5000])
def test_a_config_that_is_no_object(content: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    refused(folder, r"config.json (is not JSON|holds no JSON object)")


def test_a_config_may_say_anything_and_raises_nothing_else(folder: Path) -> None:
    random = np.random.default_rng(0)
    values: list[Any] = [None, True, -1, 0, 1, 16, 2**70, 1e400, -1.5, "", "x", [], [1], {}, {"a": 1}, {"rope_type": 3}]
    keys = [*hf_config(TinyConfig()), "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "hidden_act"]
    keys += ["use_sliding_window", "max_window_layers", "text_config", "attention_bias", "query_pre_attn_scalar"]
    for _ in range(400):
        config = hf_config(TinyConfig()) | {"model_type": random.choice(["llama", "mistral", "qwen2", "gemma3_text"])}
        for key in random.choice(keys, 3):
            config[str(key)] = values[random.integers(len(values))]
        write_json(folder / "config.json", config)
        with contextlib.suppress(ModelFormatError):
            open_checkpoint(folder)
