"""The text a student learns from, with what the teacher thought of it: a folder of shards, each whole or not there.

A shard holds the texts of one group, one after the other: ``tokens.npy`` (positions,) int32, ``written.npy``
(positions,) bool, ``hidden.npy`` (positions, width) uint16, and ``shard.json``, which says where each text lies and
what the other files' digests are. ``corpus.json`` has the settings the text was made with.
"""

from __future__ import annotations

import collections.abc as abc
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import FileAccessError, ModelFormatError, ParameterError
from quantize.folder import new_file, new_folder
from quantize.source import file_sha256

SETTINGS, SHARD = "corpus.json", "shard.json"
FORMAT = 1

Ids = NDArray[np.int64]
_ARRAYS = {"tokens": np.int32, "written": np.bool_, "hidden": np.uint16}


@dataclass(frozen=True, slots=True)
class Text:
    """
    tokens       ids, n of them; the template's are among them
    written      (n,) bool: which tokens are the teacher's answers; the others were given to it, or are a user's words
    hidden       (n, width) uint16, the bits of bfloat16: the teacher's state after its output norm. Row i is what it
                 thought after reading tokens[: i + 1], so the head turns it into the distribution of tokens[i + 1]
    task         what kind of text
    temperature  the answers were drawn at
    """

    tokens: list[int]
    written: NDArray[np.bool_]
    hidden: NDArray[np.uint16]
    task: str
    temperature: float


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a text lies in its shard, and what is known of it without reading it."""

    start: int
    num_tokens: int
    num_written: int
    task: str
    temperature: float


class CorpusWriter:
    """Adds shards to a folder, which it makes if need be. One thread, one writer a folder.

    num_shards, num_texts  that there are: the numbers of the next ones
    num_written            tokens of answers; by task, as the number of texts is
    passages               texts the teacher wrote to be asked about later; a shard keeps those made with it

    What was flushed survives the process; the texts added since are lost with it.
    """

    def __init__(self, folder: Path, settings: abc.Mapping[str, Any]) -> None:
        """Raises ParameterError when the folder's texts were made with other settings, FileAccessError, or
        ModelFormatError for a folder that is damaged."""
        self._folder = folder
        _settle(folder, dict(settings))
        corpus = Corpus(folder)
        self.num_shards = corpus.num_shards
        self.num_written, self.num_texts = corpus.num_written, len(corpus)
        self.num_written_by_task, self.num_texts_by_task = corpus.num_written_by_task, corpus.num_texts_by_task
        self.passages = corpus.passages
        self._texts: list[Text] = []
        self._passages: list[dict[str, str]] = []

    def add(self, text: Text) -> None:
        """Keeps it until ``flush``."""
        self._texts.append(text)

    def add_passage(self, passage: dict[str, str]) -> None:
        self._passages.append(passage)

    def flush(self) -> None:
        """Writes the texts added since the last time as a shard, and waits for the disk. Raises FileAccessError."""
        if not self._texts:
            return
        with new_folder(_shard(self._folder, self.num_shards), SHARD, force=False) as folder:
            _write_shard(folder, self._texts, self._passages)
        self.num_shards += 1
        for text in self._texts:
            self._count(text)
        self.passages = [*self.passages, *self._passages]
        self._texts, self._passages = [], []

    def _count(self, text: Text) -> None:
        num_written = int(text.written.sum())
        self.num_texts, self.num_written = self.num_texts + 1, self.num_written + num_written
        for counts, number in ((self.num_written_by_task, num_written), (self.num_texts_by_task, 1)):
            counts[text.task] = counts.get(text.task, 0) + number


class Corpus:
    """The texts of a folder, in the order of their numbers. Reads only; any thread.

    texts  one Entry a text
    """

    def __init__(self, folder: Path) -> None:
        """Raises ModelFormatError for a folder that is none or is damaged, as far as sizes tell; digests are compared
        when a shard is first read. FileAccessError."""
        read_json(folder / SETTINGS)
        num_shards = sum(path.is_dir() for path in folder.glob("shard-*"))
        self._shards = [_Shard.open(_shard(folder, number)) for number in range(num_shards)]
        self.texts: list[Entry] = [entry for shard in self._shards for entry in shard.entries]
        self._places = [(shard, i) for shard in self._shards for i in range(len(shard.entries))]

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, number: int) -> Text:
        """A text; its ``hidden`` is mapped from the file. Raises ModelFormatError for a damaged shard."""
        shard, place = self._places[number]
        return shard.read(place)

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    @property
    def num_tokens(self) -> int:
        """Positions of all texts."""
        return sum(entry.num_tokens for entry in self.texts)

    @property
    def num_written(self) -> int:
        """Tokens that the teacher answered."""
        return sum(entry.num_written for entry in self.texts)

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(sorted({entry.task for entry in self.texts}))

    @property
    def num_written_by_task(self) -> dict[str, int]:
        return {task: sum(e.num_written for e in self.texts if e.task == task) for task in self.tasks}

    @property
    def num_texts_by_task(self) -> dict[str, int]:
        return {task: sum(e.task == task for e in self.texts) for task in self.tasks}

    @property
    def passages(self) -> list[dict[str, str]]:
        return [passage for shard in self._shards for passage in shard.passages]


def head_ids(corpus: Corpus, num_ids: int, always: abc.Collection[int], num_vocab: int) -> Ids:
    """The ``num_ids`` ids most frequent among the written tokens, among equals the lowest, ascending; those of
    ``always`` are among them. Raises ParameterError for a number out of range, ModelFormatError for a damaged shard."""
    if not max(1, len(always)) <= num_ids <= num_vocab:
        raise ParameterError(
            f"head: got {num_ids} ids; allowed: {max(1, len(always))} (the special tokens) to {num_vocab}; change it"
        )
    counts = np.zeros(num_vocab)
    for number in range(len(corpus)):
        text = corpus.read(number)
        np.add.at(counts, np.asarray(text.tokens)[text.written], 1)
    counts[list(always)] = np.inf
    return np.sort(np.lexsort((np.arange(num_vocab), -counts))[:num_ids]).astype(np.int64)


def read_json(path: Path) -> dict[str, Any]:
    """An object of ours. Raises ModelFormatError, FileAccessError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, not {FORMAT}")
    except OSError as error:
        raise FileAccessError(f"{path} cannot be read: {error.strerror or error}; generate the text anew") from error
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    return dict(content)


@dataclass(slots=True)
class _Shard:
    """An opened shard. ``checked`` turns true once the digests were compared."""

    folder: Path
    entries: list[Entry]
    passages: list[dict[str, str]]
    sha256: dict[str, str]
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    checked: bool = False

    @classmethod
    def open(cls, folder: Path) -> _Shard:
        """Raises ModelFormatError."""
        content = read_json(folder / SHARD)
        try:
            if content.pop("digest") != _digest(content):
                raise ValueError(f"{SHARD} is not what was written")
            entries = [Entry(**entry) for entry in content["texts"]]
            shard = cls(folder, entries, list(content["passages"]), dict(content["sha256"]))
            sizes = {name: (folder / f"{name}.npy").stat().st_size for name in _ARRAYS}
            if sizes != content["num_bytes"]:
                raise ValueError(f"files of {sizes} bytes, not {content['num_bytes']}")
        except (OSError, TypeError, KeyError, ValueError) as error:
            raise _damaged(folder, str(error)) from error
        return shard

    def read(self, place: int) -> Text:
        entry = self.entries[place]
        tokens, written, hidden = (self._array(name)[entry.start : entry.start + entry.num_tokens] for name in _ARRAYS)
        return Text(tokens.tolist(), written, hidden, entry.task, entry.temperature)

    def _array(self, name: str) -> NDArray[Any]:
        if not self.checked:
            self._check()
        if name not in self.arrays:
            self.arrays[name] = np.load(self.folder / f"{name}.npy", mmap_mode="r" if name == "hidden" else None)
        return self.arrays[name]

    def _check(self) -> None:
        for name in _ARRAYS:
            if file_sha256(self.folder / f"{name}.npy") != self.sha256.get(name):
                raise _damaged(self.folder, f"{name}.npy is not what was written")
        self.checked = True


def _write_shard(folder: Path, texts: abc.Sequence[Text], passages: abc.Sequence[dict[str, str]]) -> None:
    arrays = {
        "tokens": np.concatenate([np.asarray(text.tokens, np.int32) for text in texts]),
        "written": np.concatenate([text.written for text in texts]),
        "hidden": np.concatenate([text.hidden for text in texts]),
    }
    for name, dtype in _ARRAYS.items():
        np.save(folder / f"{name}.npy", arrays[name].astype(dtype, copy=False))
    starts = np.cumsum([0, *(len(text.tokens) for text in texts)]).tolist()
    content: dict[str, Any] = {"format": FORMAT, "texts": [_entry(*pair) for pair in zip(starts, texts, strict=False)]}
    content |= {"passages": list(passages)}
    files = {name: folder / f"{name}.npy" for name in _ARRAYS}
    content |= {"num_bytes": {name: path.stat().st_size for name, path in files.items()}}
    content |= {"sha256": {name: file_sha256(path) for name, path in files.items()}}
    (folder / SHARD).write_text(json.dumps({**content, "digest": _digest(content)}), encoding="utf-8")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("ascii")).hexdigest()


def _entry(start: int, text: Text) -> dict[str, Any]:
    num_written = int(text.written.sum())
    about = {"task": text.task, "temperature": text.temperature}
    return {"start": start, "num_tokens": len(text.tokens), "num_written": num_written, **about}


def _settle(folder: Path, settings: dict[str, Any]) -> None:
    """Writes the settings into a new folder, or compares them with those of an old one."""
    path, settings = folder / SETTINGS, {"format": FORMAT, **settings}
    if not path.exists():
        with new_file(path, force=False) as made:
            made.write_text(json.dumps(settings, indent=1), encoding="utf-8")
        return
    old = read_json(path)
    for name in sorted(old.keys() | settings.keys()):
        if old.get(name) != settings.get(name):
            raise ParameterError(
                f"{folder} has text made with {name} {old.get(name)}, not {settings.get(name)}; "
                "keep that setting, or choose another folder"
            )


def _shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}"


def _damaged(path: Path, reason: str) -> ModelFormatError:
    line = " ".join(reason.split())[:200]
    return ModelFormatError(f"{path} is damaged ({line}); remove it and what was made after it, and generate again")
