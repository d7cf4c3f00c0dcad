"""The drafter seam: what the engine needs of whatever proposes tokens."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import Protocol

from edgespec.core.sequence import Cancelled, Draft, SamplingParams, never


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Propose up to ``num_draft`` tokens after ``tokens``.

    slot        which KV cache place holds this sequence
    tokens      the whole token list so far, verifier ids, at least one
    num_prompt  how many of them are the prompt (penalties tell prompt and output apart)
    num_draft   most tokens to propose, 0 or more
    params      temperature, filters, seed (set, not None, unless greedy) and rule the draft is drawn with
    end_tokens  a draft ends with the first of these: nothing after it could be kept
    min_confidence  end the draft before a token of less confidence (Draft.confidences; for a model: of a lead of less
                than so many logits, after noise under rule ``coupled``), and name that token in ``held_back``; 0.0:
                never. Not for rule ``rejection`` at a temperature above 0, where a drawn token may not be taken back
    """

    slot: int
    tokens: abc.Sequence[int]
    num_prompt: int
    num_draft: int
    params: SamplingParams
    end_tokens: frozenset[int] = frozenset()
    min_confidence: float = 0.0


class Drafter(Protocol):
    """One thread may call it, always the same one.

    name       for people and reports: "onnx", "lookup"
    num_slots  how many sequences it can hold at once
    """

    @property
    def name(self) -> str: ...
    @property
    def num_slots(self) -> int: ...

    def propose(self, requests: abc.Sequence[DraftRequest], cancelled: Cancelled = never) -> list[Draft]:
        """One draft per request, in order; fewer tokens than asked, even none, is allowed.

        Same prefix rule as Verifier.score: the whole list comes in, the drafter finds what its cache already holds.
        ``cancelled`` is asked between tokens; once true, what is drafted so far is returned. Under rule ``rejection``
        at a temperature above 0 every proposed token must be a fair draw from its q: a draft may end early for what
        was drawn before, never for the token that was just drawn.
        Raises BackendError when the model fails, ParameterError for a slot out of range, ClosedError after ``close``.
        """
        ...

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        ...
