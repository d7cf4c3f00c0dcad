"""LlamaVerifier refuses files that are not there, not readable, not a GGUF, or not a whole one."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from edgespec.errors import EdgespecError, FileAccessError, ModelFormatError, ModelNotFoundError
from edgespec.verifiers.canary import MODEL
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier


def refused(path: Path, kind: type[EdgespecError]) -> str:
    with pytest.raises(kind) as caught:
        LlamaVerifier(LlamaOptions(path, num_threads=1))
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_a_missing_file(tmp_path: Path) -> None:
    refused(tmp_path / "none.gguf", ModelNotFoundError)
    refused(MODEL / "none.gguf", ModelNotFoundError)


def test_a_folder(tmp_path: Path) -> None:
    refused(tmp_path, FileAccessError)


def test_a_file_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    assert "Permission denied" in refused(MODEL, FileAccessError)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip"])
def test_a_file_that_is_no_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    assert "not a GGUF file" in refused(path, ModelFormatError)


@pytest.mark.parametrize("num_bytes", [4, 10, 24, 100, 700, 1400, 2500, 20_000, -1])
def test_a_truncated_gguf(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(MODEL.read_bytes()[:num_bytes])
    assert "cannot load this GGUF" in refused(path, ModelFormatError)


@pytest.mark.parametrize(
    ("offset", "content"),
    [
        (4, struct.pack("<I", 99)),  # version
        (8, struct.pack("<Q", 2**63 - 1)),  # number of tensors
        (8, struct.pack("<Q", 1)),
        (16, struct.pack("<Q", 2**63 - 1)),  # number of keys
        (16, struct.pack("<Q", 1)),
        (24, struct.pack("<Q", 2**40)),  # length of the first key
    ],
)
def test_a_gguf_with_nonsense_in_its_header(tmp_path: Path, offset: int, content: bytes) -> None:
    data = bytearray(MODEL.read_bytes())
    data[offset : offset + len(content)] = content
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    refused(path, ModelFormatError)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(MODEL.read_bytes().replace(b"llama", b"camel"))
    assert "unknown model architecture: 'camel'" in refused(path, ModelFormatError)


@pytest.mark.model
def test_the_starter_cut_short_is_refused(starter_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    with starter_gguf.open("rb") as file:
        path.write_bytes(file.read(3_000_000))
    assert "incomplete" in refused(path, ModelFormatError)
