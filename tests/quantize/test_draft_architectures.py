"""Every architecture, with every rope it may have: the graph computes what llama.cpp computes from the same GGUF."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quantize import build_draft
from quantize.rope import llama3_rope, plain_rope
from tests import tiny
from tests.quantize.reference import Draft, Rows, llama_rows, relative_error
from tests.tiny import TinyConfig, write_gguf

# Long enough that windows of 8 and YaRN over 40 matter.
TOKENS = np.random.default_rng(7).integers(0, 320, 150).tolist()

ARCHITECTURES = {
    "llama": TinyConfig(),
    "qwen2": TinyConfig(architecture="qwen2"),
    "qwen3": TinyConfig(architecture="qwen3", key_length=32),
    "gemma3": TinyConfig(architecture="gemma3", key_length=32, num_layers=7, window=8, rope_base=1e6),
}
GEMMA = ARCHITECTURES["gemma3"]

# llama.cpp looks GELU up in a table of half floats; everything else is exact (see below).
TOLERANCE = {"llama": 1e-4, "qwen2": 1e-4, "qwen3": 1e-4, "gemma3": 9e-4}

_RULE = llama3_rope(16, 1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_ctx=40)
LLAMA3 = tuple((plain_rope(16, 1e4).frequencies / _RULE.frequencies).tolist())
ROPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear": {"rope_linear": 4.0},
    "yarn": {"rope_yarn": 4.0, "rope_original_ctx": 40},
    "yarn, longer vectors": {"rope_yarn": 8.0, "rope_original_ctx": 20, "rope_attn_factor": 1.2},
    "longer vectors": {"rope_attn_factor": 1.2},
}
CASES = {
    f"{name}, {rope}": replace(config, **changes)
    for (name, config), (rope, changes) in itertools.product(ARCHITECTURES.items(), ROPES.items())
}
CASES |= {f"{name}, tied": replace(config, tied=True) for name, config in ARCHITECTURES.items()}
CASES["llama, rope of Llama 3"] = TinyConfig(rope_freqs=LLAMA3)
CASES["llama, yarn and divisors"] = TinyConfig(rope_freqs=LLAMA3, rope_yarn=4.0, rope_original_ctx=40)
CASES["gemma3, no window"] = replace(GEMMA, window=0, rope_base=5e4)


def check(folder: Path, expected: Rows, tolerance: float) -> None:
    """One shot, token by token, and in steps, with what came before in the cache."""
    for step in (len(TOKENS), 1, 7):
        ends = [min(start + step, len(TOKENS)) - 1 for start in range(0, len(TOKENS), step)]
        assert relative_error(Draft(folder).rows(TOKENS, step), expected[ends]) < tolerance


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_unquantized_draft_equals_llama_cpp(config: TinyConfig, tmp_path: Path) -> None:
    folder = build_draft(write_gguf(tmp_path / "source.gguf", config), tmp_path / "draft", bits=32)
    check(folder, llama_rows(tmp_path / "source.gguf", TOKENS), TOLERANCE[config.architecture])


@pytest.mark.parametrize("num_layers", [7, 62], ids=["", "27B"])
def test_gemma_but_for_gelu_is_exact(num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its 62-layer model scales attention by the width of a head as the others have it, not by its own heads' size."""
    config = replace(GEMMA, num_layers=num_layers)
    weights = tiny.weights(config)
    weights |= {name: 0 * value for name, value in weights.items() if name.endswith("ffn_down")}
    monkeypatch.setattr(tiny, "weights", lambda config: weights)
    folder = build_draft(write_gguf(tmp_path / "source.gguf", config), tmp_path / "draft", bits=32)
    check(folder, llama_rows(tmp_path / "source.gguf", TOKENS), 1e-4)


def test_every_case_is_another_model(tmp_path: Path) -> None:
    """What a test above varies must show in the logits, or it would prove nothing."""
    rows = {}
    for i, (name, config) in enumerate(CASES.items()):
        folder = build_draft(write_gguf(tmp_path / f"{i}.gguf", config), tmp_path / str(i), bits=32)
        rows[name] = Draft(folder).rows(TOKENS, len(TOKENS))
    for first, second in itertools.combinations(rows, 2):
        assert relative_error(rows[first], rows[second]) > 3e-3, (first, second)


@pytest.mark.parametrize(("config", "num_tables"), [(TinyConfig(), 2), (GEMMA, 4), (replace(GEMMA, window=0), 2)])
def test_layers_that_rotate_alike_share_their_tables(config: TinyConfig, num_tables: int, tmp_path: Path) -> None:
    folder = build_draft(write_gguf(tmp_path / "source.gguf", config), tmp_path / "draft", bits=8)
    tensors = onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer
    assert sum(tensor.name.startswith("rotary.") for tensor in tensors) == num_tables


@pytest.mark.parametrize("config", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize(("bits", "most"), [(8, 0.08), (4, 0.8)])
def test_quantized_drafts_are_close(bits: int, most: float, config: TinyConfig, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "source.gguf", config)
    whole = Draft(build_draft(source, tmp_path / "whole", bits=32)).rows(TOKENS, 1)
    rows = Draft(build_draft(source, tmp_path / "draft", bits=bits)).rows(TOKENS, 1)
    assert np.linalg.norm(rows - whole) / np.linalg.norm(whole) < most


def test_layers_keep_their_windows_when_others_are_left_out(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "source.gguf", GEMMA)
    whole = windows(build_draft(source, tmp_path / "whole", bits=32))
    assert [i for i, window in enumerate(whole) if window == -1] == [5]
    assert windows(build_draft(source, tmp_path / "some", bits=32, layers=[5, 0])) == [-1, whole[0]]


def windows(folder: Path) -> list[int]:
    found = []
    for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node:
        values = {attribute.name: attribute.i for attribute in node.attribute}
        found += [values["local_window_size"]] if node.op_type == "GroupQueryAttention" else []
    return found
