"""The graph computes what llama.cpp computes from the same GGUF."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from quantize import build_draft
from tests import tiny
from tests.quantize.reference import Draft, llama_rows, relative_error
from tests.tiny import TinyConfig, write_gguf, write_usual_onnx

TOKENS = np.random.default_rng(7).integers(0, 320, 60).tolist()

CONFIGS = {
    "grouped": TinyConfig(),
    "tied": TinyConfig(tied=True),
    "every head its own keys": TinyConfig(num_kv_heads=4, num_vocab=500),
    "one key head, one layer": TinyConfig(num_kv_heads=1, num_layers=1),
    "wide heads": TinyConfig(width=128, num_heads=1, num_kv_heads=1),
    "odd sizes": TinyConfig(width=96, num_heads=3, num_kv_heads=1, num_hidden=160),
    "rope base": TinyConfig(rope_base=500000.0),
    "linear rope scaling": TinyConfig(rope_linear=4.0),
    "Llama 3 rope": TinyConfig(rope_freqs=tuple(np.linspace(1, 8, 8).tolist())),
    "both": TinyConfig(rope_linear=2.0, rope_freqs=tuple(np.linspace(1, 32, 8).tolist())),
}


GROUPED = CONFIGS["grouped"]


def built(folder: Path, bits: int, config: TinyConfig = GROUPED) -> Path:
    return build_draft(write_gguf(folder / "source.gguf", config), folder / "draft", bits=bits)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_unquantized_draft_equals_llama_cpp(config: TinyConfig, tmp_path: Path) -> None:
    folder = built(tmp_path, 32, config)
    expected = llama_rows(tmp_path / "source.gguf", TOKENS)
    for step in (len(TOKENS), 1, 7):
        ends = [min(start + step, len(TOKENS)) - 1 for start in range(0, len(TOKENS), step)]
        assert relative_error(Draft(folder).rows(TOKENS, step), expected[ends]) < 1e-4


@pytest.mark.parametrize("tied", [False, True])
def test_draft_of_a_quantized_source_equals_its_rounded_weights(tied: bool, tmp_path: Path) -> None:
    """llama.cpp rounds activations too where weights are Q8_0, so the reference is the exported decoder."""
    config = TinyConfig(q8_0=True, tied=tied)
    folder = built(tmp_path, 32, config)
    session = onnxruntime.InferenceSession(write_usual_onnx(tmp_path / "usual", config))
    empty = np.zeros((1, config.num_kv_heads, 0, config.head_size), np.float32)
    ids, positions = np.array([TOKENS]), np.arange(len(TOKENS))[None]
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": positions}
    feeds |= {value.name: empty for value in session.get_inputs() if value.name.startswith("past")}
    expected = session.run(["logits"], feeds)[0][0]
    assert relative_error(Draft(folder).rows(TOKENS, 1), expected) < 1e-4


@pytest.mark.parametrize("tied", [False, True])
def test_fewer_bits_are_further_off_but_close(tied: bool, tmp_path: Path) -> None:
    expected = llama_rows(write_gguf(tmp_path / "source.gguf", TinyConfig(tied=tied)), TOKENS)
    errors = {}
    for bits, block_size in itertools.product((4, 8), (16, 32, 64)):
        name = f"draft{bits}-{block_size}"
        folder = build_draft(tmp_path / "source.gguf", tmp_path / name, bits=bits, block_size=block_size)
        rows = Draft(folder).rows(TOKENS, 1)
        errors[bits, block_size] = np.linalg.norm(rows - expected) / np.linalg.norm(expected)
    assert all(errors[8, size] < 0.08 for size in (16, 32, 64))
    assert all(errors[8, size] * 4 < errors[4, size] < 0.7 for size in (16, 32, 64))


def test_the_embedding_and_a_tied_head_share_their_bytes(tmp_path: Path) -> None:
    config = TinyConfig(num_vocab=512, tied=True)
    folder = built(tmp_path, 8, config)
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    assert session.get_outputs()[0].shape == ["batch", 1, 512]
    untied = build_draft(write_gguf(tmp_path / "untied.gguf", TinyConfig(num_vocab=512)), tmp_path / "untied", bits=8)
    table_bytes = 512 * 64 + 512 * 64 // 32 * 4
    sizes = [(path / "model.onnx.data").stat().st_size for path in (folder, untied)]
    assert table_bytes <= sizes[1] - sizes[0] < table_bytes + 8192


@pytest.mark.parametrize("bits", [8, 32])
def test_rows_of_a_batch_are_independent_and_may_differ_in_length(bits: int, tmp_path: Path) -> None:
    folder = built(tmp_path, bits)
    lengths, batch = [3, 9, 17], Draft(folder, batch=3)
    alone = [Draft(folder) for _ in lengths]
    for i, length in enumerate(lengths):
        alone[i].feed([TOKENS[:length]], [0])
        for name, cache in batch.caches.items():
            cache[i] = alone[i].caches[name][0]
    for step in range(4):
        totals = [length + step for length in lengths]
        rows = batch.feed([[TOKENS[total]] for total in totals], totals)
        for i, total in enumerate(totals):
            assert relative_error(rows[i : i + 1], alone[i].feed([[TOKENS[total]]], [total])) < 1e-5


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_a_cache_is_trimmed_by_a_smaller_length(bits: int, tmp_path: Path) -> None:
    draft = Draft(built(tmp_path, bits))
    draft.feed([TOKENS[:12]], [0])
    draft.feed([TOKENS[30:60]], [12])
    fresh = Draft(tmp_path / "draft")
    fresh.feed([TOKENS[:12]], [0])
    np.testing.assert_array_equal(draft.feed([TOKENS[12:13]], [12]), fresh.feed([TOKENS[12:13]], [12]))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [4, 8, 32])
def test_a_trimmed_head_gives_the_same_logits_for_its_ids(tied: bool, bits: int, tmp_path: Path) -> None:
    whole = built(tmp_path, bits, TinyConfig(tied=tied))
    trimmed = build_draft(tmp_path / "source.gguf", tmp_path / "trimmed", bits=bits, head=[300, 5, 17, 5, 0, 319])
    d2t = np.load(trimmed / "d2t.npy")
    np.testing.assert_array_equal(d2t, [0, 5, 17, 300, 319])
    rows = Draft(trimmed).rows(TOKENS, 1)
    assert relative_error(rows, Draft(whole).rows(TOKENS, 1)[:, d2t]) < 1e-5


@pytest.mark.parametrize("layers", [(0,), (1,), (1, 0)])
def test_kept_layers_are_the_sources_in_that_order(
    layers: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_draft(write_gguf(tmp_path / "source.gguf"), tmp_path / "draft", bits=32, layers=layers)
    weights, fewer = tiny.weights(TinyConfig()), TinyConfig(num_layers=len(layers))
    kept = {name: value for name, value in weights.items() if not name.startswith("blk.")}
    for place, layer in enumerate(layers):
        own = {name: value for name, value in weights.items() if name.startswith(f"blk.{layer}.")}
        kept |= {name.replace(f"blk.{layer}.", f"blk.{place}."): value for name, value in own.items()}
    monkeypatch.setattr(tiny, "weights", lambda config: kept)
    expected = llama_rows(write_gguf(tmp_path / "fewer.gguf", fewer), TOKENS)
    assert relative_error(Draft(folder).rows(TOKENS, 1), expected) < 1e-4
