"""The nouns of the engine: what is asked (SamplingParams), what grows (Sequence), and what one round is made of."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.core.check import check_float, check_int
from edgespec.errors import ParameterError

FinishReason = Literal["stop", "length", "cancelled"]
Rule = Literal["coupled", "rejection"]
# A look-ahead guesses that its draft is accepted whole, and which token the verifier adds. Both right: what it drafted
# after that is kept. Else: whole acceptance and another token, or a rejection inside the draft.
Ahead = Literal["kept", "wrong guess", "rejected"]
RULES: tuple[Rule, ...] = ("coupled", "rejection")

MAX_SEED = 2**63 - 1

Cancelled = abc.Callable[[], bool]


def never() -> bool:
    """The ``cancelled`` of a call nobody can cancel."""
    return False


class Distribution(NamedTuple):
    """A sparse probability distribution over verifier token ids.

    ids    (n,) int64, ascending, unique
    probs  (n,) float64, all > 0, summing to 1
    """

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Every default lives here; a bad value raises ParameterError when the object is made.

    The order of processing is: repeat penalty, presence and frequency penalty, logit bias, temperature, top-k, top-p,
    min-p. ``temperature=0`` takes the most likely token after penalties and bias (the lowest id wins a tie).

    max_tokens         most tokens to generate; None means until the context is full
    top_k, top_p, min_p  0, 1.0 and 0.0 switch each of them off
    repeat_penalty     divides positive and multiplies negative logits of every token in prompt or output (Keskar et al.
                       2019, 1909.05858); 1.0 is off
    presence_penalty, frequency_penalty  subtracted once, and once per occurrence, for tokens of the output; 0.0 is off
    logit_bias         tuple of pairs (token id, added to its logit)
    seed               None draws one; the same seed gives the same tokens (rule ``coupled``: in every mode)
    stop               tuple of texts that end the output; they are not part of it
    rule               how drafts are judged: ``coupled`` or ``rejection`` (see core/acceptance.py)
    """

    max_tokens: int | None = 256
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    rule: Rule = "coupled"

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        check_int("top_k", self.top_k, 0)
        if self.seed is not None:
            check_int("seed", self.seed, 0, MAX_SEED)
        check_float("temperature", self.temperature, 0.0)
        check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("repeat_penalty", self.repeat_penalty, 0.0, open_low=True)
        check_float("presence_penalty", self.presence_penalty)
        check_float("frequency_penalty", self.frequency_penalty)
        for token, bias in _pairs(self.logit_bias):
            check_int("logit_bias token id", token, 0)
            check_float("logit_bias value", bias)
        stop = self.stop
        if not isinstance(stop, tuple) or any(not isinstance(text, str) or not text for text in stop):
            raise ParameterError(f"stop: got {stop!r}; allowed: a tuple of texts of one character or more")
        if self.rule not in RULES:
            raise ParameterError(f"rule: got {self.rule!r}; allowed: {', '.join(RULES)}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether a logits row must be changed before it is sampled from."""
        return bool(
            self.logit_bias
            or self.repeat_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _pairs(value: object) -> tuple[tuple[object, object], ...]:
    if not isinstance(value, tuple) or any(not isinstance(pair, tuple) or len(pair) != 2 for pair in value):
        raise ParameterError(f"logit_bias: got {value!r}; allowed: a tuple of pairs (token id, number)")
    return value


@dataclass(slots=True)
class Sequence:
    """One prompt and what has been generated after it. Owned by one thread.

    tokens      prompt and output, verifier token ids
    num_prompt  how many of them are the prompt
    num_ctx     most tokens this sequence may hold
    end_tokens  ids that end generation
    slot        its place in each backend's KV cache
    finish_reason  None while it grows; set by ``extend``, ``cut`` and the loop ("cancelled")
    """

    tokens: list[int]
    params: SamplingParams
    num_ctx: int
    end_tokens: frozenset[int] = frozenset()
    slot: int = 0
    num_prompt: int = field(init=False)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def room(self) -> int:
        """How many more tokens may be committed before max_tokens or the context end, at least 0."""
        room = self.num_ctx - len(self.tokens)
        if self.params.max_tokens is not None:
            room = min(room, self.params.max_tokens - self.num_output)
        return max(room, 0)

    def extend(self, tokens: abc.Sequence[int]) -> tuple[int, ...]:
        """Commit tokens up to an end-of-generation token or the end of the room; return those kept.

        Sets ``finish_reason`` to "stop" or "length" when one of the two is reached. The end-of-generation token itself
        is kept (the verifier drew it); nothing after it is.
        """
        kept: list[int] = []
        room = self.room
        for token in tokens[:room]:
            kept.append(token)
            if token in self.end_tokens:
                self.finish_reason = "stop"
                break
        self.tokens += kept
        if self.finish_reason is None and self.room == 0:
            self.finish_reason = "length"
        return tuple(kept)

    def cut(self, num_tokens: int) -> None:
        """Drop the last ``num_tokens`` tokens of the output and finish (a stop string ended before them)."""
        assert 0 <= num_tokens <= self.num_output
        del self.tokens[len(self.tokens) - num_tokens :]
        self.finish_reason = "stop"


class Candidate(NamedTuple):
    """A token that a drafter would have proposed next, and how sure it was of it (see Draft.confidences)."""

    token: int
    confidence: float


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens.

    start          index in the sequence of the first proposed token (the length of the prefix it continues)
    tokens         the proposal, verifier ids, possibly empty
    distributions  the q that each token was drawn from, for the rejection rule; None means each was certain (one-hot)
    confidences    how sure the drafter was of each token, in units of its own: more is surer. A model says by how many
                   logits the token beat the next best, lookup how many tokens matched. Empty: it does not say
    held_back      the token the draft ended before, for want of confidence; None: it ended for another reason
    is_free        whether nothing was computed for it: it says nothing about what drafting costs
    """

    start: int
    tokens: tuple[int, ...] = ()
    distributions: tuple[Distribution, ...] | None = None
    confidences: tuple[float, ...] = ()
    held_back: Candidate | None = None
    is_free: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier makes of a draft: how many tokens it accepted, and the tokens to commit.

    ``tokens`` is the accepted ones and one token of the verifier's own, so it is never empty.
    """

    accepted: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One finished round: draft, verify, commit.

    tokens    what was committed (cut at an end-of-generation token and at the room)
    draft     what had been proposed
    accepted  how many of the proposed tokens are among ``tokens``
    draft_s, verify_s  seconds either side worked for this round, on all sequences that shared the work
    hidden_s  of draft_s, what passed while the verifier worked on something else
    width     rows of the batch that verified it, those of other sequences included
    ahead     what became of the look-ahead that ran beside the verification; None where there was none
    """

    tokens: tuple[int, ...]
    draft: Draft
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    hidden_s: float = 0.0
    width: int = 1
    ahead: Ahead | None = None

    @property
    def drafted(self) -> int:
        return len(self.draft.tokens)
