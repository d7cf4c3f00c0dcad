"""The rotations, against their papers' rules written out pair by pair. tests/quantize/test_draft_architectures.py holds
them against llama.cpp's."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quantize.rope import divided_rope, linear_rope, llama3_rope, plain_rope, yarn_rope

SIZES = [(64, 10000.0), (128, 500000.0), (16, 1e6)]


@pytest.mark.parametrize(("head_size", "base"), SIZES)
def test_plain_and_linear(head_size: int, base: float) -> None:
    expected = [1.0 / base ** (2 * i / head_size) for i in range(head_size // 2)]
    np.testing.assert_allclose(plain_rope(head_size, base).frequencies, expected)
    np.testing.assert_allclose(linear_rope(head_size, base, 4.0).frequencies, np.divide(expected, 4.0))
    assert plain_rope(head_size, base).magnitude == linear_rope(head_size, base, 4.0).magnitude == 1.0


@pytest.mark.parametrize(("head_size", "base"), SIZES)
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3(head_size: int, base: float, factor: float) -> None:
    low, high, original = 1.0, 4.0, 8192
    expected = []
    for frequency in plain_rope(head_size, base).frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            expected.append(frequency)
        elif wavelength > original / low:
            expected.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    rope = llama3_rope(head_size, base, factor, low, high, original)
    np.testing.assert_allclose(rope.frequencies, expected)
    assert rope.magnitude == 1.0


def test_yarn_keeps_fast_pairs_stretches_slow_ones_and_ramps_between() -> None:
    plain, rope = plain_rope(128, 1e6).frequencies, yarn_rope(128, 1e6, 4.0, 32768)
    kept = rope.frequencies / plain
    turns = 32768 * plain / (2 * math.pi)
    first, last = int((turns > 32).sum()) - 1, int((turns >= 1).sum())
    np.testing.assert_allclose(kept[: first + 1], 1.0)
    np.testing.assert_allclose(kept[last:], 0.25)
    np.testing.assert_allclose(np.diff(kept[first : last + 1]), -0.75 / (last - first))
    assert rope.magnitude == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_yarn_by_its_options() -> None:
    assert yarn_rope(64, 1e4, 4.0, 4096, attention_factor=1.0).magnitude == 1.0
    assert yarn_rope(64, 1e4, 0.5, 4096).magnitude == 1.0
    wide = yarn_rope(64, 1e4, 4.0, 4096, beta_fast=1e9, beta_slow=1e-9).frequencies / plain_rope(64, 1e4).frequencies
    assert (np.diff(wide) < 0).all()
    none = yarn_rope(64, 1e4, 4.0, 4096, beta_fast=1e9, beta_slow=1e8)
    np.testing.assert_allclose(none.frequencies[1:], linear_rope(64, 1e4, 4.0).frequencies[1:])


def test_divisors_keep_the_magnitude() -> None:
    divisors = np.linspace(1, 8, 32)
    rope = divided_rope(yarn_rope(64, 1e4, 4.0, 4096), divisors)
    np.testing.assert_allclose(rope.frequencies * divisors, yarn_rope(64, 1e4, 4.0, 4096).frequencies)
    assert rope.magnitude == yarn_rope(64, 1e4, 4.0, 4096).magnitude
