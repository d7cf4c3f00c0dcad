"""Blocks of weights: close to what they stand for, whatever the width, and read back alike by both operators."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from quantize import build_draft
from quantize.gguf_source import open_gguf
from quantize.weights_file import BlockMatrix, Place, WeightsFile
from tests.quantize.reference import Draft
from tests.tiny import TinyConfig, write_gguf

Array = NDArray[np.float32]

BLOCK_SIZES = (16, 32, 64, 128)
# Widths and hidden sizes that some or all of the blocks do not divide.
CONFIGS = {
    "80": TinyConfig(width=80, num_heads=5, num_kv_heads=1, num_hidden=176, num_vocab=330),
    "80, tied": TinyConfig(width=80, num_heads=5, num_kv_heads=1, num_hidden=176, num_vocab=330, tied=True),
    "gemma3": TinyConfig(
        architecture="gemma3", width=80, num_heads=5, num_kv_heads=1, num_hidden=72, window=8, tied=True
    ),
    "qwen2": TinyConfig(architecture="qwen2", width=48, num_heads=3, num_kv_heads=1, num_hidden=100),
}
RECIPES = list(itertools.product((4, 8), BLOCK_SIZES))
TOKENS = np.random.default_rng(3).integers(0, 320, 40).tolist()


def read(content: bytes, place: Place) -> NDArray[Any]:
    count = int(np.prod(place.shape))
    return np.frombuffer(content, place.dtype, count, place.offset).reshape(place.shape)


def dequantized(content: bytes, matrix: BlockMatrix, bits: int) -> tuple[Array, Array]:
    """(out, in) weights, filling included, and the scale of each."""
    values, scales = read(content, matrix.values), read(content, matrix.scales)
    if bits == 4:
        values = np.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:2], -1)
    zeros = read(content, matrix.zeros)[..., None] if matrix.zeros else 1 << bits - 1
    weights = (values.astype(np.float32) - zeros) * scales[..., None]
    return weights.reshape(len(weights), -1), np.broadcast_to(abs(scales[..., None]), values.shape).reshape(
        weights.shape[0], -1
    )


@pytest.mark.parametrize(("bits", "block_size"), RECIPES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_weight_is_within_a_step_of_the_sources(
    bits: int, block_size: int, config: TinyConfig, tmp_path: Path
) -> None:
    source, stream = open_gguf(write_gguf(tmp_path / "source.gguf", config)), io.BytesIO()
    names = ("blk.0.attn_q", "blk.0.attn_k")
    matrices = [source.matrix(f"{name}.weight") for name in names]
    blocks = WeightsFile(stream, bits, block_size).blocks(*matrices)
    expected = np.concatenate([matrix.read(0, matrix.shape[0]) for matrix in matrices])
    got, step = dequantized(stream.getvalue(), blocks, bits)
    assert blocks.shape == expected.shape
    assert (abs(got[:, : config.width] - expected) <= 1.01 * step[:, : config.width]).all()
    assert not got[:, config.width :].any()
    assert got.shape[1] == -(-config.width // block_size) * block_size


@pytest.mark.parametrize(("bits", "block_size"), RECIPES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_drafts_of_any_width_are_close(bits: int, block_size: int, config: TinyConfig, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "source.gguf", config)
    whole = Draft(build_draft(source, tmp_path / "whole", bits=32)).rows(TOKENS, 1)
    rows = Draft(build_draft(source, tmp_path / "draft", bits=bits, block_size=block_size)).rows(TOKENS, 1)
    assert np.linalg.norm(rows - whole) / np.linalg.norm(whole) < (0.1 if bits == 8 else 0.9)


@pytest.mark.parametrize(("bits", "block_size"), RECIPES)
def test_the_embedding_and_a_tied_head_read_one_table_alike(bits: int, block_size: int, tmp_path: Path) -> None:
    """The head's product with a one-hot vector gives what the embedding gives for that token."""
    folder = build_draft(
        write_gguf(tmp_path / "source.gguf", CONFIGS["80, tied"]), tmp_path / "draft", bits=bits, block_size=block_size
    )
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    gather = next(node for node in model.graph.node if node.op_type == "GatherBlockQuantized")
    head = next(node for node in model.graph.node if node.op_type == "MatMulNBits" and node.input[1] == "head.values")
    first_norm = next(node for node in model.graph.node if node.op_type == "SimplifiedLayerNormalization")
    places = {t.name: {entry.key: entry.value for entry in t.external_data} for t in model.graph.initializer}
    assert places[gather.input[0]] == places[head.input[1]]
    model.graph.output.append(onnx.helper.make_tensor_value_info(first_norm.input[0], 1, ["batch", "length", 80]))
    head.input[0] = "probe"
    model.graph.input.append(onnx.helper.make_tensor_value_info("probe", 1, ["batch", 1, 80]))
    onnx.save(model, folder / "probed.onnx")
    session = onnxruntime.InferenceSession(folder / "probed.onnx", providers=["CPUExecutionProvider"])
    feeds: dict[str, NDArray[Any]] = {
        value.name: np.zeros((1, 1, 8, 16), np.float32) for value in session.get_inputs() if "past" in value.name
    }
    feeds |= {
        "input_ids": np.array([[7]]),
        "seqlens_k": np.zeros(1, np.int32),
        "total_sequence_length": np.array(1, np.int32),
    }
    for column in (0, 63, 79):
        probe = np.zeros((1, 1, 80), np.float32)
        probe[0, 0, column] = 1
        logits, embedded = session.run(["logits", first_norm.input[0]], feeds | {"probe": probe})
        assert embedded.shape == (1, 1, 80)
        np.testing.assert_allclose(logits[0, 0, 7], embedded[0, 0, column], rtol=1e-5)
