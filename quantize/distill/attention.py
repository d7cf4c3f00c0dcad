"""Rotation and attention of a decoder: what a token sees, computed once for all layers of a forward."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantize.distill.cache import Places
from quantize.source import Dimensions

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Sight:
    """What the layers of one kind (with a sliding window, or without) share in a forward.

    cos, sin  of every token's angles, (batch or 1, length, 1, pairs)
    window    tokens that a token sees, itself included; 0: all before it
    mask      added to the scores of what a cache holds, (batch, length, positions) float32; None: tokens see no cache
    """

    cos: Tensor
    sin: Tensor
    window: int
    mask: Tensor | None

    @classmethod
    def of(cls, dimensions: Dimensions, windowed: bool, length: int, places: Places | None, like: Tensor) -> Sight:
        """``like`` has the dtype of the products, and the device."""
        rope = dimensions.window_rope if windowed else dimensions.rope
        assert rope is not None
        window, steps = dimensions.window if windowed else 0, torch.arange(length)[None]
        positions = steps if places is None else places.starts[:, None] + steps
        angles = positions[..., None, None] * torch.from_numpy(rope.frequencies)
        cos, sin = ((turn(angles) * rope.magnitude).to(like) for turn in (torch.cos, torch.sin))
        if places is None or places.are_fresh:
            return cls(cos, sin, window, None)
        # Padding may lie behind the last key. It then sees what that one sees: nothing at all would be no number.
        own, keys = positions.clamp(max=places.room - 1)[..., None], torch.arange(places.room)
        return cls(cos, sin, window, _hidden(own, keys, window, like.float()))

    def rotate(self, heads: Tensor) -> Tensor:
        """Heads (batch, length, heads, head size), turned by their positions; a pair's two are in the two halves."""
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], dim=-1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, window: int, scale: float) -> Tensor:
    """Whole texts, whose tokens see themselves and those before them, ``window`` in all where it is not 0.

    Queries (batch, length, heads, head size), keys and values with as many heads as divide those. Returns (batch,
    length, queries)."""
    mixed: Tensor = _Attention.apply(queries, keys, values, window, scale)  # type: ignore[no-untyped-call]
    return mixed.flatten(2)


class _Attention(torch.autograd.Function):
    """A block of queries at a time, without the keys that none of them sees, so that scores stay in the CPU's caches:
    measured four times as fast there as torch's own, forward and backward. Queries that share a key head go together.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, window: int, scale: float) -> Tensor:
        batch, length, num_kv_heads = keys.shape[:3]
        group = queries.shape[2] // num_kv_heads
        k, v = _by_head(keys), _by_head(values)
        mixed, weights = torch.empty_like(queries), []
        for rows, seen, hidden in _blocks(length, window, queries):
            scores = torch.bmm(_shared(queries[:, rows], num_kv_heads), k[:, seen].transpose(1, 2)).mul_(scale)
            scores.view(batch, num_kv_heads, group, *hidden.shape[:1], -1)[..., -hidden.shape[1] :].add_(hidden)
            weight = scores.softmax(-1)
            mixed[:, rows] = _apart(torch.bmm(weight, v[:, seen]), batch, group)
            weights += [weight] if any(ctx.needs_input_grad) else []
        ctx.save_for_backward(queries, keys, values, *weights)
        ctx.window, ctx.scale = window, scale
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, *weights = ctx.saved_tensors
        batch, length, num_kv_heads, size = keys.shape
        group = queries.shape[2] // num_kv_heads
        k, v = _by_head(keys), _by_head(values)
        for_queries, for_k, for_v = torch.empty_like(queries), torch.zeros_like(k), torch.zeros_like(v)
        for weight, (rows, seen, _) in zip(weights, _blocks(length, ctx.window, queries), strict=True):
            arriving, own = _shared(gradient[:, rows], num_kv_heads), _shared(queries[:, rows], num_kv_heads)
            for_v[:, seen] += torch.bmm(weight.transpose(1, 2), arriving)
            for_weight = torch.bmm(arriving, v[:, seen].transpose(1, 2))
            for_scores = torch.ops.aten._softmax_backward_data(for_weight, weight, -1, weight.dtype).mul_(ctx.scale)
            for_queries[:, rows] = _apart(torch.bmm(for_scores, k[:, seen]), batch, group)
            for_k[:, seen] += torch.bmm(for_scores.transpose(1, 2), own)
        for_keys, for_values = (x.view(batch, num_kv_heads, length, size).transpose(1, 2) for x in (for_k, for_v))
        return for_queries, for_keys, for_values, None, None


def _blocks(length: int, window: int, like: Tensor) -> abc.Iterator[tuple[slice, slice, Tensor]]:
    """Some queries, the keys that they see, and what is added to the scores of the last of those keys."""
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        first = max(0, start - window + 1) if window else 0
        queries, keys = torch.arange(start, stop)[:, None], torch.arange(first if window else start, stop)
        yield slice(start, stop), slice(first, stop), _hidden(queries, keys, window, like)


def _hidden(queries: Tensor, keys: Tensor, window: int, like: Tensor) -> Tensor:
    """0 where a query's position sees a key's, and minus infinity elsewhere."""
    seen = keys <= queries
    if window:
        seen &= keys > queries - window
    return torch.zeros(seen.shape, dtype=like.dtype).masked_fill_(~seen, float("-inf")).to(like.device)


def _by_head(keys: Tensor) -> Tensor:
    """(batch, length, key heads, size) as (batch * key heads, length, size)."""
    return keys.transpose(1, 2).reshape(-1, keys.shape[1], keys.shape[3])


def _shared(queries: Tensor, num_kv_heads: int) -> Tensor:
    """(batch, length, heads, size) as (batch * key heads, group * length, size)."""
    batch, length, _, size = queries.shape
    parts = queries.view(batch, length, num_kv_heads, -1, size).permute(0, 2, 3, 1, 4)
    return parts.reshape(batch * num_kv_heads, -1, size)


def _apart(shared: Tensor, batch: int, group: int) -> Tensor:
    """Undoes ``_shared``."""
    num_kv_heads, size = shared.shape[0] // batch, shared.shape[2]
    parts = shared.view(batch, num_kv_heads, group, -1, size).permute(0, 3, 1, 2, 4)
    return parts.reshape(batch, -1, num_kv_heads * group, size)


def attend_cached(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Tokens that see what a cache holds, themselves included.

    queries       (batch, length, heads, head size)
    keys, values  (batch, key heads, positions, head size)
    mask          (batch, length, positions) float32, see ``Sight``

    No gradient is needed here. Returns (batch, length, queries).
    """
    batch, num_kv_heads, num_keys, size = keys.shape
    length, group = queries.shape[1], queries.shape[2] // num_kv_heads
    shared = _shared(queries, num_kv_heads).to(keys.dtype)
    products = torch.bmm(keys.reshape(-1, num_keys, size), shared.transpose(1, 2))  # for few queries faster this way
    scores = products.transpose(1, 2).contiguous().float().view(batch, num_kv_heads, group, length, num_keys)
    weights = (scores * scale + mask[:, None, None]).softmax(-1).to(keys.dtype)
    mixed = torch.bmm(weights.view(-1, group * length, num_keys), values.reshape(-1, num_keys, size))
    return _apart(mixed, batch, group).flatten(2)
