"""The header as somebody else's writer writes it and somebody else's reader reads it, and as nobody should."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec.errors import FileAccessError, ModelFormatError
from quantize.gguf_header import read_header
from tests.tiny import TinyConfig, write_gguf


@pytest.mark.parametrize("config", [TinyConfig(), TinyConfig(architecture="gemma3", window=8, q8_0=True)])
def test_tensors_lie_where_the_gguf_package_finds_them(config: TinyConfig, tmp_path: Path) -> None:
    _check_tensors(write_gguf(tmp_path / "tiny.gguf", config))


@pytest.mark.model
def test_tensors_of_the_real_model(starter_gguf: Path) -> None:
    _check_tensors(starter_gguf)


def _check_tensors(path: Path) -> None:
    tensors = read_header(path).tensors
    expected = gguf.GGUFReader(path).tensors
    assert list(tensors) == [tensor.name for tensor in expected]
    for tensor in expected:
        place = tensors[tensor.name]
        assert place.shape == tuple(reversed(tensor.shape.tolist()))
        assert (place.kind, place.offset) == (tensor.tensor_type, tensor.data_offset)
        assert place.num_rows * place.row_bytes == tensor.n_bytes


def test_fields_of_every_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "fields.gguf", "llama")
    numbers: dict[str, float] = {
        "uint8": 7,
        "int8": -7,
        "uint16": 700,
        "int16": -700,
        "uint32": 1 << 31,
        "int32": -(1 << 30),
    }
    numbers |= {"uint64": 1 << 63, "int64": -(1 << 62), "float32": 0.5, "float64": 0.1, "bool": True}
    for name, value in numbers.items():
        getattr(writer, f"add_{name}")(name, value)
    writer.add_string("string", "nö\n")
    writer.add_array("strings", ["a", "", "ö"])
    writer.add_array("integers", [1, -2, 3])
    writer.add_array("bools", [True, False])
    writer.add_array("nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = read_header(tmp_path / "fields.gguf").fields
    assert {name: fields[name] for name in numbers} == numbers
    assert (fields["string"], fields["strings"]) == ("nö\n".encode(), [b"a", b"", "ö".encode()])
    assert (fields["integers"].tolist(), fields["bools"].tolist()) == ([1, -2, 3], [True, False])
    assert [array.tolist() for array in fields["nested"]] == [[1, 2], [3]]


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _file(*, version: int = 3, num_tensors: int = 0, fields: tuple[bytes, ...] = (), rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, len(fields)) + b"".join(fields) + rest


def _tensor(name: bytes, sizes: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return _string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


FIELD = _string(b"a") + struct.pack("<II", 4, 1)
BAD = {
    "another format": (b"GGML" + _file()[4:], "it does not start with GGUF"),
    "version 1": (_file(version=1), "version 1; readable: 2, 3"),
    "big endian": (_file(version=3 << 24), "version 50331648"),
    "a billion fields": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "ends early"),
    "a name of a terabyte": (_file(fields=(struct.pack("<Q", 1 << 40),)), "ends early"),
    "a list of a billion texts": (_file(fields=(_string(b"a") + struct.pack("<IIQ", 9, 8, 1 << 60),)), "ends early"),
    "a list of a billion numbers": (_file(fields=(_string(b"a") + struct.pack("<IIQ", 9, 4, 1 << 62),)), "ends early"),
    "lists in lists": (_file(fields=(_string(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9999,)), ""),
    "an unknown type": (_file(fields=(_string(b"a") + struct.pack("<I", 99),)), "a field has type 99"),
    "a field twice": (_file(fields=(FIELD, FIELD)), "a name twice"),
    "a tensor twice": (_file(num_tensors=2, rest=_tensor(b"t", (1,)) * 2), "a name twice"),
    "a tensor beyond the end": (_file(num_tensors=1, rest=_tensor(b"t", (4,), offset=1 << 40)), "ends early"),
    "a tensor larger than memory": (_file(num_tensors=1, rest=_tensor(b"t", (1 << 62, 1 << 62))), "ends early"),
    "a tensor without sizes": (_file(num_tensors=1, rest=_tensor(b"t", ())), "tensor t has 0 dimensions"),
    "part of a block": (_file(num_tensors=1, rest=_tensor(b"t", (33,), kind=8)), "rows of 33 in type Q8_0"),
    "no alignment": (_file(fields=(_string(b"general.alignment") + struct.pack("<II", 4, 0),)), "alignment is 0"),
    "a name that is no text": (_file(fields=(_string(b"\xff") + struct.pack("<II", 4, 1),)), "utf-8"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_bad_files(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ModelFormatError, match=rf"is not a whole GGUF file \(.*{message}.*\); download it again"):
        read_header(tmp_path / "bad.gguf")


def test_a_weight_type_that_the_package_does_not_know(tmp_path: Path) -> None:
    """llama.cpp writes newer ones than a released package reads: the file is whole."""
    (tmp_path / "new.gguf").write_bytes(_file(num_tensors=1, rest=_tensor(b"t", (32,), kind=999)))
    with pytest.raises(ModelFormatError, match=r"new.gguf: tensor t is of type 999, .*; use a GGUF of another type"):
        read_header(tmp_path / "new.gguf")


def test_a_stated_alignment(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "aligned.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("t", np.arange(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    place = read_header(tmp_path / "aligned.gguf").tensors["t"]
    assert place.offset % 256 == 0
    assert np.fromfile(tmp_path / "aligned.gguf", np.float32, 3, offset=place.offset).tolist() == [0, 1, 2]


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FileAccessError, match="cannot be read: Permission denied"):
        read_header(path)
