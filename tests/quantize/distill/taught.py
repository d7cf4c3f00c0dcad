"""A small corpus with a real teacher: random texts of few different tokens, and what the teacher makes of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from quantize.distill.corpus import Corpus, CorpusWriter, Text
from quantize.distill.decoder import Decoder
from quantize.source import Source

NUM_TOKENS = 24  # different ones
HEAD = np.arange(0, 320, 2, dtype=np.int64)


def write_corpus(folder: Path, source: Source, num_texts: int = 40, *, seed: int = 0) -> Corpus:
    """Texts of 8 to 40 tokens; the first three of each were given. A folder that has some gets more."""
    teacher = Decoder.of(source)
    writer = CorpusWriter(folder, {"seed": seed})
    for number in range(writer.num_texts, num_texts):
        writer.add(_text(teacher, np.random.default_rng((seed, number))))
    writer.flush()
    return Corpus(folder)


@torch.inference_mode()
def _text(teacher: Decoder, random: np.random.Generator) -> Text:
    length = int(random.integers(8, 40))
    tokens = random.integers(3, 3 + NUM_TOKENS, length).tolist()
    hidden = teacher(torch.tensor([tokens]))[0].bfloat16().view(torch.int16).numpy().view(np.uint16)
    return Text(tokens, np.arange(length) >= 3, hidden, "chat", 0.0)


def student_of(source: Source) -> Decoder:
    return Decoder.of(source, [0], head=HEAD)


def head_of(source: Source) -> torch.Tensor:
    return torch.from_numpy(source.matrix("output.weight").take(HEAD).read(0, len(HEAD)))
