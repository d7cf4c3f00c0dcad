"""One conversation on its way: which tokens the teacher has to read next, and what becomes of those it writes."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ParameterError
from quantize.distill.prompts import Script, Turn

if TYPE_CHECKING:
    from quantize.head_text import TextSide

MAX_LOOP = 24  # tokens of an answer that only repeat what stood before
_LONGEST_LOOP = 96  # tokens until a loop comes round
_MAX_WORDS = 64  # tokens of a user's words that the teacher writes
_MAX_QUESTION = 32
_WORDS_TEMPERATURE = 0.8
_MOST_CHARACTERS = 64  # of each half of a user's words, for each token that fits
_LEAST_WORDS = 8  # a user's, that must fit
_ENDS_LINE = ("Ċ", "\n", "<0x0A>")  # as vocabularies spell it


@dataclass(frozen=True)
class Speech:
    """How a model talks: its text side and the raw vocabulary, and how long texts may get.

    max_length  tokens of a text
    max_answer  of an answer
    """

    side: TextSide
    tokens: abc.Sequence[str]
    max_length: int
    max_answer: int

    def check(self) -> None:
        """Raises ParameterError where no text would fit."""
        least = len(self.side.start) + len(self.side.bridge) + _LEAST_WORDS + self.max_answer
        if self.max_length < least:
            raise ParameterError(
                f"max_length: got {self.max_length}; a chat with an answer of {self.max_answer} tokens needs {least}; "
                "allow longer texts or give shorter answers"
            )

    @cached_property
    def stops(self) -> frozenset[int]:
        """What ends any writing."""
        return self.side.end_tokens | self.side.special

    @cached_property
    def line_ends(self) -> frozenset[int]:
        return frozenset(t for t, text in enumerate(self.tokens) if any(end in text for end in _ENDS_LINE))

    @cached_property
    def question_ends(self) -> frozenset[int]:
        return frozenset(t for t, text in enumerate(self.tokens) if "?" in text)

    @cached_property
    def between(self) -> tuple[int, ...]:
        """A user's words and the answer."""
        return self.side.bridge or tuple(self.side.encode("\n"))


class Writing:
    """A text that is being written. It says what is to be read (``due``), and once that is read and it is not
    ``done``, takes the next token, drawn at ``temperature``. Deterministic by script and ``random``.

    tokens   so far
    written  which of them are answers
    answer   the tokens of the last one
    """

    def __init__(self, script: Script, speech: Speech, random: np.random.Generator) -> None:
        self.script, self._speech, self._random = script, speech, random
        self.tokens: list[int] = []
        self.written: list[bool] = []
        self.answer: list[int] = []
        self.temperature = script.temperature
        self.done = False
        self._num_read = 0
        self._play = self._plays()
        next(self._play)

    @property
    def expected(self) -> int:
        """Tokens it may get to."""
        max_answer = self.script.max_answer or self._speech.max_answer
        num_more = sum(max_answer + (_MAX_WORDS if turn.goes_on else 0) for turn in self.script.turns)
        return min(len(self.tokens) + num_more, self._speech.max_length)

    @property
    def due(self) -> list[int]:
        return self.tokens[self._num_read :]

    @property
    def num_read(self) -> int:
        return self._num_read

    def have_read(self, num_tokens: int) -> None:
        self._num_read += num_tokens

    def draw(self) -> float:
        """A uniform number, for the next token."""
        return float(self._random.random())

    def take(self, token: int) -> None:
        try:
            self._play.send(token)
        except StopIteration:
            self.done = True

    def _plays(self) -> abc.Generator[None, int, None]:
        """Appends to the text; yields where a token of the teacher is wanted."""
        side = self._speech.side
        max_answer = self.script.max_answer or self._speech.max_answer
        self._give(side.start)
        for number, turn in enumerate(self.script.turns):
            if number and not self._follow(max_answer):
                return
            yield from self._words(turn, max_answer)
            self._give(self._speech.between)
            self.answer = side.encode(turn.answer)
            self._give(self.answer)
            yield from self._answer(max_answer)

    def _follow(self, max_answer: int) -> bool:
        """Begin the user's next turn, where the model has such and it fits."""
        again = self._speech.side.again
        if self.tokens[-1:] == list(again[:1]):  # the answer has ended by itself
            again = again[1:]
        if not again or self._room(max_answer) < len(again) + _LEAST_WORDS:
            return False
        self._give(again)
        return True

    def _room(self, max_answer: int) -> int:
        """For a user's words."""
        return self._speech.max_length - len(self.tokens) - len(self._speech.between) - max_answer

    def _words(self, turn: Turn, max_answer: int) -> abc.Generator[None, int, None]:
        room = self._room(max_answer)
        self._give(_cut_middle(self._speech.side.encode(_cut_text(turn.words, room)), room))
        if not turn.goes_on:
            return
        speech, is_question = self._speech, self.script.task in ("question", "retrieval")
        self.temperature = _WORDS_TEMPERATURE
        token = -1
        for _ in range(min(self._room(max_answer) - 1, _MAX_QUESTION if is_question else _MAX_WORDS)):
            token = yield
            if token in speech.stops or token in speech.line_ends:
                break
            self._give((token,))
            if token in speech.question_ends:
                break
        if is_question and token not in speech.question_ends:
            self._give(speech.side.encode("?")[:1])

    def _answer(self, max_answer: int) -> abc.Generator[None, int, None]:
        self.temperature = self.script.temperature
        loop = _Loop(self.tokens[len(self.tokens) - len(self.answer) :])
        for _ in range(min(max_answer, self._speech.max_length - len(self.tokens))):
            token = yield
            self._give((token,), written=True)
            if token in self._speech.stops:
                return
            self.answer.append(token)
            if loop.add(token) >= MAX_LOOP:
                return

    def _give(self, tokens: abc.Sequence[int], *, written: bool = False) -> None:
        self.tokens += tokens
        self.written += [written] * len(tokens)


class _Loop:
    """Finds repetition in what is added: whether the last tokens are those some way before them."""

    def __init__(self, tokens: abc.Iterable[int]) -> None:
        self._recent: NDArray[np.int64] = np.full(_LONGEST_LOOP, -1)  # newest first
        self._runs: NDArray[np.int64] = np.zeros(_LONGEST_LOOP, np.int64)  # of the loop of each length
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> int:
        """How many tokens up to this one only repeat."""
        self._runs = (self._runs + 1) * (self._recent == token)
        self._recent = np.concatenate(([token], self._recent[:-1]))
        return int(self._runs.max())


def _cut_text(text: str, room: int) -> str:
    """Without most of what would be cut anyway: to encode megabytes takes minutes."""
    most = _MOST_CHARACTERS * max(1, room)
    return text if len(text) <= 2 * most else text[:most] + text[-most:]


def _cut_middle(tokens: list[int], room: int) -> list[int]:
    """What fits: a prompt's first and last words say what is asked."""
    if len(tokens) <= room:
        return tokens
    first = room // 2
    return tokens[:first] + tokens[len(tokens) - (room - first) :]
