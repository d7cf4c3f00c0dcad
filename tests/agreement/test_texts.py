"""What is read: files of both kinds, files that are none, and how texts become pieces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.agreement.texts import MAX_CHARS_PER_TOKEN, Piece, Text, cut, read_texts
from edgespec.errors import FileAccessError, PromptError


def encode(text: str) -> list[int]:
    """A token a character; the first one begins the text."""
    return [0, *map(ord, text)]


def test_the_projects_own_texts() -> None:
    texts = read_texts(None, 2000)
    categories = [text.category for text in texts]
    assert set(categories) == {"prose", "chat", "code", "summary", "translation", "maths", "list"}
    assert len(set(categories[:7])) == 7  # mixed, so that the beginning of the file has all
    assert all(len(text.text) > 300 for text in texts)
    assert len({text.text for text in texts}) == len(texts)


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    lines = [{"category": "a", "text": "one"}, {"text": "zwei ü 🙂", "more": 3}]
    path.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n \n", encoding="utf-8")
    assert read_texts(path, 100) == [Text("a", "one"), Text("text", "zwei ü 🙂")]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_whole_file(mark: str, tmp_path: Path) -> None:
    path = tmp_path / "novel.txt"
    path.write_text(mark + "Once\nupon a time", encoding="utf-8")
    assert read_texts(path, 100) == [Text("novel", "Once\nupon a time")]


@pytest.mark.parametrize("name", ["huge.txt", "huge.jsonl"])
def test_a_huge_file_is_not_read_to_its_end(name: str, tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 1000}) + "\n"
    (tmp_path / name).write_text(line * 1000 + "{", encoding="utf-8")
    found = read_texts(tmp_path / name, 10)
    assert sum(len(text.text) for text in found) <= MAX_CHARS_PER_TOKEN * 10 + 1000


@pytest.mark.parametrize("max_tokens", [10**12, 10**19])
def test_as_many_tokens_as_there_are(max_tokens: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 1000, encoding="utf-8")
    assert read_texts(tmp_path / "a.txt", max_tokens) == [Text("a", "x" * 1000)]


@pytest.mark.parametrize(
    "line",
    ["{", "[1]", '"text"', "{}", '{"text": 3}', '{"text": null}', '{"text": "a", "category": 4}', "null", "[" * 10_000],
)
def test_lines_that_are_not_right(line: str, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "fine"}\n' + line, encoding="utf-8")
    with pytest.raises(PromptError, match=r'texts\.jsonl, line 2: got .*; allowed: \{"text": "\.\.\."') as caught:
        read_texts(tmp_path / "texts.jsonl", 100)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
@pytest.mark.parametrize("content", ["", " \n\t \n"])
def test_empty_texts(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(PromptError, match="are empty; give a file with some hundred words"):
        read_texts(tmp_path / name, 100)


@pytest.mark.parametrize("name", ["texts.txt", "texts.jsonl"])
def test_texts_that_are_not_utf_8(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes('{"text": "Bücher"}'.encode("latin-1"))
    with pytest.raises(PromptError, match=r"are not UTF-8 \(.*\); save them in this encoding"):
        read_texts(tmp_path / name, 100)


def test_texts_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(FileAccessError, match=r"the texts .* cannot be read: "):
            read_texts(path, 100)


def test_every_text_gives_the_same_share() -> None:
    texts = [Text("a", "a" * 100), Text("b", "b" * 300)]
    pieces = cut(texts, encode, max_tokens=100, num_vocab=1000, num_ctx=1000)
    assert [(piece.category, len(piece.tokens) - 1) for piece in pieces] == [("a", 25), ("b", 75)]
    whole = cut(texts, encode, max_tokens=10_000, num_vocab=1000, num_ctx=1000)
    assert [len(piece.tokens) for piece in whole] == [101, 301]


def test_long_texts_become_pieces() -> None:
    pieces = cut([Text("a", "abcdefgh")], encode, max_tokens=100, num_vocab=1000, num_ctx=4)
    assert pieces == [Piece("a", encode(part)) for part in ("abc", "def", "gh")]  # each with what begins a text


def test_pieces_of_a_vocabulary_in_which_nothing_begins_a_text() -> None:
    def bare(text: str) -> list[int]:
        return encode(text)[1:]

    pieces = cut([Text("a", "abcdefgha")], bare, max_tokens=100, num_vocab=1000, num_ctx=4)
    assert pieces == [Piece("a", bare(part)) for part in ("abcd", "efgh")]  # what is left is one token


def test_a_piece_ends_before_what_cannot_be_read() -> None:
    pieces = cut([Text("a", "abcäbc"), Text("b", "ä")], encode, max_tokens=100, num_vocab=128, num_ctx=64)
    assert pieces == [Piece("a", encode("abc"))]


@pytest.mark.parametrize("text", ["", "ä"])
def test_nothing_to_compare(text: str) -> None:
    with pytest.raises(PromptError, match="give no two tokens in a row"):
        cut([Text("a", text)], encode, max_tokens=100, num_vocab=128, num_ctx=64)
