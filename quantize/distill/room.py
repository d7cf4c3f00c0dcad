"""Whether a distillation has room: memory and disk, estimated before hours are spent."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from edgespec.devices.probe import usable_memory
from edgespec.errors import FileAccessError, MemoryBudgetError
from quantize.source import Dimensions

PROCESS_BYTES = 600 << 20  # Python, torch and their buffers
_STATE_BYTES = 12  # of a trained weight: itself and the optimizer's two averages, float32
_NUM_CHECKPOINTS = 4  # two, the one before the decay, and one being written
_POSITIONS = 4  # of a text, for each token that the verifier wrote of it
_USUAL_TOKENS_AT_ONCE = 96 * 4 * 200
_MIN_ROWS, _MAX_ROWS, _WEIGHTS_OF_A_STEP = 8, 96, 2e10  # times rows


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a distillation.

    num_layers, num_head  of the student
    num_rows      texts written at once
    max_length    tokens of each
    batch_tokens  positions of a training step
    """

    dimensions: Dimensions
    num_layers: int
    num_head: int
    num_rows: int
    max_length: int
    batch_tokens: int

    @property
    def teacher(self) -> int:
        return num_weights(self.dimensions)

    @property
    def student(self) -> int:
        """Weights that are trained."""
        return self.num_layers * layer_weights(self.dimensions) + self.num_head * self.dimensions.width

    @property
    def generate_bytes(self) -> int:
        """Weights of 16 bits, a cache for every row, and the hidden states kept."""
        d, positions = self.dimensions, self.num_rows * self.max_length
        kept = 2 * positions * (2 * d.num_layers * d.keys + d.width)
        return 2 * self.teacher + kept + 8 * self.num_rows * d.num_vocab

    @property
    def train_bytes(self) -> int:
        """Weights, rounded ones, gradients and averages, the embedding, and what the backward pass needs of every
        layer: about ten vectors of the model's width and four hidden ones a position."""
        d = self.dimensions
        kept = 4 * self.batch_tokens * (self.num_layers * (10 * d.width + 4 * d.num_hidden) + 6 * d.width)
        return (4 + 4 + _STATE_BYTES) * self.student + 4 * d.num_vocab * d.width + kept

    def disk_bytes(self, tokens: int | None) -> int:
        """Checkpoints, and the hidden states of the text, or of one shard where nobody said how much text."""
        text = 2 * self.dimensions.width * (_USUAL_TOKENS_AT_ONCE if tokens is None else _POSITIONS * tokens)
        return _NUM_CHECKPOINTS * _STATE_BYTES * self.student + text + 4 * self.dimensions.num_vocab * 2


def layer_weights(d: Dimensions) -> int:
    return 2 * d.width * (d.queries + d.keys) + 3 * d.width * d.num_hidden


def num_weights(d: Dimensions) -> int:
    """Of the whole model, the head counted where it is the embedding, too."""
    return d.num_layers * layer_weights(d) + 2 * d.num_vocab * d.width


def usual_rows(dimensions: Dimensions) -> int:
    """Texts to write at once: the larger a model, the longer a step of all of them takes, and the fewer are enough to
    keep the processor busy."""
    return max(_MIN_ROWS, min(_MAX_ROWS, int(_WEIGHTS_OF_A_STEP / num_weights(dimensions))))


def check_memory(sizes: Sizes) -> None:
    """Raises MemoryBudgetError."""
    stages = {"writing text": sizes.generate_bytes, "training": sizes.train_bytes}
    stage, most = max(stages.items(), key=lambda item: item[1])
    needed, free = most + PROCESS_BYTES, usable_memory()[1]
    if needed > free:
        raise MemoryBudgetError(
            f"{stage} takes about {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free; ask for a smaller "
            "--max-length or --batch-size, or close other programs"
        )


def check_disk(out: Path, sizes: Sizes, tokens: int | None) -> None:
    """Raises FileAccessError. What is there already is not counted again."""
    place = next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    made = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) if out.is_dir() else 0
    needed, free = sizes.disk_bytes(tokens) - made, shutil.disk_usage(place).free
    if needed > free:
        raise FileAccessError(
            f"{out} takes about {needed / 1e9:.1f} GB more, {free / 1e9:.1f} GB are free; free space, ask for fewer "
            "--tokens, or choose another folder"
        )
