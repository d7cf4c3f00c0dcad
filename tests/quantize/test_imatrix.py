"""Importance matrices of both formats, and files that are none, or another model's."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec.errors import FileAccessError, ModelFormatError, ModelNotFoundError
from quantize.imatrix import check_imatrix, read_imatrix
from quantize.verifier import quantize_verifier
from tests.quantize.make_imatrix import importances, write_gguf_imatrix, write_legacy
from tests.tiny import TinyConfig, write_gguf

CONFIG = TinyConfig(width=256, num_hidden=256, num_layers=1, num_kv_heads=1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "source.gguf", CONFIG)


@pytest.mark.parametrize("write", [write_legacy, write_gguf_imatrix])
def test_both_formats_give_means(write: object, tmp_path: Path) -> None:
    found = read_imatrix(write(tmp_path / "matrix", CONFIG))  # type: ignore[operator]
    expected = importances(CONFIG)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6)
        assert found[name].dtype == np.float32


def test_both_formats_make_the_same_model(source: Path, tmp_path: Path) -> None:
    legacy = write_legacy(tmp_path / "matrix.dat", CONFIG)
    newer = write_gguf_imatrix(tmp_path / "matrix.gguf", CONFIG)
    outs = [quantize_verifier(source, tmp_path / f"{m.name}.out", "Q4_K_M", imatrix=m) for m in (legacy, newer)]
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_experts_are_divided_by_their_own_counts(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "matrix", "")
    writer.add_type("imatrix")
    writer.add_tensor("blk.0.ffn_up_exps.weight.in_sum2", np.array([[2, 4], [30, 60], [7, 7]], np.float32))
    writer.add_tensor("blk.0.ffn_up_exps.weight.counts", np.array([[2], [10], [0]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_imatrix(tmp_path / "matrix")["blk.0.ffn_up_exps.weight"]
    assert found.tolist() == [1, 2, 3, 6, 1, 1]  # an expert without tokens counts evenly
    check_imatrix(tmp_path, {"blk.0.ffn_up_exps.weight": found}, {"blk.0.ffn_up_exps.weight": (2, 5, 3, 1)})


def test_a_missing_matrix(source: Path, tmp_path: Path) -> None:
    for path, kind in ((tmp_path / "none", ModelNotFoundError), (tmp_path, FileAccessError)):
        with pytest.raises(kind):
            read_imatrix(path)
        with pytest.raises(kind):
            quantize_verifier(source, tmp_path / "out.gguf", "IQ2_XXS", imatrix=path)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("write", [write_legacy, write_gguf_imatrix])
@pytest.mark.parametrize("num_bytes", [3, 4, 20, 200, 2000])
def test_a_truncated_matrix(write: object, num_bytes: int, tmp_path: Path) -> None:
    path = write(tmp_path / "matrix", CONFIG)  # type: ignore[operator]
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelFormatError, match=r"matrix is no importance matrix \(.+\); make one with llama-imatrix"):
        read_imatrix(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"just a text that somebody wrote",
        struct.pack("<i", 0),
        struct.pack("<i", -1),
        struct.pack("<ii", 1, 2**30) + b"name",
        struct.pack("<ii2sii", 1, 2, b"ab", 1, -5),
        struct.pack("<ii2sii", 1, 2, b"\xff\xff", 1, 1) + bytes(4),
        struct.pack("<ii2sii", 1, 2, b"ab", 1, 2**31 - 1),
    ],
)
def test_a_file_that_is_no_matrix(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "matrix").write_bytes(content)
    with pytest.raises(ModelFormatError, match="is no importance matrix"):
        read_imatrix(tmp_path / "matrix")


def test_a_model_is_no_matrix(source: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"no tensor NAME\.in_sum2 among 12"):
        read_imatrix(source)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_values_that_are_no_weights(value: float, tmp_path: Path) -> None:
    path = write_legacy(tmp_path / "matrix", CONFIG, {"output.weight": np.array([1, value], np.float32)})
    with pytest.raises(ModelFormatError, match=r"output\.weight has values that are no weights"):
        read_imatrix(path)


def refused(source: Path, matrix: Path, kind: str = "Q4_K_M") -> str:
    with pytest.raises(ModelFormatError) as caught:
        quantize_verifier(source, source.with_name("out.gguf"), kind, imatrix=matrix)
    assert not source.with_name("out.gguf").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_matrix_of_another_model(source: Path, tmp_path: Path) -> None:
    other = {f"model.{name}": values for name, values in importances(CONFIG).items()}
    message = refused(source, write_legacy(tmp_path / "matrix", CONFIG, other))
    assert "matrix is of another model: it has model.blk.0.attn_q.weight, which this one has not" in message


def test_a_matrix_of_another_width(source: Path, tmp_path: Path) -> None:
    message = refused(source, write_legacy(tmp_path / "matrix", TinyConfig(width=128)))
    assert "blk.0.attn_q.weight has 128 inputs there and 256 here" in message


def test_a_matrix_that_lacks_what_the_type_needs(source: Path, tmp_path: Path) -> None:
    some = {name: values for name, values in importances(CONFIG).items() if "ffn" not in name}
    message = refused(source, write_legacy(tmp_path / "matrix", CONFIG, some), "IQ2_XXS")
    assert "matrix: missing importance matrix for tensor blk.0.ffn_down.weight" in message
    quantize_verifier(source, tmp_path / "out.gguf", "Q4_K_M", imatrix=tmp_path / "matrix")
