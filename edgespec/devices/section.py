"""A section of a settings file as a frozen dataclass that knows what each of its values may be."""

from __future__ import annotations

import reprlib
from dataclasses import Field, dataclass, field, fields
from typing import Any

from edgespec.errors import ProfileError


def one_of(default: Any, allowed: tuple[Any, ...]) -> Any:
    return field(default=default, metadata={"allowed": allowed})


def number(default: float, low: float, high: float) -> Any:
    """A whole number where the default is one, otherwise any."""
    return field(default=default, metadata={"low": low, "high": high})


def numbers(low: float, high: float) -> Any:
    return field(default=(), metadata={"items": 0.0, "low": low, "high": high})


def texts() -> Any:
    return field(default=(), metadata={"items": ""})


@dataclass(frozen=True, slots=True)
class Section:
    """What the sections share: every value has its default's type and is one of those allowed, else ProfileError."""

    def __post_init__(self) -> None:
        for key in fields(self):
            value = getattr(self, key.name)
            if not _fits(value, key):
                raise ProfileError(f"{key.name}: got {shown(value)}; allowed: {_allowed(key)}")


def native(value: Any, key: Field[Any]) -> Any:
    """TOML's lists as tuples, and whole numbers as floats where the key holds such; anything else as it is."""
    if isinstance(value, list):
        return tuple(_as_float(item, key.metadata.get("items")) for item in value)
    return _as_float(value, key.default)


def _as_float(value: Any, example: Any) -> Any:
    return float(value) if type(value) is int and isinstance(example, float) and abs(value) < 2**53 else value


def _fits(value: Any, key: Field[Any]) -> bool:
    items = key.metadata.get("items")
    if items is None:
        return _one_fits(value, key.default, key)
    return isinstance(value, tuple) and all(_one_fits(item, items, key) for item in value)


def _one_fits(value: Any, example: Any, key: Field[Any]) -> bool:
    kinds = (int, float) if isinstance(example, float) else (type(example),)
    rules = key.metadata
    if type(value) not in kinds:  # a bool is no int here
        return False
    if "low" in rules:
        return bool(rules["low"] <= value <= rules["high"])  # not so for nan
    return "allowed" not in rules or value in rules["allowed"]


def _allowed(key: Field[Any]) -> str:
    """For people, what a key may be."""
    rules, items = key.metadata, key.metadata.get("items")
    if "allowed" in rules:
        return ", ".join(str(value) for value in rules["allowed"])
    bounds = f" from {rules['low']} to {rules['high']}" if "low" in rules else ""
    if items is not None:
        return f"a list of {'texts' if isinstance(items, str) else f'numbers{bounds}'}"
    names = {bool: "true or false", str: "a text", int: f"a whole number{bounds}", float: f"a number{bounds}"}
    return names[type(key.default)]


def shown(value: Any) -> str:
    return reprlib.repr(value)
