"""What the user sees of the output tokens: bytes joined to characters, stop strings cut off."""

from __future__ import annotations

import collections.abc as abc
from typing import NamedTuple

from edgespec.text.detokenizer import Detokenizer
from edgespec.text.stop import StopScanner


class Text(NamedTuple):
    """What some tokens added to the visible text.

    emit        text that is certain now, possibly ""
    num_tokens  how many of the tokens were read: all, or up to and with the one that completed a stop string
    stopped     whether a stop string was met, now or before
    """

    emit: str
    num_tokens: int
    stopped: bool


class OutputText:
    """The visible text of one output, token by token.

    piece  the bytes of a token id, see Tokenizer.piece
    stops  texts that end the output and are no part of it

    Belongs to one output and one thread.
    """

    def __init__(self, piece: abc.Callable[[int], bytes], stops: abc.Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(piece)
        self._scanner = StopScanner(stops)
        self._stopped = False

    def feed(self, tokens: abc.Sequence[int]) -> Text:
        """Read tokens up to the one that completes a stop string; once stopped, none is read."""
        parts: list[str] = []
        num_tokens = 0
        while num_tokens < len(tokens) and not self._stopped:
            emit, self._stopped = self._scanner.feed(self._detokenizer.feed((tokens[num_tokens],)))
            parts.append(emit)
            num_tokens += 1
        return Text("".join(parts), num_tokens, self._stopped)

    def flush(self) -> str:
        """The rest, once the output is over: text held back and U+FFFD for a character that never became whole."""
        emit, _ = self._scanner.feed(self._detokenizer.flush())
        return emit + self._scanner.flush()
