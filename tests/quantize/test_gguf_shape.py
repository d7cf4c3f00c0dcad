"""Sizes of a GGUF of any architecture, and of drafts before they are built."""

from __future__ import annotations

import collections.abc as abc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgespec.errors import ModelFormatError, ModelNotFoundError
from quantize import build_draft
from quantize.gguf_shape import draft_shape, read_gguf
from quantize.source import open_source
from tests.gguf_tools import split_gguf
from tests.tiny import TinyConfig, token_strings, write_gguf

TOKENS = token_strings(300)


def write(path: Path, architecture: str = "falcon", **values: Any) -> Path:
    """A GGUF with such metadata and a few tensors, which no llama.cpp need load. ``__`` stands for a dot."""
    facts: dict[str, Any] = {"block_count": 3, "embedding_length": 64, "context_length": 128} | values
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in facts.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    writer.add_token_list(TOKENS)
    writer.add_tensor("token_embd.weight", np.ones((300, 64), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


HEADS: dict[str, Any] = {"attention__head_count": 8, "attention__head_count_kv": 2, "feed_forward_length": 256}


def test_any_architecture_says_its_sizes(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", **HEADS, attention__key_length=16, attention__value_length=24)
    info = read_gguf(path)
    shape = info.shape
    assert (info.architecture, info.tokens, info.paths) == ("falcon", tuple(TOKENS), (path,))
    assert (shape.num_kv_heads, shape.num_heads, shape.width, shape.num_hidden) == ((2, 2, 2), 8, 64, 256)
    assert (shape.head_size_k, shape.head_size_v, shape.num_vocab, shape.num_ctx) == (16, 24, 300, 128)
    assert (shape.weights_bytes, shape.embedding_bytes) == (path.stat().st_size, 300 * 64 * 2)
    assert (shape.output_bytes, shape.window, info.license, info.name) == (0, False, "", "")
    assert (info.file_type, info.is_quantized) == ("F16", False)


def test_values_may_differ_from_layer_to_layer(tmp_path: Path) -> None:
    lists: dict[str, Any] = {"attention__head_count": [8, 4, 8], "attention__head_count_kv": [2, 0, 1]}
    shape = read_gguf(write(tmp_path / "x.gguf", **lists, feed_forward_length=[64, 512, 128])).shape
    assert shape.num_kv_heads == (2, 0, 1)
    assert (shape.num_heads, shape.num_hidden) == (8, 512)
    assert shape.kv_bytes(100, "f16", "f16") == 100 * 3 * 8 * 2 * 2


def test_experts_count_as_many_as_work_at_once(tmp_path: Path) -> None:
    experts: dict[str, Any] = {"expert_feed_forward_length": 96, "expert_used_count": 8}
    assert read_gguf(write(tmp_path / "x.gguf", **HEADS, **experts)).shape.num_hidden == 768


def test_without_heads_for_keys_each_head_has_its_own(tmp_path: Path) -> None:
    assert read_gguf(write(tmp_path / "x.gguf", attention__head_count=4)).shape.num_kv_heads == (4, 4, 4)
    assert read_gguf(write(tmp_path / "y.gguf", "mamba")).shape.kv_bytes(1000, "f16", "f16") == 0


def test_a_quantized_file_says_so(tmp_path: Path) -> None:
    info = read_gguf(write_gguf(tmp_path / "x.gguf", TinyConfig(q8_0=True)))
    assert (info.file_type, info.is_quantized) == ("Q8_0", True)


def test_a_file_type_that_is_no_number_says_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "general", **HEADS, file_type=[1, 2])
    assert read_gguf(path).file_type == "F16"  # that of its weights


def test_a_sliding_window_is_seen(tmp_path: Path) -> None:
    config = TinyConfig("gemma3", num_layers=6, window=32, key_length=16)
    assert read_gguf(write_gguf(tmp_path / "x.gguf", config)).shape.window


def test_a_split_model_is_all_its_files(tmp_path: Path) -> None:
    one = write_gguf(tmp_path / "whole.gguf")
    first, second = split_gguf(one, tmp_path)
    whole, info = read_gguf(one), read_gguf(first)
    assert info.paths == (first, second)
    assert info.shape.weights_bytes == first.stat().st_size + second.stat().st_size
    assert info.shape.output_bytes == whole.shape.output_bytes > 0
    assert info.tokens == whole.tokens


def test_a_split_model_with_a_part_missing_or_misnamed_is_refused(tmp_path: Path) -> None:
    first, second = split_gguf(write_gguf(tmp_path / "whole.gguf"), tmp_path)
    with pytest.raises(ModelFormatError, match="give the first"):
        read_gguf(first.rename(tmp_path / "renamed.gguf"))
    (tmp_path / "renamed.gguf").rename(first)
    second.unlink()
    with pytest.raises(ModelNotFoundError, match="00002-of-00002"):
        read_gguf(first)


@pytest.mark.parametrize(
    "values",
    [
        {"block_count": None},
        {"block_count": 0},
        {"block_count": 2**31},
        {"embedding_length": None},
        {"context_length": "long"},
        {"attention__head_count": "many"},
        {"attention__head_count": [2.5, 1.0, 1.0]},
        {"feed_forward_length": 2**31},
    ],
    ids=str,
)
def test_metadata_that_is_no_size_is_refused(values: dict[str, Any], tmp_path: Path) -> None:
    (key,) = values
    with pytest.raises(ModelFormatError, match=f"falcon.{key.replace('__', '.')} is"):
        read_gguf(write(tmp_path / "x.gguf", **HEADS | values))


def test_what_is_no_language_model_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "clip.gguf", "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFormatError, match="tokenizer"):
        read_gguf(tmp_path / "clip.gguf")


# -------------------------------------------------------------------------------------------------------------- drafts

CONFIGS = (
    TinyConfig(num_vocab=4000, width=128, num_hidden=320),
    TinyConfig(num_vocab=4000, width=128, num_hidden=320, tied=True),
    TinyConfig("qwen3", num_vocab=4000, width=128, key_length=64),
    TinyConfig("gemma3", num_layers=6, width=128, key_length=64, window=32, rope_base_swa=1000.0, tied=True),
)


@pytest.mark.parametrize("recipe", [(8, 32), (4, 128), (32, 32)], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.architecture}-{'tied' if c.tied else 'untied'}")
@pytest.mark.parametrize("head", [None, range(0, 200, 2)], ids=["whole", "trimmed"])
def test_a_drafts_size_is_known_before_it_is_built(
    config: TinyConfig, recipe: tuple[int, int], head: abc.Sequence[int] | None, tmp_path: Path
) -> None:
    source, (bits, block_size) = write_gguf(tmp_path / "x.gguf", config), recipe
    build_draft(source, tmp_path / "draft", bits=bits, block_size=block_size, head=head)
    shape = draft_shape(open_source(source), bits, block_size, num_head_vocab=len(head or ()))
    written = (tmp_path / "draft" / "model.onnx.data").stat().st_size
    assert shape.weights_bytes <= written + 16_000  # norms and biases of less than a kilobyte lie in the graph
    assert shape.weights_bytes >= written - 4096 * 40 * config.num_layers  # each tensor starts on a page of its own


def test_fewer_layers_make_a_smaller_draft(tmp_path: Path) -> None:
    source = open_source(write_gguf(tmp_path / "x.gguf", TinyConfig(num_layers=4)))
    one, two, whole = (draft_shape(source, 8, 32, num_layers=count) for count in (1, 2, 0))
    assert (one.num_layers, two.num_layers, whole.num_layers) == (1, 2, 4)
    layer = two.weights_bytes - one.weights_bytes
    assert whole.weights_bytes == one.weights_bytes + 3 * layer


@pytest.mark.model
def test_the_starter_drafts_size_is_known(starter_gguf: Path, starter_draft: Path) -> None:
    shape = draft_shape(open_source(starter_gguf), 8, 32)
    assert shape.weights_bytes == pytest.approx((starter_draft / "model.onnx.data").stat().st_size, rel=0.005)
    assert read_gguf(starter_gguf).license == "apache-2.0"
    assert read_gguf(starter_gguf).file_type == "Q4_1"
