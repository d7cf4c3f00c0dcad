"""The ids of a head: counted in a corpus, or in text that the model writes."""

from __future__ import annotations

import collections.abc as abc
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import EdgespecError, FileAccessError, ModelFormatError, ParameterError
from quantize import build_draft
from quantize.head import HeadChoice, _coverage, choose_head
from tests import tiny
from tests.tiny import TinyConfig, token_strings, write_gguf
from tests.tiny_hf import write_checkpoint

TOKENS = token_strings(320)
SPECIAL = [0, 1, 2]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in both forms."""
    folder = tmp_path_factory.mktemp("sources")
    return {"gguf": write_gguf(folder / "tiny.gguf"), "checkpoint": write_checkpoint(folder / "checkpoint")}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def write_file(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


def ids(*texts: str) -> list[int]:
    return sorted([*SPECIAL, *map(TOKENS.index, texts)])


# -------------------------------------------------------------------------------------------------------------- corpus


@pytest.mark.parametrize("kind", ["gguf", "checkpoint"])
def test_most_frequent_tokens_of_a_text(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    corpus = write_file(tmp_path / "corpus.txt", "x the the the s s zzzz")
    choice = choose_head(sources[kind], 6, corpus=[corpus])
    assert choice.ids == ids("z", "Ġthe", "Ġs")
    assert choice.num_counted == len(["x", "Ġthe", "Ġthe", "Ġthe", "Ġs", "Ġs", "Ġ", "z", "z", "z", "z"])


@pytest.mark.parametrize("kind", ["gguf", "checkpoint"])
def test_among_equals_the_lowest_ids_win(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    corpus = write_file(tmp_path / "corpus.txt", "zyx")
    assert choose_head(sources[kind], 5, corpus=[corpus]).ids == ids("x", "y")
    assert choose_head(sources[kind], 8, corpus=[corpus]).ids == [0, 1, 2, 3, 4, *ids("x", "y", "z")[3:]]


@pytest.mark.parametrize("kind", ["gguf", "checkpoint"])
def test_special_tokens_spelled_in_a_text_are_text(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    corpus = write_file(tmp_path / "corpus.txt", "<|im_end|>")
    assert choose_head(sources[kind], 4, corpus=[corpus]).num_counted == 10


@pytest.mark.parametrize(
    "line",
    [
        '"zz"',
        '["z", "z"]',
        '{"text": "zz", "id": "aaaaaaa"}',
        '{"prompt": "z", "response": "z"}',
        '{"turns": ["z", "z"], "category": "aaaaaa"}',
        '{"messages": [{"role": "user", "content": "z"}, {"role": "model", "content": [{"text": "z"}]}]}',
    ],
)
def test_lines_of_json(line: str, sources: dict[str, Path], tmp_path: Path) -> None:
    corpus = write_file(tmp_path / "corpus.jsonl", f"\ufeff{line}\n\n{line}\r\n")
    choice = choose_head(sources["gguf"], 4, corpus=[corpus])
    assert choice.ids == ids("z")
    assert choice.num_counted in (4, 6)  # texts of a line are joined by a line feed


def test_several_files_count_together(sources: dict[str, Path], tmp_path: Path) -> None:
    stages: list[tuple[str, float]] = []
    first = write_file(tmp_path / "a.txt", "x" * 50_000)
    second = write_file(tmp_path / "b.jsonl", json.dumps({"text": "y" * 60_000 + "\ud800"}))
    choice = choose_head(
        sources["gguf"], 5, corpus=[first, second], progress=lambda stage, done: stages.append((stage, done))
    )
    assert choice.ids == ids("x", "y")
    assert choice.num_counted == 110_001
    fractions = [done for _, done in stages]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert {stage for stage, _ in stages} == {"reading", "counting", "done"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt holds no text"),
        ("a.txt", b"  \n\n ", "a.txt holds no text"),
        ("a.jsonl", b"\n\n", "a.jsonl holds no text"),
        ("a.jsonl", b'{"text": " "}', "a.jsonl holds no text"),
        ("a.txt", b"abc\xff\xfe", "is not UTF-8 text"),
        ("a.txt", b"abc\0def", "is not text, it has zero bytes"),
        ("a.jsonl", b'{"text": "a\\u0000"}', "is not text, it has zero bytes"),
        ("a.jsonl", b'"a"\n{"text": "a"', "line 2 of .* is not JSON"),
        ("a.jsonl", b'{"id": "a"}', "line 1 of .* has no text; allowed keys: text, content"),
        ("a.jsonl", b"[" * 100_000, "line 1 of .* is not JSON"),
        ("a.jsonl", b"3", "line 1 of .* has no text"),
    ],
)
def test_a_corpus_that_is_none(
    name: str, content: bytes, message: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        choose_head(sources["gguf"], 10, corpus=[write_file(tmp_path / name, content)])
    assert "\n" not in str(caught.value)


def test_a_corpus_that_is_not_there_or_no_file(sources: dict[str, Path], tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none.txt", "cannot be read: No such file"), (tmp_path, "is not a regular file")):
        with pytest.raises(FileAccessError, match=message):
            choose_head(sources["gguf"], 10, corpus=[path])


# ------------------------------------------------------------------------------------------------------------- written


def written(source: Path, **changes: Any) -> HeadChoice:
    return choose_head(source, **{"num_ids": 40, "num_tokens": 600, "num_threads": 1, **changes})


@pytest.mark.parametrize("kind", ["gguf", "checkpoint"])
def test_written_text_depends_on_the_model_and_the_seed_only(
    kind: str, sources: dict[str, Path], temporary: Path
) -> None:
    choice = written(sources[kind])
    assert written(sources[kind]) == choice
    assert written(sources[kind], seed=1).ids != choice.ids
    assert choice.num_counted == 600
    assert choice.ids == sorted(set(choice.ids))
    assert len(choice.ids) == 40
    assert set(SPECIAL) <= set(choice.ids)
    assert list(temporary.iterdir()) == []


def test_what_the_model_says_most_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that says three letters and little else, whatever comes before."""
    weights, favourites = tiny.weights(TinyConfig()), ids("q", "w", "Ġthe")[3:]
    weights["output"] *= 0.01
    weights["output_norm"] *= 0
    monkeypatch.setattr(tiny, "weights", lambda config: weights)
    source = write_gguf(tmp_path / "flat.gguf")
    flat = written(source, num_ids=6, num_tokens=3000)
    assert flat.coverage < 0.05
    weights["token_embd"][:, 0] = 10.0
    weights["output_norm"][0] = 1.0
    weights["output"][:, 0] = 0.0
    weights["output"][favourites, 0] = 6.0
    choice = written(write_gguf(tmp_path / "sharp.gguf"), num_ids=6, num_tokens=500)
    assert choice.ids == [*SPECIAL, *favourites]
    assert choice.coverage > 0.8


@pytest.mark.parametrize("kind", ["gguf", "checkpoint"])
def test_a_model_without_a_chat_template_writes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gguf.GGUFWriter.add_chat_template", lambda self, template: None)
    source = write_gguf(tmp_path / "a.gguf") if kind == "gguf" else write_checkpoint(tmp_path / "a")
    if kind == "checkpoint":
        (source / "tokenizer_config.json").unlink()
    assert written(source, num_tokens=100).num_counted == 100


def test_a_context_too_short_for_chats(tmp_path: Path) -> None:
    assert written(write_gguf(tmp_path / "a.gguf", TinyConfig(num_ctx=32)), num_tokens=100).num_counted == 100
    with pytest.raises(ModelFormatError, match="writes no text in a context of 1"):
        written(write_gguf(tmp_path / "b.gguf", TinyConfig(num_ctx=1)))


@pytest.mark.parametrize("stage", ["quantizing", "writing text"])
def test_ctrl_c_leaves_nothing(stage: str, sources: dict[str, Path], temporary: Path) -> None:
    def progress(now: str, done: float) -> None:
        if now == stage and done > 0.0:
            assert list(temporary.iterdir())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        written(sources["gguf"], progress=progress)
    assert list(temporary.iterdir()) == []


def test_progress_rises_to_the_end(sources: dict[str, Path]) -> None:
    seen: list[tuple[str, float]] = []
    written(sources["gguf"], progress=lambda stage, done: seen.append((stage, done)))
    fractions = [done for _, done in seen]
    assert fractions == sorted(fractions)
    assert (seen[0], seen[-1]) == (("reading", 0.0), ("done", 1.0))
    assert "writing text" in dict(seen)


# ---------------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_ids": 0}, "num_ids: got 0; allowed: a whole number from 1 to 320"),
        ({"num_ids": 321}, "num_ids: got 321; allowed: a whole number from 1 to 320"),
        ({"num_ids": 2}, "num_ids, with 3 special tokens: got 2; allowed: a whole number from 3 to 320"),
        ({"num_ids": 4.0}, "num_ids: got 4.0"),
        ({"num_tokens": 0}, "num_tokens: got 0; allowed: a whole number of 1 or more"),
        ({"seed": -1}, "seed: got -1; allowed: a whole number of 0 or more"),
        ({"num_threads": 0}, "num_threads: got 0; allowed: a whole number of 1 or more"),
    ],
    ids=str,
)
def test_numbers_out_of_range(changes: dict[str, Any], message: str, sources: dict[str, Path]) -> None:
    with pytest.raises(ParameterError, match=message):
        written(sources["gguf"], **changes)


def test_a_source_that_is_none(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path, write_file(tmp_path / "a.gguf", b"GGUF")):
        with pytest.raises(EdgespecError):
            choose_head(path, 10)


def test_coverage_is_that_of_text_a_head_was_not_chosen_by() -> None:
    def coverage(even: abc.Sequence[int], odd: abc.Sequence[int], num_ids: int) -> float:
        return _coverage(np.array([even, odd]), np.array([0]), num_ids)

    assert coverage([0, 5, 5, 0], [0, 5, 5, 0], 3) == 1.0
    assert coverage([0, 8, 0, 0], [0, 0, 8, 0], 2) == 0.0
    assert coverage([0, 9, 1, 0], [0, 2, 0, 8], 2) == 2 / 20  # the even half's head says 1, the odd one's says 3
    assert coverage([3, 0, 0, 9], [3, 9, 0, 0], 1) == 6 / 24


@pytest.mark.parametrize("repeats", [(400,), (399, 1), (10,) * 40])
def test_the_two_halves_of_a_corpus_are_alike_whatever_its_pieces(
    repeats: tuple[int, ...], sources: dict[str, Path], tmp_path: Path
) -> None:
    """Of six letters in turn a head says four; one that is chosen by a half with little or no text says none."""
    lines = [json.dumps("qwxyzv" * repeat) for repeat in repeats]
    corpus = write_file(tmp_path / "a.jsonl", "\n".join(lines))
    choice = choose_head(sources["gguf"], len(SPECIAL) + 4, corpus=[corpus])
    assert choice.num_counted == 2400
    assert choice.coverage == pytest.approx(4 / 6, abs=0.02)


def test_every_id_is_a_head_too(sources: dict[str, Path], tmp_path: Path) -> None:
    choice = choose_head(sources["gguf"], 320, corpus=[write_file(tmp_path / "a.txt", "hello")])
    assert choice.ids == list(range(320))
    assert choice.coverage == 1.0


def test_a_draft_is_built_with_it(sources: dict[str, Path], tmp_path: Path) -> None:
    corpus = write_file(tmp_path / "a.txt", "hello there")
    head = choose_head(sources["gguf"], 32, corpus=[corpus]).ids
    draft = build_draft(sources["gguf"], tmp_path / "draft", head=head)
    np.testing.assert_array_equal(np.load(draft / "d2t.npy"), head)
