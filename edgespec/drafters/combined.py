"""CombinedDrafter: prompt lookup where the text repeats itself, a draft model where it does not."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass, field, replace

import numpy as np

from edgespec.core.prefix import num_common
from edgespec.core.sequence import Cancelled, Draft, never
from edgespec.core.track import BY_CONFIDENCE, EDGES, Floats, Rates
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.errors import BackendError, ClosedError, ParameterError

FREE = 0.1  # of the tokens of a round may be missing if drafting them costs nothing
MAX_MATCH = 48

# How often the token after a match of 1, 2, … tokens is the verifier's own (0.49, 0.61, 0.75, 0.79, … 0.87 for 8 in
# answers to all kinds of questions), and a draft model's choice is, before anything is known of the text.
_MATCHED = 1.0 - 1.0 / np.arange(1.0, MAX_MATCH + 1)
_DRAFTED = np.array([0.7])
# How often a model is right whose choice leads by so much.
_RATES, _LEADS = np.array([*BY_CONFIDENCE, 1.0]), np.array([*EDGES, 2 * EDGES[-1]])
_MEMORY, _PRIOR_MEMORY = 48.0, 256.0
_WORTH = 6.0


class CombinedDrafter:
    """Asks prompt lookup first; where it finds nothing, or nothing good enough, the draft model.

    model   proposes what lookup does not; it reads what it has missed when it is asked
    lookup  its confidences are the tokens that matched
    lost    told once why the model failed, if it does: from then on lookup drafts alone

    How often either is right is learned from the tokens of later requests, for each slot, starting from what all texts
    so far were like. Lookup drafts where that promises as many tokens as the model, less FREE; what it would have
    proposed is followed even where it may not, so that it comes back. Its confidences are turned into the model's unit:
    the lead, in logits, with which a model is right as often. One thread may call it, always the same one.
    """

    def __init__(self, model: Drafter, lookup: Drafter, lost: abc.Callable[[str], object] = str) -> None:
        self._model, self._lookup, self._lost = model, lookup, lost
        self._is_lost = False
        self.num_slots = min(model.num_slots, lookup.num_slots)
        self._matched = Rates(_MATCHED, _PRIOR_MEMORY, _WORTH)
        self._drafted = Rates(_DRAFTED, _PRIOR_MEMORY, _WORTH)
        self._texts = [self._text() for _ in range(self.num_slots)]
        self._closed = False

    @property
    def name(self) -> str:
        return f"{self._lookup.name} + {self._model.name}"

    def propose(self, requests: abc.Sequence[DraftRequest], cancelled: Cancelled = never) -> list[Draft]:
        """See Drafter.propose. A draft that lookup found says that it is free."""
        if self._closed:
            raise ClosedError("this drafter was closed; open another")
        self._check(requests)
        for request in requests:
            self._follow(request)
        found = self._lookup.propose([replace(request, min_confidence=0.0) for request in requests], cancelled)
        chosen = [self._choose(request, draft) for request, draft in zip(requests, found, strict=True)]
        asked = [request for request, draft in zip(requests, chosen, strict=True) if draft is None]
        drafted = iter(self._ask(asked, cancelled))
        drafts = [next(drafted) if draft is None else draft for draft in chosen]
        for request, draft, match in zip(requests, drafts, found, strict=True):
            self._texts[request.slot].remember(draft, match)
        return drafts

    def _ask(self, requests: abc.Sequence[DraftRequest], cancelled: Cancelled) -> list[Draft]:
        """The model's drafts; empty ones once it has failed."""
        if requests and not self._is_lost:
            try:
                return self._model.propose(requests, cancelled)
            except BackendError as error:
                self._is_lost = True
                self._lost(str(error))
        return [Draft(len(request.tokens)) for request in requests]

    def close(self) -> None:
        """Close both; a second call does nothing."""
        self._closed = True
        self._lookup.close()
        self._model.close()

    def _check(self, requests: abc.Sequence[DraftRequest]) -> None:
        slots = [request.slot for request in requests]
        if len(set(slots)) < len(slots) or any(not 0 <= slot < self.num_slots for slot in slots):
            raise ParameterError(f"slots: got {slots}; allowed: different ones from 0 to {self.num_slots - 1}")
        if any(not request.tokens for request in requests):
            raise ParameterError("tokens: got an empty list; allowed: one token or more")

    def _text(self) -> _Text:
        matched, drafted = self._matched, self._drafted
        return _Text((Rates(matched.rates, _MEMORY, _WORTH), matched), (Rates(drafted.rates, _MEMORY, _WORTH), drafted))

    def _follow(self, request: DraftRequest) -> None:
        tokens = list(request.tokens)
        if not self._texts[request.slot].follow(tokens):
            self._texts[request.slot] = self._text()
            self._texts[request.slot].follow(tokens)

    def _choose(self, request: DraftRequest, found: Draft) -> Draft | None:
        """Lookup's draft in the model's unit, or None if the model is to draft."""
        if not found.tokens:
            return None
        text = self._texts[request.slot]
        rates = text.matched[0].rates[_kinds(found)]
        confidences = tuple(np.interp(rates, _RATES, _LEADS).tolist())
        drafted = np.full(len(rates), text.drafted[0].rates[0])
        if confidences[0] < request.min_confidence or _tokens(rates) < (1.0 - FREE) * _tokens(drafted):
            return None
        return replace(found, confidences=confidences, is_free=True)


def _tokens(rates: Floats) -> float:
    """What a round with such a draft commits on average."""
    return 1.0 + float(rates.cumprod().sum())


def _kinds(found: Draft) -> list[int]:
    """By how many tokens each of its tokens is matched if those before it are right, less one."""
    return [min(int(size) + i, MAX_MATCH) - 1 for i, size in enumerate(found.confidences)]


@dataclass(slots=True)
class _Proposal:
    """Tokens from ``start`` on, each of a kind that ``rates``, one for the text and one for all, tell apart."""

    start: int
    tokens: tuple[int, ...]
    kinds: list[int]
    rates: tuple[Rates, Rates]

    def judge(self, tokens: abc.Sequence[int]) -> None:
        """Learn from what was committed; nothing from the first wrong token on."""
        after = tokens[self.start : self.start + len(self.tokens)]
        for token, kind, got in zip(self.tokens, self.kinds, after, strict=False):
            for rates in self.rates:
                rates.observe(kind, token == got)
            if token != got:
                break


@dataclass(slots=True)
class _Text:
    """What one slot's text has shown.

    matched, drafted  how often lookup and the model were right here, and everywhere

    asked      the tokens of the last request
    num_known  how many of them are committed
    ahead      what was drafted after them
    pending    proposals nobody has judged yet, each after a prefix of ``asked``
    """

    matched: tuple[Rates, Rates]
    drafted: tuple[Rates, Rates]
    asked: list[int] = field(default_factory=list)
    num_known: int = 0
    ahead: list[int] = field(default_factory=list)
    pending: list[_Proposal] = field(default_factory=list)

    def follow(self, tokens: list[int]) -> bool:
        """Judge what was proposed by the tokens of a new request; False if they are another text's.

        Where they are the last ones and their draft, a look-ahead goes on from it, and nobody has committed anything: a
        verifier adds a token of its own.
        """
        agreed = num_common(self.asked, tokens)
        if agreed < self.num_known:
            return False
        if not self.ahead or agreed < len(self.asked) or tokens[agreed:] != self.ahead:
            for proposal in self.pending:
                if proposal.start <= agreed:
                    proposal.judge(tokens)
            self.pending, self.num_known = [], len(tokens)
        self.asked, self.ahead = tokens, []
        return True

    def remember(self, draft: Draft, found: Draft) -> None:
        """What was drafted, and what lookup found, whether or not that is the draft."""
        self.ahead = list(draft.tokens)
        self.pending.append(_Proposal(found.start, found.tokens, _kinds(found), self.matched))
        if not draft.is_free:
            tokens = draft.tokens
            if draft.held_back is not None:
                tokens = (*tokens, draft.held_back.token)
            self.pending.append(_Proposal(draft.start, tokens, [0] * len(tokens), self.drafted))
