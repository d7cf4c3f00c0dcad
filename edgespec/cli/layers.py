"""Layers as people write them."""

from __future__ import annotations


def layer_numbers(text: str) -> tuple[int, ...]:
    """``0,1,26-29`` as numbers. Raises ValueError."""
    return tuple(layer for part in text.split(",") for layer in _range(part.strip()))


def _range(part: str) -> range:
    from edgespec.devices.gguf_sizes import MAX_LAYERS

    first, dash, last = part.partition("-")
    found = range(int(first), int(last if dash else first) + 1)
    if not 0 < len(found) <= MAX_LAYERS:
        raise ValueError(part)
    return found
