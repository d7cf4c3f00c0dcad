"""The default policy in worlds made of numbers: near the best fixed choice, and never much below plain decoding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgespec.core.costs import Costs, Curves, Overlap
from edgespec.core.policy import Fixed, Goodput, Policy
from edgespec.core.sequence import Draft, Round
from edgespec.core.track import Track
from tests.core.worlds import SHAPES, Acceptance, Box, Result, Session, Text, curves, gain

NEVER_SLOWER = 0.98


def speedup(result: Result, box: Box) -> float:
    return result.rate * box.truth.verify_s[0][0]


def run(policy: Policy, box: Box, text: Text, num_tokens: int = 2000) -> float:
    return speedup(Session(box, policy).request(text, num_tokens), box)


def always(chance: float) -> Acceptance:
    return lambda position: chance


def switching(every: int, chance: float = 1.0) -> Acceptance:
    return lambda position: chance * (position // every % 2)


def lying(true: Curves, factor: float) -> Curves:
    """Measured wrongly at all widths but one row."""
    return replace(true, verify_s=tuple((row[0], *(factor * s for s in row[1:])) for row in true.verify_s))


# Near the best


@pytest.mark.parametrize("name", ["flat", "linear", "no AMX, Q4_0", "AMX, Q8_0", "Zen 4, Q8_0"])
def test_as_good_as_the_best_length(name: str) -> None:
    """A few percent behind it, on text that it has to get to know first. More only where little can be won: there an
    unlucky start makes it hesitate for some hundred tokens."""
    shares = []
    for step in (0.01, 0.1, 0.3, 1.0):
        box = Box.of(curves(name, step))
        for chance in (0.0, 0.5, 0.8, 0.95) if step < 1.0 else (0.9,):
            text = Text(always(chance), seed=1)
            best = max(run(Fixed(length), box, text, 1500) for length in (0, best_length(box, chance)))
            shares.append(run(Goodput(), box, text, 1500) / best)
    assert np.mean(shares) >= 0.96
    assert min(shares) >= 0.85
    assert np.median(shares) >= 0.97


def best_length(box: Box, chance: float) -> int:
    """Of drafts that are accepted with a constant chance."""
    costs, lengths = Costs(box.truth), np.arange(1, 17)
    tokens = np.cumsum(chance ** np.arange(17))[1:]
    return int(lengths[np.argmax([t / costs.round_s(n + 1, n) for t, n in zip(tokens, lengths.tolist(), strict=True)])])


@pytest.mark.parametrize("name", ["flat", "linear", "AMX, Q8_0"])
@pytest.mark.parametrize("chance", [0.5, 0.85])
def test_as_good_as_the_best_length_and_confidence(name: str, chance: float) -> None:
    box, text = Box.of(curves(name, 0.1)), Text(always(chance), sure=4.0, seed=3)
    fixed = max(run(Fixed(n, c), box, text) for n in (2, 4, 8, 16) for c in (0.0, 0.8, 2.0))
    assert run(Goodput(), box, text) >= 0.97 * fixed


@pytest.mark.parametrize("step", [0.1, 0.3])
@pytest.mark.parametrize("chance", [0.5, 0.95])
def test_side_by_side_too(step: float, chance: float) -> None:
    box = Box.of(replace(curves("flat", step), overlap=Overlap(1.05, 1.05)), overlapped=True)
    text = Text(always(chance), seed=2)
    fixed = max(run(Fixed(n), box, text) for n in (0, 1, 2, 3, 4, 6, 9, 13))
    assert run(Goodput(), box, text) >= 0.96 * fixed


# Never slower

HOSTILE = {
    "nothing is right": always(0.0),
    "a third is right": always(0.33),
    "switching": switching(50),
    "switching to so-so": switching(50, 0.6),
}


@pytest.mark.parametrize("world", HOSTILE)
@pytest.mark.parametrize("name", ["flat", "linear", "no AMX, Q4_0", "AMX, Q8_0"])
@pytest.mark.parametrize(("step", "sure"), [(0.02, None), (0.2, 4.0)])
def test_never_slower(world: str, name: str, step: float, sure: float | None) -> None:
    text = Text(HOSTILE[world], sure, seed=1)
    assert run(Goodput(), Box.of(curves(name, step)), text, 1200) >= NEVER_SLOWER


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("name", SHAPES)
def test_never_slower_with_curves_that_lie(name: str, factor: float) -> None:
    true = curves(name, 0.1)
    box = Box(lying(true, factor), true)
    assert run(Goodput(), box, Text(always(0.2), seed=1), 2000) >= NEVER_SLOWER


@pytest.mark.parametrize("name", SHAPES)
def test_never_slower_with_noisy_times(name: str) -> None:
    box = Box.of(curves(name, 0.1), noise=0.5)
    speedups = [
        speedup(Session(box, Goodput(), seed).request(Text(always(0.2), seed=seed), 1500), box) for seed in range(3)
    ]
    assert np.mean(speedups) >= NEVER_SLOWER - 0.01  # the times that are added up are noisy themselves


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 25])
def test_never_slower_over_many_short_requests(num_tokens: int) -> None:
    box = Box.of(curves("AMX, Q8_0", 0.1))
    session = Session(box, Goodput())
    for i in range(1200 // num_tokens):
        session.request(Text(always(0.1), 4.0, seed=i, size=64), num_tokens)
    if num_tokens > 1:
        assert speedup(session.result, box) >= NEVER_SLOWER
    else:
        assert session.result.lengths == []


def test_a_session_learns_from_request_to_request() -> None:
    box = Box.of(curves("flat", 0.05))
    session = Session(box, Goodput())
    rates = [session.request(Text(always(0.95), seed=i, size=128), 60).rate for i in range(12)]
    assert np.mean(rates[6:]) > 0.7 * gain(Costs(box.truth), 0.95) / box.truth.verify_s[0][0]
    other = Session(box, Goodput())
    other.prior = session.prior
    assert other.request(Text(always(0.95), seed=77, size=128), 60).lengths[0] > 8


# Coming back


@pytest.mark.parametrize("name", ["flat", "linear", "AMX, Q8_0", "Zen 4, Q8_0"])
@pytest.mark.parametrize("sure", [None, 4.0])
def test_speculation_comes_back(name: str, sure: float | None) -> None:
    """A thousand tokens that nobody could foresee, and then text that anybody can."""
    box = Box.of(curves(name, 0.02))
    text = Text(lambda position: float(position > 1000), sure, seed=4)
    session = Session(box, Goodput())
    lengths = session.request(text, 4000).lengths
    back = next(i for i, length in enumerate(lengths) if length >= 6 and i > 950)
    assert back < 1000 + 600
    assert np.mean(lengths[-20:]) > 6


def test_one_of_many_keeps_to_itself() -> None:
    """Two of eight sequences can be foreseen; the others lose little by it, and all together gain."""
    true = curves("flat", 0.05)
    costs, rng = Costs(true), np.random.default_rng(0)
    prior = Track()
    tracks = [Track(prior) for _ in range(8)]
    committed, seconds = 0, 0.0
    for i in range(400):
        plans = Goodput().plans(tracks, costs)
        width = 8 + sum(plan.length for plan in plans)
        verify_s = Costs(true).verify_s(width)
        draft_s = Costs(true).draft_s(max(plan.length for plan in plans))
        rounds = []
        for place, (track, plan) in enumerate(zip(tracks, plans, strict=True)):
            right = rng.random(plan.length) < (0.95 if place < 2 else 0.02)
            accepted = int(np.argmin([*right, False]))
            draft = Draft(track.num_tokens, (1,) * plan.length)
            rounds.append(Round((1,) * (accepted + 1), draft, accepted, draft_s, verify_s, 0.0, width))
            track.observe(rounds[-1])
            prior.observe(rounds[-1])
        if i:
            costs.observe(rounds, 100)
            committed += sum(len(round_.tokens) for round_ in rounds)
            seconds += verify_s + draft_s
    assert committed / seconds > 1.15 * 8 / Costs(true).verify_s(8)
    assert [plan.length > 0 for plan in Goodput().plans(tracks, costs)][:2] == [True, True]


def test_a_clock_that_jumps_does_not_switch_it_off() -> None:
    box = Box.of(curves("flat", 0.05))
    session = Session(box, Goodput())
    session.request(Text(always(0.9), seed=5), 300)
    for jump in (-50.0, 0.0, 1e7, 3000.0, float("nan")):
        session.costs.observe([Round((1,) * 5, Draft(0, (1,) * 4), 4, jump, jump, 0.0, 5)], 100)
        assert np.mean(session.request(Text(always(0.9), seed=6), 100).lengths[2:]) > 4
