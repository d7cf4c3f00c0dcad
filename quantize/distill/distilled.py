"""What was trained, as a Source: the student's weights, with the vocabulary and the embedding of the model it is of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from edgespec.errors import ModelFormatError
from quantize.architecture import Architecture
from quantize.distill.decoder import Decoder, Ids
from quantize.source import Dimensions, Floats, Matrix, Source


@dataclass(frozen=True, slots=True)
class DistilledSource:
    """See quantize.source.Source; ``build_draft_of`` makes a draft of it.

    source    what the student was made from
    head_ids  the ids its head speaks, ascending, to be given to ``build_draft_of`` too; None: the whole vocabulary

    Reads the decoder's weights when they are asked for: do not train meanwhile.
    """

    source: Source
    decoder: Decoder
    head_ids: Ids | None = None

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def architecture(self) -> Architecture:
        return self.source.architecture

    @property
    def dimensions(self) -> Dimensions:
        return self.decoder.dimensions

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.source.tokens

    @property
    def tied(self) -> bool:
        return self.decoder.head is None

    @property
    def pairs_neighbours(self) -> bool:
        return False

    def matrix(self, name: str) -> Matrix:
        if name == "token_embd.weight":
            return self.source.matrix(name)
        if name == "output.weight" and self.head_ids is not None:
            assert self.decoder.head is not None
            return HeadMatrix(_floats(self.decoder.head), self.head_ids, self.dimensions.num_vocab)
        return ArrayMatrix(self.vector(name))

    def vector(self, name: str) -> Floats:
        return _floats(self._tensor(name))

    def _tensor(self, name: str) -> Tensor:
        if not name.startswith("blk."):
            return self.decoder.get_parameter({"output_norm.weight": "output_norm", "output.weight": "head"}[name])
        _, number, own_name = name.split(".", 2)
        return self.decoder.layer(int(number)).tensors()[own_name]

    def sha256(self) -> str:
        return self.source.sha256()


@dataclass(frozen=True, slots=True)
class ArrayMatrix:
    """A Matrix in memory."""

    values: Floats

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def read(self, start: int, stop: int) -> Floats:
        return self.values[start:stop].copy()

    def take(self, rows: Ids) -> ArrayMatrix:
        return ArrayMatrix(self.values[rows])


@dataclass(frozen=True, slots=True)
class HeadMatrix:
    """A Matrix of the whole vocabulary that has the rows ``values`` of some ``ids`` only: they must be taken."""

    values: Floats
    ids: Ids
    num_vocab: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_vocab, self.values.shape[1]

    def read(self, start: int, stop: int) -> Floats:
        return self.take(np.arange(start, stop)).values

    def take(self, rows: Ids) -> ArrayMatrix:
        """Raises ValueError for an id that the head does not speak."""
        if unknown := np.setdiff1d(rows, self.ids).tolist():
            raise ValueError(f"the head was not trained for {len(unknown)} of these ids, {unknown[0]} for one")
        return ArrayMatrix(self.values[np.searchsorted(self.ids, rows)])


def _floats(tensor: Tensor) -> Floats:
    values: Floats = tensor.detach().float().cpu().numpy().copy()  # training goes on in the same memory
    if not np.isfinite(values).all():
        raise ModelFormatError("the trained weights are not all finite numbers; train with a lower learning rate")
    return values
