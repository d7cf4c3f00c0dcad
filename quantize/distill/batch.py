"""Many texts written at once by a teacher: rows of one batch, each taken by the next text as soon as one is done."""

from __future__ import annotations

import collections.abc as abc

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from quantize.distill.cache import Cache
from quantize.distill.decoder import Decoder
from quantize.distill.writing import Writing

MIN_P = 0.05  # tokens this much less likely than the likeliest are never drawn

_MAX_PADDED = 4096  # tokens of prompts read at once
_STEPWISE = 8  # tokens a row may have to read and still go along with those that read one
_TOGETHER, _PATIENCE = 4, 8  # prompts wait for each other: so many are read at once, or those there are every few steps
_NUM_CANDIDATES = 4
_BLOCK = 256

Bits = NDArray[np.uint16]


class Batch:
    """``num_rows`` texts of up to ``max_length`` tokens at once. One thread."""

    def __init__(self, teacher: Decoder, num_rows: int, max_length: int) -> None:
        self._teacher, self._cache = teacher, Cache(teacher, num_rows, max_length)
        width = teacher.dimensions.width
        self._hidden = torch.zeros(num_rows, max_length, width, dtype=torch.bfloat16)
        self._newest = torch.zeros(num_rows, width, dtype=teacher.dtype, device=teacher.device)
        self._rows: list[Writing | None] = [None] * num_rows
        self._num_steps = 0

    def run(self, writings: abc.Iterable[Writing]) -> abc.Iterator[tuple[Writing, Bits] | None]:
        """Write all of them. Yields each text that is done with its hidden states (tokens, width), and None after every
        step; a caller that stops listening leaves the rest unwritten."""
        waiting = iter(writings)
        while self._fill(waiting):
            yield None
            for row in self._step():
                yield self._finish(row)

    def _fill(self, waiting: abc.Iterator[Writing]) -> bool:
        """Give free rows to those that wait; whether any row is in use."""
        for row, writing in enumerate(self._rows):
            if writing is None:
                self._rows[row] = next(waiting, None)
        return any(writing is not None for writing in self._rows)

    @torch.inference_mode()
    def _step(self) -> list[int]:
        """Read what long prompts there are, then one token of every row. Returns the rows that are done."""
        due = {row: writing.due for row, writing in enumerate(self._rows) if writing is not None}
        prompts = sorted((row for row in due if len(due[row]) > _STEPWISE), key=lambda row: (len(due[row]), row))
        if len(prompts) >= _TOGETHER or self._num_steps % _PATIENCE == 0:
            for rows in _portions(prompts, due):
                self._read(rows, [due[row] for row in rows])
        self._num_steps += 1
        rows = [row for row in due if row not in prompts]
        if rows:
            self._read(rows, [due[row][:1] for row in rows])
        return self._go_on(sorted(due))

    def _read(self, rows: list[int], tokens: list[list[int]]) -> None:
        """Let the teacher read more of these rows, and keep its hidden states. Where it is most of the rows, the others
        go along as padding: to gather some rows of the cache means to copy them."""
        every = len(rows) * 2 > len(self._rows) and max(map(len, tokens)) == 1
        batch = list(range(len(self._rows))) if every else rows
        by_row = dict(zip(rows, tokens, strict=True))
        counts = torch.tensor([len(by_row.get(row, ())) for row in batch])
        padded = torch.zeros(len(batch), int(counts.max()), dtype=torch.int64)
        for place, row in enumerate(batch):
            padded[place, : counts[place]] = torch.tensor(by_row.get(row, ()), dtype=torch.int64)
        places = None if every else torch.tensor(batch)
        hidden = self._teacher(padded.to(self._teacher.device), self._cache, counts, places)
        self._keep(batch, counts, hidden)

    def _keep(self, batch: list[int], counts: Tensor, hidden: Tensor) -> None:
        rows, stored = torch.tensor(batch), hidden.to("cpu", torch.bfloat16)
        place, step = (torch.arange(stored.shape[1]) < counts[:, None]).nonzero(as_tuple=True)
        starts = (self._cache.lengths[rows] - counts)[place]
        self._hidden[rows[place], starts + step] = stored[place, step]
        last = (counts > 0).nonzero()[:, 0]
        self._newest[rows[last]] = hidden[last, counts[last] - 1]
        for row, count in zip(batch, counts.tolist(), strict=True):
            if count and (writing := self._rows[row]):
                writing.have_read(count)

    def _go_on(self, rows: list[int]) -> list[int]:
        """Draw the next token of rows that have read all; those that are done are returned."""
        read = {row: writing for row in rows if (writing := self._rows[row]) and not writing.due}
        drawing = {row: writing for row, writing in read.items() if not writing.done}
        if drawing:
            temperatures = [writing.temperature for writing in drawing.values()]
            uniforms = [writing.draw() for writing in drawing.values()]
            chosen = draw(self._teacher, self._newest[list(drawing)], temperatures, uniforms)
            for writing, token in zip(drawing.values(), chosen, strict=True):
                writing.take(token)
        return [row for row, writing in read.items() if writing.done and not writing.due]

    def _finish(self, row: int) -> tuple[Writing, Bits]:
        writing, self._rows[row] = self._rows[row], None
        assert writing is not None
        self._cache.clear([row])
        hidden = self._hidden[row, : len(writing.tokens)].clone()
        return writing, hidden.view(torch.int16).numpy().view(np.uint16)


def _portions(rows: list[int], due: abc.Mapping[int, list[int]]) -> abc.Iterator[list[int]]:
    """Rows of similar length that together are not too many tokens."""
    portion: list[int] = []
    for row in rows:
        if portion and len(due[row]) * (len(portion) + 1) > _MAX_PADDED:
            yield portion
            portion = []
        portion.append(row)
    if portion:
        yield portion


def draw(
    teacher: Decoder, hidden: Tensor, temperatures: abc.Sequence[float], uniforms: abc.Sequence[float]
) -> list[int]:
    """The next tokens of rows of hidden states (n, width): the most likely at temperature 0, else by the uniform number
    in [0, 1), of those at least MIN_P as likely as the likeliest."""
    logits = teacher.logits(hidden)
    chosen = torch.empty(len(hidden), dtype=torch.int64, device=logits.device)
    heat = torch.tensor(temperatures, device=logits.device)
    cold, hot = (heat == 0).nonzero()[:, 0], (heat > 0).nonzero()[:, 0]
    if len(cold):
        chosen[cold] = _likeliest(teacher, hidden[cold], logits[cold])
    if len(hot):
        share = torch.tensor(uniforms, device=logits.device)[hot]
        chosen[hot] = _drawn(logits[hot].float().div_(heat[hot, None]), share)
    return chosen.tolist()


def _likeliest(teacher: Decoder, hidden: Tensor, logits: Tensor) -> Tensor:
    """Rounded logits have ties and worse, so the best few are computed again."""
    head = teacher.embedding if teacher.head is None else teacher.head
    ids = logits.topk(min(_NUM_CANDIDATES, logits.shape[1])).indices
    exact = torch.einsum("nkw,nw->nk", head[ids].float(), hidden.float())
    return ids.gather(1, exact.argmax(1, keepdim=True))[:, 0]


def _drawn(logits: Tensor, uniforms: Tensor) -> Tensor:
    """By where the uniform number falls among the summed weights: of blocks first, then within one."""
    weights = torch.exp(logits - logits.amax(1, keepdim=True))
    weights[weights < MIN_P] = 0
    blocks = functional.pad(weights, (0, -weights.shape[1] % _BLOCK)).view(len(weights), -1, _BLOCK)
    ends = blocks.sum(2).cumsum(1)
    target = uniforms * ends[:, -1]
    block = _first_above(ends, target)
    rows = torch.arange(len(blocks), device=logits.device)
    before = ends[rows, block] - blocks[rows, block].sum(1)
    inner = blocks[rows, block]
    return block * _BLOCK + _first_above(inner.cumsum(1), (target - before).clamp(min=0))


def _first_above(sums: Tensor, target: Tensor) -> Tensor:
    """The first place whose sum is above the target; rounding may hide it, then the place of the last increase."""
    last = (sums >= sums[:, -1:]).int().argmax(1)
    return torch.minimum(torch.searchsorted(sums, target[:, None], right=True)[:, 0], last)
