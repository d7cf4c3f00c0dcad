"""How fast an answer is decoded."""

from __future__ import annotations

import collections.abc as abc
import time
from typing import NamedTuple, TypeVar

from edgespec.core.policy import Policy
from edgespec.core.sequence import SamplingParams
from edgespec.runtime import Mode, Prompt, Runtime

_T = TypeVar("_T")


class Run(NamedTuple):
    """One answer: its tokens after the first round and the seconds they took, what was drafted, its tokens."""

    num_tokens: int
    seconds: float
    drafted: int
    accepted: int
    tokens: tuple[int, ...] = ()


def timed(
    runtime: Runtime,
    prompt: Prompt,
    params: SamplingParams,
    mode: Mode | None = None,
    policy: Policy | None = None,
) -> Run:
    """Answer a prompt. The first round is left out of the rate: it evaluates what is left of the prompt."""
    first_s, num_first = 0.0, 0
    tokens: list[int] = []
    for chunk in runtime.stream(prompt, params, mode=mode, policy=policy):
        if not tokens:
            first_s, num_first = time.perf_counter(), len(chunk.tokens)
        tokens += chunk.tokens
        last_s = time.perf_counter()
    stats = chunk.stats
    return Run(len(tokens) - num_first, last_s - first_s, stats.drafted, stats.accepted, tuple(tokens))


def rate(runs: abc.Iterable[Run]) -> float:
    """Tokens a second over all of them; 0.0 where every answer came in its first round."""
    runs = list(runs)
    seconds = sum(run.seconds for run in runs)
    return sum(run.num_tokens for run in runs) / seconds if seconds else 0.0


def acceptance(runs: abc.Iterable[Run]) -> float:
    """accepted / drafted over all of them; 0.0 where nothing was drafted."""
    runs = list(runs)
    return sum(run.accepted for run in runs) / max(1, sum(run.drafted for run in runs))


def rotated(items: abc.Sequence[_T], turn: int) -> list[_T]:
    """In another order each turn, so that none is always first."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


def drafting_mode(runtime: Runtime) -> Mode:
    """One in which both sides read a prompt, where there are two."""
    return "plain" if runtime.draft_name == "none" else "sequential"
