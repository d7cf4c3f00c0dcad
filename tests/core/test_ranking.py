"""The most likely token and its lead in one sweep, against looking twice."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.core.ranking import foremost, lead, most_likely
from edgespec.errors import BackendError

SIZES = [1, 2, 64, 4095, 4096, 4097, 8192, 12_345, 50_257]


def rows(size: int) -> list[np.ndarray]:
    """Spread values, many ties, all equal, mostly banned tokens, one that is not banned, ascending, descending."""
    rng = np.random.default_rng(size)
    spread = 3 * rng.standard_normal(size, dtype=np.float32)
    banned = np.where(rng.random(size) < 0.9, -np.inf, spread)
    banned[size // 2] = 0.0
    lone = np.full(size, -np.inf)
    lone[-1] = -5.0
    values: list[np.ndarray] = [
        spread,
        np.round(spread),
        np.zeros(size),
        banned,
        lone,
        np.sort(spread),
        -np.sort(-spread),
    ]
    return [row.astype(np.float32) for row in values]


@pytest.mark.parametrize("size", SIZES)
def test_foremost_is_the_most_likely_token_and_its_lead(size: int) -> None:
    for row in rows(size):
        before, (best, _) = row.copy(), most_likely(row)
        assert foremost(row) == (best, lead(row, best))
        assert np.array_equal(row, before)


@pytest.mark.parametrize("place", [0, 4095, 4096, 8192, 12_344])
def test_foremost_finds_a_logit_and_its_rival_wherever_they_are(place: int) -> None:
    for rival in {0, 4095, 4097, 12_344} - {place}:
        row = np.zeros(12_345, dtype=np.float32)
        row[place], row[rival] = 3.0, 1.0
        assert foremost(row) == (place, 2.0)
        row[rival] = 3.0
        assert foremost(row) == (min(place, rival), 0.0)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("size", SIZES)
def test_foremost_refuses_a_broken_row_as_most_likely_does(value: float, size: int) -> None:
    for row in rows(size):
        for place in (0, size // 2, size - 1):
            broken = row.copy()
            broken[place] = value
            with pytest.raises(BackendError) as expected:
                most_likely(broken)
            with pytest.raises(BackendError) as got:
                foremost(broken)
            assert str(got.value) == str(expected.value)


def test_foremost_refuses_a_row_without_anything_finite() -> None:
    with pytest.raises(BackendError, match="the largest of 5000 logits is -inf"):
        foremost(np.full(5000, -np.inf, dtype=np.float32))
