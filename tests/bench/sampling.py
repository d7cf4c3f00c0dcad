"""What selecting a token costs: ``python -m tests.bench.sampling`` prints a markdown table, in microseconds a call.

Rows look like a language model's: a normal bulk, and some tens of candidates that stand out. One thread.
"""

from __future__ import annotations

import collections.abc as abc
import time
import timeit
from dataclasses import replace

import numpy as np

from edgespec.core.acceptance import judge
from edgespec.core.ranking import largest
from edgespec.core.sampling import Stream, distribution, pick
from edgespec.core.sequence import Draft, SamplingParams

VOCABULARIES = (151_936, 49_152)
NUM_DRAFT = 5
NUM_PROMPT = 1000
OPEN = SamplingParams(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=1)
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "top-k 40": replace(OPEN, top_k=40),
    "top-k 40, top-p 0.95, min-p 0.05": replace(OPEN, top_k=40, top_p=0.95, min_p=0.05),
    "the same, penalties over 2,000 tokens": replace(
        OPEN, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1.1, frequency_penalty=0.1
    ),
    "top-p 0.95": replace(OPEN, top_p=0.95),
    "min-p 0.05": replace(OPEN, min_p=0.05),
    "no filter": OPEN,
}


def make_rows(num: int, num_vocab: int) -> np.ndarray:
    rng = np.random.default_rng(num_vocab)
    rows = rng.standard_normal((num, num_vocab), dtype=np.float32) * np.float32(2)
    for row in rows:
        row[rng.choice(num_vocab, 100, replace=False)] += rng.exponential(3, 100).astype(np.float32) + np.float32(6)
    return rows


def micros(call: abc.Callable[[], object]) -> float:
    """CPU time, the best of several batches: the box may have other things to do."""
    timer = timeit.Timer(call, timer=time.process_time)
    number = max(1, int(0.06 / timer.timeit(3)))
    return min(timer.repeat(7, number)) / number * 1e6


def row_costs(num_vocab: int) -> abc.Iterator[tuple[str, float, float]]:
    row = make_rows(1, num_vocab)[0]
    tokens = np.random.default_rng(0).integers(0, num_vocab, 2 * NUM_PROMPT)
    yield "(top 40 alone)", micros(lambda: largest(row, 40)), 0.0
    for name, params in SETTINGS.items():
        dist = distribution(row, params, tokens, NUM_PROMPT)
        yield (
            name,
            micros(lambda params=params: distribution(row, params, tokens, NUM_PROMPT)),
            micros(lambda dist=dist, params=params: pick(dist, params, 7, Stream.DRAFT)),
        )


def judge_costs(num_vocab: int) -> abc.Iterator[tuple[str, float, float]]:
    """Judging a draft from the very distributions of the verifier: every row has to be read."""
    rows, tokens = make_rows(NUM_DRAFT + 1, num_vocab), [0] * 4000
    for name in ("greedy", "top-k 40, top-p 0.95, min-p 0.05"):
        for rule in ("coupled", "rejection"):
            params = replace(SETTINGS[name], rule=rule)
            dists = tuple(distribution(row, params, (), 0) for row in rows[:NUM_DRAFT])
            drafted = tuple(pick(dist, params, 4000 + i, Stream.DRAFT) for i, dist in enumerate(dists))
            draft = Draft(4000, drafted, dists)
            assert judge(draft, rows, params, tokens, NUM_PROMPT).accepted == NUM_DRAFT
            cost = micros(lambda draft=draft, params=params: judge(draft, rows, params, tokens, NUM_PROMPT))
            yield f"judge {NUM_DRAFT} drafted, all accepted: {name}, {rule}", cost, 0.0


def main() -> None:
    print("| vocabulary | what | distribution, us | pick, us |\n|---|---|---|---|")
    for num_vocab in VOCABULARIES:
        for costs in (row_costs(num_vocab), judge_costs(num_vocab)):
            for name, first, second in costs:
                print(f"| {num_vocab:,} | {name} | {first:.0f} | {f'{second:.0f}' if second else ''} |")


if __name__ == "__main__":
    main()
