"""Token ids to text, a few at a time."""

from __future__ import annotations

import codecs
import collections.abc as abc


class Detokenizer:
    """Joins the bytes of tokens to whole characters; feed and flush give what decoding all bytes at once would.

    piece  the bytes of a token id, see Tokenizer.piece

    Belongs to one output and one thread.
    """

    def __init__(self, piece: abc.Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: abc.Iterable[int]) -> str:
        """Text of the tokens; a character still in pieces is held back, impossible bytes become U+FFFD."""
        return self._decoder.decode(b"".join(self._piece(token) for token in tokens))

    def flush(self) -> str:
        """U+FFFD for a character that never became whole, else ""; the next feed begins anew."""
        return self._decoder.decode(b"", final=True)
