"""Sampling within a budget."""

from __future__ import annotations

import pytest

from edgespec.core.sequence import never
from edgespec.engine.samples import MAX_SAMPLE_S, Sampler, typical


def sampler(budget_s: float, repeats: int = 3) -> Sampler:
    return Sampler(lambda: 0.0, budget_s, repeats, None, never)


def test_points_take_turns() -> None:
    order: list[int] = []
    taking = sampler(100.0)

    def sample(point: int) -> float | None:
        order.append(point)
        return taking.spend(1.0 + len(order))

    found = taking.sweep("", (8, 1), sample, 1.0)
    assert order == [8, 1] * 3
    assert found == {8: [2.0, 4.0, 6.0], 1: [3.0, 5.0, 7.0]}
    assert typical(found) == {1: 3.0, 8: 2.0}
    assert list(typical(found)) == [1, 8]


def test_moments_that_were_busy_do_not_count() -> None:
    taking = sampler(1000.0, repeats=5)
    seconds = iter([9.0, 1.0, 50.0, 1.1, 40.0])
    assert typical(taking.sweep("", (1,), lambda _: taking.spend(next(seconds)), 1.0)) == {1: 1.1}


@pytest.mark.parametrize(("samples", "expected"), [([3.0], 3.0), ([4.0, 3.0], 3.0), ([4.0, 3.0, 5.0, 6.0], 4.0)])
def test_few_samples_will_do(samples: list[float], expected: float) -> None:
    assert typical({1: samples}) == {1: expected}


def test_a_point_that_would_exceed_the_budget_is_not_begun() -> None:
    taking = sampler(10.0)
    found = taking.sweep("", (1, 32), lambda point: taking.spend(0.5 * point), 1.0)
    assert found == {1: [0.5] * 3}
    assert taking.spent_s == 1.5


def test_known_points_tell_what_others_may_cost() -> None:
    taking = sampler(10.0)
    taking.spend(4.0)
    assert taking.sweep("", (16, 4), taking.spend, 1.0, known={1: [1.0]}) == {4: [4.0]}


def test_points_that_must_be_are_sampled_once_beyond_the_budget() -> None:
    taking = sampler(1.0)
    taking.spend(5.0)
    assert taking.sweep("", (1, 8, 4), lambda point: taking.spend(point), 1.0, must=2) == {1: [1], 8: [8]}


def test_what_no_clock_can_have_measured_is_not_spent() -> None:
    taking = sampler(1.0)
    for seconds in (0.0, -1.0, float("nan"), float("inf"), MAX_SAMPLE_S):
        assert taking.spend(seconds) is None
    assert taking.spent_s == 0.0
