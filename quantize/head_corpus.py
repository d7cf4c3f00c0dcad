"""Reads the files a head is counted on, a piece at a time."""

from __future__ import annotations

import collections.abc as abc
import io
import json
from pathlib import Path
from typing import Any, TextIO

from edgespec.errors import FileAccessError, ParameterError

# Where the texts of a .jsonl line's object are: of plain corpora, of instructions and answers, of chats.
KEYS = ("text", "content", "prompt", "instruction", "input", "response", "output", "turns", "messages", "conversations")

_PIECE = 1 << 14  # characters; a word cut in two here and there changes no ranking


def read_texts(paths: abc.Sequence[Path]) -> abc.Iterator[tuple[str, float]]:
    """Pieces of text, and the fraction of all files that is read.

    A .jsonl file has a JSON text, or an object, or a list of those, on each line; of an object the values of KEYS
    count. Any other file is text as it is. UTF-8. Raises FileAccessError, or ParameterError for what is no text.
    """
    total = num_bytes(paths)
    done, empty = 0, True
    for path in paths:
        for text, position in _pieces(path):
            empty = empty and not text.strip()
            yield text, min(1.0, (done + position) / total)
        done += _size(path)
    if empty:
        raise ParameterError(f"corpus: {', '.join(path.name for path in paths)} holds no text; give files that do")


def num_bytes(paths: abc.Sequence[Path]) -> int:
    """Of all files together. Raises FileAccessError."""
    return sum(map(_size, paths))


def _size(path: Path) -> int:
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for its other end
            raise FileAccessError(f"corpus {path} is not a regular file; give files of text or .jsonl")
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _pieces(path: Path) -> abc.Iterator[tuple[str, int]]:
    """Pieces, and how many bytes are read so far."""
    lines = path.suffix.lower() in (".jsonl", ".ndjson")
    try:
        with path.open("rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig") as stream:
            for text in _json_lines(path, stream) if lines else iter(lambda: stream.read(_PIECE), ""):
                if "\0" in text:
                    raise ParameterError(f"corpus: {path} is not text, it has zero bytes; give files of text or .jsonl")
                yield text, raw.tell()
    except UnicodeDecodeError as error:
        raise ParameterError(f"corpus: {path} is not UTF-8 text ({error.reason}); give text or .jsonl") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _json_lines(path: Path, stream: TextIO) -> abc.Iterator[str]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            texts = list(_texts(json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"corpus: line {number} of {path} is not JSON ({error}); correct it") from error
        if not texts:
            raise ParameterError(f"corpus: line {number} of {path} has no text; allowed keys: {', '.join(KEYS)}")
        # lone surrogates, which JSON can spell, are no text that a tokenizer could read
        yield "\n".join(texts).encode("utf-8", "replace").decode("utf-8")


def _texts(value: Any) -> abc.Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)
    elif isinstance(value, dict):
        yield from _texts([value[key] for key in KEYS if key in value])


def _unreadable(path: Path, error: OSError) -> FileAccessError:
    return FileAccessError(f"corpus {path} cannot be read: {error.strerror or error}; check the path and permissions")
