"""Published decoder exports: the usual input names, a KV cache that grows by what each call returns.

input_ids (batch, length), attention_mask (batch, past + length), optionally position_ids (batch, length),
use_cache_branch (1,) and num_logits_to_keep (), and past_key_values.N.key/value (batch, heads, past, head_size) float32
or float16 give logits (batch, length or 1, vocabulary) and present.N.key/value (batch, heads, past + length,
head_size): the names of Optimum's and onnxruntime-genai's exports.
"""

from __future__ import annotations

import collections.abc as abc
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgespec.drafters.onnx_session import Row, run, signature
from edgespec.errors import BackendError, ModelFormatError

CHUNK = 64

_CACHE = re.compile(r"past_key_values\.\d+\.(key|value)")
_DTYPES: dict[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}
_REQUIRED = {"input_ids", "attention_mask"}
_OPTIONAL = {"position_ids", "use_cache_branch", "num_logits_to_keep"}


@dataclass(frozen=True, slots=True)
class _Input:
    name: str
    dtype: type[np.generic]
    shape: tuple[int | str | None, ...]


class GrowingCacheModel:
    """See DraftModel. One slot per call; correctness first. Opening evaluates one token, which shows that it runs."""

    def __init__(self, session: Any, num_slots: int, num_ctx: int) -> None:
        self._session, self.num_ctx = session, num_ctx
        inputs = _checked_inputs(session)
        self._caches = [value for value in inputs if _CACHE.fullmatch(value.name)]
        self._others = [value for value in inputs if not _CACHE.fullmatch(value.name)]
        self._merged = any(value.name == "use_cache_branch" for value in inputs)
        self._past: list[list[Any]] = [self._empty() for _ in range(num_slots)]
        self.num_logits = self.num_vocab = self._probe()

    def chunk(self, num_cached: int) -> int:
        """Merged exports may have been traced with one token after a past and then know no causal mask there."""
        if not self._merged:
            return CHUNK
        return 1 if num_cached else self.num_ctx

    def extend(self, slot: int, tokens: abc.Sequence[int], num_cached: int) -> Row:
        past = [_trimmed(value, num_cached) for value in self._past[slot]]
        binding = self._session.io_binding()
        for value, cache in zip(self._caches, past, strict=True):
            binding.bind_ortvalue_input(value.name, cache)
        for value in self._others:
            binding.bind_cpu_input(value.name, _content(value, tokens, num_cached))
        outputs = ["logits", *(_present(value.name) for value in self._caches)]
        for name in outputs:
            binding.bind_output(name, "cpu")
        run(self._session, binding)
        logits, *self._past[slot] = binding.get_outputs()
        row: Row = logits.numpy()[0, -1].astype(np.float32, copy=False)
        return row

    def step(self, tokens: abc.Mapping[int, int], num_cached: abc.Sequence[int]) -> dict[int, Row]:
        return {slot: self.extend(slot, (token,), num_cached[slot]) for slot, token in tokens.items()}

    def close(self) -> None:
        self._past.clear()
        self._session = None

    def _empty(self) -> list[Any]:
        """A cache of no tokens, one OrtValue an input."""
        return [
            ort.OrtValue.ortvalue_from_numpy(np.zeros(_shape(cache, 0), dtype=cache.dtype)) for cache in self._caches
        ]

    def _probe(self) -> int:
        """The number of logits. A model that breaks here, or whose cache does not grow by one, is of another kind."""
        try:
            num_logits = len(self.extend(0, (0,), 0))
        except BackendError as error:
            raise ModelFormatError(f"the draft model fails on its first token: {error}") from error
        if any(value.shape()[2] != 1 for value in self._past[0]):
            raise _wrong_kind(self._session)
        self._past[0] = self._empty()
        return num_logits


def _checked_inputs(session: Any) -> list[_Input]:
    inputs = [_Input(x.name, _DTYPES.get(x.type, np.void), tuple(x.shape)) for x in session.get_inputs()]
    caches = [value for value in inputs if _CACHE.fullmatch(value.name)]
    others = {value.name for value in inputs} - {value.name for value in caches}
    outputs = {value.name for value in session.get_outputs()}
    fits = all(len(cache.shape) == 4 and {type(cache.shape[1]), type(cache.shape[3])} == {int} for cache in caches)
    if not caches or not fits or not _REQUIRED <= others <= _REQUIRED | _OPTIONAL:
        raise _wrong_kind(session)
    if not {"logits", *(_present(cache.name) for cache in caches)} <= outputs or np.void in {v.dtype for v in inputs}:
        raise _wrong_kind(session)
    return inputs


def _wrong_kind(session: Any) -> ModelFormatError:
    return ModelFormatError(
        f"the draft model is no decoder with a KV cache: got {signature(session)}; expected input_ids, attention_mask, "
        "optionally position_ids, and past_key_values.N.key/value [batch, heads, past, size] -> logits, "
        "present.N.key/value; export it for text generation with past"
    )


def _shape(cache: _Input, num_cached: int) -> tuple[int, ...]:
    _, num_heads, _, head_size = cache.shape
    return 1, int(num_heads or 0), num_cached, int(head_size or 0)


def _present(cache: str) -> str:
    return cache.replace("past_key_values", "present", 1)


def _content(value: _Input, tokens: abc.Sequence[int], num_cached: int) -> NDArray[Any]:
    """What an input other than the cache gets."""
    total = num_cached + len(tokens)
    contents: dict[str, Any] = {
        "input_ids": [tokens],
        "attention_mask": np.ones((1, total)),
        "position_ids": [range(num_cached, total)],
        "use_cache_branch": [num_cached > 0],
        "num_logits_to_keep": np.ones([1] * len(value.shape)),
    }
    return np.asarray(contents[value.name], dtype=value.dtype)


def _trimmed(cache: Any, num_cached: int) -> Any:
    """The first ``num_cached`` places of a cache."""
    if cache.shape()[2] == num_cached:
        return cache
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(cache.numpy()[:, :, :num_cached]))
