"""What is remembered of how a sequence's drafts were received, and what that promises for the next one."""

from __future__ import annotations

import bisect
import collections.abc as abc
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.core.sequence import Draft, Round

Floats = NDArray[np.float64]

EDGES = (0.0, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0, 3.0, 4.0, 6.0, 8.0)  # of confidence: where each bin begins
MAX_DEPTH = 32
MIN_CANDIDATES, MAX_CANDIDATES = 3, 8  # of the rule in ``Steps``

# What a runtime that has seen nothing expects: a draft model that is right in 7 of 10.
_SHARES = np.array([0.05, 0.04, 0.03, 0.07, 0.08, 0.07, 0.10, 0.10, 0.10, 0.12, 0.10, 0.14])
BY_CONFIDENCE = np.array([0.35, 0.38, 0.42, 0.47, 0.52, 0.57, 0.64, 0.71, 0.78, 0.85, 0.90, 0.94])
_BY_DEPTH = np.full(MAX_DEPTH, 0.7)
_MEMORY, _PRIOR_MEMORY = 96.0, 256.0  # observations after which an older one counts for little
_TYPICAL_TOKENS = 100.0
_CREDIT = 100  # quiet rounds that a new runtime starts with, so that it need not wait to find out
_WORTH = 8.0  # observations that what is expected beforehand counts for
# The same for one bin or depth, given what all of them show: depths hardly differ, bins do.
_BIN_WORTH, _DEPTH_WORTH = 3.0, 10.0
_FADE, _FADED = 0.98, 14.0
_FADING = 8  # quiet rounds that are taken together: each for itself would cost more than it tells
_SURE = 0.995


class Outlook(NamedTuple):
    """What drafts would come to, by the confidence demanded of each token and the length asked for.

    thresholds  (E,) the confidence demanded
    drafted     (E, L + 1) the chance that a draft gets to l tokens; 1 at 0
    accepted    (E, L + 1) the chance that it does and that all l are accepted; 1 at 0
    kept        (E, L + 1) the chance that a draft for which l tokens were asked is accepted whole, and the verifier's
                own token is what the drafter guesses comes next
    """

    thresholds: tuple[float, ...]
    drafted: Floats
    accepted: Floats
    kept: Floats

    @classmethod
    def constant(cls, acceptance: float, max_length: int) -> Outlook:
        """Of a drafter that is right with the same chance every time, and does not say how sure it is."""
        return _unsaid(np.full(max_length, acceptance), acceptance)


class Received(NamedTuple):
    """How a draft was received. Where the sequence ended inside it, nothing was refused.

    num_accepted  of its tokens
    num_judged    those and, if one was refused, that one
    confidences   of at least the tokens that were judged; () where the drafter says none
    """

    num_accepted: int
    num_judged: int
    confidences: tuple[float, ...] = ()

    @classmethod
    def of(cls, round_: Round) -> Received:
        num_right = round_.accepted
        num_judged = min(num_right + (len(round_.tokens) > num_right), round_.drafted, MAX_DEPTH)
        return cls(num_right, num_judged, round_.draft.confidences)


class Track:
    """One sequence's, or, as a ``prior``, all sequences' so far. One thread: the engine's.

    prior  what earlier sequences were like, to start from. It is told of the sequence that begins; its rounds the
           engine reports to both. A sequence forgets within tens of tokens, a track without a prior within hundreds
    received  drafts of other text that it knows of, without counting them as its own
    room      most tokens the sequence may still have

    num_rounds  observed, the first one of a sequence included
    quiet       rounds since the last one that anything was drafted for; goes on from the prior's
    last        how many tokens were drafted and accepted in the last round; (0, 0) for none
    num_tokens  the sequence's length, prompt included
    num_read    how many of them the drafter has read; whoever knows that its cache holds some may set it
    steps       for the policy ``threshold``
    says        whether drafts come with confidences; None: nothing was drafted yet
    """

    def __init__(
        self, prior: Track | None = None, received: abc.Iterable[Received] = (), room: float = math.inf
    ) -> None:
        self.num_rounds = self.num_tokens = self.num_read = 0
        self.last = (0, 0)
        self.steps = Steps()
        self.quiet: int = prior.quiet if prior else _CREDIT
        self.says: bool | None = prior.says if prior else None
        self._uniform: bool = prior._uniform if prior else False
        memory = _MEMORY if prior else _PRIOR_MEMORY
        self._by_depth: Rates = Rates(prior._by_depth.rates if prior else _BY_DEPTH, memory, _DEPTH_WORTH)
        self._by_confidence: Rates = Rates(prior._by_confidence.rates if prior else BY_CONFIDENCE, memory, _BIN_WORTH)
        self._shares = _WORTH * (prior.shares if prior else _SHARES)
        self._keep = 1.0 - 0.5 / memory
        self._right, self._expected = np.zeros(MAX_DEPTH), np.zeros(MAX_DEPTH)
        self._num_committed, self._num_begun = _TYPICAL_TOKENS, 1.0
        self._room = room
        self._typical = prior._begin(room) if prior else _TYPICAL_TOKENS
        self._outlook: Outlook | None = None
        for one in received:
            self._learn(one)

    @property
    def shares(self) -> Floats:
        """(bins,) how often a token's confidence lies in each bin, given that all before it were accepted."""
        shares: Floats = self._shares / self._shares.sum()
        return shares

    @property
    def by_depth(self) -> Floats:
        """(MAX_DEPTH,) the chance that a drafted token is accepted, given that all before it in its draft were."""
        return self._by_depth.rates

    @property
    def by_confidence(self) -> Floats:
        """(bins,) the same by the drafter's confidence."""
        return self._by_confidence.rates

    @property
    def horizon(self) -> float:
        """How many more tokens are to be expected: as many as sequences have on average, or as this one had so far, but
        no more than it may have."""
        num_tokens = self._num_committed - _TYPICAL_TOKENS
        return min(max(self._typical, num_tokens), self._room - num_tokens)

    def observe(self, round_: Round) -> None:
        """Learn from a round; every one of the sequence, in order."""
        draft, num_right = round_.draft, round_.accepted
        self.num_rounds += 1
        self.num_tokens = draft.start + len(round_.tokens)
        self._num_committed += len(round_.tokens)
        self.last = (round_.drafted, num_right)
        if not draft.tokens and draft.held_back is None:
            self.quiet += 1
            if self.quiet % _FADING == 0:
                self._fade()
                self._outlook = None
            return
        self._outlook = None
        self.quiet = 0
        if not draft.is_free:
            self.num_read = self.num_tokens
        self.steps = self.steps.after(round_)
        if draft.tokens:
            self._learn(Received.of(round_))
        self._observe_held_back(draft, round_)

    def outlook(self, max_length: int) -> Outlook:
        """What the next draft would come to."""
        if self._outlook is None or self._outlook.drafted.shape[1] != max_length + 1:
            self._outlook = self._foresee(max_length)
        return self._outlook

    def _begin(self, room: float) -> float:
        """Take note of a new sequence; return how many tokens they have had on average. One that may not have so many
        counts for as much of one as it may have: its end will tell nothing about the others."""
        typical = self._num_committed / self._num_begun
        share = min(1.0, room / typical)
        keep = 1.0 - 0.05 * share
        self._num_committed, self._num_begun = keep * self._num_committed, keep * self._num_begun + share
        return typical

    def _learn(self, received: Received) -> None:
        num_right, num_judged, confidences = received
        self.says = bool(confidences)
        if len(confidences) > 1:
            self._uniform = len(set(confidences)) == 1
        rates = self.by_confidence  # once: every observation changes them a little
        for i in range(num_judged):
            self._observe_token(i, i < num_right, confidences[i] if confidences else None, rates)

    def _observe_token(self, depth: int, right: bool, confidence: float | None, rates: Floats) -> None:
        self._by_depth.observe(depth, right)
        if confidence is None:
            return
        place = _bin(confidence)
        self._right[depth] = self._keep * self._right[depth] + right
        self._expected[depth] = self._keep * self._expected[depth] + rates[place]
        self._by_confidence.observe(place, right)
        if depth == 0 or not self._uniform:
            self._observe_share(place)

    def _observe_held_back(self, draft: Draft, round_: Round) -> None:
        """What was held back after a draft that was right can be judged too: the verifier drew in its place."""
        if draft.held_back is None or not len(draft.tokens) == round_.accepted < len(round_.tokens):
            return
        place = _bin(draft.held_back.confidence)
        self._by_confidence.observe(place, round_.tokens[-1] == draft.held_back.token)
        self._observe_share(place)

    def _observe_share(self, place: int) -> None:
        self._shares *= self._keep
        self._shares[place] += 1.0

    def _fade(self) -> None:
        self._by_depth.fade()
        self._by_confidence.fade()

    def _foresee(self, max_length: int) -> Outlook:
        if self.says is False:
            by_depth = self.by_depth[:max_length]
            return _unsaid(by_depth, float(by_depth[0]))
        mass = np.maximum(self.shares, 1e-9)
        right = mass * self.by_confidence
        passing, passing_right = _from_the_end(mass), _from_the_end(right)
        rates = (passing_right / passing)[:, None] * self._by_position(max_length)
        passes = np.repeat((passing / passing[0])[:, None], max_length, axis=1)
        if self._uniform:
            passes[:, 1:] = 1.0
        drafted, accepted = _chain(passes), _chain(passes * np.minimum(rates, _SURE))
        ends = accepted.copy() if not self._uniform else np.ones_like(accepted)
        unsure = (right.sum() - passing_right)[:, None]  # the draft ends there, and its guess is right
        before = np.cumsum(ends, axis=1) - ends if not self._uniform else np.ones_like(ends)
        kept = np.minimum(accepted * right.sum() + unsure * before, 1.0)
        return Outlook(EDGES, drafted, accepted, kept)

    def _by_position(self, max_length: int) -> Floats:
        """By what factor tokens at each depth were accepted more often than their confidence says."""
        factors: Floats = ((self._right + _WORTH) / (self._expected + _WORTH))[:max_length]
        return factors


def _unsaid(by_depth: Floats, guess: float) -> Outlook:
    accepted = _chain(by_depth[None])
    return Outlook((0.0,), np.ones_like(accepted), accepted, accepted * guess)


def _chain(chances: Floats) -> Floats:
    """The chance of the first l things, each given those before it: (E, L) to (E, L + 1)."""
    chain = np.ones((chances.shape[0], chances.shape[1] + 1))
    np.cumprod(chances, axis=1, out=chain[:, 1:])
    return chain


def _from_the_end(values: Floats) -> Floats:
    return np.cumsum(values[::-1])[::-1]


def _bin(confidence: float) -> int:
    return max(0, bisect.bisect_right(EDGES, confidence) - 1)


class Rates:
    """How often things of several kinds went right, from few observations of each.

    A kind is expected to go right as often as ``beliefs`` says, times what all kinds together show; its own
    observations outweigh that as they come in.

    beliefs  (n,) in [0, 1]
    memory   observations of a kind after which an older one counts for little
    worth    observations of a kind that the expectation counts for
    """

    def __init__(self, beliefs: Floats, memory: float, worth: float) -> None:
        self._beliefs, self._keep = np.clip(beliefs, 0.02, _SURE), 1.0 - 1.0 / memory
        self._num, self._right = np.zeros(len(beliefs)), np.zeros(len(beliefs))
        self._all_right = self._all_expected = 0.0
        self._worth, self._all_worth = worth, _WORTH * float(np.mean(beliefs))
        self._rates: Floats | None = None

    @property
    def rates(self) -> Floats:
        """(n,) the chance that the next one of each kind goes right."""
        if self._rates is None:
            common = (self._all_right + self._all_worth) / (self._all_expected + self._all_worth)
            expected = np.minimum(self._beliefs * common, _SURE)
            self._rates = np.minimum((self._right + self._worth * expected) / (self._num + self._worth), _SURE)
        return self._rates

    def observe(self, kind: int, right: bool) -> None:
        self._num[kind] = self._keep * self._num[kind] + 1.0
        self._right[kind] = self._keep * self._right[kind] + right
        self._all_expected = self._keep * self._all_expected + float(self._beliefs[kind])
        self._all_right = self._keep * self._all_right + right
        self._rates = None

    def fade(self) -> None:
        """_FADING rounds without observations: what is known ages, so that a few new ones soon outweigh it."""
        if self._num.sum() > _FADED:
            share = _FADE**_FADING
            self._num *= share
            self._right *= share
            self._all_expected *= share
            self._all_right *= share
            self._rates = None


class Steps(NamedTuple):
    """The rule of ``threshold`` over all rounds so far, whatever length it starts from.

    A round of which less than 60 % was accepted asks for one candidate more, up to MAX_CANDIDATES, one of which more
    than 80 % was for one fewer, down to MIN_CANDIDATES. Any number of such steps is one shift between two bounds.
    """

    shift: int = 0
    low: float = -math.inf
    high: float = math.inf

    def after(self, round_: Round) -> Steps:
        if not round_.drafted:
            return self
        rate = round_.accepted / round_.drafted
        step = 1 if rate < 0.6 else -1 if rate > 0.8 else 0
        low, high = (min(max(bound + step, MIN_CANDIDATES), MAX_CANDIDATES) for bound in (self.low, self.high))
        return Steps(self.shift + step, low, high) if step else self

    def length(self, start: int) -> int:
        return int(min(max(start + self.shift, self.low), self.high))
