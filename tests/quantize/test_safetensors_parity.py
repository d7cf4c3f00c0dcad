"""A draft built from a checkpoint computes what llama.cpp computes from a GGUF of the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantize import build_draft
from quantize.rope import llama3_rope, plain_rope
from tests.quantize.reference import Draft, Rows, llama_rows, relative_error
from tests.tiny import TinyConfig, write_gguf
from tests.tiny_hf import DTYPES, Dtype, arrays, hf_config, write_checkpoint, write_json, write_weights

# Long enough that windows of 8 and YaRN over 40 matter.
TOKENS = np.random.default_rng(7).integers(0, 320, 150).tolist()

LLAMA = TinyConfig()
QWEN2 = TinyConfig(architecture="qwen2")
QWEN3 = TinyConfig(architecture="qwen3", key_length=32)
GEMMA = TinyConfig(architecture="gemma3", key_length=32, num_layers=7, window=8, rope_base=1e6, tied=True)
YARN: dict[str, Any] = {"rope_yarn": 4.0, "rope_original_ctx": 40}

_RULE = llama3_rope(16, 1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_ctx=40)
_DIVISORS = tuple((plain_rope(16, 1e4).frequencies / _RULE.frequencies).tolist())
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 40}

# The model, and what its config.json says otherwise than transformers 4 would.
CASES: dict[str, tuple[TinyConfig, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "llama, tied": (replace(LLAMA, tied=True), {}),
    "llama, tied by having no head": (replace(LLAMA, tied=True), {"tie_word_embeddings": None}),
    "llama, no key heads, no head_dim": (
        replace(LLAMA, num_kv_heads=4),
        {"num_key_value_heads": None, "head_dim": None},
    ),
    "llama, linear": (replace(LLAMA, rope_linear=4.0), {}),
    "llama, yarn": (replace(LLAMA, **YARN), {}),
    "llama, yarn, its context beside the rope's keys": (
        replace(LLAMA, **YARN),
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 40},
    ),
    "llama, Llama 3": (replace(LLAMA, rope_freqs=_DIVISORS), {"rope_scaling": {"rope_type": "llama3", **_LLAMA3}}),
    "llama, transformers 5": (
        replace(LLAMA, rope_freqs=_DIVISORS),
        {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, **_LLAMA3}},
    ),
    "mistral": (LLAMA, {"model_type": "mistral", "sliding_window": None}),
    "mistral, window as wide as the context": (LLAMA, {"model_type": "mistral", "sliding_window": 256}),
    "qwen2": (QWEN2, {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}),
    "qwen2, yarn": (replace(QWEN2, **YARN), {}),
    "qwen2, linear, transformers 5": (
        replace(QWEN2, rope_linear=2.0),
        {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000}},
    ),
    "qwen3": (QWEN3, {}),
    "qwen3, tied, yarn": (replace(QWEN3, tied=True, **YARN), {"layer_types": ["full_attention"] * 2}),
    "gemma3": (GEMMA, {}),
    "gemma3, linear": (replace(GEMMA, rope_linear=4.0), {}),
    "gemma3, untied": (replace(GEMMA, tied=False), {}),
    "gemma3, transformers 5": (
        replace(GEMMA, rope_linear=4.0),
        {
            "rope_scaling": None,
            "rope_theta": None,
            "rope_local_base_freq": None,
            "layer_types": ["full_attention" if i == 5 else "sliding_attention" for i in range(7)],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


def rows_of(source: Path, step: int) -> Rows:
    return Draft(build_draft(source, source.parent / f"{source.stem}-draft", bits=32, force=True)).rows(TOKENS, step)


@pytest.mark.parametrize(("config", "changes"), CASES.values(), ids=CASES)
def test_draft_equals_llama_cpp_and_the_one_from_the_gguf(
    config: TinyConfig, changes: dict[str, Any], tmp_path: Path
) -> None:
    source = write_gguf(tmp_path / "gguf.gguf", config)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", config, **changes)
    expected, draft = llama_rows(source, TOKENS), rows_of(checkpoint, 1)
    assert relative_error(draft, expected) < 1e-3
    assert relative_error(rows_of(checkpoint, len(TOKENS)), expected[-1:]) < 1e-3
    assert relative_error(draft, rows_of(source, 1)) < 1e-5


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_half_precision_and_shards(dtype: Dtype, num_shards: int, tmp_path: Path) -> None:
    half = write_checkpoint(tmp_path / "half", dtype=dtype, num_shards=num_shards)
    assert len(list(half.glob("*.safetensors"))) == num_shards
    rounded = write_checkpoint(tmp_path / "rounded")
    values = {name: value.astype(DTYPES[dtype]).astype(np.float32) for name, value in arrays(LLAMA).items()}
    write_weights(rounded, values)
    np.testing.assert_array_equal(rows_of(half, 1), rows_of(rounded, 1))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("tied", [True, False])
def test_the_language_model_of_a_model_that_sees_images(prefix: str, tied: bool, tmp_path: Path) -> None:
    config = replace(GEMMA, tied=tied)
    plain = write_checkpoint(tmp_path / "plain", config)
    nested = write_checkpoint(tmp_path / "nested", config)
    head = "language_model.lm_head" if prefix.startswith("language") else "lm_head"
    values = {
        name.replace("lm_head", head) if name.startswith("lm_head") else name.replace("model.", prefix, 1): value
        for name, value in arrays(config).items()
    }
    vision = ["vision_tower.vision_model.x", "multi_modal_projector.y", "model.vision_tower.z"]
    write_weights(nested, values | {name: np.ones(3, np.int8) for name in vision})
    text = hf_config(config)
    write_json(
        nested / "config.json", {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 5}}
    )
    np.testing.assert_array_equal(rows_of(nested, 1), rows_of(plain, 1))


def test_a_mistral_sees_its_window_only(tmp_path: Path) -> None:
    """llama.cpp has no window there, so the reference is what the window hides: other tokens before it change nothing.
    One layer, else what a token saw reaches further."""
    one = replace(LLAMA, num_layers=1)
    changes: dict[str, Any] = {"model_type": "mistral", "sliding_window": 8}
    narrow = build_draft(write_checkpoint(tmp_path / "a", one, **changes), tmp_path / "narrow", bits=32)
    wide = build_draft(write_checkpoint(tmp_path / "b", one), tmp_path / "wide", bits=32)
    other = [*TOKENS[100:120], *TOKENS[20:60]]
    seen, changed = (Draft(narrow).rows(tokens, 1) for tokens in (TOKENS[:60], other))
    np.testing.assert_allclose(seen[27:], changed[27:], atol=1e-5)
    assert relative_error(seen[26:27], changed[26:27]) > 1e-3
    everything = Draft(wide).rows(TOKENS[:60], 1)
    assert relative_error(seen[:8], everything[:8]) < 1e-5
    assert relative_error(seen[8:9], everything[8:9]) > 1e-3


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_layers_with_a_window_are_those_after_the_first(model_type: str, tmp_path: Path) -> None:
    config = QWEN2 if model_type == "qwen2" else QWEN3
    old: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    new: dict[str, Any] = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
    rows = [
        rows_of(write_checkpoint(tmp_path / str(i), config, **changes), 1)
        for i, changes in enumerate((old, new, dict[str, Any]()))
    ]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert relative_error(rows[0][:8], rows[2][:8]) < 1e-5
    assert relative_error(rows[0][8:], rows[2][8:]) > 1e-3


def test_attention_scale_of_a_gemma(tmp_path: Path) -> None:
    """The 27B model divides by the square root of something else than its head size."""
    scaled = rows_of(write_checkpoint(tmp_path / "a", GEMMA, query_pre_attn_scalar=16), 1)
    assert relative_error(scaled, rows_of(write_checkpoint(tmp_path / "b", GEMMA), 1)) > 1e-2
