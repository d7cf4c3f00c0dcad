from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgespec.core.head import Head
from edgespec.core.ranking import largest, most_likely
from edgespec.core.sampling import distribution, penalise
from edgespec.core.sequence import Distribution, SamplingParams
from edgespec.errors import BackendError, ModelFormatError
from tests.core import reference
from tests.core.reference import random_row

PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
GREEDY = SamplingParams(temperature=0.0)
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_p": 0.9, "min_p": 0.02},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"top_k": 3, "top_p": 0.5},
]
PENALTIES = [
    {"repeat_penalty": 1.3},
    {"repeat_penalty": 0.7},
    {"presence_penalty": 0.9},
    {"frequency_penalty": -0.4},
    {"logit_bias": ((3, 2.5), (70, -1.5), (3, 0.5))},
    {
        "repeat_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": ((5, 9.0),),
        "top_k": 20,
        "top_p": 0.9,
    },
]


def check_form(dist: Distribution) -> None:
    assert dist.ids.dtype == np.int64
    assert dist.probs.dtype == np.float64
    assert np.all(np.diff(dist.ids) > 0)
    assert np.all(dist.probs > 0)
    assert dist.probs.sum() == pytest.approx(1.0, abs=1e-12)


# Top-k


def row_of(kind: str, size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    row = random_row(size, size)
    if kind == "ties":
        row = np.round(row).astype(np.float32)
    elif kind == "equal":
        row = np.full(size, -1.5, dtype=np.float32)
    elif kind == "banned":
        row[rng.random(size) < 0.97] = -np.inf
    elif kind == "ascending":
        row.sort()
    return row


@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "banned", "ascending"])
@pytest.mark.parametrize("size", [1, 2, 5, 63, 64, 65, 127, 1000, 4096, 50257])
@pytest.mark.parametrize("num", [1, 2, 40, 64, 1000, 10**6])
def test_largest_is_the_beginning_of_a_full_stable_sort(kind: str, size: int, num: int) -> None:
    row = row_of(kind, size)
    ranking = np.argsort(-row, kind="stable")
    expected = [i for i in ranking[:num] if row[i] > -np.inf]
    if expected:
        assert largest(row, num).tolist() == expected
    else:
        with pytest.raises(BackendError, match="needs a finite one"):
            largest(row, num)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("size", [5, 64, 1000, 4096, 50257])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.999])
def test_largest_refuses_a_broken_row_wherever_it_is_broken(value: float, size: int, place: float) -> None:
    row = random_row(size, size)
    row[int(place * size)] = value
    for num in (1, 40):
        with pytest.raises(BackendError, match="needs a finite one"):
            largest(row, num)


def test_largest_finds_logits_wherever_they_are() -> None:
    for place in (0, 63, 64, 777, 1023, 1024, 1039):  # 1040 = 64 columns of 16 and a tail of 16
        row = np.zeros(1040, dtype=np.float32)
        row[place] = 1
        assert largest(row, 2).tolist() == sorted({place, 0 if place else 1}, key=lambda i: -row[i])


# Distributions


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("size", [7, 3001])
def test_filters_agree_with_the_reference(temperature: float, filters: dict, size: int) -> None:
    params = replace(PLAIN, temperature=temperature, **filters)
    row = random_row(size, size)
    dist = distribution(row, params, (), 0)
    check_form(dist)
    np.testing.assert_allclose(reference.dense(dist, size), reference.probabilities(row, params), rtol=1e-9)


@pytest.mark.parametrize("filters", FILTERS)
def test_filters_agree_with_the_reference_on_ties_and_bans(filters: dict) -> None:
    params = replace(PLAIN, **filters)
    row = np.round(random_row(5000)).astype(np.float32)
    row[::3] = -np.inf
    dist = distribution(row, params, (), 0)
    check_form(dist)
    np.testing.assert_allclose(reference.dense(dist, 5000), reference.probabilities(row, params), rtol=1e-9)


def test_a_wide_nucleus_is_found_by_growing() -> None:
    row = random_row(30_000, scale=0.1)
    params = replace(PLAIN, top_p=0.9)
    dist = distribution(row, params, (), 0)
    assert len(dist.ids) > 20_000
    np.testing.assert_allclose(reference.dense(dist, 30_000), reference.probabilities(row, params), rtol=1e-9)


@pytest.mark.parametrize("scale", [1000.0, 1.0, 1e-9])
def test_min_p_keeps_what_lies_exactly_on_its_edge(scale: float) -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        low = np.float32(rng.standard_normal() * scale)
        row = np.array([low, low + np.float32(rng.uniform(0.1, 20))], dtype=np.float32)
        min_p = float(np.exp(np.float64(row[0]) - np.float64(row[1])))
        assert distribution(row, replace(PLAIN, min_p=min_p), (), 0).ids.tolist() == [0, 1]


@pytest.mark.parametrize("filters", PENALTIES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalties_agree_with_the_reference(filters: dict, temperature: float) -> None:
    params = replace(PLAIN, temperature=temperature, **filters)
    row, tokens = random_row(300), [1, 5, 9, 9, 250, 3, 3, 3, 17]
    dist = distribution(row, params, tokens, 4)
    check_form(dist)
    expected = reference.probabilities(row, params, tokens, 4)
    np.testing.assert_allclose(reference.dense(dist, 300), expected, rtol=1e-5)
    again = distribution(row, params, np.array(tokens), 4)
    assert np.array_equal(again.ids, dist.ids)
    assert np.array_equal(again.probs, dist.probs)


@pytest.mark.parametrize("filters", [*FILTERS, *PENALTIES, {"temperature": 0.0}])
def test_the_row_is_not_touched(filters: dict) -> None:
    row = random_row(300)
    before = row.copy()
    row.flags.writeable = False
    distribution(row, replace(PLAIN, **filters), [1, 2, 3, 3], 2)
    assert np.array_equal(row, before)


def test_penalties_leave_bans_and_other_logits_alone() -> None:
    row = np.array([1.0, -np.inf, 2.0, -2.0], dtype=np.float32)
    params = replace(PLAIN, repeat_penalty=2.0, logit_bias=((1, 100.0),))
    assert penalise(row, params, [1, 2, 3], 3).tolist() == [1.0, -np.inf, 1.0, -4.0]
    assert penalise(row, PLAIN, [1, 2, 3], 3) is row


def test_extreme_penalties_are_clamped() -> None:
    row = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    for bias in (1e300, 1e39, 3.4e38):
        assert distribution(row, replace(PLAIN, logit_bias=((0, bias),)), (), 0).ids.tolist() == [0]
        assert distribution(row, replace(PLAIN, logit_bias=((0, -bias),)), (), 0).ids.tolist() == [1, 2]
    banned = distribution(row, replace(PLAIN, frequency_penalty=1e308), [0, 0, 1], 0)
    assert banned.ids.tolist() == [2]
    assert distribution(row, replace(PLAIN, repeat_penalty=1e-320), [1], 1).ids.tolist() == [1]


def test_ids_without_a_logit_are_ignored() -> None:
    row = random_row(10)
    params = replace(PLAIN, repeat_penalty=1.5, frequency_penalty=1.0, logit_bias=((10, 5.0), (2**40, 5.0)))
    dist = distribution(row, params, [10, 99, 10**12], 1)
    np.testing.assert_allclose(dist.probs, reference.probabilities(row, PLAIN), rtol=1e-9)


def test_greedy_takes_the_lowest_of_equals_after_penalties() -> None:
    row = np.array([0.0, 5.0, 5.0, 4.0], dtype=np.float32)
    assert distribution(row, GREEDY, (), 0).ids.tolist() == [1]
    assert distribution(row, replace(GREEDY, presence_penalty=1.0), [1, 2], 1).ids.tolist() == [1]
    assert distribution(row, replace(GREEDY, presence_penalty=1.0), [1, 2], 0).ids.tolist() == [1]
    assert distribution(row, replace(GREEDY, presence_penalty=1.5), [1, 2], 0).ids.tolist() == [3]
    assert distribution(row, replace(GREEDY, logit_bias=((0, 5.5),)), (), 0).ids.tolist() == [0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 1e-5])
@pytest.mark.parametrize("filters", FILTERS)
def test_a_tiny_temperature_is_nearly_greedy(temperature: float, filters: dict) -> None:
    row = np.array([0.0, 5.0, 5.0, -3e38, 3.0], dtype=np.float32)
    dist = distribution(row, replace(PLAIN, temperature=temperature, **filters), (), 0)
    assert set(dist.ids.tolist()) <= {1, 2}
    check_form(dist)


def test_a_huge_temperature_is_uniform() -> None:
    row = np.array([0.0, 50.0, -np.inf, 3e38], dtype=np.float32)
    for filters in ({}, {"min_p": 0.5}, {"top_p": 0.999}, {"top_k": 3}):
        dist = distribution(row, replace(PLAIN, temperature=1e300, **filters), (), 0)
        assert dist.ids.tolist() == [0, 1, 3]
        np.testing.assert_allclose(dist.probs, 1 / 3)


@pytest.mark.parametrize("size", [1, 10, 64, 65, 5000])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_a_row_with_nan_or_infinity_is_refused(size: int, value: float, filters: dict) -> None:
    for place in {0, size // 2, size - 1}:
        row = random_row(size)
        row[place] = value
        with pytest.raises(BackendError, match="logits"):
            distribution(row, replace(PLAIN, **filters), (), 0)
        with pytest.raises(BackendError):  # and no penalty hides it
            distribution(row, replace(PLAIN, repeat_penalty=2.0, logit_bias=((place, -1e300),), **filters), [place], 0)


def test_a_row_without_a_finite_logit_is_refused() -> None:
    with pytest.raises(BackendError, match="-inf"):
        distribution(np.full(100, -np.inf, dtype=np.float32), PLAIN, (), 0)


def test_most_likely() -> None:
    assert most_likely(np.array([1.0, 3.0, 3.0], dtype=np.float32)) == (1, 3.0)


# Trimmed heads

D2T = np.array([900, 3, 4000, 17, 250, 12, 31], dtype=np.int64)


@pytest.mark.parametrize("d2t", [D2T, np.sort(D2T)], ids=["unordered", "ascending"])
@pytest.mark.parametrize("filters", [*FILTERS, *PENALTIES, {"temperature": 0.0}, {"temperature": 0.0, "min_p": 0.1}])
def test_a_trimmed_head_is_the_full_row_with_everything_else_banned(d2t: np.ndarray, filters: dict) -> None:
    params = replace(PLAIN, **filters)
    row = np.round(random_row(len(d2t), scale=1.5)).astype(np.float32)  # with ties
    full = np.full(5000, -np.inf, dtype=np.float32)
    full[d2t] = row
    tokens = [3, 900, 900, 5, 4999, 12]
    dist, expected = (
        distribution(row, params, tokens, 2, Head(d2t)),
        distribution(full, params, tokens, 2),
    )
    check_form(dist)
    assert dist.ids.tolist() == expected.ids.tolist()
    np.testing.assert_allclose(dist.probs, expected.probs, rtol=1e-12)


def test_a_large_trimmed_head_selects_like_the_full_row() -> None:
    d2t = np.random.default_rng(4).permutation(50_000)[:8192].astype(np.int64)
    row, full = random_row(8192), np.full(50_000, -np.inf, dtype=np.float32)
    full[d2t] = row
    params = SamplingParams(seed=1, repeat_penalty=1.1)
    tokens = d2t[::50].tolist()
    dist, expected = distribution(row, params, tokens, 0, Head(d2t)), distribution(full, params, tokens, 0)
    assert dist.ids.tolist() == expected.ids.tolist()
    np.testing.assert_allclose(dist.probs, expected.probs)


@pytest.mark.parametrize("bad", [[], [[1, 2]], [1, -2], [1, 2, 1], [0.5, 1.0]])
def test_a_malformed_head_is_refused(bad: list) -> None:
    with pytest.raises(ModelFormatError, match="d2t"):
        Head(np.array(bad))
