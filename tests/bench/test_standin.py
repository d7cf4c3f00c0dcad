from __future__ import annotations

import collections.abc as abc
import contextlib
import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.errors import ModelFormatError, ModelNotFoundError, ParameterError
from edgespec.text import Tokenizer
from edgespec.verifiers.base import ScoreRequest
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from tests import tiny
from tests.bench import standin

# 3 query heads per KV head, as in the starter model; head size 16
CONFIG = tiny.TinyConfig(width=96, num_heads=6, num_kv_heads=2)
TOKENS = tuple(range(3, 63))

TEXT = (
    "The water of the river comes down from the mountains in spring, when the snow melts. It fills the lakes, and in "
    "summer the farmers of the valley lead it through small canals to their fields."
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("standin") / "tiny.gguf", CONFIG)


@contextlib.contextmanager
def opened(path: Path) -> abc.Iterator[LlamaVerifier]:
    verifier = LlamaVerifier(LlamaOptions(path=path, num_threads=1, num_ctx=256, use_extra_bufts=False))
    try:
        yield verifier
    finally:
        verifier.close()


def logits(path: Path, tokens: tuple[int, ...]) -> NDArray[np.float32]:
    with opened(path) as verifier:
        return np.array(verifier.score([ScoreRequest(0, tokens, len(tokens))])[0])


def encode(path: Path, text: str) -> tuple[int, ...]:
    with opened(path) as verifier:
        return tuple(Tokenizer(verifier.model).encode(text, add_special=False, parse_special=False))


def assert_same_model(source: Path, target: Path, tolerance: float, tokens: tuple[int, ...] = TOKENS) -> None:
    expected, got = logits(source, tokens), logits(target, tokens)
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() < tolerance * expected.std()


@pytest.mark.parametrize(
    ("width", "num_layers", "heads"),
    [(96, 2, (6, 2)), (128, 2, (8, 2)), (256, 2, (16, 4)), (288, 5, (18, 6))],
    ids=["same", "wider groups", "wider groups, more KV heads", "more layers"],
)
def test_logits_stay(source: Path, tmp_path: Path, width: int, num_layers: int, heads: tuple[int, int]) -> None:
    target = tmp_path / "wide.gguf"
    shape = standin.widen(source, target, width=width, hidden=192, num_layers=num_layers, quant="F32")
    assert (shape.num_heads, shape.num_kv_heads, shape.num_layers) == (*heads, num_layers)
    assert_same_model(source, target, 0.005)


@pytest.mark.parametrize("quant", ["F16", "Q8_0"])
def test_quantized_weights_survive(tmp_path: Path, quant: str) -> None:
    """The source's weights are 8-bit already: only activations are rounded anew."""
    config = dataclasses.replace(CONFIG, q8_0=True)
    path = tiny.write_gguf(tmp_path / "source.gguf", config)
    standin.widen(path, tmp_path / "wide.gguf", width=128, hidden=192, quant=quant)
    assert_same_model(path, tmp_path / "wide.gguf", 0.3)
    old, new = (gguf.GGUFReader(tmp_path / name).tensors for name in ("source.gguf", "wide.gguf"))
    values = [gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in (*old, *new) if "ffn_up" in tensor.name]
    for before, after in zip(values[:2], values[2:], strict=True):
        rows, columns = before.shape
        assert np.allclose(after[:rows, :columns], before, atol=2e-3)
        assert not after[rows:].any()
        assert not after[:, columns:].any()


def test_the_shape_is_real(source: Path, tmp_path: Path) -> None:
    """Nothing is left out: every matrix of every layer has the new sizes, and an extra layer's are not all zero."""
    standin.widen(source, tmp_path / "wide.gguf", width=288, hidden=192, num_layers=3)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "wide.gguf").tensors}
    assert [*tensors["blk.2.ffn_up.weight"].shape] == [288, 192]
    assert [*tensors["blk.2.attn_output.weight"].shape] == [288, 288]
    assert [*tensors["blk.2.attn_k.weight"].shape] == [288, 96]
    assert len(tensors) == 3 * 9 + 3
    silent = {name for name, tensor in tensors.items() if not gguf.dequantize(tensor.data, tensor.tensor_type).any()}
    assert silent == {"blk.2.attn_output.weight", "blk.2.ffn_down.weight"}


def test_tied_output_and_scaled_rotation_stay(tmp_path: Path) -> None:
    config = tiny.TinyConfig(width=96, num_heads=6, num_kv_heads=2, tied=True, rope_freqs=(1.0,) * 4 + (8.0,) * 4)
    path = tiny.write_gguf(tmp_path / "tied.gguf", config)
    standin.widen(path, tmp_path / "wide.gguf", width=160, hidden=128, quant="F32")
    names = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "wide.gguf").tensors}
    assert "output.weight" not in names
    assert_same_model(path, tmp_path / "wide.gguf", 0.005)


def test_metadata_is_copied_but_for_the_shape(source: Path, tmp_path: Path) -> None:
    standin.widen(source, tmp_path / "wide.gguf", width=128, hidden=192)
    old, new = (gguf.GGUFReader(path).fields for path in (source, tmp_path / "wide.gguf"))
    for name, field in old.items():
        if name.startswith(("tokenizer.", "llama.rope", "llama.context")):
            assert new[name].contents() == field.contents(), name
    assert new["general.name"].contents() == "tiny (stand-in)"
    assert new["llama.attention.layer_norm_rms_epsilon"].contents() == pytest.approx(1e-5 * 96 / 128)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"width": 64, "hidden": 192}, "width: got 64; the source has 96"),
        ({"width": 128, "hidden": 96}, "hidden: got 96; the source has 128"),
        ({"width": 128, "hidden": 192, "num_layers": 1}, "layers: got 1; the source has 2"),
        ({"width": 128, "hidden": 200}, "multiples of 32"),
        ({"width": 112, "hidden": 192}, "multiples of 32"),
    ],
)
def test_impossible_sizes_are_refused_and_leave_nothing(
    source: Path, tmp_path: Path, sizes: dict[str, int], says: str
) -> None:
    with pytest.raises(ParameterError, match=says):
        standin.widen(source, tmp_path / "wide.gguf", **sizes)
    assert not list(tmp_path.iterdir())


def test_heads_that_cannot_be_shared_out_are_refused(source: Path, tmp_path: Path) -> None:
    """10 heads in groups of 3 or more: 2 groups of 5, enough; 7 KV heads would not be."""
    shape = standin.widen(source, tmp_path / "wide.gguf", width=160, hidden=128, quant="F32")
    assert (shape.num_heads, shape.num_kv_heads) == (10, 2)
    assert_same_model(source, tmp_path / "wide.gguf", 0.005)
    config = tiny.TinyConfig(width=96, num_heads=6, num_kv_heads=6)
    path = tiny.write_gguf(tmp_path / "many.gguf", config)
    assert standin.widen(path, tmp_path / "wide.gguf", width=160, hidden=128).num_kv_heads == 10
    starter = standin.Shape(576, 1536, 30, 9, 3, 64, 49152)
    with pytest.raises(ParameterError, match="cannot be shared out to 3 KV heads"):
        standin._grown(starter, 640, 1536, 30)


def test_a_source_that_is_no_plain_llama_is_refused(source: Path, tmp_path: Path) -> None:
    def widen(path: Path) -> None:
        standin.widen(path, tmp_path / "wide.gguf", width=128, hidden=192)

    with pytest.raises(ModelNotFoundError, match=r"missing\.gguf"):
        widen(tmp_path / "missing.gguf")
    other = tmp_path / "other.gguf"
    other.write_bytes(source.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.1.attn_q.biases"))
    with pytest.raises(ModelFormatError, match=r"attn_q\.biases"):
        widen(other)
    other.write_bytes(source.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0qwen2"))
    with pytest.raises(ModelFormatError, match="qwen2"):
        widen(other)
    assert not (tmp_path / "wide.gguf").exists()


def test_a_failed_write_leaves_the_old_file(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "wide.gguf"
    target.write_bytes(b"old")
    monkeypatch.setattr(standin, "_widened", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        standin.widen(source, target, width=128, hidden=192)
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["wide.gguf"]


def test_the_command_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "wide.gguf"
    assert standin.main([str(source), str(target), "--width", "128", "--ffn", "192", "--type", "Q4_0"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, "width=128" in captured.err) == ("", True)
    assert standin.main([str(source), str(target), "--width", "32"]) == ParameterError.exit_code


@pytest.mark.model
@pytest.mark.slow
def test_the_starter_model_says_the_same(starter_gguf: Path, tmp_path: Path) -> None:
    """Over real text most next tokens agree; what differs is a near-tie under 8-bit activations."""
    standin.widen(starter_gguf, tmp_path / "wide.gguf", width=768, hidden=1664, num_layers=31)
    tokens = encode(starter_gguf, TEXT)
    expected, got = logits(starter_gguf, tokens), logits(tmp_path / "wide.gguf", tokens)
    assert np.median(np.abs(got - expected)) < 0.06 * expected.std()
    assert np.mean(got.argmax(axis=1) == expected.argmax(axis=1)) > 0.8
