"""What a decoder remembers of the tokens it has read: keys and values, of rows that differ in length."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from quantize.distill.decoder import Decoder


_STEP = 64


class Cache:
    """Keys and values of ``num_rows`` texts of at most ``max_length`` tokens each.

    lengths  (num_rows,) int64 on the CPU: how many tokens each row holds. What lies beyond is never read, so a smaller
             number trims a row, and ``clear`` empties it. ``Decoder.forward`` counts what it appends

    Memory grows in steps with the longest row: products are fastest over whole arrays.
    """

    def __init__(self, decoder: Decoder, num_rows: int, max_length: int) -> None:
        d = decoder.dimensions
        shape = (num_rows, d.num_kv_heads, 0, d.head_size)
        self._memory = [
            [torch.zeros(shape, dtype=decoder.dtype, device=decoder.device) for _ in ("keys", "values")]
            for _ in range(d.num_layers)
        ]
        self.lengths = torch.zeros(num_rows, dtype=torch.int64)
        self.max_length = max_length

    def clear(self, rows: abc.Sequence[int]) -> None:
        """Forget what these rows hold."""
        self.lengths[torch.tensor(rows, dtype=torch.int64)] = 0

    def places(self, length: int, counts: Tensor | None, rows: Tensor | None) -> Places:
        """Where ``length`` more tokens of each of the rows go; see Decoder.forward. Raises ValueError without room."""
        every = torch.arange(len(self.lengths)) if rows is None else rows.cpu()
        starts = self.lengths[every]
        more = torch.full_like(starts, length) if counts is None else counts.cpu()
        ends = starts + more
        if (longest := int(ends.max())) > self.max_length:
            raise ValueError(f"the cache has room for {self.max_length} tokens a row; {longest} do not fit")
        self._make_room(longest)
        row, step = (torch.arange(length) < more[:, None]).nonzero(as_tuple=True)
        return Places(every, rows is None, starts, (row, step, every[row], starts[row] + step), ends, self.room)

    @property
    def room(self) -> int:
        """Tokens of a row that there is memory for now."""
        return self._memory[0][0].shape[2]

    def _make_room(self, longest: int) -> None:
        if longest <= self.room:
            return
        more = min(-(-longest // _STEP) * _STEP, self.max_length) - self.room
        for layer in self._memory:
            layer[:] = [functional.pad(memory, (0, 0, 0, more)) for memory in layer]

    def append(self, layer: int, keys: Tensor, values: Tensor, places: Places) -> None:
        """Write what is new of a layer, both (batch, length, key heads, head size)."""
        row, step, place, position = places.new
        for memory, fresh in zip(self._memory[layer], (keys, values), strict=True):
            memory[place, :, position] = fresh[row, step].to(memory.dtype)

    def read(self, layer: int, places: Places) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, (batch, key heads, room, head size)."""
        keys, values = (memory if places.all_rows else memory[places.rows] for memory in self._memory[layer])
        return keys, values

    def commit(self, places: Places) -> None:
        """Count what a whole forward has appended."""
        self.lengths[places.rows] = places.ends


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tokens of one forward go.

    rows      their numbers in the cache; all_rows: they are all of its rows in order
    starts    how many tokens each row holds before, (batch,); ends: and after
    new       of every new token: its row and step in the batch, its row and position in the cache
    room      positions that the cache has memory for
    """

    rows: Tensor
    all_rows: bool
    starts: Tensor
    new: tuple[Tensor, Tensor, Tensor, Tensor]
    ends: Tensor
    room: int

    @property
    def are_fresh(self) -> bool:
        """Whether all rows were empty, so that new tokens see nothing but each other."""
        return not bool(self.starts.any())
