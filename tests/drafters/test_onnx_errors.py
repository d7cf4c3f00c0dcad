"""Broken draft models: one line, the right class, what to do."""

from __future__ import annotations

import collections.abc as abc
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgespec.drafters.onnx import OnnxDrafter
from edgespec.errors import (
    ClosedError,
    EdgespecError,
    FileAccessError,
    ModelFormatError,
    ModelNotFoundError,
    VocabularyMismatchError,
)


@pytest.fixture
def own(own_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(own_folder, tmp_path / "draft")


@pytest.fixture
def trimmed(trimmed_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trimmed_folder, tmp_path / "draft")


@pytest.fixture
def usual(usual_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(usual_folder, tmp_path / "export")


def refusal(path: Path, kind: type[EdgespecError], capfd: pytest.CaptureFixture[str]) -> str:
    """The message of the error that opening raises; nothing else may reach the terminal."""
    with pytest.raises(kind) as caught:
        OnnxDrafter.open(path, num_ctx=64, num_threads=1)
    assert type(caught.value) is kind
    assert capfd.readouterr() == ("", "")
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


def manifest(folder: Path, old: str, new: str) -> None:
    path = folder / "draft.toml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_missing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in refusal(tmp_path / "absent.onnx", ModelNotFoundError, capfd)
    assert "does not exist" in refusal(tmp_path / "absent", ModelNotFoundError, capfd)
    assert "no .onnx file and no draft.toml" in refusal(tmp_path, ModelNotFoundError, capfd)


def test_no_graph_beside_the_manifest(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (own / "model.onnx").unlink()
    assert "model.onnx does not exist" in refusal(own, ModelNotFoundError, capfd)


def test_several_models(usual: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (usual / "model.onnx").rename(usual / "model_q4.onnx")
    shutil.copy(usual / "model_q4.onnx", usual / "model_q8.onnx")
    message = refusal(usual, ModelFormatError, capfd)
    assert "several models: model_q4.onnx, model_q8.onnx; give the path of one of them" in message
    OnnxDrafter.open(usual / "model_q8.onnx", num_ctx=64, num_threads=1)


@pytest.mark.parametrize("name", ["model.onnx", "draft.toml"])
def test_not_readable(own: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    (own / name).unlink()
    (own / name).mkdir()
    assert f"{name} cannot be read: Is a directory" in refusal(own, FileAccessError, capfd)


def test_no_permission(own: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    assert "cannot be read: Permission denied" in refusal(own / "model.onnx", FileAccessError, capfd)


@pytest.mark.parametrize("size", [0, 1, 100, 3000])
@pytest.mark.parametrize("form", ["own", "usual"])
def test_truncated_graph(
    size: int, form: str, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    folder: Path = request.getfixturevalue(form)
    content = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(content[:size])
    message = refusal(folder, ModelFormatError, capfd)
    assert "is no usable ONNX model" in message
    assert "ONNXRuntimeError" not in message


def test_text_instead_of_a_graph(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (own / "model.onnx").write_text("version https://git-lfs.github.com/spec/v1\n", encoding="utf-8")
    assert "is no usable ONNX model" in refusal(own, ModelFormatError, capfd)


@pytest.mark.parametrize("size", [None, 0, 1000])
def test_truncated_or_missing_weights(own: Path, size: int | None, capfd: pytest.CaptureFixture[str]) -> None:
    (weights,) = own.glob("*.data")
    content = weights.read_bytes()
    weights.unlink()
    if size is not None:
        weights.write_bytes(content[:size])
    assert "is no usable ONNX model" in refusal(own, ModelFormatError, capfd)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("format = 1", "format = 2", "has format 2; allowed: 1"),
        ("format = 1\n", "", "has format None; allowed: 1"),
        ("format = 1", "format = ", "is not TOML"),
        ("num_layers = 2\n", "", "lacks num_layers"),
        ("num_layers = 2", "num_layers = 0", "num_layers is 0; allowed: a whole number of 1 or more"),
        ("num_layers = 2", 'num_layers = "2"', "num_layers is '2'; allowed: a whole number of 1 or more"),
        ("num_layers = 2", "num_layers = true", "num_layers is True; allowed: a whole number of 1 or more"),
        ("num_layers = 2", "num_layers = 3", "graph does not fit its manifest: got input_ids"),
        ("num_layers = 2", "num_layers = 1", "graph does not fit its manifest: got input_ids"),
        ("num_kv_heads = 2", "num_kv_heads = 4", "graph does not fit its manifest: got input_ids"),
        ("head_size = 16", "head_size = 32", "graph does not fit its manifest: got input_ids"),
        ("num_head_vocab = 320", "num_head_vocab = 300", "names 300 logits for 320 tokens and no d2t"),
        ('model = "model.onnx"', 'model = "../model.onnx"', "model is '../model.onnx'; allowed: a file name"),
        ('tokens = "tokens.json"', "tokens = 3", "tokens is 3; allowed: a file name"),
    ],
)
def test_manifest(own: Path, old: str, new: str, expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    manifest(own, old, new)
    assert expected in refusal(own, ModelFormatError, capfd)


def test_binary_manifest(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (own / "draft.toml").write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in refusal(own, ModelFormatError, capfd)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda d2t: np.append(d2t[:-1], 320), r"to 320; allowed: 0 to 319"),
        (lambda d2t: np.append(d2t[:-1], -1), r"from -1 to \d+; allowed: 0 to 319"),
        (lambda d2t: d2t[:-1], r"has shape \(99,\); allowed: 100 whole numbers"),
        (lambda d2t: d2t[None], r"has shape \(1, 100\); allowed"),
        (lambda d2t: d2t.astype(np.float32), "allowed: 100 whole numbers"),
        (lambda d2t: np.append(d2t[:-1], d2t[0]), "repeated"),
    ],
)
def test_d2t(
    trimmed: Path, change: abc.Callable[..., np.ndarray], expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    np.save(trimmed / "d2t.npy", change(np.load(trimmed / "d2t.npy")))
    assert re.search(expected, refusal(trimmed, ModelFormatError, capfd))


@pytest.mark.parametrize("content", [b"", b"no array", b"\x93NUMPY\x01\x00"])
def test_d2t_that_is_no_array(trimmed: Path, content: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    (trimmed / "d2t.npy").write_bytes(content)
    assert "d2t.npy is not a .npy array" in refusal(trimmed, ModelFormatError, capfd)


def test_d2t_that_is_missing(trimmed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (trimmed / "d2t.npy").unlink()
    assert "d2t.npy does not exist" in refusal(trimmed, ModelNotFoundError, capfd)


def test_a_graph_that_is_no_decoder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("picture", "class")]
    graph = helper.make_graph([helper.make_node("Neg", ["picture"], ["class"])], "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "a.onnx")
    message = refusal(tmp_path / "a.onnx", ModelFormatError, capfd)
    assert "no decoder with a KV cache: got picture ['n'] -> class ['n']; expected input_ids, attention_mask" in message


def test_a_graph_of_the_own_form_without_its_manifest(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (own / "draft.toml").unlink()
    assert "no decoder with a KV cache: got input_ids" in refusal(own, ModelFormatError, capfd)


def test_an_export_with_an_unknown_input(usual: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = onnx.load(usual / "model.onnx")
    model.graph.input.append(helper.make_tensor_value_info("encoder_states", TensorProto.FLOAT, ["n"]))
    onnx.save(model, usual / "model.onnx")
    assert "encoder_states ['n']" in refusal(usual, ModelFormatError, capfd)


def test_an_export_that_fails_when_it_runs(usual: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = onnx.load(usual / "model.onnx")
    gather = next(node for node in model.graph.node if node.input and "input_ids" in node.input)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(10**6), "far"))
    model.graph.node.insert(0, helper.make_node("Add", ["input_ids", "far"], ["far_ids"]))
    gather.input[1] = "far_ids"
    onnx.save(model, usual / "model.onnx")
    assert "fails on its first token: ONNX Runtime failed" in refusal(usual, ModelFormatError, capfd)


def test_a_broken_config_beside_an_export(usual: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (usual / "config.json").write_text("[1, 2", encoding="utf-8")
    assert "config.json is not a model's config.json" in refusal(usual, ModelFormatError, capfd)


def test_an_export_without_a_token_list(usual: Path) -> None:
    (usual / "tokenizer.json").unlink()
    drafter = OnnxDrafter.open(usual, num_ctx=64, num_threads=1)
    with pytest.raises(VocabularyMismatchError, match=r"put the model's tokenizer\.json into"):
        _ = drafter.tokens


def test_a_broken_token_list(own: Path) -> None:
    (own / "tokens.json").write_text("{", encoding="utf-8")
    drafter = OnnxDrafter.open(own, num_ctx=64, num_threads=1)
    with pytest.raises(ModelFormatError, match=r"tokens\.json is no token list"):
        _ = drafter.tokens


def test_closed(own: Path) -> None:
    drafter = OnnxDrafter.open(own, num_ctx=64, num_threads=1)
    drafter.close()
    with pytest.raises(ClosedError, match="open another"):
        drafter.propose([])
