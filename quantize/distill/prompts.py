"""What the teacher is asked: prompts of many kinds, made of the templates beside this module and of passages that it
wrote before, or a user's own file of them."""

from __future__ import annotations

import collections.abc as abc
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edgespec.errors import FileAccessError, ParameterError
from quantize.distill.words import Filler, Sections, load_sections

# Shares of the written tokens.
SHARES = {
    "summary": 0.15,
    "retrieval": 0.15,
    "translation": 0.15,
    "question": 0.15,
    "math": 0.15,
    "chat": 0.04,
    "writing": 0.05,
    "roleplay": 0.03,
    "reasoning": 0.03,
    "coding": 0.04,
    "extraction": 0.03,
    "knowledge": 0.03,
}
PASSAGE_TASKS = frozenset(("summary", "retrieval", "extraction"))  # may need passages
NEWS, ENTRY = "news", "entry"  # kinds of passages
GOES_ON = "…"  # ends words that the teacher goes on with

_ONE_TURN = frozenset(("translation", "question"))
_TWO_TURNS_SHARE, _GREEDY_SHARE = 0.4, 0.5
_TEMPERATURES = (0.3, 1.0)
_PASSAGE_TEMPERATURES = (0.8, 1.1)
_NUM_SNIPPETS = (3, 6)
_OTHERS_SHARE = 0.75  # of the snippets beside the first, those about something else
_SNIPPET_WORDS = (50, 110)
_MAX_WORDS = 420  # of all snippets of a prompt
_MAX_PASSAGE = 420  # tokens
_MIN_PASSAGE_CHARACTERS = 200
_SENTENCE_ENDS = (".", "!", "?", '"', "”")
_ENDS_SENTENCE = re.compile(r"(?<=[.!?\"”])\s+")


@dataclass(frozen=True, slots=True)
class Turn:
    """
    words    a user's, or their beginning
    goes_on  whether the teacher goes on with them
    answer   how the answer begins
    """

    words: str
    goes_on: bool = False
    answer: str = ""


@dataclass(frozen=True, slots=True)
class Script:
    """A conversation to be written.

    temperature  of the answers
    max_answer   tokens of an answer; None: what is usual
    """

    task: str
    temperature: float
    turns: tuple[Turn, ...]
    max_answer: int | None = None


@dataclass(frozen=True, slots=True)
class Passage:
    """A text of the teacher's, as a corpus keeps it."""

    kind: str
    title: str
    text: str


class Prompts(Protocol):
    """Where scripts come from. Pure: the same arguments give the same scripts.

    shares  of the written tokens, by task
    """

    @property
    def shares(self) -> abc.Mapping[str, float]: ...

    def passage_script(self, kind: str, random: np.random.Generator) -> tuple[str, Script]:
        """The title of a passage, and how it is written."""
        ...

    def script(
        self, task: str, number: int, random: np.random.Generator, passages: abc.Sequence[Passage]
    ) -> Script: ...


class OwnPrompts:
    """The shipped templates. See Prompts."""

    shares: abc.Mapping[str, float] = SHARES

    def __init__(self) -> None:
        self._sections: Sections = load_sections("topics.txt", "sentences.txt", "tasks.txt")

    def passage_script(self, kind: str, random: np.random.Generator) -> tuple[str, Script]:
        filler = Filler(self._sections, random)
        words, _, answer = filler.line("passage" if kind == NEWS else "entry_passage").partition(" || ")
        title = filler.fill("{event}" if kind == NEWS else "{entry}")
        temperature = random.uniform(*_PASSAGE_TEMPERATURES)
        return _begin(title), Script("passage", temperature, (Turn(words, answer=_begin(answer)),), _MAX_PASSAGE)

    def script(self, task: str, number: int, random: np.random.Generator, passages: abc.Sequence[Passage]) -> Script:
        filler = Filler(self._sections, random, _given(task, passages, random))
        turns = [_turn(filler.line(task))]
        if task not in _ONE_TURN and random.random() < _TWO_TURNS_SHARE:
            more = f"more_{task}"
            turns.append(_turn(filler.line(more if more in self._sections else "more")))
        return Script(task, answer_temperature(random), tuple(turns))


class FilePrompts:
    """A user's own, line after line and again from the start. See Prompts."""

    shares: abc.Mapping[str, float] = {"prompts": 1.0}

    def __init__(self, path: Path) -> None:
        """Reads ``path``, whose lines are objects: {"turns": [...]}, a user's words turn by turn, or {"prompt": ...} or
        {"text": ...}, a user's only words. Raises FileAccessError, or ParameterError for what is no such file."""
        self._conversations = tuple(_read_lines(path))
        if not self._conversations:
            raise ParameterError(f"prompts: {path} has no line; give objects with turns, prompt or text")

    def passage_script(self, kind: str, random: np.random.Generator) -> tuple[str, Script]:
        raise LookupError("a file of prompts has no passages, and no task that needs one")

    def script(self, task: str, number: int, random: np.random.Generator, passages: abc.Sequence[Passage]) -> Script:
        return Script(task, answer_temperature(random), self._conversations[number % len(self._conversations)])


def answer_temperature(random: np.random.Generator) -> float:
    """Half of the answers are the most likely ones."""
    return 0.0 if random.random() < _GREEDY_SHARE else round(random.uniform(*_TEMPERATURES), 2)


def as_passage(kind: str, title: str, text: str) -> Passage:
    """The text up to the end of its last whole sentence, if there is much of it, without breaks between paragraphs."""
    sentences = _sentences(text)
    whole = " ".join(sentences if sentences[-1].endswith(_SENTENCE_ENDS) else sentences[:-1])
    return Passage(kind, title, whole if len(whole) >= _MIN_PASSAGE_CHARACTERS else " ".join(sentences) or title)


def _sentences(text: str) -> list[str]:
    return _ENDS_SENTENCE.split(" ".join(text.split()))


def _begin(text: str) -> str:
    """With a capital."""
    return text[:1].upper() + text[1:]


def _turn(line: str) -> Turn:
    return Turn(_begin(line.removesuffix(GOES_ON)), line.endswith(GOES_ON))


def _given(task: str, passages: abc.Sequence[Passage], random: np.random.Generator) -> dict[str, str]:
    """The slots that passages fill."""
    if task not in PASSAGE_TASKS:
        return {}
    news, entries = ([passage for passage in passages if passage.kind == kind] for kind in (NEWS, ENTRY))
    first, second = (news[int(i)].text for i in random.choice(len(news), 2, replace=len(news) < 2))
    main = entries[random.integers(len(entries))]
    given = {"news": first, "news2": second, "encyclopedia": main.text, "asked": main.title}
    snippets = _snippets(main, entries, random)
    source = passages[int(random.integers(len(passages)))]
    return given | {"snippets": "\n".join(snippets), "snippet": _snippet(source, random)}


def _snippets(main: Passage, entries: abc.Sequence[Passage], random: np.random.Generator) -> list[str]:
    """Several, of which one at least is about what is asked, in any order."""
    num_others = int(random.integers(*_NUM_SNIPPETS)) - 1
    others = [
        entries[i] if random.random() < _OTHERS_SHARE else main for i in random.integers(len(entries), size=num_others)
    ]
    most = _MAX_WORDS // (num_others + 1)
    snippets = [f"{passage.title} {_snippet(passage, random, most)}" for passage in (main, *others)]
    return [snippets[i] for i in random.permutation(len(snippets))]


def _snippet(passage: Passage, random: np.random.Generator, most: int = _MAX_WORDS) -> str:
    """Some sentences in a row, the last one cut."""
    sentences, num_words = _sentences(passage.text), min(most, int(random.integers(*_SNIPPET_WORDS)))
    start = int(random.integers(max(1, len(sentences) // 2)))
    words = " ".join(sentences[start:]).split(" ")
    return " ".join(words[:num_words])


def _read_lines(path: Path) -> abc.Iterator[tuple[Turn, ...]]:
    if path.exists() and not path.is_file():
        raise FileAccessError(f"prompts {path} is no regular file, which is read more than once; give a .jsonl file")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON may hold other breaks, as U+2028
    except UnicodeDecodeError as error:
        raise ParameterError(f"prompts: {path} is not UTF-8 text ({error.reason}); give .jsonl") from error
    except OSError as error:
        raise FileAccessError(
            f"prompts {path} cannot be read: {error.strerror or error}; check the path and permissions"
        ) from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _read_line(f"line {number} of {path}", line)


def _read_line(where: str, line: str) -> tuple[Turn, ...]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"prompts: {where} is not JSON ({error}); correct it") from error
    given = [key for key in ("turns", "prompt", "text") if isinstance(content, dict) and key in content]
    words: Any = content[given[0]] if given else None
    words = [words] if isinstance(words, str) and given[0] != "turns" else words
    if not isinstance(words, list) or not words or not all(isinstance(w, str) and w.strip() for w in words):
        raise ParameterError(
            f'prompts: {where} holds no prompt; allowed: {{"turns": [texts]}}, {{"prompt": text}}, {{"text": text}}'
        )
    # lone surrogates, which JSON can spell, are no text that a tokenizer could read
    return tuple(Turn(text.encode("utf-8", "replace").decode("utf-8")) for text in words)
