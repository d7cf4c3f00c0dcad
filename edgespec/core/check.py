"""Checks of parameters: what was got, and what is allowed, on one line."""

from __future__ import annotations

import math

from edgespec.errors import ParameterError


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise ParameterError unless ``value`` is a whole number from ``low`` to ``high`` (None: no bound)."""
    allowed = f"a whole number of {low} or more" if high is None else f"a whole number from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise ParameterError(f"{name}: got {value!r}; allowed: {allowed}")


def check_float(
    name: str, value: object, low: float = -math.inf, high: float = math.inf, *, open_low: bool = False
) -> None:
    """Raise ParameterError unless ``value`` is a finite number from ``low`` (or, if open, above it) to ``high``."""
    bounds = [f"{'above' if open_low else 'at least'} {low:g}"] if low > -math.inf else []
    bounds += [f"at most {high:g}"] if high < math.inf else []
    allowed = ", ".join(["a finite number", *bounds])
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _finite(value):
        raise ParameterError(f"{name}: got {value!r}; allowed: {allowed}")
    if value < low or value > high or (open_low and value == low):
        raise ParameterError(f"{name}: got {value!r}; allowed: {allowed}")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number no float can hold
        return False
