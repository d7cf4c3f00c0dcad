"""Draft models in edgespec's own form: a KV cache of fixed length, updated in place.

The graph takes input_ids (batch, length) int64, seqlens_k (batch,) int32 (tokens in the cache after the call, minus
one), total_sequence_length () int32 (the most tokens in any cache after the call) and past_key_values.N.key/value
(batch, num_kv_heads, num_ctx, head_size) float32. It gives logits (batch, 1, num_logits) after the last token, and
present.N.key/value. These are the conventions of ONNX Runtime's GroupQueryAttention operator; with past tokens and a
length above 1 its batch must be 1.
"""

from __future__ import annotations

import collections.abc as abc
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.onnx_manifest import DraftManifest
from edgespec.drafters.onnx_session import Row, run, signature
from edgespec.errors import ModelFormatError

CHUNK = 128
# Evaluating one idle row costs about a quarter of a call of its own.
MAX_GAP = 3

_ALIGNMENT = 64


class FixedCacheModel:
    """See DraftModel. Past and present are one memory, so trimming is a smaller number and nothing is ever copied.

    A slot may hold num_ctx - 1 tokens at most: idle slots inside a batch write to the place after their last token.
    """

    def __init__(self, session: Any, manifest: DraftManifest, num_slots: int, num_ctx: int) -> None:
        _check_graph(session, manifest)
        self._session = session
        self.num_vocab, self.num_logits = manifest.num_vocab, manifest.num_head_vocab
        self.num_ctx = min(num_ctx, manifest.num_ctx)
        shape = (num_slots, manifest.num_kv_heads, self.num_ctx, manifest.head_size)
        names = [f"{layer}.{part}" for layer in range(manifest.num_layers) for part in ("key", "value")]
        self._caches = {name: aligned(shape, np.float32) for name in names}
        self._ids, self._chunk = aligned((num_slots, 1), np.int64), aligned((1, CHUNK), np.int64)
        self._seqlens, self._total = aligned((num_slots,), np.int32), aligned((), np.int32)
        self._logits = aligned((num_slots, 1, self.num_logits), np.float32)
        self._bindings: dict[tuple[int, int, bool], Any] = {}

    def chunk(self, num_cached: int) -> int:
        return CHUNK

    def extend(self, slot: int, tokens: abc.Sequence[int], num_cached: int) -> Row:
        size = len(tokens)
        self._chunk[0, :size] = tokens
        self._seqlens[slot] = num_cached + size - 1
        self._total[...] = num_cached + size
        binding = self._bound(slot, 1, chunked=True)
        _bind_input(binding, "input_ids", self._chunk[:, :size])
        run(self._session, binding)
        return self._row(slot)

    def step(self, tokens: abc.Mapping[int, int], num_cached: abc.Sequence[int]) -> dict[int, Row]:
        for slot, token in tokens.items():
            self._ids[slot, 0] = token
        self._seqlens[:] = num_cached
        for first, last in spans(sorted(tokens), MAX_GAP):
            self._total[...] = max(num_cached[first : last + 1]) + 1
            run(self._session, self._bound(first, last - first + 1, chunked=False))
        return {slot: self._row(slot) for slot in tokens}

    def _row(self, slot: int) -> Row:
        row: Row = self._logits[slot, 0]
        return row

    def _bound(self, first: int, count: int, *, chunked: bool) -> Any:
        """The binding of ``count`` neighbouring slots, made once; a chunk's caller binds its own input_ids."""
        key = (first, count, chunked)
        if key not in self._bindings:
            self._bindings[key] = self._bind(slice(first, first + count))
        return self._bindings[key]

    def _bind(self, slots: slice) -> Any:
        binding = self._session.io_binding()
        _bind_input(binding, "input_ids", self._ids[slots])
        _bind_input(binding, "seqlens_k", self._seqlens[slots])
        _bind_input(binding, "total_sequence_length", self._total)
        _bind_output(binding, "logits", self._logits[slots])
        for name, cache in self._caches.items():
            _bind_input(binding, f"past_key_values.{name}", cache[slots])
            _bind_output(binding, f"present.{name}", cache[slots])
        return binding

    def close(self) -> None:
        self._bindings.clear()
        self._caches.clear()
        self._session = None


def aligned(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """Zeros that start at a multiple of 64 bytes, as wide vector loads like it. Pages are touched on first use."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + size].view(dtype).reshape(shape)


def spans(slots: abc.Sequence[int], max_gap: int) -> list[tuple[int, int]]:
    """Ascending slots as (first, last) runs; up to ``max_gap`` idle slots between two are taken along."""
    found: list[tuple[int, int]] = []
    for slot in slots:
        if found and slot - found[-1][1] <= max_gap + 1:
            found[-1] = (found[-1][0], slot)
        else:
            found.append((slot, slot))
    return found


def _bind_input(binding: Any, name: str, values: NDArray[Any]) -> None:
    binding.bind_input(name, "cpu", 0, values.dtype.type, values.shape, values.ctypes.data)


def _bind_output(binding: Any, name: str, values: NDArray[Any]) -> None:
    binding.bind_output(name, "cpu", 0, values.dtype.type, values.shape, values.ctypes.data)


def _check_graph(session: Any, manifest: DraftManifest) -> None:
    """Everything is bound by pointer, so a graph that is not what its manifest says would read foreign memory."""
    m = manifest
    expected = {"input_ids": "tensor(int64)", "seqlens_k": "tensor(int32)", "total_sequence_length": "tensor(int32)"}
    caches = [f"past_key_values.{layer}.{part}" for layer in range(m.num_layers) for part in ("key", "value")]
    expected |= dict.fromkeys(caches, "tensor(float)")
    got = {value.name: value.type for value in session.get_inputs()}
    shapes = {value.name: list(value.shape) for value in [*session.get_inputs(), *session.get_outputs()]}
    fits = all(shapes[name][1::2] == [m.num_kv_heads, m.head_size] for name in caches if name in shapes)
    if got != expected or not fits or shapes.get("logits", [])[2:] != [m.num_head_vocab]:
        raise ModelFormatError(
            f"the draft model's graph does not fit its manifest: got {signature(session)}; expected input_ids, "
            f"seqlens_k, total_sequence_length and {m.num_layers} layers of past_key_values.N.key/value "
            f"[batch, {m.num_kv_heads}, length, {m.head_size}] -> logits [batch, 1, {m.num_head_vocab}]; "
            "build the draft model again"
        )
