"""Sources that cannot become a draft are refused in one clear line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec.errors import FileAccessError, ModelFormatError, ModelNotFoundError
from quantize import build_draft
from quantize.gguf_source import open_gguf
from quantize.rope import linear_rope, llama3_rope, plain_rope
from tests import tiny
from tests.tiny import TinyConfig, token_strings, write_gguf


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "source.gguf")


def test_dimensions_and_tokens_are_the_files(tmp_path: Path) -> None:
    config = TinyConfig(num_vocab=400, rope_linear=2.0, tied=True)
    source = open_gguf(write_gguf(tmp_path / "source.gguf", config))
    d = source.dimensions
    assert (d.num_layers, d.width, d.num_heads, d.num_kv_heads, d.head_size) == (2, 64, 4, 2, 16)
    assert (d.num_hidden, d.num_vocab, d.num_ctx, d.attention_scale) == (128, 400, 256, 0.25)
    np.testing.assert_array_equal(d.rope.frequencies, linear_rope(16, 10000.0, 2.0).frequencies)
    assert (d.window, d.window_layers, d.window_rope) == (0, frozenset(), None)
    assert source.tied
    assert source.tokens == tuple(token_strings(400))


def test_rows_are_decoded_on_demand(source: Path) -> None:
    expected = tiny.weights(TinyConfig())["output"]
    matrix = open_gguf(source).matrix("output.weight")
    np.testing.assert_array_equal(matrix.read(5, 9), expected[5:9])
    np.testing.assert_array_equal(matrix.take(np.array([7, 3])).read(0, 2), expected[[7, 3]])


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelNotFoundError, match="is not there"):
            build_draft(path, tmp_path / "draft")


@pytest.mark.parametrize("kept", [0, 3, 20, 1000, 0.1, 0.5, 0.9, 0.9999])
def test_truncated_file(source: Path, kept: float) -> None:
    content = source.read_bytes()
    source.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(ModelFormatError, match="not a whole GGUF file"):
        build_draft(source, source.parent / "draft")
    assert not (source.parent / "draft").exists()


def test_corrupt_header_raises_nothing_else(source: Path) -> None:
    content, random = source.read_bytes(), np.random.default_rng(0)
    num_refused = 0
    for _ in range(100):
        damaged = bytearray(content)
        for position in random.integers(0, 2000, 3):
            damaged[position] = random.integers(0, 256)
        source.write_bytes(damaged)
        try:
            open_gguf(source)  # damage inside a token is a file like any other
        except ModelFormatError:
            num_refused += 1
    assert num_refused > 20


def test_weights_that_are_no_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tiny.weights(TinyConfig())
    weights["blk.1.ffn_up"][3, 4] = np.nan
    monkeypatch.setattr(tiny, "weights", lambda config: weights)
    with pytest.raises(ModelFormatError, match="finite"):
        build_draft(write_gguf(tmp_path / "source.gguf"), tmp_path / "draft")
    assert [path.name for path in tmp_path.iterdir()] == ["source.gguf"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TinyConfig(width=96, num_heads=4), "head size 24; supported: multiples of 16"),
        (TinyConfig(width=96, num_heads=3, num_kv_heads=2), "number of key heads 2; supported: divisors of its 3"),
    ],
)
def test_unsupported_heads(config: TinyConfig, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=message):
        open_gguf(write_gguf(tmp_path / "source.gguf", config))


def test_unsupported_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "source.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFormatError, match="architecture mamba; supported: llama, qwen2, qwen3, gemma3"):
        open_gguf(tmp_path / "source.gguf")


Fields = dict[str, object]


def write_with(path: Path, fields: Fields, config: TinyConfig, patch: pytest.MonkeyPatch) -> Path:
    """A GGUF whose metadata has these fields too, or instead."""
    add_metadata = tiny._add_metadata

    def add(writer: gguf.GGUFWriter, config: TinyConfig) -> None:
        add_metadata(writer, config)
        for key, value in fields.items():
            writer.kv_data[0].pop(key, None)
            kinds = {bool: "bool", int: "int32", float: "float32", str: "string", list: "array"}
            getattr(writer, f"add_{kinds[type(value)]}")(key, value)

    patch.setattr(tiny, "_add_metadata", add)
    return write_gguf(path, config)


def test_a_part_of_a_split_model_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_with(tmp_path / "part-00001-of-00003.gguf", {"split.count": 3}, TinyConfig(), monkeypatch)
    with pytest.raises(ModelFormatError, match=r"one of several files; join them with .*llama-gguf-split"):
        open_gguf(path)
    write_with(path, {"split.count": 1}, TinyConfig(), monkeypatch)
    assert open_gguf(path).dimensions.num_layers == 2


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rope.freq_base", 1.0, "llama.rope.freq_base is 1.0; expected above 1 with YaRN"),
        ("rope.scaling.factor", 0.5, "llama.rope.scaling.factor is 0.5; expected 1 or more with YaRN"),
    ],
)
def test_yarn_that_stretches_nothing(
    key: str, value: float, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_with(tmp_path / "source.gguf", {f"llama.{key}": value}, TinyConfig(rope_yarn=4.0), monkeypatch)
    with pytest.raises(ModelFormatError, match=re.escape(message)):
        open_gguf(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rope.scaling.type", "longrope", "rope scaling longrope; supported: none, linear, yarn"),
        ("rope.scaling.factor", -2.0, "llama.rope.scaling.factor is -2.0; expected above 0"),
        ("rope.scaling.factor", float("inf"), "llama.rope.scaling.factor is inf; expected above 0"),
        ("rope.scaling.attn_factor", 0.0, "llama.rope.scaling.attn_factor is 0.0; expected above 0"),
        ("rope.freq_base", float("nan"), "llama.rope.freq_base is nan; expected above 0"),
        ("attention.causal", False, "llama.attention.causal is false; expected true"),
        ("attention.value_length", 32, "llama.attention.value_length 32; supported: 16"),
        ("rope.dimension_count", 8, "llama.rope.dimension_count 8; supported: 16"),
        ("attention.head_count_kv", [2, 1], "llama.attention.head_count_kv is a list of 2; expected int"),
        ("context_length", 0, "llama.context_length is 0; expected 1 to 2147483647"),
        ("block_count", 2**31 - 1, "llama.block_count is 2147483647; expected 1 to 4096"),
        ("attention.key_length", 2**31 - 16, "head size 2147483632; supported: multiples of 16 up to 4096"),
        ("context_length", "long", "llama.context_length is 'long'; expected int"),
    ],
)
def test_unsupported_metadata(
    key: str, value: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_with(tmp_path / "source.gguf", {f"llama.{key}": value}, TinyConfig(), monkeypatch)
    with pytest.raises(ModelFormatError, match=message):
        open_gguf(path)


GEMMA = TinyConfig(architecture="gemma3", num_layers=7, window=8, key_length=32, rope_base=1e6)


@pytest.mark.parametrize(
    ("fields", "window_layers"),
    [
        ({}, {0, 1, 2, 3, 4, 6}),
        ({"gemma3.attention.sliding_window_pattern": 2}, {0, 2, 4, 6}),
        ({"gemma3.attention.sliding_window_pattern": 1}, set()),
        ({"gemma3.attention.sliding_window_pattern": 0}, set(range(7))),
        ({"gemma3.attention.sliding_window_pattern": [True] + [False] * 5 + [True]}, {0, 6}),
        ({"gemma3.attention.sliding_window": 0}, set()),
    ],
)
def test_which_layers_see_a_window(
    fields: Fields, window_layers: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = open_gguf(write_with(tmp_path / "source.gguf", fields, GEMMA, monkeypatch)).dimensions
    assert set(d.window_layers) == window_layers
    assert d.window == (8 if window_layers else 0)
    assert (d.window_rope is not None) == bool(window_layers)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.sliding_window_pattern", [True] * 6, "is a list of 6; expected one value for each of 7 layers"),
        ("attention.sliding_window_pattern", "all", "is 'all'; expected int"),
        ("attention.sliding_window_pattern", -1, "is -1; expected 0 or more"),
        ("attention.sliding_window", 8.5, "is 8.5; expected int"),
        ("attention.key_length_swa", 64, "gemma3.attention.key_length_swa 64; supported: 32"),
        ("final_logit_softcapping", 30.0, "gemma3.final_logit_softcapping is 30.0; expected none"),
    ],
)
def test_unsupported_windows(
    key: str, value: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_with(tmp_path / "source.gguf", {f"gemma3.{key}": value}, GEMMA, monkeypatch)
    with pytest.raises(ModelFormatError, match=message):
        open_gguf(path)


def test_the_rope_of_a_window_has_its_own_base_and_no_scaling(tmp_path: Path) -> None:
    config = replace(GEMMA, rope_yarn=4.0, rope_base_swa=5000.0)
    d = open_gguf(write_gguf(tmp_path / "source.gguf", config)).dimensions
    assert d.window_rope is not None
    np.testing.assert_array_equal(d.window_rope.frequencies, plain_rope(32, 5000.0).frequencies)
    assert d.rope.magnitude == pytest.approx(1.0 + 0.1 * np.log(4.0))
    assert d.window_rope.magnitude == 1.0


def test_llama_3_rope_is_the_same_from_divisors_and_from_its_rule(tmp_path: Path) -> None:
    rule = llama3_rope(32, 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_ctx=64)
    divisors = tuple((plain_rope(32, 5e5).frequencies / rule.frequencies).tolist())
    config = TinyConfig(key_length=32, rope_base=5e5, rope_freqs=divisors)
    d = open_gguf(write_gguf(tmp_path / "source.gguf", config)).dimensions
    np.testing.assert_allclose(d.rope.frequencies, rule.frequencies, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blk.0.attn_q_norm", (16,), "a tensor blk.0.attn_q_norm.weight, which is not supported"),
        ("rope_freqs", (4,), r"tensor rope_freqs.weight is \(4,\); expected \(8,\)"),
        ("blk.1.attn_q.bias", (64,), "a tensor blk.1.attn_q.bias, which is not supported"),
        ("blk.1.ffn_down", None, "no tensor blk.1.ffn_down.weight"),
        ("output_norm", (32,), r"tensor output_norm.weight is \(32,\); expected \(64,\)"),
    ],
)
def test_tensors_that_do_not_fit(
    name: str, shape: tuple[int, ...] | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tiny.weights(TinyConfig())
    if shape is None:
        del weights[name]
    else:
        weights[name] = np.ones(shape, np.float32)
    monkeypatch.setattr(tiny, "weights", lambda config: weights)
    path = write_gguf(tmp_path / "source.gguf")
    with pytest.raises(ModelFormatError, match=message):
        open_gguf(path)


@pytest.mark.parametrize(
    ("config", "lost", "added", "message"),
    [
        (TinyConfig(architecture="qwen2"), "blk.1.attn_k.bias", None, "no tensor blk.1.attn_k.bias"),
        (
            TinyConfig(architecture="qwen2"),
            None,
            "blk.0.attn_output.bias",
            "a tensor blk.0.attn_output.bias, which is not",
        ),
        (TinyConfig(architecture="qwen2"), None, "rope_freqs", "a tensor rope_freqs.weight, which is not supported"),
        (TinyConfig(architecture="qwen3"), "blk.0.attn_q_norm", None, "no tensor blk.0.attn_q_norm.weight"),
        (GEMMA, "blk.2.post_ffw_norm", None, "no tensor blk.2.post_ffw_norm.weight"),
    ],
)
def test_tensors_are_those_of_the_architecture(
    config: TinyConfig,
    lost: str | None,
    added: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = {name: value for name, value in tiny.weights(config).items() if name != lost}
    weights |= {added: np.ones(64, np.float32)} if added else {}
    monkeypatch.setattr(tiny, "weights", lambda config: weights)
    with pytest.raises(ModelFormatError, match=message):
        open_gguf(write_gguf(tmp_path / "source.gguf", config))


def test_divisors_of_zero_are_refused(tmp_path: Path) -> None:
    config = TinyConfig(rope_freqs=(1.0,) * 7 + (0.0,))
    with pytest.raises(ModelFormatError, match=r"rope_freqs.weight has values of 0 or less"):
        open_gguf(write_gguf(tmp_path / "source.gguf", config))


def test_a_file_that_shrinks_after_it_was_opened_is_refused(source: Path) -> None:
    opened = open_gguf(source)
    source.write_bytes(source.read_bytes()[:-100_000])
    with pytest.raises(FileAccessError, match="changed while it was read"):
        opened.matrix("output.weight").read(0, 320)
