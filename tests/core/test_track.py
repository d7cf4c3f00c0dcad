"""What a track makes of rounds: rates between 0 and 1 that follow the text, and a start from what was before."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from edgespec.core.sequence import Candidate, Draft, Round
from edgespec.core.track import EDGES, MAX_DEPTH, Outlook, Steps, Track


def observe(
    track: Track,
    num_drafted: int,
    accepted: int,
    confidences: tuple[float, ...] = (),
    held_back: Candidate | None = None,
    own: int = 9,
) -> None:
    draft = Draft(track.num_tokens, (7,) * num_drafted, None, confidences, held_back)
    track.observe(Round((*(7,) * accepted, own), draft, accepted))


def bin_of(confidence: float) -> int:
    return max(i for i, edge in enumerate(EDGES) if edge <= confidence)


def test_a_fresh_one_expects_seven_of_ten() -> None:
    track = Track()
    assert (track.shares * track.by_confidence).sum() == pytest.approx(0.7, abs=0.03)
    assert track.by_depth == pytest.approx(np.full(MAX_DEPTH, 0.7))
    assert (np.diff(track.by_confidence) > 0).all()
    assert track.shares.sum() == pytest.approx(1.0)


def test_a_few_rounds_say_more_than_what_was_expected() -> None:
    track = Track(Track())
    for _ in range(8):
        observe(track, 1, 0)
    assert track.by_depth[0] < 0.35
    assert track.by_depth[5] < 0.5  # nothing got that far, but all show the same
    for _ in range(60):
        observe(track, 4, 4)
    assert track.by_depth[:4].min() > 0.9


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_acceptance_by_depth_and_by_confidence_is_learned(rate: float) -> None:
    rng, track = np.random.default_rng(0), Track(Track())
    estimates = []
    for _ in range(600):
        right = rng.random(4) < rate
        accepted = int(np.argmin([*right, False]))
        observe(track, 4, accepted, tuple(rng.uniform(0, 10, 4)))
        estimates.append([track.by_depth[0], (track.shares * track.by_confidence).sum()])
    assert np.mean(estimates[100:], axis=0) == pytest.approx(rate, abs=0.05)


def test_confidence_tells_which_tokens_are_right() -> None:
    rng, track = np.random.default_rng(1), Track(Track())
    for _ in range(400):
        confidences = rng.choice([0.05, 5.0], 3)
        accepted = int(np.argmin([*(confidences > 1), False]))
        observe(track, 3, accepted, tuple(confidences))
    assert track.by_confidence[bin_of(5.0)] > 0.93
    assert track.by_confidence[bin_of(0.05)] < 0.1
    outlook = track.outlook(4)
    at = outlook.thresholds.index(2.0)
    assert outlook.accepted[at, 1] / outlook.drafted[at, 1] > 0.93
    assert outlook.drafted[at, 1] < 0.75
    assert outlook.drafted[0, 4] == 1.0


def test_what_was_held_back_is_judged_by_the_verifiers_own_token() -> None:
    right, wrong = Track(Track()), Track(Track())
    for _ in range(30):
        observe(right, 1, 1, (5.0,), Candidate(9, 0.05), own=9)
        observe(wrong, 1, 1, (5.0,), Candidate(9, 0.05), own=8)
    assert right.by_confidence[0] > 0.9
    assert wrong.by_confidence[0] < 0.1
    assert right.shares[0] == pytest.approx(wrong.shares[0])
    assert right.shares[0] > 0.3


def test_what_was_held_back_after_a_wrong_token_says_nothing() -> None:
    track, other = Track(Track()), Track(Track())
    for _ in range(10):
        observe(track, 2, 1, (5.0, 5.0), Candidate(9, 0.05), own=9)
        observe(other, 2, 1, (5.0, 5.0))
    assert (track.by_confidence == other.by_confidence).all()
    assert (track.shares == other.shares).all()


def test_a_sequence_that_ended_inside_its_draft_refused_nothing() -> None:
    track = Track(Track())
    for _ in range(30):
        track.observe(Round((7, 7), Draft(0, (7, 7, 7, 7, 7), None, (5.0,) * 5), 2))
    assert track.by_depth[:2].min() > 0.85
    assert track.by_depth[2] >= 0.7


def test_a_new_sequence_starts_where_the_others_were() -> None:
    prior = Track()
    for _ in range(300):
        observe(prior, 3, 3, (5.0, 5.0, 5.0))
    track = Track(prior)
    assert track.num_rounds == 0
    assert track.by_depth == pytest.approx(prior.by_depth)
    assert track.by_confidence == pytest.approx(prior.by_confidence)
    assert track.shares == pytest.approx(prior.shares)
    for _ in range(12):
        observe(track, 1, 0, (5.0,))
    assert track.by_depth[0] < 0.45
    assert prior.by_depth[0] > 0.95


def test_drafts_without_confidences_are_known_for_it() -> None:
    track = Track()
    assert track.says is None
    observe(track, 2, 1)
    assert track.says is False
    assert track.outlook(5).thresholds == (0.0,)
    assert Track(track).says is False
    observe(track, 0, 0)
    assert track.says is False
    observe(track, 2, 1, (1.0, 1.5))
    assert track.says is True
    assert track.outlook(5).thresholds == EDGES


def test_one_confidence_for_a_whole_draft() -> None:
    """Lookup's: the first token passes, or none does."""
    track = Track(Track())
    for i in range(60):
        size = 2.0 + 6 * (i % 2)
        observe(track, 6, 6 if size > 4 else 0, (size,) * 6)
    outlook = track.outlook(6)
    at = outlook.thresholds.index(6.0)
    assert outlook.drafted[at, 1:] == pytest.approx(np.full(6, outlook.drafted[at, 1]))
    assert outlook.drafted[at, 1] == pytest.approx(0.5, abs=0.1)
    assert outlook.accepted[at, 6] > 0.7 * outlook.drafted[at, 6]


def test_first_tokens_that_are_worse_than_later_ones() -> None:
    rng, track = np.random.default_rng(2), Track(Track())
    for _ in range(400):
        accepted = 0 if rng.random() < 0.5 else 6
        observe(track, 6, accepted, tuple(rng.uniform(1, 3, 6)))
    chances = track.outlook(6).accepted[0]
    assert chances[1] == pytest.approx(0.5, abs=0.15)
    assert chances[6] > 0.6 * chances[1]


def test_quiet_rounds_are_counted_from_the_last_draft() -> None:
    prior = Track()
    observe(prior, 1, 0)
    for _ in range(7):
        observe(prior, 0, 0)
    track = Track(prior)
    assert (prior.quiet, track.quiet) == (7, 7)
    observe(track, 0, 0)
    assert track.quiet == 8
    observe(track, 0, 0, (), Candidate(3, 0.1))  # something was drafted, though nothing came of it
    assert track.quiet == 0
    assert (track.num_read, track.num_tokens) == (2, 2)


def test_in_a_quiet_stretch_knowledge_ages() -> None:
    new, aged = Track(Track()), Track(Track())
    for track in (new, aged):
        for _ in range(80):
            observe(track, 1, 0, (1.0,))
    before = aged.by_depth[0]
    for _ in range(300):
        observe(aged, 0, 0)
    assert aged.by_depth[0] == pytest.approx(before, abs=0.12)
    for track in (new, aged):
        observe(track, 6, 6, (1.0,) * 6)
        observe(track, 6, 6, (1.0,) * 6)
    assert aged.by_depth[0] > new.by_depth[0] + 0.05
    assert aged.by_confidence[bin_of(1.0)] > new.by_confidence[bin_of(1.0)] + 0.1


def test_the_horizon_follows_how_long_sequences_are() -> None:
    prior = Track()
    assert Track().horizon == 100
    for _ in range(60):
        track = Track(prior)
        for _ in range(3):
            observe(track, 0, 0)
            observe(prior, 0, 0)
    assert 2 < Track(prior).horizon < 15
    long = Track(prior)
    for _ in range(40):
        observe(long, 0, 0)
    assert long.horizon == 40


def test_whatever_comes_chances_stay_chances() -> None:
    rng, prior = np.random.default_rng(3), Track()
    track = Track(prior)
    for i in range(1500):
        track = Track(prior) if i % 50 == 0 else track
        num = int(rng.integers(0, 33))
        accepted = int(rng.integers(0, num + 1))
        choices = [0.0, 1e-9, 0.3, 8.0, 1e30, np.inf, *rng.exponential(2, 5)]
        confidences = tuple(rng.choice(choices, num)) if rng.random() < 0.8 else ()
        held_back = Candidate(9, float(rng.choice(choices))) if rng.random() < 0.3 else None
        for one in (track, prior):
            observe(one, num, accepted, confidences, held_back)
        outlook = track.outlook(int(rng.integers(1, 33)))
        for chances in (outlook.drafted, outlook.accepted, outlook.kept):
            assert ((chances >= 0) & (chances <= 1)).all()
        assert (np.diff(outlook.drafted) <= 1e-12).all()
        assert (np.diff(outlook.accepted) <= 1e-12).all()
        assert (outlook.accepted <= outlook.drafted).all()
        assert np.isfinite(track.by_confidence).all()


def test_a_constant_outlook() -> None:
    outlook = Outlook.constant(0.5, 3)
    assert outlook.accepted.tolist() == [[1.0, 0.5, 0.25, 0.125]]
    assert outlook.drafted.tolist() == [[1.0, 1.0, 1.0, 1.0]]
    assert outlook.kept.tolist() == [[0.5, 0.25, 0.125, 0.0625]]


def stepped(start: int, rates: tuple[float, ...]) -> int:
    """The rule of ``threshold``, word by word."""
    for rate in rates:
        start = min(start + 1, 8) if rate < 0.6 else max(start - 1, 3) if rate > 0.8 else start
    return start


@pytest.mark.parametrize("start", range(3, 9))
def test_steps_are_the_rule_from_any_start(start: int) -> None:
    for rates in itertools.product((0.4, 0.6, 0.8, 1.0), repeat=6):
        steps = Steps()
        for rate in rates:
            steps = steps.after(Round((7,), Draft(0, (7,) * 5), round(5 * rate)))
        assert steps.length(start) == stepped(start, rates)
    many = Steps()
    for _ in range(20):
        many = many.after(Round((7,), Draft(0, (7,) * 5), 0)).after(Round((7,), Draft(0)))
    assert many.length(start) == 8


def test_a_sequence_is_expected_to_go_on_as_others_did_but_not_beyond_its_room() -> None:
    prior = Track()
    for _ in range(30):
        Track(prior)
        for _ in range(10):
            observe(prior, 3, 3)
    usual = Track(prior).horizon
    assert usual == pytest.approx(40, rel=0.1)
    bounded = Track(prior, room=12)
    assert bounded.horizon == 12
    observe(bounded, 3, 3)
    assert bounded.horizon == 8


def test_answers_that_were_cut_short_do_not_make_others_be_expected_short() -> None:
    prior = Track()
    for _ in range(50):
        Track(prior, room=3)
        observe(prior, 2, 2)
    assert Track(prior).horizon == pytest.approx(100, rel=0.1)
