"""Sources that cannot become a draft are refused in one clear line."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec.errors import ModelFormatError, ModelNotFoundError
from quantize import build_draft
from quantize.gguf_source import open_gguf
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
    assert (d.num_hidden, d.num_vocab, d.num_ctx, d.rope_base, d.rope_scale) == (128, 400, 256, 10000.0, 2.0)
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
    writer = gguf.GGUFWriter(tmp_path / "source.gguf", "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFormatError, match="architecture qwen2; supported: llama"):
        open_gguf(tmp_path / "source.gguf")


@pytest.mark.parametrize(
    ("setter", "value", "message"),
    [
        ("add_rope_scaling_type", gguf.RopeScalingType.YARN, "rope scaling yarn; supported: none, linear"),
        ("add_value_length", 32, "llama.attention.value_length 32; supported: 16"),
        ("add_context_length", 0, "llama.context_length is 0; expected 1 or more"),
        ("add_rope_freq_base", float("nan"), "llama.rope.freq_base is nan; expected above 0"),
    ],
)
def test_unsupported_metadata(
    setter: str, value: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_metadata = tiny._add_metadata

    def add(writer: gguf.GGUFWriter, config: TinyConfig) -> None:
        add_metadata(writer, config)
        getattr(writer, setter)(value)

    monkeypatch.setattr(tiny, "_add_metadata", add)
    monkeypatch.setattr("gguf.gguf_writer.logger.warning", lambda *text: None)  # a key set twice is meant
    path = write_gguf(tmp_path / "source.gguf")
    with pytest.raises(ModelFormatError, match=message):
        open_gguf(path)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blk.0.attn_q_norm", (16,), "a tensor blk.0.attn_q_norm.weight, which is not supported"),
        ("rope_freqs", (4,), r"tensor rope_freqs.weight is \(4,\); expected \(8,\)"),
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
