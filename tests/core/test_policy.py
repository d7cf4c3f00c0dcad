"""The policies' rules, one by one; how well the default one does is in test_goodput.py."""

from __future__ import annotations

import time

import numpy as np
import pytest

from edgespec.core.costs import Costs, Curves, Overlap
from edgespec.core.policy import DEFAULT_POLICY, MAX_DRAFT_LENGTH, Fixed, Goodput, Plan, Threshold
from edgespec.core.sequence import Candidate, Draft, Round
from edgespec.core.track import EDGES, Track
from edgespec.errors import ParameterError
from tests.core.worlds import gain

CHEAP = Curves((1, 64), (0,), ((0.02, 0.03),), (1, 8), (0.0005, 0.001), Overlap(), 0.0001)
DEAR = Curves((1, 64), (0,), ((0.02, 1.28),), (1,), (0.02,), Overlap())


def seen(
    accepted: int, drafted: int = 4, times: int = 60, confidence: float | None = 2.5, prior: Track | None = None
) -> Track:
    """A track of rounds that all went the same way."""
    track = Track(prior or Track())
    track.observe(Round((1,), Draft(0)))
    for _ in range(times):
        confidences = () if confidence is None else (confidence,) * (drafted - 1) + (confidence + 0.01,)
        track.observe(
            Round((1,) * (accepted + 1), Draft(track.num_tokens, (1,) * drafted, None, confidences), accepted)
        )
    return track


def plain(track: Track, times: int) -> Track:
    for _ in range(times):
        track.observe(Round((1,), Draft(track.num_tokens)))
    return track


# Fixed and threshold


@pytest.mark.parametrize("length", [-1, MAX_DRAFT_LENGTH + 1, 1.5, True])
def test_lengths_nobody_can_draft_are_refused(length: object) -> None:
    for make in (Fixed, Threshold, Goodput):
        with pytest.raises(ParameterError, match="allowed"):
            make(length)  # type: ignore[arg-type]


def test_fixed_is_fixed() -> None:
    tracks = [Track(), seen(0), seen(4)]
    assert Fixed(3, 0.5).plans(tracks, Costs()) == [Plan(3, 0.5)] * 3


def test_threshold_lengthens_bad_drafts_and_shortens_good_ones() -> None:
    track, policy = Track(), Threshold()
    lengths = []
    for accepted in (2, 2, 3, 0, 0, 8, 7, 6, 6, 5):
        (plan,) = policy.plans([track], Costs())
        lengths.append(plan.length)
        num = min(accepted, plan.length)
        track.observe(Round((1,) * (num + 1), Draft(0, (1,) * plan.length), num))
    # 2/5: longer, 2/6: longer, 3/7: longer, 0/8 twice: at the bound, 8/8: shorter, 7/7: shorter, 6/6, 5/5, 4/4
    assert lengths == [5, 6, 7, 8, 8, 8, 7, 6, 5, 4]
    assert policy.plans([track], Costs()) == [Plan(3)]


@pytest.mark.parametrize(("accepted", "length"), [(2, 6), (3, 5), (4, 5), (5, 4)])  # 0.4, exactly 0.6 and 0.8, 1.0
def test_the_thresholds_themselves_change_nothing(accepted: int, length: int) -> None:
    track = Track()
    track.observe(Round((1,) * (accepted + 1), Draft(0, (1,) * 5), accepted))
    assert Threshold().plans([track], Costs()) == [Plan(length)]


def test_threshold_starts_where_it_is_told() -> None:
    assert [Threshold(n).plans([Track()], Costs())[0].length for n in (3, 8)] == [3, 8]
    with pytest.raises(ParameterError):
        Threshold(2)
    with pytest.raises(ParameterError):
        Threshold(9)


# Goodput, one sequence


def length_of(track: Track, curves: Curves, *, overlapped: bool = False) -> int:
    (plan,) = Goodput().plans([track], Costs(curves), overlapped=overlapped)
    return plan.length


def test_it_is_the_default() -> None:
    assert Goodput() == DEFAULT_POLICY


def test_the_first_token_comes_as_soon_as_it_can() -> None:
    assert length_of(Track(seen(4)), CHEAP) == 0
    assert DEFAULT_POLICY.plans([Track(seen(4))] * 3, Costs(CHEAP)) == [Plan(0)] * 3


def test_text_that_can_be_foreseen_is_drafted_and_other_text_is_not() -> None:
    assert length_of(seen(4), CHEAP) == 16
    assert 2 <= length_of(seen(2), CHEAP) <= 8
    assert length_of(seen(0, 1), DEAR) == 0
    assert length_of(seen(4), DEAR) == 0


def test_plans_change_nothing() -> None:
    track, costs = seen(2), Costs(CHEAP)
    first = Goodput().plans([track], costs)
    for _ in range(50):
        assert Goodput().plans([track], costs) == first


def test_unsure_tokens_are_not_worth_a_row_where_rows_are_dear() -> None:
    track = Track(Track())
    rng = np.random.default_rng(0)
    for _ in range(300):
        confidences = rng.choice([0.05, 5.0], 4, p=[0.3, 0.7])
        accepted = int(np.argmin([*(confidences > 1), False]))
        track.observe(
            Round((1,) * (accepted + 1), Draft(track.num_tokens, (1,) * 4, None, tuple(confidences)), accepted)
        )
    curves = Curves((1, 32), (0,), ((0.05, 0.05 + 31 * 0.02),), (1,), (0.001,))
    (plan,) = Goodput().plans([track], Costs(curves))
    assert 0.05 < plan.min_confidence <= 4.0
    assert plan.length > 4


def test_no_confidence_is_asked_of_a_drafter_that_gives_none() -> None:
    assert Goodput().plans([seen(3, confidence=None)], Costs(CHEAP))[0].min_confidence == 0.0
    plans = Goodput().plans([seen(3, confidence=None), seen(3)], Costs(CHEAP))
    assert plans[0].min_confidence == 0.0
    assert plans[0].length > 0


def test_a_drafter_that_must_read_much_for_a_short_answer_is_left_alone() -> None:
    curves = Curves((1, 64), (0,), ((0.02, 0.03),), (1,), (0.0005,), Overlap(), 0.01)
    prior = Track()
    for _ in range(40):  # answers of two tokens
        track = Track(prior)
        for one in (track, prior):
            plain(one, 2)
    for num_prompt, drafts in ((2, True), (400, False)):
        track = Track(prior)
        track.observe(Round((1,), Draft(num_prompt)))
        assert (length_of(track, curves) > 0) is drafts
    track.num_read = track.num_tokens  # its cache was found to hold the prompt
    assert length_of(track, curves) > 0
    long = plain(Track(Track()), 3)
    long.num_tokens += 400
    assert length_of(long, CHEAP) > 0


def test_it_never_tries_where_nothing_can_be_won() -> None:
    track = plain(seen(0, 1), 100_000)
    assert length_of(track, DEAR) == 0
    assert DEFAULT_POLICY.plans([track] * 4, Costs(DEAR)) == [Plan(0)] * 4


def test_it_tries_after_it_has_saved_up_for_it() -> None:
    linear = Curves((1, 32), (0,), ((0.05, 0.05 + 31 * 0.03),), (1,), (0.002,), None, 1e-6)
    track, tries = seen(0, 1), 0
    for _ in range(2000):
        length = length_of(track, linear)
        tries += length > 0
        track.observe(Round((1,), Draft(track.num_tokens, (2,) * length, None, (2.0,) * length)))
    # a token costs 0.032 s beside a round of 0.05: one in 64 rounds would be 1 %
    assert 10 <= tries <= 40


def test_a_try_that_paid_is_followed_by_longer_ones() -> None:
    linear = Curves((1, 32), (0,), ((0.05, 0.05 + 31 * 0.03),), (1,), (0.002,), None, 1e-6)
    track, lengths = plain(seen(0, 1, 200), 400), []
    for _ in range(4):
        lengths.append(length_of(track, linear))
        confidences = tuple(np.linspace(2.0, 2.5, lengths[-1]))
        draft = Draft(track.num_tokens, (1,) * lengths[-1], None, confidences)
        track.observe(Round((1,) * (lengths[-1] + 1), draft, lengths[-1]))
    assert lengths[0] >= 1
    assert lengths == sorted(lengths)
    assert lengths[-1] >= 4


def test_it_takes_a_look_at_plain_decoding_now_and_then() -> None:
    costs, track, lengths = Costs(CHEAP), seen(4), []
    for i in range(800):
        (plan,) = Goodput().plans([track], costs)
        lengths.append(plan.length)
        costs.observe([Round((1,), Draft(i, (1,) * plan.length), 0, 0.0, 0.02, 0.0, plan.length + 1)], i)
    assert 1 <= lengths.count(0) <= 8


def test_side_by_side_a_dear_draft_pays_too() -> None:
    curves = Curves((1, 16), (0,), ((0.05, 0.055),), (1,), (0.022,), Overlap(1.02, 1.02))
    assert gain(Costs(curves), 0.95) < gain(Costs(curves), 0.95, overlapped=True)
    assert length_of(seen(4), curves, overlapped=True) > 0


# gain


def test_gain_is_one_where_nothing_is_won() -> None:
    assert gain(Costs(DEAR), 1.0) == 1.0
    assert gain(Costs(CHEAP), 0.0) == 1.0


def test_gain_is_the_best_length_s() -> None:
    costs = Costs(CHEAP)
    expected = max(
        sum(0.8**i for i in range(n + 1)) * costs.verify_s(1) / (costs.verify_s(n + 1) + n * 0.0005) for n in range(17)
    )
    assert gain(costs, 0.8) == pytest.approx(expected)
    gains = [gain(costs, acceptance) for acceptance in (0.0, 0.3, 0.6, 0.9, 1.0)]
    assert gains == sorted(gains)
    assert gain(costs, 1.0, max_length=3) < 4.0


def test_a_dip_in_the_curve_is_used() -> None:
    dip = Curves((1, 2, 3, 4, 8), (0,), ((0.1, 0.19, 0.28, 0.14, 0.9),))
    (plan,) = Goodput().plans([seen(4, confidence=None)], Costs(dip))
    assert plan.length == 3


# Goodput, many sequences


def lengths_of(tracks: list[Track], curves: Curves) -> list[int]:
    return [plan.length for plan in Goodput().plans(tracks, Costs(curves))]


def test_no_sequences_no_plans() -> None:
    assert Goodput().plans([], Costs()) == []


def test_rows_go_where_they_are_accepted() -> None:
    curves = Curves((1, 8, 64), (0,), ((0.05, 0.052, 0.5),), (1, 8), (0.0005, 0.001))
    good, bad = seen(4), seen(0, 1)
    lengths = lengths_of([good, bad, good, bad], curves)
    assert min(lengths[0], lengths[2]) >= 1
    assert lengths[1] == lengths[3] == 0
    assert lengths_of([good] * 4, CHEAP) == [16] * 4


def test_the_width_is_shared_and_wide_batches_are_left_when_they_do_not_pay() -> None:
    curves = Curves((1, 16, 17, 256), (0,), ((0.05, 0.052, 0.2, 3.2),), (1, 8), (0.0005, 0.001))
    good = seen(4)
    assert sum(lengths_of([good] * 4, curves)) == 12  # up to the step at 16 rows
    assert max(lengths_of([good] * 4, curves)) <= 4
    assert lengths_of([good] * 20, curves) == [0] * 20


def test_a_step_that_only_pays_in_full_is_looked_over() -> None:
    curves = Curves((1, 4, 5, 8, 64), (0,), ((0.05, 0.05, 0.12, 0.07, 2.0),))
    assert sum(lengths_of([seen(4, confidence=None)] * 4, curves)) == 4


def test_equals_take_turns() -> None:
    curves = Curves((1, 6, 7, 64), (0,), ((0.05, 0.052, 0.2, 3.2),))
    prior, tracks = seen(4, confidence=None), []
    tracks = [plain(Track(prior), 1) for _ in range(4)]
    totals = [0] * 4
    for _ in range(40):
        lengths = lengths_of(tracks, curves)
        assert sum(lengths) == 2
        for i, (track, length) in enumerate(zip(tracks, lengths, strict=True)):
            totals[i] += length
            track.observe(Round((1,) * (length + 1), Draft(track.num_tokens, (1,) * length), length))
    assert min(totals) >= 10


def test_many_new_sequences_with_long_prompts_and_short_answers_are_not_drafted() -> None:
    curves = Curves((1, 64), (0,), ((0.02, 0.03),), (1,), (0.0005,), Overlap(), 0.01)
    prior = Track()
    for _ in range(40):
        track = Track(prior)
        for one in (track, prior):
            plain(one, 2)
    tracks = [Track(prior) for _ in range(8)]
    for track in tracks:
        track.observe(Round((1,), Draft(400)))
    assert lengths_of(tracks, curves) == [0] * 8
    tracks[3].num_read = 401
    assert [length > 0 for length in lengths_of(tracks, curves)] == [i == 3 for i in range(8)]


def test_one_of_many_is_tried_again_at_its_share_of_the_time() -> None:
    linear = Curves((1, 256), (0,), ((0.05, 0.05 + 255 * 0.03),), (1, 8), (0.002, 0.004), None, 1e-6)
    tracks = [seen(0, 1) for _ in range(8)]
    tries = 0
    for _ in range(400):
        lengths = lengths_of(tracks, linear)
        tries += sum(lengths)
        for track, length in zip(tracks, lengths, strict=True):
            draft = Draft(track.num_tokens, (2,) * length, None, (2.0,) * length, None)
            track.observe(Round((1,), draft))
    assert tries >= 1
    assert tries * 0.034 <= 0.02 * 400 * (0.05 + 7 * 0.03)


def test_what_is_held_back_counts_as_a_try() -> None:
    track = plain(seen(0, 1), 400)
    track.observe(Round((1,), Draft(track.num_tokens, held_back=Candidate(5, 0.1))))
    assert track.quiet == 0


def test_it_decides_quickly() -> None:
    """Orders of magnitude only: thousands of sequences a second, tens of thousands of single plans."""
    rng = np.random.default_rng(0)
    tracks = [seen(int(rng.integers(0, 5)), times=5) for _ in range(64)]
    began = time.process_time()
    for track in tracks:
        track.observe(Round((1, 1), Draft(track.num_tokens, (1,), None, (0.5,)), 1))
    assert len(Goodput().plans(tracks, Costs(CHEAP))) == 64
    assert time.process_time() - began < 1.0


def test_every_edge_is_a_confidence_one_may_ask_for() -> None:
    assert EDGES[0] == 0.0
    assert list(EDGES) == sorted(set(EDGES))


def test_of_many_one_tries_at_a_time() -> None:
    """All have saved up for a try; what is found out about one says something of all."""
    steep = Curves((1, 8), (0,), ((0.02, 0.043),))
    tracks = [Track(Track()) for _ in range(64)]
    for track in tracks:
        track.observe(Round((1,), Draft(0)))
    costs, tried = Costs(steep), []
    for _ in range(5):
        tried.append(sum(plan.length for plan in Goodput().plans(tracks, costs)))
        for track in tracks:
            track.observe(Round((1,), Draft(track.num_tokens)))
    assert max(tried) == 1
    assert sum(tried) >= 1
