"""A corpus as batches: which texts are only measured by, which come together and in what order, and their tensors."""

from __future__ import annotations

import collections.abc as abc
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from edgespec.errors import ParameterError
from quantize.distill.corpus import Text

HELD_OUT_EVERY, MIN_HELD_OUT = 50, 8  # one text of so many is held out, where that makes at least so many
MIN_TEXTS = 2 * MIN_HELD_OUT
_POOL = 512  # texts that are sorted by length together

Numbers = NDArray[np.int64]


class Batch(NamedTuple):
    """
    tokens   (rows, length) int64, shorter texts filled up with 0
    places   (positions,) where in the flattened ``tokens`` those are that are learned from
    taught   (positions, width) bfloat16, the teacher's last hidden states
    written  (positions,) whether the token that follows is the model's own
    num_tokens  of the texts
    """

    tokens: torch.Tensor
    places: torch.Tensor
    taught: torch.Tensor
    written: torch.Tensor
    num_tokens: int


def split(num_texts: int) -> tuple[Numbers, Numbers]:
    """The numbers of texts to train on, and of the held-out ones. In a corpus that grows the old ones stay what they
    were, once it has a few hundred. Raises ParameterError for too few texts."""
    if num_texts < MIN_TEXTS:
        raise ParameterError(
            f"the corpus has {num_texts} texts; training needs at least {MIN_TEXTS}; write more tokens"
        )
    numbers = np.arange(num_texts)
    held_out = numbers % min(HELD_OUT_EVERY, num_texts // MIN_HELD_OUT) == 0
    return numbers[~held_out], numbers[held_out]


def epoch(numbers: Numbers, lengths: Numbers, max_tokens: int, seed: int, number: int) -> list[Numbers]:
    """Every text once, texts of about the same length together, in an order that depends on (seed, number) only.

    lengths     of all texts, in tokens
    max_tokens  of a batch, filling included; a longer text comes alone
    """
    random = np.random.default_rng((seed, number))
    order = random.permutation(numbers)
    pools = [order[start : start + _POOL] for start in range(0, len(order), _POOL)]
    batches = [batch for pool in pools for batch in _by_length(pool, lengths, max_tokens)]
    return [batches[place] for place in random.permutation(len(batches))]


def _by_length(pool: Numbers, lengths: Numbers, max_tokens: int) -> abc.Iterator[Numbers]:
    """The longest first, which says how many come with it."""
    ordered = pool[np.argsort(-lengths[pool], kind="stable")]
    start = 0
    while start < len(ordered):
        num_rows = max(1, max_tokens // int(lengths[ordered[start]]))
        yield ordered[start : start + num_rows]
        start += num_rows


def collate(
    texts: abc.Sequence[Text], max_length: int, prompt_share: float, random: np.random.Generator, device: str
) -> Batch:
    """Of a text longer than ``max_length`` the end: there the model writes.

    All positions are learned from where the model wrote what follows, and a random share of those where it was given:
    that is as good as to count them less, and costs less.
    """
    lengths = [min(len(text.tokens), max_length) for text in texts]
    tokens = np.zeros((len(texts), max(lengths)), dtype=np.int64)
    places, taught, written = [], [], []
    for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        tokens[row, :length] = text.tokens[-length:]
        follows = text.written[-length:][1:]  # nothing follows the last token
        kept = np.flatnonzero(follows | (random.random(length - 1) < prompt_share))
        places.append(row * tokens.shape[1] + kept)
        taught.append(text.hidden[-length:][kept])
        written.append(follows[kept])
    bits = torch.from_numpy(np.concatenate(taught).view(np.int16)).view(torch.bfloat16)
    parts = (tokens, np.concatenate(places), np.concatenate(written))
    ids, where, own = (torch.from_numpy(part).to(device) for part in parts)
    return Batch(ids, where, bits.to(device), own, sum(lengths))
