"""What one llama_decode is given: spans of token lists, laid out in a llama_batch. llama.cpp itself is handed in."""

from __future__ import annotations

import collections.abc as abc
import ctypes
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.verifiers.base import Rows
from edgespec.verifiers.host_memory import HostMemory


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens start..stop of a slot, to be evaluated; the last num_rows of them give rows."""

    slot: int
    tokens: list[int]
    start: int
    stop: int
    num_rows: int


class Batch:
    """A llama_batch over numpy arrays from ``memory``, filled anew for every decode."""

    def __init__(self, lib: Any, size: int, memory: HostMemory) -> None:
        self.size = size
        self._tokens, self._positions, self._slots, self._counts = memory.array((4, size), np.int32)
        self._counts.fill(1)
        self._wanted = memory.array(size, np.int8)
        # llama.cpp wants a pointer per token to the sequences it belongs to: here always one
        self._slot_pointers = self._slots.ctypes.data + self._slots.itemsize * np.arange(size, dtype=np.uintp)
        self._spans: list[Span] = []
        self._end = 0
        self.native = lib.llama_batch(
            0,
            _pointer(self._tokens, ctypes.c_int32),
            None,
            _pointer(self._positions, ctypes.c_int32),
            _pointer(self._counts, ctypes.c_int32),
            _pointer(self._slot_pointers, ctypes.POINTER(ctypes.c_int32)),
            _pointer(self._wanted, ctypes.c_int8),
        )

    @property
    def room(self) -> int:
        return self.size - self._end

    def add(self, span: Span) -> None:
        """Append a span that fits."""
        part = slice(self._end, self._end + span.stop - span.start)
        self._tokens[part] = span.tokens[span.start : span.stop]
        self._positions[part] = np.arange(span.start, span.stop)
        self._slots[part] = span.slot
        self._wanted[part] = 0
        self._wanted[part.stop - span.num_rows : part.stop] = 1
        self._spans.append(span)
        self._end = part.stop

    def take(self) -> tuple[list[Span], int]:
        """What the batch holds and its tokens; ``native`` is then ready, and the next ``add`` starts afresh."""
        taken = self._spans, self._end
        self.native.n_tokens = self._end
        self._spans, self._end = [], 0
        return taken


def cut(span: Span, max_rows: int) -> list[Span]:
    """The span in pieces of at most max_rows rows; all before the first row belongs to the first piece."""
    first = span.stop - span.num_rows
    stops = [*range(first + max_rows, span.stop, max_rows), span.stop]
    starts = [span.start, *stops[:-1]]
    return [
        replace(span, start=start, stop=stop, num_rows=stop - max(start, first))
        for start, stop in zip(starts, stops, strict=True)
    ]


def grouped(spans: list[Span], max_rows: int) -> list[list[Span]]:
    """Spans in their order, as few groups as have at most max_rows rows each."""
    groups: list[list[Span]] = []
    room = 0
    for span in spans:
        if span.num_rows > room:
            groups.append([])
            room = max_rows
        groups[-1].append(span)
        room -= span.num_rows
    return groups


def collected(spans: list[Span], max_rows: int, evaluate: abc.Callable[[list[Span]], list[Rows]]) -> list[Rows]:
    """The rows of each span, where one evaluation gives at most max_rows and the next overwrites them.

    Those of the last evaluation are as they were given, of earlier ones copies. A slot has one span.
    """
    groups = grouped([piece for span in spans for piece in cut(span, max_rows)], max_rows)
    found: dict[int, list[Rows]] = {span.slot: [] for span in spans}
    for group in groups:
        for span, rows in zip(group, evaluate(group), strict=True):
            found[span.slot].append(rows if group is groups[-1] else rows.copy())
    return [rows[0] if len(rows) == 1 else np.concatenate(rows) for rows in found.values()]


def split(rows: Rows, spans: list[Span]) -> list[Rows]:
    """Views of each span's rows, which lie one after the other in the order of the spans."""
    stops = list(accumulate(span.num_rows for span in spans))
    return [rows[stop - span.num_rows : stop] for span, stop in zip(spans, stops, strict=True)]


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
