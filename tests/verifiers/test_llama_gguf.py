"""llama.cpp's own reader of GGUF headers, against ours, and over files that are not right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec.errors import ModelFormatError
from edgespec.verifiers.canary import MODEL
from edgespec.verifiers.llama_gguf import read_header
from quantize import gguf_header
from tests.gguf_tools import split_gguf
from tests.tiny import TinyConfig, write_gguf


def check_same(path: Path) -> None:
    """As the toolkit's reader has it; lists of strings are left out."""
    ours, theirs = gguf_header.read_header(path), read_header(path)
    texts = {key for key, value in ours.fields.items() if isinstance(value, list)}
    assert set(theirs.fields) == set(ours.fields) - texts
    for key, value in theirs.fields.items():
        np.testing.assert_equal(value, ours.fields[key])
        assert isinstance(value, type(ours.fields[key]))
    sizes = {name: place.num_rows * place.row_bytes for name, place in ours.tensors.items()}
    assert theirs.tensor_bytes == sizes
    assert theirs.num_vocab == len(ours.fields.get("tokenizer.ggml.tokens", []))


@pytest.mark.parametrize(
    "config",
    [TinyConfig(), TinyConfig("gemma3", num_layers=6, window=64, key_length=32, tied=True), TinyConfig(q8_0=True)],
    ids=str,
)
def test_both_readers_say_the_same(config: TinyConfig, tmp_path: Path) -> None:
    check_same(write_gguf(tmp_path / "tiny.gguf", config))


def test_both_readers_say_the_same_of_parts_and_of_a_model_without_tokens(tmp_path: Path) -> None:
    for part in split_gguf(write_gguf(tmp_path / "whole.gguf"), tmp_path):
        check_same(part)
    check_same(MODEL)


def test_values_of_every_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "fields.gguf", "llama")
    for name, value in {"uint8": 7, "int16": -700, "uint64": 1 << 63, "float32": 0.5, "float64": 0.1}.items():
        getattr(writer, f"add_{name}")(name, value)
    writer.add_bool("bool", True)
    writer.add_string("string", "nö")
    writer.add_array("integers", [1, -2, 3])
    writer.add_array("texts", ["a", "b"])
    writer.add_array("tokenizer.ggml.tokens", [1, 2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    header = read_header(tmp_path / "fields.gguf")
    fields = header.fields
    assert (fields["uint8"], fields["int16"], fields["uint64"], fields["float32"]) == (7, -700, 1 << 63, 0.5)
    assert (fields["float64"], fields["bool"], fields["string"]) == (0.1, True, "nö".encode())
    assert fields["integers"].tolist() == [1, -2, 3]
    assert "texts" not in fields
    assert (header.num_vocab, header.tensor_bytes) == (0, {})


@pytest.mark.parametrize("data", [b"", b"GGUF", b"GGUF" + bytes(20), b"not a GGUF at all", b"GGUF\xff\xff\xff\xff"])
def test_what_is_no_gguf(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(ModelFormatError, match=r"bad\.gguf: llama.cpp cannot load this GGUF"):
        read_header(tmp_path / "bad.gguf")


def test_what_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelFormatError):
            read_header(path)


DAMAGE = """
import random, sys
from pathlib import Path
from edgespec.errors import EdgespecError
from edgespec.verifiers.llama_gguf import read_header
whole, path, rng = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]), random.Random(0)
for _ in range(300):
    damaged = bytearray(whole[: rng.choice([len(whole), rng.randrange(len(whole))])])
    for _ in range(rng.randrange(6)):
        damaged[rng.randrange(min(4000, len(damaged)))] = rng.choice([0, 1, 255, rng.randrange(256)])
    path.write_bytes(damaged)
    try:
        read_header(path)
    except EdgespecError:
        pass
print("alive")
"""


def test_a_damaged_file_is_read_or_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", DAMAGE, str(tiny_gguf), str(tmp_path / "damaged.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "alive\n"
