"""What is read while two models are compared. The texts beside this file were written for it (Apache-2.0)."""

from __future__ import annotations

import collections.abc as abc
import json
from pathlib import Path
from typing import NamedTuple

from edgespec.errors import FileAccessError, PromptError

TEXTS = Path(__file__).with_name("texts.jsonl")
MAX_CHARS_PER_TOKEN = 64  # more than any text has: enough to stop reading a file that is far too long
MAX_CHARS = 2**27  # weeks of comparing; a read of more reserves the memory for it


class Text(NamedTuple):
    category: str
    text: str


class Piece(NamedTuple):
    """A run of tokens that is read from an empty cache; the rows after all of them but the last are compared."""

    category: str
    tokens: list[int]


def read_texts(path: Path | None, max_tokens: int) -> list[Text]:
    """Of a .jsonl file, {"text": "...", "category": "..."} a line, or of any other file the whole as one text.

    path        None: the project's own texts
    max_tokens  what lies far beyond them need not be read
    Raises FileAccessError, or PromptError for what is not UTF-8, not such lines, or empty.
    """
    path = TEXTS if path is None else path
    max_chars = min(MAX_CHARS_PER_TOKEN * max_tokens, MAX_CHARS)
    try:
        with path.open(encoding="utf-8-sig") as stream:
            if path.suffix != ".jsonl":
                found = [Text(path.stem, stream.read(max_chars))]
            else:
                found = list(_parsed(path, stream, max_chars))
    except OSError as error:
        raise FileAccessError(f"the texts {path} cannot be read: {error.strerror or error}; check the path") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"the texts {path} are not UTF-8 ({error.reason}); save them in this encoding") from error
    if not any(text.text.strip() for text in found):
        raise PromptError(f"the texts {path} are empty; give a file with some hundred words")
    return found


def _parsed(path: Path, lines: abc.Iterable[str], max_chars: int) -> abc.Iterator[Text]:
    num_chars = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        yield (found := _entry(path, number, line))
        num_chars += len(found.text)
        if num_chars >= max_chars:
            return


def _entry(path: Path, number: int, line: str) -> Text:
    try:
        content = json.loads(line)
        text, category = content["text"], content.get("category", "text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        text = category = None
    if not isinstance(text, str) or not isinstance(category, str):
        raise PromptError(
            f'{path}, line {number}: got {line.strip()[:60]!r}; allowed: {{"text": "...", "category": "..."}}, '
            "the category may be left out"
        )
    return Text(category, text)


def cut(
    texts: abc.Sequence[Text], encode: abc.Callable[[str], list[int]], *, max_tokens: int, num_vocab: int, num_ctx: int
) -> list[Piece]:
    """The texts as tokens: of each the same share from its beginning, so that about ``max_tokens`` positions remain.

    num_vocab  a piece ends before an id that one of the models cannot read
    num_ctx    longer texts are read in pieces of at most so many tokens, each of which begins as a text does: without
               the token that begins one, some models make no sense of what follows
    Raises PromptError when nothing is left.
    """
    coded = [(text.category, encode(text.text)) for text in texts]
    start = encode("")[:1]
    share = min(1.0, max_tokens / max(1, sum(len(ids) - 1 for _, ids in coded)))
    pieces = [
        Piece(category, part)
        for category, ids in coded
        for part in _parts(ids[: round(share * (len(ids) - 1)) + 1], start, num_vocab, num_ctx)
    ]
    if not pieces:
        raise PromptError("the texts give no two tokens in a row that both models can read; choose longer ones")
    return pieces


def _parts(ids: list[int], start: list[int], num_vocab: int, num_ctx: int) -> abc.Iterator[list[int]]:
    end = next((i for i, token in enumerate(ids) if token >= num_vocab), len(ids))
    start = start if ids[:1] == start and num_ctx > 1 else []
    for first in range(len(start), end, num_ctx - len(start)):
        part = [*start, *ids[first : min(first + num_ctx - len(start), end)]]
        if len(part) > 1:
            yield part
