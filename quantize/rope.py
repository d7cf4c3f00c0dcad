"""Rotary position embedding: how fast each pair of a head's dimensions turns, and how long the turned vectors are.

Rotation is Su et al., arXiv 2104.09864. The scalings stretch a model over more positions than it was first trained on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rope:
    """
    frequencies  radians per position of each rotated pair, (head_size / 2,), scaling applied
    magnitude    what cosines and sines are multiplied by (YaRN); 1 elsewhere
    """

    frequencies: Doubles
    magnitude: float = 1.0


def plain_rope(head_size: int, base: float) -> Rope:
    """Unscaled."""
    return Rope(_frequencies(head_size, base))


def linear_rope(head_size: int, base: float, factor: float) -> Rope:
    """All positions divided by ``factor`` (Chen et al., arXiv 2306.15595)."""
    return Rope(_frequencies(head_size, base) / factor)


def yarn_rope(
    head_size: int,
    base: float,
    factor: float,
    original_ctx: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
) -> Rope:
    """YaRN (Peng et al., arXiv 2309.00071).

    Positions of pairs that turn less than ``beta_slow`` times within ``original_ctx`` tokens are divided by ``factor``,
    those of pairs that turn more than ``beta_fast`` times are kept, and between lies a ramp over the pairs' numbers.
    ``attention_factor`` is the magnitude; by default the paper's, of ``factor``.
    """
    plain = _frequencies(head_size, base)
    first = max(0, math.floor(_pair_with_turns(beta_fast, head_size, base, original_ctx)))
    last = min(head_size - 1, math.ceil(_pair_with_turns(beta_slow, head_size, base, original_ctx)))
    stretched = np.clip((np.arange(head_size // 2) - first) / max(0.001, last - first), 0.0, 1.0)
    magnitude = yarn_magnitude(factor) if attention_factor is None else attention_factor
    return Rope(plain * (1.0 - stretched) + plain / factor * stretched, magnitude)


def yarn_magnitude(factor: float) -> float:
    """The square root of what the paper sharpens attention by: 0.1 ln(factor) + 1."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def llama3_rope(
    head_size: int, base: float, factor: float, low_freq_factor: float, high_freq_factor: float, original_ctx: int
) -> Rope:
    """Llama 3.1's: wavelengths above ``original_ctx / low_freq_factor`` positions are stretched by ``factor``, those
    below ``original_ctx / high_freq_factor`` are kept, and between lies a ramp over the inverse wavelength.

    A GGUF carries the same as divisors, rope_freqs.weight.
    """
    plain = _frequencies(head_size, base)
    turns = original_ctx * plain / (2.0 * math.pi)
    kept = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return Rope(plain * kept + plain / factor * (1.0 - kept))


def divided_rope(rope: Rope, divisors: NDArray[np.floating]) -> Rope:
    """Each frequency divided by its own divisor, (head_size / 2,)."""
    return Rope(rope.frequencies / divisors, rope.magnitude)


def _frequencies(head_size: int, base: float) -> Doubles:
    return np.asarray(base ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size))


def _pair_with_turns(turns: float, head_size: int, base: float, num_ctx: int) -> float:
    """The (fractional) number of the pair that turns so many times within ``num_ctx`` positions."""
    return head_size * math.log(num_ctx / (turns * 2.0 * math.pi)) / (2.0 * math.log(base))
