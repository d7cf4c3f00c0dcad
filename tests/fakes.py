"""Stand-ins for the two models, small enough to know everything about."""

from __future__ import annotations

import collections.abc as abc

import numpy as np
from numpy.typing import NDArray

from edgespec.core.sampling import Stream, distribution, pick
from edgespec.core.sequence import Draft
from edgespec.drafters.base import DraftRequest
from edgespec.errors import ClosedError, ParameterError
from edgespec.verifiers.base import Cancelled, Interrupted, Rows, ScoreRequest, check_requests, check_tokens, never

LETTERS = "abcdefghijklmnopqrstuvwxyz .!?"
END = 31  # FakeTokenizer's end-of-generation token

Logits = abc.Callable[[abc.Sequence[int]], NDArray[np.float32]]


def random_logits(num_vocab: int, seed: int = 0) -> Logits:
    """A language model of order two: the row depends on the last two tokens, and on nothing else."""

    def logits(tokens: abc.Sequence[int]) -> NDArray[np.float32]:
        rng = np.random.default_rng([seed, *tokens[-2:]])
        return 2.0 * rng.standard_normal(num_vocab, dtype=np.float32)

    return logits


class FakeVerifier:
    """Answers from a function of the tokens. Rows turn to NaN at the next call: who keeps them too long is found out.

    requests  every call's, for a test to look at
    """

    def __init__(
        self, num_vocab: int = 32, num_ctx: int = 64, num_slots: int = 1, logits: Logits | None = None
    ) -> None:
        self.num_vocab, self.num_ctx, self.num_slots = num_vocab, num_ctx, num_slots
        self.requests: list[list[ScoreRequest]] = []
        self._logits = logits or random_logits(num_vocab)
        self._given: list[Rows] = []
        self._closed = False

    def score(self, requests: abc.Sequence[ScoreRequest], cancelled: Cancelled = never) -> list[Rows]:
        if self._closed:
            raise ClosedError("this verifier is closed; open a new one")
        check_requests(self, requests)
        for request in requests:
            check_tokens(request.tokens, self.num_vocab)
        if cancelled():
            raise Interrupted
        self.requests.append([*requests])
        for rows in self._given:
            rows.fill(np.nan)
        self._given = [self._rows(request) for request in requests]
        return self._given

    def _rows(self, request: ScoreRequest) -> Rows:
        first = len(request.tokens) - request.num_rows + 1
        return np.stack([self._logits(request.tokens[:stop]) for stop in range(first, len(request.tokens) + 1)])

    def close(self) -> None:
        self._closed = True


class FakeDrafter:
    """Drafts with the real sampling from a function of the tokens; by default the one FakeVerifier answers from.

    requests  every call's, for a test to look at
    """

    name = "fake"

    def __init__(self, num_vocab: int = 32, num_slots: int = 1, logits: Logits | None = None) -> None:
        self.num_slots = num_slots
        self.requests: list[list[DraftRequest]] = []
        self._logits = logits or random_logits(num_vocab)
        self._closed = False

    def propose(
        self, requests: abc.Sequence[DraftRequest], cancelled: abc.Callable[[], bool] = lambda: False
    ) -> list[Draft]:
        if self._closed:
            raise ClosedError("this drafter is closed; open a new one")
        if any(not 0 <= request.slot < self.num_slots for request in requests):
            raise ParameterError(f"slot: allowed: 0 to {self.num_slots - 1}")
        self.requests.append([*requests])
        return [self._propose(request, cancelled) for request in requests]

    def _propose(self, request: DraftRequest, cancelled: abc.Callable[[], bool]) -> Draft:
        tokens, params, dists = list(request.tokens), request.params, []
        while len(dists) < request.num_draft and not cancelled():
            dists.append(distribution(self._logits(tokens), params, tokens, request.num_prompt))
            tokens.append(pick(dists[-1], params, len(tokens), Stream.DRAFT))
        drawn = dists and params.rule == "rejection" and not params.greedy
        start = len(request.tokens)
        return Draft(start, tuple(tokens[start:]), tuple(dists) if drawn else None)

    def close(self) -> None:
        self._closed = True


class FakeTokenizer:
    """A letter a token: 26 letters, a space and some marks; the last token ends generation."""

    num_vocab = 32
    end_tokens = frozenset({END})
    bos = eos = ""
    chat_template: str | None = "{% for message in messages %}{{ message.content }}{% endfor %}"

    @property
    def tokens(self) -> list[str]:
        return [*LETTERS, *["<pad>"] * (END - len(LETTERS)), "<end>"]

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def encode_chat(self, text: str) -> list[int]:
        return self.encode(text, add_special=False, parse_special=True)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return self.tokens[token].encode() if special or token < len(LETTERS) else b""
