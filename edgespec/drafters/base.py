"""The drafter seam: what the engine needs of whatever proposes tokens."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import Protocol

from edgespec.core.sequence import Draft, SamplingParams


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Propose up to ``num_draft`` tokens after ``tokens``.

    slot        which KV cache place holds this sequence
    tokens      the whole token list so far, verifier ids, at least one
    num_prompt  how many of them are the prompt (penalties tell prompt and output apart)
    num_draft   most tokens to propose, 0 or more
    params      temperature, filters, seed (set, not None, unless greedy) and rule the draft is drawn with
    """

    slot: int
    tokens: abc.Sequence[int]
    num_prompt: int
    num_draft: int
    params: SamplingParams


class Drafter(Protocol):
    """One thread may call it, always the same one.

    name       for people and reports: "onnx", "lookup"
    num_slots  how many sequences it can hold at once
    """

    @property
    def name(self) -> str: ...
    @property
    def num_slots(self) -> int: ...

    def propose(
        self, requests: abc.Sequence[DraftRequest], cancelled: abc.Callable[[], bool] = lambda: False
    ) -> list[Draft]:
        """One draft per request, in order; fewer tokens than asked, even none, is allowed.

        Same prefix rule as Verifier.score: the whole list comes in, the drafter finds what its cache already holds.
        ``cancelled`` is asked between tokens; once true, what is drafted so far is returned. A draft may stop early
        only for reasons that do not look at the token that would have come next under randomness of its own (the
        rejection rule needs every proposed token to be a fair draw from its q).
        Raises BackendError when the model fails.
        """
        ...

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        ...
