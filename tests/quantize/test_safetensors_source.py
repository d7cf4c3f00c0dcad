"""Checkpoint folders: what is read of them, and the ones that are refused in one clear line."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import EdgespecError, MissingDependencyError, ModelFormatError, ModelNotFoundError
from quantize import build_draft
from quantize.safetensors_file import StoredMatrix, StoredTensor
from quantize.safetensors_source import open_checkpoint
from quantize.source import open_source
from tests import tiny
from tests.tiny import TinyConfig, token_strings
from tests.tiny_hf import arrays, change_json, hf_tokenizer, write_checkpoint, write_json, write_weights

GEMMA = TinyConfig(architecture="gemma3", key_length=32, num_layers=6, window=8, tied=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", num_shards=3)


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------- what is read


def test_dimensions_tokens_and_weights_are_the_folders(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", TinyConfig(num_vocab=400, tied=True), dtype="BF16")
    source = open_source(folder)
    d = source.dimensions
    assert (d.num_layers, d.width, d.num_heads, d.num_kv_heads, d.head_size) == (2, 64, 4, 2, 16)
    assert (d.num_hidden, d.num_vocab, d.num_ctx, d.norm_epsilon, d.attention_scale) == (128, 400, 256, 1e-5, 0.25)
    assert source.path == folder
    assert source.tied
    assert not source.pairs_neighbours
    assert source.tokens == (*token_strings(0), *[""] * (400 - len(token_strings(0))))


def test_rows_are_read_on_demand_and_in_any_order(folder: Path) -> None:
    expected = tiny.weights(TinyConfig())["output"]
    matrix = open_checkpoint(folder).matrix("output.weight")
    np.testing.assert_array_equal(matrix.read(5, 9), expected[5:9])
    rows = np.array([7, 3, 4, 5, 319, 0, 0])
    taken = matrix.take(rows)
    assert taken.shape == (7, 64)
    np.testing.assert_array_equal(taken.read(0, 7), expected[rows])
    np.testing.assert_array_equal(taken.take(np.array([4, 1])).read(0, 2), expected[[319, 3]])
    assert taken.read(2, 2).shape == (0, 64)


def test_norms_of_a_gemma_get_their_offset(tmp_path: Path) -> None:
    source, expected = open_checkpoint(write_checkpoint(tmp_path / "checkpoint", GEMMA)), tiny.weights(GEMMA)
    for name in ("output_norm", "blk.0.attn_norm", "blk.5.post_ffw_norm", "blk.3.attn_q_norm"):
        np.testing.assert_allclose(source.vector(f"{name}.weight"), expected[name], rtol=1e-6)


def test_a_row_of_a_huge_tensor_costs_a_row(tmp_path: Path) -> None:
    num_rows, width = 2**21, 2048
    with (tmp_path / "huge").open("wb") as stream:
        stream.truncate(8 + num_rows * width * 2)  # a sparse file
    matrix = StoredMatrix(StoredTensor(tmp_path / "huge", "huge", "BF16", (num_rows, width), 8))
    tracemalloc.start()
    assert matrix.read(num_rows - 3, num_rows).shape == (3, width)
    assert matrix.take(np.arange(0, num_rows, 2**19)).read(0, 4).shape == (4, width)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 40 * width * 4


def test_digest_covers_weights_and_config_and_their_names(shards: Path) -> None:
    names = ["config.json", *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))]
    expected = hashlib.sha256()
    for name in names:
        expected.update(name.encode() + b"\0" + hashlib.sha256((shards / name).read_bytes()).digest())
    assert open_checkpoint(shards).sha256() == expected.hexdigest()
    change_json(shards / "config.json", rms_norm_eps=1e-6)
    assert open_checkpoint(shards).sha256() != expected.hexdigest()


def test_nothing_is_written_to_the_source(shards: Path, tmp_path: Path) -> None:
    def state() -> dict[str, tuple[bytes, int]]:
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in shards.iterdir()}

    before = state()
    for path in shards.iterdir():
        path.chmod(0o444)
    build_draft(shards, tmp_path / "draft", head=[1, 2, 300])
    assert state() == before


def test_a_folder_of_links_as_download_caches_make_them(folder: Path, tmp_path: Path) -> None:
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    assert open_checkpoint(linked).sha256() == open_checkpoint(folder).sha256()


@pytest.mark.parametrize("name", ["model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_stored_tables_that_follow_from_the_config_are_ignored(name: str, folder: Path) -> None:
    write_weights(folder, arrays(TinyConfig()) | {name: np.ones(8, np.float32)})
    assert open_checkpoint(folder).dimensions.num_layers == 2


def test_an_unused_copy_of_a_tied_head(tmp_path: Path) -> None:
    config = TinyConfig(tied=True)
    folder, values = write_checkpoint(tmp_path / "checkpoint", config), arrays(config)
    write_weights(folder, values | {"lm_head.weight": values["model.embed_tokens.weight"].copy()})
    assert open_checkpoint(folder).tied
    write_weights(folder, values | {"lm_head.weight": 2 * values["model.embed_tokens.weight"]})
    refused(folder, "tie_word_embeddings and has another lm_head.weight than embedding")


def test_published_gemma_configs_leave_most_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", GEMMA)
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    write_json(folder / "config.json", {"model_type": "gemma3", "text_config": text, "vision_config": {}})
    refused(folder, r"tensor model.embed_tokens.weight is \(320, 64\); its config.json asks for \(262208, 2560\)")


# ------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelNotFoundError, match=f"{name} is not there"):
        open_checkpoint(folder)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is not there"):
        open_checkpoint(tmp_path / "none")


@pytest.mark.parametrize("kept", [0, 7, 8, 20, 0.01, 0.5, 0.9999])
def test_truncated_weights(kept: float, folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(ModelFormatError, match="not a whole safetensors file"):
        build_draft(folder, folder.parent / "draft")
    assert not (folder.parent / "draft").exists()


def write_header(path: Path, header: bytes, data: bytes = bytes(64)) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2, 2]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 17]},
        {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2.0, 2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [-16, 0]},
        {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]},
        {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 16]},
        {"dtype": 5, "shape": [2, 2], "data_offsets": [0, 16]},
        [],
        None,
    ],
    ids=str,
)
def test_headers_that_describe_no_tensor(entry: object, folder: Path) -> None:
    write_header(folder / "model.safetensors", json.dumps({"model.norm.weight": entry}).encode())
    refused(folder, "not a whole safetensors file")


@pytest.mark.parametrize("header", [b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b"{}" + bytes(6)])
def test_headers_that_are_no_object(header: bytes, folder: Path) -> None:
    write_header(folder / "model.safetensors", header)
    refused(folder, "not a whole safetensors file")


def test_a_damaged_header_raises_nothing_else(folder: Path) -> None:
    path, random, num_refused = folder / "model.safetensors", np.random.default_rng(0), 0
    content = path.read_bytes()
    for _ in range(200):
        damaged = bytearray(content)
        for position in random.integers(0, 1500, 3):
            damaged[position] = random.integers(0, 256)
        path.write_bytes(damaged)
        try:
            open_checkpoint(folder)  # damage in the metadata is a file like any other
        except ModelFormatError:
            num_refused += 1
    assert num_refused > 100


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.layers.1.mlp.down_proj.weight", None, "has no tensor model.layers.1.mlp.down_proj.weight"),
        (
            "model.norm.weight",
            np.ones(32, np.float32),
            r"model.norm.weight is \(32,\); its config.json asks for \(64,\)",
        ),
        ("model.norm.weight", np.ones((64, 1), np.float32), r"model.norm.weight is \(64, 1\)"),
        ("model.norm.weight", np.ones(64, np.float64), "stored as F64; supported: F32, F16, BF16"),
        ("model.layers.0.self_attn.q_proj.bias", np.ones(64, np.float32), "q_proj.bias, which is not supported"),
        ("model.layers.2.input_layernorm.weight", np.ones(64, np.float32), "layers.2.input_layernorm.weight, which"),
        ("vision_tower.x", np.ones(64, np.float32), "a tensor vision_tower.x, which is not supported"),
        ("lm_head.weight", None, "no tensor lm_head.weight, and tie_word_embeddings is false"),
    ],
)
def test_tensors_that_do_not_fit(name: str, value: Any, message: str, folder: Path) -> None:
    values = arrays(TinyConfig()) | {name: value}
    write_weights(folder, {name: array for name, array in values.items() if array is not None})
    refused(folder, message)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_that_are_no_numbers(bad: float, name: str, folder: Path) -> None:
    values = arrays(TinyConfig())
    values[name].flat[3] = bad
    write_weights(folder, values)
    with pytest.raises(ModelFormatError, match=f"{name} is not all finite"):
        build_draft(folder, folder.parent / "draft")
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]


def test_a_file_that_shrinks_while_it_is_read(folder: Path) -> None:
    source = open_checkpoint(folder)
    os.truncate(folder / "model.safetensors", 5000)
    with pytest.raises(ModelFormatError, match="ends within tensor"):
        source.matrix("output.weight").read(0, 320)


# --------------------------------------------------------------------------------------------------------------- index


@pytest.mark.parametrize(
    "name",
    [
        "../elsewhere.safetensors",
        "/etc/elsewhere.safetensors",
        "deeper/file.safetensors",
        "..",
        "",
        "config.json",
        3,
        None,
        "a\0.safetensors",
    ],
)
def test_an_index_that_points_elsewhere(name: Any, shards: Path) -> None:
    shutil.copy(next(shards.glob("*.safetensors")), shards.parent / "elsewhere.safetensors")
    index = shards / "model.safetensors.index.json"
    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    change_json(index, weight_map=places | {"model.norm.weight": name})
    refused(shards, "allowed: .safetensors files in its own folder")


def test_an_index_that_names_a_missing_shard(shards: Path) -> None:
    (shards / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"model-00002-of-00003\.safetensors are not there"):
        open_checkpoint(shards)


def test_an_index_that_is_not_the_shards(shards: Path) -> None:
    index = shards / "model.safetensors.index.json"
    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    change_json(index, weight_map=places | {"model.more.weight": "model-00001-of-00003.safetensors"})
    refused(shards, "places model.more.weight in model-00001-of-00003.safetensors, which lacks it")


@pytest.mark.parametrize("places", [None, [], {}, "x"])
def test_an_index_without_places(places: Any, shards: Path) -> None:
    change_json(shards / "model.safetensors.index.json", weight_map=places)
    refused(shards, "has no weight_map")


# ----------------------------------------------------------------------------------------------------------- tokenizer


def test_a_tokenizer_of_another_model(folder: Path) -> None:
    tokenizer = hf_tokenizer()
    tokenizer["model"]["vocab"] |= {f"more{i}": 274 + i for i in range(50)}
    write_json(folder / "tokenizer.json", tokenizer)
    refused(folder, "has a token 323, and the model a vocabulary of 320")


def test_a_special_token_beyond_the_vocabulary_is_left_out(folder: Path) -> None:
    """As Gemma 3's for images, which has no embedding in a model of text."""
    tokenizer = hf_tokenizer()
    tokenizer["model"]["vocab"] |= {f"more{i}": 274 + i for i in range(46)}
    image = {**tokenizer["added_tokens"][0], "id": 320, "content": "<image_soft_token>"}
    tokenizer["added_tokens"].append(image)
    write_json(folder / "tokenizer.json", tokenizer)
    assert open_checkpoint(folder).tokens[-1] == "more45"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": 3}', "\xff"])
def test_a_tokenizer_that_is_none(content: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(content.encode("latin-1"))
    refused(folder, "tokenizer.json is not a tokenizer")


def test_a_tokenizer_without_tokens(folder: Path) -> None:
    tokenizer = hf_tokenizer() | {"added_tokens": []}
    tokenizer["model"] |= {"vocab": {}, "merges": []}
    write_json(folder / "tokenizer.json", tokenizer)
    refused(folder, "tokenizer.json has no tokens")


def test_without_its_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependencyError, match=r"tokenizers; get it with: pip install 'edgespec\[quantize\]'"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_in_a_files_place(name: str, folder: Path) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(EdgespecError, match=name):
        open_checkpoint(folder)
