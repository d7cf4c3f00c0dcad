"""Sampling done the slow and obvious way, to compare with: dense, in float64, one step after the other."""

from __future__ import annotations

import collections.abc as abc

import numpy as np
from numpy.typing import NDArray

from edgespec.core.sequence import Distribution, SamplingParams

Floats = NDArray[np.float64]


def penalised(row: NDArray[np.float32], params: SamplingParams, tokens: abc.Sequence[int], num_prompt: int) -> Floats:
    logits = row.astype(np.float64)
    for token in set(tokens):
        logits[token] *= 1 / params.repeat_penalty if logits[token] > 0 else params.repeat_penalty
    for token in set(tokens[num_prompt:]):
        logits[token] -= params.presence_penalty
    for token in tokens[num_prompt:]:
        logits[token] -= params.frequency_penalty
    for token, bias in params.logit_bias:
        logits[token] += bias
    return logits


def probabilities(
    row: NDArray[np.float32], params: SamplingParams, tokens: abc.Sequence[int] = (), num_prompt: int = 0
) -> Floats:
    """The distribution as a dense array over the vocabulary."""
    logits = penalised(row, params, tokens, num_prompt)
    ranking = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.temperature == 0:
        return np.eye(len(logits))[ranking[0]]
    weights = np.exp((logits - logits.max()) / params.temperature)
    kept = ranking[: params.top_k or len(ranking)]
    kept = _nucleus(kept, weights, params.top_p)
    kept = [i for i in kept if weights[i] >= params.min_p * weights.max()]
    result = np.zeros(len(logits))
    result[kept] = weights[kept] / weights[kept].sum()
    return result


def _nucleus(ranking: list[int], weights: Floats, top_p: float) -> list[int]:
    if top_p == 1:
        return ranking
    wanted, mass = top_p * weights[ranking].sum(), 0.0
    for num, i in enumerate(ranking, start=1):
        mass += weights[i]
        if mass >= wanted:
            return ranking[:num]
    return ranking


def dense(dist: Distribution, size: int) -> Floats:
    result = np.zeros(size)
    result[dist.ids] = dist.probs
    return result


def random_row(size: int, seed: int = 0, scale: float = 2.5) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)
