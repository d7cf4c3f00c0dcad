"""A verifier of another type: every type of llama.cpp, and every reason to refuse."""

from __future__ import annotations

import collections.abc as abc
import ctypes
import logging
import shutil
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest

from edgespec.errors import EdgespecError, FileAccessError, ModelFormatError, ModelNotFoundError, ParameterError
from edgespec.verifiers.base import ScoreRequest
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from quantize.verifier import TYPES, predicted_bytes, quantize_verifier
from tests.quantize.make_imatrix import write_legacy
from tests.tiny import TinyConfig, write_gguf

# Rows of 256 weights, which the blocks of every type divide.
CONFIG = TinyConfig(width=256, num_hidden=256, num_layers=1, num_kv_heads=1)
# Together they take half a minute: llama.cpp searches for the best block of a codebook.
SLOW = ("IQ1_S", "IQ1_M", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS")
KINDS = [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in TYPES]
NEED_IMATRIX = ("IQ1_S", "IQ2_XXS", "IQ3_XXS", "Q2_K_S")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("source") / "source.gguf", CONFIG)


@pytest.fixture(scope="module")
def imatrix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_legacy(tmp_path_factory.mktemp("imatrix") / "imatrix.dat", CONFIG)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(kind: type[EdgespecError], source: Path, type_name: str = "Q8_0", **options: object) -> str:
    """The message; nothing may be left beside the source."""
    before = names(source.parent) if source.parent.is_dir() else []
    with pytest.raises(kind) as caught:
        quantize_verifier(source, source.parent / "refused.gguf", type_name, **options)  # type: ignore[arg-type]
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert (names(source.parent) if source.parent.is_dir() else []) == before
    return str(caught.value)


def opened(path: Path) -> tuple[int, np.ndarray]:
    """A file's type, by its own account, and rows."""
    text = ctypes.create_string_buffer(32)
    verifier = LlamaVerifier(LlamaOptions(path, num_threads=1, num_ctx=64))
    try:
        llama_cpp.llama_model_meta_val_str(verifier.model, b"general.file_type", text, len(text))
        (rows,) = verifier.score([ScoreRequest(0, list(range(3, 40)), 37)])
        return int(text.value or -1), rows.copy()
    finally:
        verifier.close()


def logits(path: Path) -> np.ndarray:
    return opened(path)[1]


def test_the_types_are_those_of_the_library() -> None:
    prefixes = ("LLAMA_FTYPE_MOSTLY_", "LLAMA_FTYPE_ALL_")
    known = {name: getattr(llama_cpp, name) for name in dir(llama_cpp) if name.startswith(prefixes)}
    named = {name.removeprefix(prefixes[0]).removeprefix(prefixes[1]): number for name, number in known.items()}
    assert named.pop("NVFP4") not in TYPES.values()  # llama.cpp reads it, and cannot write it
    assert named == TYPES


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_gives_a_model_that_runs(kind: str, source: Path, imatrix: Path, tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    out = quantize_verifier(
        source,
        tmp_path / "out.gguf",
        kind,
        imatrix=imatrix,
        num_threads=2,
        progress=lambda stage, fraction: told.append((stage, fraction)),
    )
    assert names(tmp_path) == ["out.gguf"]
    file_type, rows = opened(out)
    assert file_type == TYPES[kind]
    assert np.isfinite(rows).all()
    fractions = [fraction for _, fraction in told]
    assert (told[0], told[-1]) == (("reading", 0.0), ("done", 1.0))
    assert fractions == sorted(fractions)
    assert len(set(fractions)) > 10
    assert [stage for stage, _ in told][-2] == "checking"


def test_more_bits_are_nearer_to_the_source(source: Path, tmp_path: Path) -> None:
    exact = logits(source)
    errors = []
    for kind in ("F32", "F16", "Q8_0", "Q5_K_M", "Q3_K_S"):
        quantize_verifier(source, tmp_path / "out.gguf", kind, force=True)
        errors.append(float(np.abs(logits(tmp_path / "out.gguf") - exact).mean()))
    assert errors == sorted(errors)
    assert errors[0] == 0.0
    assert errors[-1] > 10 * errors[2]


@pytest.mark.parametrize("kind", ["F16", "Q4_K_M", "IQ4_XS"])
def test_the_size_is_known_before(kind: str, source: Path, tmp_path: Path) -> None:
    out = quantize_verifier(source, tmp_path / "out.gguf", kind)
    assert abs(predicted_bytes(source, kind) - out.stat().st_size) < 300


def test_the_size_of_a_type_that_needs_a_matrix_is_known_too(source: Path) -> None:
    assert predicted_bytes(source, "IQ2_XXS") < predicted_bytes(source, "q4_0") < predicted_bytes(source, "Q8_0")


@pytest.mark.parametrize("kind", NEED_IMATRIX)
def test_types_that_need_a_matrix_say_so(kind: str, source: Path) -> None:
    message = refused(ParameterError, source, kind)
    assert f"type {kind} needs an importance matrix of source.gguf" in message


def test_a_matrix_makes_a_difference(source: Path, imatrix: Path, tmp_path: Path) -> None:
    with_matrix = quantize_verifier(source, tmp_path / "with.gguf", "Q4_K_M", imatrix=imatrix)
    without = quantize_verifier(source, tmp_path / "without.gguf", "Q4_K_M")
    assert with_matrix.read_bytes() != without.read_bytes()


def test_the_number_of_threads_makes_none(source: Path, tmp_path: Path) -> None:
    one, two = (quantize_verifier(source, tmp_path / f"{n}.gguf", "Q4_K_M", num_threads=n) for n in (1, 2))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("kind", ["Q4_K", "Q8", "", "NVFP4", "Q4_K_M "])
def test_an_unknown_type(kind: str, source: Path) -> None:
    message = refused(ParameterError, source, kind)
    assert message.startswith(f"type: got {kind!r}; allowed: F32, BF16, F16, Q8_0, ")
    assert ("nearest: Q4_K_S, Q4_K_M" in message or "nearest: Q4_K_M, Q4_K_S" in message) == (kind == "Q4_K")


@pytest.mark.parametrize("num_threads", [0, -1, 1.5, True])
def test_threads_out_of_range(num_threads: object, source: Path) -> None:
    assert "num_threads: got" in refused(ParameterError, source, num_threads=num_threads)


# ---------------------------------------------------------------------------------------------------- quantized sources


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "quantized.gguf", TinyConfig(width=256, num_hidden=256, num_layers=1, q8_0=True))


@pytest.mark.parametrize("kind", ["Q4_K_M", "F16", "Q4_0"])
def test_a_quantized_source_must_be_allowed(kind: str, quantized: Path) -> None:
    message = refused(ParameterError, quantized, kind)
    assert f"is quantized already: 9 of its 12 tensors would go from q8_0 to {kind}" in message
    out = quantize_verifier(quantized, quantized.with_name("out.gguf"), kind, requantize=True)
    assert np.isfinite(logits(out)).all()


def test_what_has_the_type_already_is_copied(quantized: Path) -> None:
    out = quantize_verifier(quantized, quantized.with_name("out.gguf"), "Q8_0")
    assert np.array_equal(logits(out), logits(quantized))


def test_rows_that_no_block_divides_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd = write_gguf(tmp_path / "odd.gguf", TinyConfig(width=64))
    with caplog.at_level(logging.WARNING, "edgespec"):
        out = quantize_verifier(odd, tmp_path / "out.gguf", "Q4_K_M")
    assert "of 21 tensors have rows that the blocks of Q4_K_M do not divide" in caplog.text
    assert np.isfinite(logits(out)).all()


# ------------------------------------------------------------------------------------------------------------ bad files


def test_a_missing_source(tmp_path: Path) -> None:
    assert "no model file at" in refused(ModelNotFoundError, tmp_path / "none.gguf")
    (tmp_path / "file").write_bytes(b"")
    assert "no model file at" in refused(ModelNotFoundError, tmp_path / "file" / "none.gguf")
    assert "is not a regular file" in refused(FileAccessError, tmp_path)


def test_a_source_without_permission(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    assert "cannot be read: Permission denied" in refused(FileAccessError, source)


@pytest.mark.parametrize("content", [b"", b"GG", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_source_that_is_no_gguf(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    assert "not a GGUF file" in refused(ModelFormatError, tmp_path / "bad.gguf")


@pytest.mark.parametrize("num_bytes", [4, 300, 20_000, -1])
def test_a_truncated_source(num_bytes: int, source: Path, tmp_path: Path) -> None:
    (tmp_path / "short.gguf").write_bytes(source.read_bytes()[:num_bytes])
    message = refused(ModelFormatError, tmp_path / "short.gguf")
    assert "short.gguf: llama.cpp cannot quantize this GGUF: " in message


def test_weights_that_are_no_numbers(source: Path, tmp_path: Path) -> None:
    content = bytearray(source.read_bytes())
    content[-4096:] = np.full(1024, np.nan, np.float32).tobytes()
    (tmp_path / "nan.gguf").write_bytes(content)
    message = refused(ModelFormatError, tmp_path / "nan.gguf", "Q4_K_M")
    assert "llama.cpp cannot quantize this GGUF: " in message


def test_an_unknown_architecture_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "other.gguf").write_bytes(source.read_bytes().replace(b"llama", b"camel"))
    assert "unknown model architecture: 'camel'" in refused(ModelFormatError, tmp_path / "other.gguf")


def test_a_gguf_that_is_no_model(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    writer.add_tensor("something", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "key not found in model" in refused(ModelFormatError, tmp_path / "other.gguf")


# --------------------------------------------------------------------------------------------------------- split models


@pytest.fixture
def split(source: Path, tmp_path: Path) -> Path:
    """The source in several files; the first of them."""
    whole, count = gguf.GGUFReader(source), 3
    parts = [gguf.GGUFWriter(tmp_path / f"model-{i + 1:05}-of-{count:05}.gguf", "llama") for i in range(count)]
    for i, writer in enumerate(parts):
        for field in whole.fields.values() if i == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                kind = field.types[0]
                writer.add_key_value(
                    field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None
                )
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(whole.tensors))
        for tensor in whole.tensors[i::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return tmp_path / "model-00001-of-00003.gguf"


def test_a_split_source_becomes_one_file(split: Path, source: Path) -> None:
    out = quantize_verifier(split, split.with_name("out.gguf"), "Q8_0")
    whole = quantize_verifier(source, split.with_name("whole.gguf"), "Q8_0")
    assert np.array_equal(logits(out), logits(whole))
    assert abs(predicted_bytes(split, "Q8_0") - out.stat().st_size) < 1000


def test_links_to_the_parts_of_a_split_model_are_not_followed(split: Path) -> None:
    """As a cache keeps them: named links to files whose names say nothing."""
    (split.parent / "blobs").mkdir()
    for i, part in enumerate(sorted(split.parent.glob("model-*"))):
        part.rename(split.parent / "blobs" / f"{i:064}")
        part.symlink_to(split.parent / "blobs" / f"{i:064}")
    assert quantize_verifier(split, split.with_name("out.gguf"), "Q8_0").is_file()


def test_a_part_is_missing_or_not_the_first(split: Path) -> None:
    later = split.with_name("model-00002-of-00003.gguf")
    assert "give its first, model-00001-of-00003.gguf" in refused(ParameterError, later)
    later.unlink()
    assert f"no model file at {later}, a part of {split}" in refused(ModelNotFoundError, split)


# -------------------------------------------------------------------------------------------------------------- outputs


def test_an_existing_output_is_kept_unless_forced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"old")
    with pytest.raises(FileAccessError, match="exists"):
        quantize_verifier(source, out, "Q8_0")
    with pytest.raises(ParameterError):
        quantize_verifier(source, out, "IQ1_S", force=True)
    assert out.read_bytes() == b"old"
    quantize_verifier(source, out, "Q8_0", force=True)
    assert opened(out)[0] == TYPES["Q8_0"]
    assert names(tmp_path) == ["out.gguf"]


def test_no_source_is_ever_written(source: Path, split: Path, tmp_path: Path) -> None:
    copy = shutil.copy(source, tmp_path / "copy.gguf")
    content = copy.read_bytes()
    with pytest.raises(FileAccessError, match="which is never written"):
        quantize_verifier(copy, copy, "Q8_0", force=True)
    assert copy.read_bytes() == content
    with pytest.raises(FileAccessError, match="which is never written"):
        quantize_verifier(split, split.with_name("model-00002-of-00003.gguf"), "Q8_0", force=True)


def test_too_little_room_is_seen_before_the_work(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    stages: list[str] = []
    with pytest.raises(FileAccessError, match=r"would take 0\.6 MB|would take 1 MB, 0 MB are free"):
        quantize_verifier(source, tmp_path / "out.gguf", "Q8_0", progress=lambda stage, _: stages.append(stage))
    assert stages == ["reading"]
    assert names(tmp_path) == []


@pytest.mark.model
def test_the_starter_is_planned_to_the_byte(starter_gguf: Path, tmp_path: Path) -> None:
    told: list[float] = []
    track: abc.Callable[[str, float], None] = lambda stage, fraction: told.append(fraction)  # noqa: E731
    out = quantize_verifier(starter_gguf, tmp_path / "q8.gguf", "Q8_0", requantize=True, progress=track)
    assert predicted_bytes(starter_gguf, "Q8_0") == out.stat().st_size
    assert told == sorted(told)
