"""Curves are checked, looked up and followed: whatever the clock says, a time stays above 0 and finite."""

from __future__ import annotations

import collections.abc as abc
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from edgespec.core.costs import Costs, Curves, Overlap
from edgespec.core.sequence import Candidate, Draft, Round

CURVES = Curves(
    widths=(1, 2, 3, 4, 8),
    depths=(0, 1000),
    verify_s=((0.10, 0.13, 0.16, 0.14, 0.24), (0.12, 0.15, 0.18, 0.16, 0.28)),
    batches=(1, 4),
    step_s=(0.01, 0.016),
    overlap=Overlap(1.25, 1.5),
    read_s=0.002,
)


def round_of(verify_s: float, width: int = 1, draft_s: float = 0.0, start: int = 0, **fields: object) -> Round:
    draft = Draft(start, (7,) * (width - 1))
    return replace(Round((7,) * width, draft, width - 1, draft_s, verify_s, 0.0, width), **fields)  # type: ignore[arg-type]


def follow(costs: Costs, seconds: abc.Callable[[int], float], widths: abc.Iterable[int]) -> None:
    for width in widths:
        costs.observe([round_of(seconds(width), width)], 0)


# Curves


def test_they_survive_json() -> None:
    for curves in (CURVES, replace(CURVES, batches=(), step_s=(), overlap=None, read_s=None)):
        assert Curves.from_dict(json.loads(json.dumps(curves.as_dict()))) == curves


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("widths", [2, 3, 4, 5, 8]),
        ("widths", [1, 2, 2, 4, 8]),
        ("widths", [1, 2, 3, 4]),
        ("widths", [1, 2, 3, 4, 8.0]),
        ("widths", "12345"),
        ("widths", 5),
        ("depths", []),
        ("depths", [-1, 5]),
        ("depths", [0]),
        ("verify_s", [[0.1] * 5]),
        ("verify_s", [[0.1] * 5, [0.1] * 4]),
        ("verify_s", [[0.1] * 5, [0.1, 0.1, 0.0, 0.1, 0.1]]),
        ("verify_s", [[0.1] * 5, [0.1, 0.1, math.nan, 0.1, 0.1]]),
        ("verify_s", [[0.1] * 5, [0.1, 0.1, math.inf, 0.1, 0.1]]),
        ("verify_s", [[0.1] * 5, [0.1, 0.1, "0.1", 0.1, 0.1]]),
        ("verify_s", [0.1, 0.2]),
        ("verify_s", None),
        ("batches", [4, 8]),
        ("batches", []),
        ("step_s", [0.1]),
        ("step_s", [0.1, -0.1]),
        ("step_s", [0.1, True]),
        ("overlap", {"verify": 1.0}),
        ("overlap", {"verify": 1.0, "draft": 0.0}),
        ("overlap", [1.0, 1.0]),
        ("read_s", 0.0),
        ("read_s", 1e9),
    ],
)
def test_what_cannot_have_been_measured_is_refused(name: str, value: object) -> None:
    values = json.loads(json.dumps(CURVES.as_dict())) | {name: value}
    with pytest.raises(ValueError, match="allowed"):
        Curves.from_dict(values)


@pytest.mark.parametrize("values", [None, [], {}, {**CURVES.as_dict(), "more": 1}, "widths"])
def test_anything_else_is_no_curves(values: object) -> None:
    with pytest.raises(ValueError, match="curves: got"):
        Curves.from_dict(values)


# Looking up


def test_measured_points_come_out_as_they_went_in() -> None:
    costs = Costs(CURVES)
    for depth, row in zip(CURVES.depths, CURVES.verify_s, strict=True):
        assert [costs.verify_s(width, depth) for width in CURVES.widths] == pytest.approx(row)
    assert costs.draft_s(5) == pytest.approx(0.05)
    assert costs.draft_s(2, 4) == pytest.approx(0.032)


def test_between_them_it_is_linear_and_keeps_the_dips() -> None:
    costs = Costs(CURVES)
    assert costs.verify_s(6) == pytest.approx(0.19)
    assert costs.verify_s(4) < costs.verify_s(3)
    assert costs.verify_s(1, 500) == pytest.approx(0.11)
    assert costs.draft_s(1, 2) == pytest.approx(0.012)


def test_beyond_the_last_it_goes_on_and_never_falls() -> None:
    costs = Costs(CURVES)
    assert costs.verify_s(12) == pytest.approx(0.34)
    assert costs.verify_s(1, 2000) == pytest.approx(0.14)
    assert costs.draft_s(1, 6) == pytest.approx(0.02)
    falling = Costs(Curves((1, 8, 16), (0, 100), ((0.1, 0.3, 0.2), (0.05, 0.2, 0.1))))
    assert falling.verify_s(1000) == pytest.approx(0.2)
    assert falling.verify_s(1, 10_000) == pytest.approx(0.05)
    assert Costs(Curves((1,), (64,), ((0.1,),))).verify_s(50, 9999) == pytest.approx(0.1)


@pytest.mark.parametrize("depth", [-5, 0, 1, 999, 1e12, math.inf, math.nan])
def test_any_depth_gives_a_time(depth: float) -> None:
    costs = Costs(CURVES)
    assert 0.0 < costs.verify_s(3, depth) < math.inf


def test_a_round_is_both_sides_and_the_overhead() -> None:
    costs = Costs(CURVES)
    for _ in range(200):
        costs.observe([round_of(0.1)], 0, overhead_s=0.001)
    assert costs.overhead_s == pytest.approx(0.001, rel=0.01)
    assert costs.plain_s() == pytest.approx(0.101, rel=0.01)
    assert costs.plain_s(0, 4) == pytest.approx(0.141, rel=0.01)
    assert costs.round_s(4, 3) == pytest.approx(0.171, rel=0.01)
    assert costs.round_s(4, 3, overlapped=True) == pytest.approx(0.176, rel=0.01)  # the slower side, slowed down
    assert costs.round_s(1, 0, overlapped=True) == pytest.approx(0.101, rel=0.01)


def test_lookup_costs_nothing() -> None:
    costs = Costs(replace(CURVES, batches=(), step_s=()))
    assert not costs.has_drafter
    assert costs.draft_s(8) == costs.read_s(1000) == 0.0
    assert costs.round_s(4, 3) == costs.verify_s(4)


def test_reading_is_cheaper_than_drafting_where_it_was_not_measured() -> None:
    assert Costs(CURVES).read_s(100) == pytest.approx(0.2)
    assert 0.0 < Costs(replace(CURVES, read_s=None)).read_s(100) < 0.5 * Costs(CURVES).draft_s(100)


# Following


def truth(factor: float) -> abc.Callable[[int], float]:
    return lambda width: factor * Costs(CURVES).verify_s(width)


@pytest.mark.parametrize("factor", [0.05, 0.5, 0.9, 1.3, 2.5, 20.0])
def test_a_slower_box_is_slower_at_every_width(factor: float) -> None:
    costs = Costs(CURVES)
    follow(costs, truth(factor), [1, 4, 6, 2, 3] * 15)
    for width in (1, 2, 3, 4, 5, 6, 8, 12):
        assert costs.verify_s(width) == pytest.approx(truth(factor)(width), rel=0.15)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_curve_that_is_wrong_at_wide_batches_does_not_change_the_baseline(factor: float) -> None:
    costs = Costs(CURVES)
    for _ in range(4):
        follow(costs, lambda width: truth(factor if width > 4 else 1.0)(width), [*[8] * 30, 1])
    assert costs.plain_s() == pytest.approx(0.1, rel=0.1)
    assert costs.verify_s(8) == pytest.approx(0.24 * factor, rel=0.15)


def test_a_box_that_changes_while_only_wide_batches_are_seen() -> None:
    costs = Costs(CURVES)
    follow(costs, truth(1.0), [1, 8] * 30)
    follow(costs, truth(1.8), [8] * 60)
    assert costs.plain_s() == pytest.approx(0.18, rel=0.15)


def test_noise_averages_out() -> None:
    costs, rng = Costs(CURVES), np.random.default_rng(0)
    follow(costs, lambda width: truth(1.0)(width) * rng.uniform(0.5, 1.5), [1, 4, 8] * 100)
    for width in (1, 4, 8):
        assert costs.verify_s(width) == pytest.approx(truth(1.0)(width), rel=0.25)


JUMPS = [0.0, -1.0, -1e9, math.nan, math.inf, -math.inf, 1e-300, 1e9, 1e300, 3599.0]


@pytest.mark.parametrize("seconds", JUMPS)
def test_a_clock_that_jumps_changes_nothing(seconds: float) -> None:
    costs = Costs(CURVES)
    follow(costs, truth(1.0), [1, 4, 8] * 10)
    before = [costs.verify_s(width) for width in CURVES.widths] + [costs.draft_s(1), costs.plain_s()]
    for start in (0, 4, 8):
        costs.observe([round_of(seconds, 4, seconds, start)], 0, overhead_s=min(seconds, 1e300))
    after = [costs.verify_s(width) for width in CURVES.widths] + [costs.draft_s(1), costs.plain_s()]
    assert after == pytest.approx(before, rel=0.01)


def test_whatever_comes_times_stay_times() -> None:
    costs, rng = Costs(CURVES), np.random.default_rng(1)
    for i in range(3000):
        seconds = float(rng.choice([*JUMPS, *10.0 ** rng.uniform(-8, 5, 20)]))
        width = int(rng.integers(1, 40))
        costs.observe([round_of(seconds, width, seconds, i * width, hidden_s=seconds / 2)], float(seconds), seconds)
        found = [*costs.verify_many(np.arange(1.0, 64)), costs.draft_s(1), costs.draft_s(3, 9), costs.plain_s(77)]
        assert np.isfinite(found).all()
        assert min(found) > 0.0


def test_drafting_is_followed_where_nothing_had_to_be_read_first() -> None:
    costs = Costs(CURVES)
    for i in range(40):  # a round of 5 tokens in 10, as a probe makes: reading the rest took long
        costs.observe([round_of(0.2, 5, 0.5, 10 * i)], 0)
    assert costs.draft_s(1) == pytest.approx(0.01)
    for i in range(40):  # one after the other
        costs.observe([round_of(0.2, 5, 0.08, 5 * i)], 0)
    assert costs.draft_s(1) == pytest.approx(0.02, rel=0.05)


def test_a_held_back_token_was_drafted_too() -> None:
    costs = Costs(CURVES)
    for i in range(40):
        draft = Draft(2 * i, (7,), held_back=Candidate(8, 0.1))
        costs.observe([Round((7, 7), draft, 1, 0.02, 0.13, 0.0, 2)], 0)
    assert costs.draft_s(1) == pytest.approx(0.01, rel=0.02)


def test_times_taken_side_by_side_are_no_slower_box() -> None:
    costs = Costs(CURVES)
    for i in range(40):
        slow = round_of(0.14 * 1.25, 4, 0.01 * 4 * 1.5, 4 * i, hidden_s=0.06, ahead="kept")
        costs.observe([slow], 0)
    assert costs.verify_s(4) == pytest.approx(0.14, rel=0.02)
    assert costs.draft_s(1) == pytest.approx(0.01, rel=0.02)


def test_a_baseline_is_wanted_now_and_then_and_less_where_little_depends_on_it() -> None:
    costs = Costs(CURVES)
    wanted = []
    for i in range(600):
        wanted.append(costs.wants_baseline(1.0))
        costs.observe([round_of(0.1) if wanted[-1] else round_of(0.14, 4)], i)
    assert 30 <= sum(wanted) <= 75
    assert any(wanted[:10])
    for i in range(200):
        costs.observe([round_of(0.14, 4)], i)
    assert costs.wants_baseline(1.1)
    assert not costs.wants_baseline(3.0)


def test_no_rounds_say_nothing() -> None:
    costs = Costs(CURVES)
    costs.observe([], 0)
    assert costs.plain_s() == pytest.approx(0.1)


def test_what_was_seen_at_a_width_beyond_the_curve_bends_nothing() -> None:
    """It says how fast the box is there, not that further rows are free."""
    curves = Curves((1, 2, 4, 8), (0,), ((0.01, 0.017, 0.026, 0.044),))
    costs, fresh = Costs(curves), Costs(curves)
    for _ in range(20):
        costs.observe([Round((1,), Draft(0), verify_s=0.8 * fresh.verify_s(64), width=64)] * 64, 0)
    per_row = (costs.verify_s(80) - costs.verify_s(64)) / 16
    assert costs.verify_s(64) == pytest.approx(0.8 * fresh.verify_s(64), rel=0.05)
    assert per_row == pytest.approx(0.8 * (fresh.verify_s(80) - fresh.verify_s(64)) / 16, rel=0.05)
