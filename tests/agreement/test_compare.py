"""Real models against each other: a GGUF, a draft folder, a published export and a checkpoint of the same weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from edgespec.agreement import Agreement, compare
from edgespec.agreement.comparison import BLOCK
from edgespec.agreement.scorers import LlamaScorer, OnnxScorer, opened
from edgespec.errors import (
    BackendError,
    FileAccessError,
    ModelFormatError,
    ModelNotFoundError,
    ParameterError,
    PromptError,
    VocabularyMismatchError,
)
from quantize import build_draft
from quantize.verifier import quantize_verifier
from tests.tiny import TinyConfig, write_gguf
from tests.tiny_hf import write_checkpoint

NUM_TOKENS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agreement")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    return write_checkpoint(folder / "checkpoint", TinyConfig())


def measured(subject: Path, source: Path, num_tokens: int = NUM_TOKENS) -> Agreement:
    return compare(subject, source, max_tokens=num_tokens, num_threads=1)


def same(found: Agreement) -> None:
    """Two computations of the same weights."""
    assert found.total.num_positions == pytest.approx(NUM_TOKENS, abs=14)
    assert found.total.agreement > 0.99
    assert 0 <= found.total.kl < 1e-5
    assert found.total.subject_perplexity == pytest.approx(found.total.source_perplexity, rel=1e-3)
    assert found.total.coverage == 1.0
    assert found.total.rejection > 0.99
    assert found.total.coupled > 0.98
    assert found.num_head_vocab is None


@pytest.mark.parametrize("name", ["tiny_gguf", "own_folder", "usual_folder"])
def test_the_same_weights_agree(name: str, tiny_gguf: Path, request: pytest.FixtureRequest) -> None:
    found = measured(request.getfixturevalue(name), tiny_gguf)
    same(found)
    assert (found.subject, found.source) == (request.getfixturevalue(name), tiny_gguf)
    assert min(found.subject_ms or 0, found.source_ms or 0) > 0


def test_a_checkpoint_is_built_for_the_time_it_takes(checkpoint: Path, tiny_gguf: Path, own_folder: Path) -> None:
    told: list[tuple[str, float]] = []
    found = compare(
        checkpoint, tiny_gguf, max_tokens=NUM_TOKENS, num_threads=1, progress=lambda *step: told.append(step)
    )
    same(found)
    assert found.subject_ms is None
    assert found.subject_bytes == (checkpoint / "model.safetensors").stat().st_size
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert {"loading", "quantizing", "comparing", "done"} <= {stage for stage, _ in told}
    same(measured(own_folder, checkpoint))  # its own tokenizer.json reads the texts


def test_progress_goes_from_nothing_to_done(tiny_gguf: Path) -> None:
    told: list[tuple[str, float]] = []
    compare(tiny_gguf, tiny_gguf, max_tokens=200, num_threads=1, progress=lambda *step: told.append(step))
    assert (told[0], told[-1]) == (("loading", 0.0), ("done", 1.0))
    assert [fraction for _, fraction in told] == sorted(fraction for _, fraction in told)
    assert len(told) > 10


def test_categories_add_up(own_folder: Path, tiny_gguf: Path) -> None:
    found = measured(own_folder, tiny_gguf)
    assert list(found.by_category) == ["prose", "chat", "code", "summary", "translation", "maths", "list"]
    assert sum(scores.num_positions for scores in found.by_category.values()) == found.total.num_positions
    kl = sum(scores.num_positions * scores.kl for scores in found.by_category.values())
    assert kl / found.total.num_positions == pytest.approx(found.total.kl)
    assert found.num_texts == 14


def test_other_weights_agree_less(tiny_gguf: Path, folder: Path) -> None:
    noisy = [measured(write_gguf(folder / f"{n}.gguf", TinyConfig(noise=n)), tiny_gguf).total for n in (0.05, 0.5)]
    assert 1 > noisy[0].agreement > noisy[1].agreement
    assert 0 < noisy[0].kl < noisy[1].kl
    assert 1 > noisy[0].rejection > noisy[1].rejection
    assert 1 > noisy[0].coupled > noisy[1].coupled


def test_fewer_bits_agree_less(folder: Path) -> None:
    source = write_gguf(folder / "wide.gguf", TinyConfig(width=256, num_hidden=256, num_layers=1))
    found = []
    for kind in ("Q8_0", "Q4_0", "Q2_K"):
        subject = quantize_verifier(source, folder / f"{kind}.gguf", kind, num_threads=1)
        found.append(measured(subject, source))
        assert found[-1].subject_bytes == subject.stat().st_size
    assert [one.total.kl for one in found] == sorted(one.total.kl for one in found)
    assert found[0].total.kl < 0.01 < found[2].total.kl


def test_a_trimmed_head_is_measured_on_what_it_can_say(trimmed_folder: Path, tiny_gguf: Path) -> None:
    found = measured(trimmed_folder, tiny_gguf)
    head = np.load(trimmed_folder / "d2t.npy")
    assert found.num_head_vocab == len(head) == 100
    assert found.total.kl < 1e-5  # over its own ids it is the same model
    assert found.total.agreement < 0.6  # the source says other ids, too
    assert 0.1 < found.total.coverage < 0.6
    assert found.total.subject_perplexity < found.total.source_perplexity
    assert found.total.rejection < 0.9
    assert found.subject_bytes == sum(path.stat().st_size for path in trimmed_folder.iterdir())
    assert any("the subject can say 100 ids" in line for line in found.lines())


@pytest.fixture(scope="module")
def trimmed_folder(tiny_gguf: Path, folder: Path) -> Path:
    head = np.random.default_rng(5).permutation(200)[:100]  # the rest are padding
    return build_draft(tiny_gguf, folder / "trimmed", bits=32, head=head.tolist())


def test_rows_of_texts_are_never_all_kept(tiny_gguf: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    for kind in (LlamaScorer, OnnxScorer):
        score = kind.score

        def noted(self: object, tokens: list[int], num_rows: int, score: object = score) -> object:
            asked.append(num_rows)
            return score(self, tokens, num_rows)  # type: ignore[operator]

        monkeypatch.setattr(kind, "score", noted)
    measured(own_folder, tiny_gguf, 1000)
    assert max(asked) == BLOCK


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 700])
def test_texts_of_any_length(num_tokens: int, tiny_gguf: Path, own_folder: Path, tmp_path: Path) -> None:
    """700 tokens are more than the model's context of 256."""
    (tmp_path / "long.txt").write_text("x " * 350, encoding="utf-8")
    found = compare(own_folder, tiny_gguf, texts=tmp_path / "long.txt", max_tokens=num_tokens, num_threads=1)
    assert found.total.num_positions == pytest.approx(min(num_tokens, 697), abs=2)
    assert found.total.kl < 1e-5
    assert list(found.by_category) == ["long"]


def test_a_split_model_is_measured_by_all_its_parts(tiny_gguf: Path, tmp_path: Path) -> None:
    from edgespec.agreement.scorers import _gguf_bytes

    for i in (1, 2):
        (tmp_path / f"a-0000{i}-of-00002.gguf").write_bytes(bytes(10 * i))
    (tmp_path / "b-00001-of-00002.gguf").write_bytes(bytes(1000))
    assert _gguf_bytes(tmp_path / "a-00001-of-00002.gguf") == 30
    assert _gguf_bytes(tiny_gguf) == tiny_gguf.stat().st_size


def test_an_export_is_its_graph_and_the_weights_named_after_it(usual_folder: Path, tmp_path: Path) -> None:
    export = shutil.copytree(usual_folder, tmp_path / "export")
    (export / "model.onnx.data").write_bytes(bytes(1000))
    (export / "model_q4.onnx").write_bytes(bytes(5000))
    with opened(export, 1, lambda *_: None) as scorer:
        assert scorer.num_bytes == (export / "model.onnx").stat().st_size + 1000


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("side", ["subject", "source"])
def test_a_missing_model(side: str, tiny_gguf: Path, tmp_path: Path) -> None:
    paths = {"subject": tiny_gguf, "source": tiny_gguf, side: tmp_path / "none"}
    with pytest.raises(ModelNotFoundError, match=r"none; give a GGUF, a draft folder, an \.onnx file or a checkpoint"):
        compare(**paths)
    with pytest.raises(ModelNotFoundError, match=r"has no \.onnx file and no draft\.toml"):
        compare(**(paths | {side: tmp_path}))


def test_a_model_without_permission(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, **_: object) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(FileAccessError, match="cannot be read: Permission denied"):
        compare(tmp_path / "locked" / "model.gguf", tiny_gguf)


@pytest.mark.parametrize("num_bytes", [0, 100, 20_000])
def test_a_truncated_model(num_bytes: int, tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "short.gguf").write_bytes(tiny_gguf.read_bytes()[:num_bytes])
    with pytest.raises(ModelFormatError, match=r"short\.gguf"):
        compare(tmp_path / "short.gguf", tiny_gguf)


def test_other_tokens(own_folder: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    other = shutil.copytree(own_folder, tmp_path / "other")
    tokens = json.loads((other / "tokens.json").read_text(encoding="utf-8"))
    tokens[100] = "something else"
    (other / "tokens.json").write_text(json.dumps(tokens), encoding="utf-8")
    with pytest.raises(VocabularyMismatchError, match="token 100 is 'something else'"):
        compare(other, tiny_gguf)


def test_padding_may_differ(tiny_gguf: Path, folder: Path) -> None:
    wider = write_gguf(folder / "wider.gguf", TinyConfig(num_vocab=384))
    for subject, source in ((wider, tiny_gguf), (tiny_gguf, wider)):
        found = measured(subject, source, 50)
        assert found.total.coverage == 1.0
        assert np.isfinite(found.total.kl)


@pytest.mark.parametrize("side", ["subject", "source"])
def test_a_model_that_gives_no_numbers_is_named(side: str, tiny_gguf: Path, tmp_path: Path) -> None:
    content = bytearray(tiny_gguf.read_bytes())
    content[-400_000:] = np.full(100_000, np.nan, np.float32).tobytes()
    (tmp_path / "nan.gguf").write_bytes(content)
    paths = {"subject": tiny_gguf, "source": tiny_gguf, side: tmp_path / "nan.gguf"}
    with pytest.raises(BackendError, match=r"nan\.gguf gave no usable logits: the largest of 320 logits is nan"):
        compare(**paths, max_tokens=50)


def test_nobody_can_read_texts(own_folder: Path) -> None:
    with pytest.raises(ParameterError, match="has a tokenizer to read texts with"):
        compare(own_folder, own_folder)


def test_texts_without_two_tokens(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("x", encoding="utf-8")
    with pytest.raises(PromptError, match="give no two tokens in a row"):
        compare(tiny_gguf, tiny_gguf, texts=tmp_path / "short.txt")


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"max_tokens": 1.5}, {"num_threads": 0}])
def test_parameters_out_of_range(options: dict[str, int], tiny_gguf: Path) -> None:
    with pytest.raises(ParameterError, match=next(iter(options))):
        compare(tiny_gguf, tiny_gguf, **options)


@pytest.mark.model
def test_the_starter_draft_agrees_with_its_verifier(starter_draft: Path, starter_gguf: Path) -> None:
    found = compare(starter_draft, starter_gguf, max_tokens=140, num_threads=1)
    assert found.total.agreement > 0.9
    assert found.total.kl < 0.05
    assert found.total.subject_perplexity == pytest.approx(found.total.source_perplexity, rel=0.1)
