"""Which mode pays, over curves made up for it."""

from __future__ import annotations

import pytest

from edgespec.core.costs import Curves, Overlap
from edgespec.engine.advice import MAX_LENGTH, USUAL_ACCEPTANCE, advise, plain_s, speedup

WIDTHS = (1, 2, 4, 8, 16, 32)


def curves(*verify_ms: float, step_ms: float | None = None, overlap: Overlap | None = None) -> Curves:
    """The last cost holds for all wider ones."""
    row = [*verify_ms, *[verify_ms[-1]] * (len(WIDTHS) - len(verify_ms))]
    step_s = () if step_ms is None else (step_ms / 1000,)
    return Curves(WIDTHS, (64,), (tuple(ms / 1000 for ms in row),), (1,) * len(step_s), step_s, overlap)


def test_without_a_draft_model_plain() -> None:
    advice = advise(curves(10.0))
    assert (advice.mode, advice.gain, advice.reason) == ("plain", 1.0, "there is no draft model")


def test_lookup_is_worth_a_try_where_rows_cost_less_than_rounds() -> None:
    flat = advise(curves(10.0), is_free=True)
    assert flat.mode == "sequential"
    assert flat.gain == pytest.approx(MAX_LENGTH + 1)
    assert advise(curves(10.0, 20.0, 40.0, 80.0, 160.0, 320.0), is_free=True).mode == "plain"


def test_a_draft_model_that_cannot_pay_even_if_always_right_is_plain() -> None:
    dear = curves(11.0, 14.0, 24.0, 37.0, 66.0, 133.0, step_ms=10.0)
    advice = advise(dear)
    assert advice.mode == "plain"
    assert advice.gain < 1.03
    assert f"{advice.gain:.2f} x plain" in advice.reason


def test_one_that_may_pay_is_tried_however_bad_its_drafts_may_be() -> None:
    advice = advise(curves(89.0, 110.0, 136.0, 195.0, 284.0, 584.0, step_ms=25.0))
    assert advice.mode == "sequential"
    assert 1.5 < advice.gain < 3.0


def test_both_at_once_where_neither_disturbs_the_other() -> None:
    verify = (100.0, 100.0, 100.0, 100.0)
    turns, together = curves(*verify, step_ms=10.0), curves(*verify, step_ms=12.0, overlap=Overlap())
    advice = advise(turns, together)
    assert advice.mode == "overlapped"
    assert advice.gain > speedup(turns, 0.1, 1.0)
    assert "both at once would reach" in advice.reason


@pytest.mark.parametrize(
    "together",
    [
        curves(100.0, step_ms=10.0, overlap=Overlap(2.0, 2.0)),
        curves(200.0, step_ms=10.0, overlap=Overlap()),
        curves(100.0, step_ms=100.0, overlap=Overlap()),
        curves(100.0, step_ms=10.0),
        curves(100.0),
        None,
    ],
    ids=["disturbed", "fewer threads to verify", "fewer to draft", "not measured", "no draft", "not tried"],
)
def test_one_after_the_other_where_that_is_faster(together: Curves | None) -> None:
    assert advise(curves(100.0, step_ms=10.0), together).mode == "sequential"


def test_both_at_once_may_pay_where_taking_turns_does_not() -> None:
    verify = (10.0, 14.0, 18.0, 26.0, 42.0, 74.0)
    turns = curves(*verify, step_ms=8.0)
    assert advise(turns).mode == "plain"
    assert advise(turns, curves(*verify, step_ms=8.0, overlap=Overlap())).mode == "overlapped"


def test_both_at_once_must_pay_since_a_part_of_the_cpus_is_slower_where_nothing_is_drafted() -> None:
    verify = (10.0, 30.0, 31.0, 32.0, 33.0, 34.0)
    turns, together = curves(*verify, step_ms=6.0), curves(*[2.1 * ms for ms in verify], step_ms=1.0, overlap=Overlap())
    assert speedup(turns, 0.01) < 1.0 < speedup(turns, 0.01, 1.0)
    assert speedup(turns, 0.01) < speedup(together, 0.01, overlapped=True) < 1.03
    assert advise(turns, together).mode == "sequential"


def test_plain_is_what_the_better_threads_can_do() -> None:
    busy, quiet = curves(90.0, step_ms=10.0), curves(20.0, step_ms=10.0, overlap=Overlap())
    assert plain_s(busy, quiet) == plain_s(quiet) == pytest.approx(0.02)
    assert plain_s(busy, None) == pytest.approx(0.09)
    assert advise(busy, quiet).gain < speedup(quiet, 0.09, 1.0, overlapped=True)


def test_more_acceptance_is_more_speed_and_overlapping_never_costs_without_disturbance() -> None:
    free = curves(100.0, 120.0, 140.0, step_ms=10.0, overlap=Overlap())
    by_acceptance = [speedup(free, 0.1, acceptance) for acceptance in (0.2, 0.5, USUAL_ACCEPTANCE, 1.0)]
    assert by_acceptance == sorted(by_acceptance)
    for acceptance in (0.0, 0.3, 0.9, 1.0):
        assert speedup(free, 0.1, acceptance, overlapped=True) >= speedup(free, 0.1, acceptance)
