"""A trained student as a Source: the draft that is built of it says what the student says."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from edgespec.errors import ModelFormatError, ParameterError
from quantize.distill.decoder import Decoder, Ids
from quantize.distill.distilled import DistilledSource, HeadMatrix
from quantize.distill.rounding import rounded, rounded_weights
from quantize.draft import build_draft_of
from quantize.source import Source, open_source
from tests.quantize.reference import Draft, Rows, relative_error
from tests.quantize.test_draft_architectures import ARCHITECTURES, TOKENS
from tests.tiny import TinyConfig, write_gguf
from tests.tiny_hf import write_checkpoint

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HEAD = np.array([0, 1, 2, 5, 17, 300, 319])


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return open_source(write_gguf(tmp_path / "source.gguf"))


def trained(student: Decoder) -> Decoder:
    """As if: every weight elsewhere."""
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=random))
    return student


@torch.no_grad()
def rows_of(student: Decoder) -> Rows:
    return np.asarray(student.logits(student(torch.tensor([TOKENS])))[0].numpy())


def exported(source: DistilledSource, folder: Path, bits: int = 32, embedding_bits: int | None = None) -> Path:
    head = None if source.head_ids is None else source.head_ids.tolist()
    return build_draft_of(source, folder, bits=bits, embedding_bits=embedding_bits, head=head)


@pytest.mark.parametrize(
    ("kind", "tied", "head"),
    [("gguf", True, HEAD), ("gguf", False, None), ("checkpoint", False, HEAD), ("checkpoint", True, None)],
    ids=["gguf, tied", "gguf, whole head", "checkpoint", "checkpoint, tied, whole head"],
)
@pytest.mark.parametrize("config", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_the_draft_equals_the_student(
    config: TinyConfig, kind: str, tied: bool, head: Ids | None, tmp_path: Path
) -> None:
    config, path = replace(config, tied=tied), tmp_path / "source"
    source = open_source(write_gguf(path, config) if kind == "gguf" else write_checkpoint(path, config))
    student = trained(Decoder.of(source, [config.num_layers - 1, 0], head=head))
    folder = exported(DistilledSource(source, student, head), tmp_path / "draft")
    assert relative_error(Draft(folder).rows(TOKENS, 1), rows_of(student)) < 2e-5
    assert relative_error(Draft(folder).rows(TOKENS, 150), rows_of(student)[-1:]) < 2e-5


@pytest.mark.parametrize(("bits", "most"), [(8, 0.1), (4, 0.8)])
def test_fewer_bits_are_close(bits: int, most: float, source: Source, tmp_path: Path) -> None:
    student = trained(Decoder.of(source, [1, 0], head=HEAD))
    folder = exported(DistilledSource(source, student, HEAD), tmp_path / "draft", bits=bits)
    expected = rows_of(student)
    assert 0 < np.linalg.norm(Draft(folder).rows(TOKENS, 1) - expected) / np.linalg.norm(expected) < most


@pytest.mark.parametrize(
    "config", [TinyConfig(), TinyConfig(tied=True), TinyConfig(width=80, num_heads=5, num_kv_heads=1)]
)
def test_a_student_that_read_a_rounded_embedding_finds_it_in_its_draft(config: TinyConfig, tmp_path: Path) -> None:
    source = open_source(write_gguf(tmp_path / "source.gguf", config))
    plain, student = (Decoder.of(source, [0], head=HEAD, embedding_bits=bits) for bits in (None, 4))
    folder = exported(DistilledSource(source, student, HEAD), tmp_path / "draft", 32, embedding_bits=4)
    rows = Draft(folder).rows(TOKENS, 1)
    assert relative_error(rows, rows_of(student)) < 2e-5
    assert relative_error(rows, rows_of(plain)) > 0.02


def test_rounding_takes_any_values_and_is_done_once() -> None:
    values = torch.randn(50, 72, generator=torch.Generator().manual_seed(0))
    values[3], values[4], values[5, :32], values[6, ::2] = 0.0, -2.5, torch.linspace(-4, 4, 32), 1e-30
    once = rounded(values, 32)
    assert once.shape == values.shape
    assert once.isfinite().all()
    torch.testing.assert_close(rounded(once, 32), once, rtol=0.0, atol=0.0)
    assert (once - values).abs().max() <= values.abs().max() / 8 + 1e-6
    assert not once[3].any()
    torch.testing.assert_close(once[4], values[4])


def test_rounded_weights_are_those_of_the_draft(source: Source, tmp_path: Path) -> None:
    """But for the activations, which ONNX Runtime rounds to 8 bits."""
    student = trained(Decoder.of(source, [1, 0], head=HEAD, embedding_bits=4))
    before = {name: value.clone() for name, value in student.state_dict().items()}
    exact = rows_of(student)
    rows = Draft(exported(DistilledSource(source, student, HEAD), tmp_path / "draft", bits=4)).rows(TOKENS, 1)
    with rounded_weights(student):
        inside = rows_of(student)
    assert relative_error(rows, inside) < 0.05 < 0.1 < relative_error(rows, exact)
    for name, value in student.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0.0, atol=0.0)


def test_weights_come_back_exact_whatever_happens_and_keep_their_gradients(source: Source) -> None:
    student = Decoder.of(source, [1])
    before = {name: value.clone() for name, value in student.state_dict().items()}
    learn = rounded_weights(student)
    learn.__enter__()
    student(torch.tensor([TOKENS])).square().mean().backward()
    assert not torch.equal(student.layer(0).ffn_down, before["layers.0.ffn_down"])
    assert not learn.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0.0, atol=0.0)
        assert name == "head" or (parameter.grad is not None and parameter.grad.any())


def test_a_student_that_learned_with_rounded_weights_loses_less_by_rounding(source: Source) -> None:
    tokens, losses = torch.tensor([TOKENS]), {}

    def loss_of(student: Decoder) -> torch.Tensor:
        logits = student.logits(student(tokens[:, :-1]))[0]
        return torch.nn.functional.cross_entropy(logits, tokens[0, 1:])

    for aware in (False, True):
        student = Decoder.of(source, [0], head=np.arange(320))
        optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
        for _ in range(40):
            with rounded_weights(student) if aware else contextlib.nullcontext():
                optimizer.zero_grad()
                loss_of(student).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad(), rounded_weights(student):
            losses[aware] = float(loss_of(student))
    assert losses[True] < 0.8 * losses[False]


def test_only_what_a_draft_can_have_is_rounded(source: Source) -> None:
    with pytest.raises(ParameterError, match="embedding_bits: got 8; allowed: 4, or none"):
        Decoder.of(source, embedding_bits=8)


def test_the_manifest_says_of_what_and_how_it_was_made(source: Source, tmp_path: Path) -> None:
    distilled = DistilledSource(source, Decoder.of(source, [1], head=HEAD), HEAD)
    folder = build_draft_of(
        distilled, tmp_path / "draft", bits=8, embedding_bits=4, head=HEAD.tolist(), facts={"distill": {"steps": 12}}
    )
    manifest = tomllib.loads((folder / "draft.toml").read_text(encoding="utf-8"))
    sizes = {"num_layers": 1, "num_vocab": 320, "num_head_vocab": 7, "bits": 8, "embedding_bits": 4}
    assert manifest.items() >= (sizes | {"source": "source.gguf", "source_sha256": source.sha256()}).items()
    assert manifest["distill"] == {"steps": 12}
    assert set(manifest["sha256"]) == {"d2t.npy", "model.onnx", "model.onnx.data", "tokens.json"}


def test_facts_are_not_the_manifests_own_words(source: Source, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bits"):
        build_draft_of(source, tmp_path / "draft", facts={"bits": 3})
    assert not (tmp_path / "draft").exists()


def test_rows_that_nobody_trained_are_not_made_up() -> None:
    head = HeadMatrix(np.arange(6, dtype=np.float32).reshape(3, 2), np.array([4, 7, 9]), num_vocab=12)
    assert head.shape == (12, 2)
    np.testing.assert_array_equal(head.take(np.array([9, 4])).read(0, 2), [[4, 5], [0, 1]])
    np.testing.assert_array_equal(head.take(np.array([4, 7, 9])).take(np.array([1])).read(0, 1), [[2, 3]])
    for wrong in (lambda: head.take(np.array([4, 5])), lambda: head.read(0, 12)):
        with pytest.raises(ValueError, match="not trained for"):
            wrong()


def test_weights_that_are_no_numbers_make_no_draft(source: Source, tmp_path: Path) -> None:
    student = Decoder.of(source, [1], head=HEAD)
    with torch.no_grad():
        student.layer(0).ffn_down[0, 0] = float("nan")
    with pytest.raises(ModelFormatError, match="trained weights are not all finite"):
        exported(DistilledSource(source, student, HEAD), tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


# ------------------------------------------------------------------------------------- an embedding of its own fineness


@pytest.mark.parametrize(("bits", "embedding_bits"), [(8, 4), (4, 8), (32, 8), (8, 32)])
@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_has_its_own_bits(bits: int, embedding_bits: int, tied: bool, tmp_path: Path) -> None:
    """Such a draft is what two others are: its embedding as in the one, its layers and head as in the other."""
    source = open_source(write_gguf(tmp_path / "source.gguf", TinyConfig(num_vocab=512, tied=tied)))
    mixed = build_draft_of(source, tmp_path / "mixed", bits=bits, embedding_bits=embedding_bits)
    parts = [build_draft_of(source, tmp_path / f"{width}", bits=width) for width in (bits, embedding_bits)]
    rows = [Draft(folder).rows(TOKENS, 1) for folder in (mixed, *parts)]
    assert relative_error(rows[0], rows[1]) > 1e-3
    assert relative_error(rows[0], rows[2]) > 1e-3
    own = {tensor.name: list(tensor.dims) for tensor in initializers(mixed)}
    assert own.get("embedding.values", own.get("embedding")) == [512, 64 * min(embedding_bits, 8) // 8]


@pytest.mark.parametrize("bits", [4, 8])
def test_saying_the_same_bits_twice_changes_no_byte_of_the_weights(bits: int, tmp_path: Path) -> None:
    source = open_source(write_gguf(tmp_path / "source.gguf", TinyConfig(tied=True)))
    folders = [build_draft_of(source, tmp_path / f"{b}", bits=bits, embedding_bits=b) for b in (None, bits)]
    one, other = ((folder / "model.onnx.data").read_bytes() for folder in folders)
    assert one == other


def test_bits_of_an_embedding_that_nothing_reads(source: Source, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="embedding_bits: got 3; allowed: 4, 8, 32"):
        build_draft_of(source, tmp_path / "draft", embedding_bits=3)
    with pytest.raises(ParameterError, match="block_size: got 48"):
        build_draft_of(source, tmp_path / "draft", bits=32, embedding_bits=4, block_size=48)


def initializers(folder: Path) -> list[onnx.TensorProto]:
    return list(onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer)
