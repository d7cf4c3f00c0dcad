"""What a round costs outside the two runtimes: ``python -m tests.bench.overhead`` prints milliseconds a round.

A verifier and a draft model that answer at once, from rows that lie ready; everything else is real: the loop and the
drafter's thread, the policy, OnnxDrafter's sampling of five drafted tokens, judging six rows, committing. Vocabulary
151,936 on both sides, all accepted. Exits with 1 where the sequential loop takes more than 0.3 ms greedy, or 1.2 ms
sampled with top-k 40 (medians of the repeats). The overlapped loop hides its drafting behind the verifier, which takes
no time here to hide anything behind, and draws one token more; the last column has what is added until a chunk of text
reaches the caller's thread. Takes about 15 s.
"""

from __future__ import annotations

import argparse
import collections.abc as abc
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from edgespec.core.costs import Costs
from edgespec.core.policy import DEFAULT_POLICY, Plan
from edgespec.core.sequence import Cancelled, Round, SamplingParams, Sequence, never
from edgespec.core.track import Track
from edgespec.drafters.onnx import OnnxDrafter
from edgespec.engine.draft_thread import DraftThread
from edgespec.engine.loops import overlapped, sequential
from edgespec.engine.rounds import Guide
from edgespec.runtime import Chunk, Runtime
from edgespec.text.tokenizer import Tokenizer
from edgespec.verifiers.base import Rows, ScoreRequest
from tests.bench.sampling import make_rows
from tests.fakes import FakeTokenizer

NUM_VOCAB, LENGTH, NUM_CTX = 151_936, 5, 1 << 14
LIMITS_S = {"greedy": 0.3e-3, "top-k 40": 1.2e-3}


class ReadyVerifier:
    """The same row after every token, each copy of it in memory of its own, as a real verifier's rows lie."""

    num_ctx, num_slots = NUM_CTX, 1

    def __init__(self, row: NDArray[np.float32]) -> None:
        self.num_vocab = len(row)
        self._rows = np.tile(row, (LENGTH + 1, 1))

    def score(self, requests: abc.Sequence[ScoreRequest], cancelled: Cancelled = never) -> list[Rows]:
        return [self._rows[: request.num_rows] for request in requests]

    def close(self) -> None: ...


class ReadyModel:
    """The same row after every token; see DraftModel."""

    num_ctx = NUM_CTX

    def __init__(self, row: NDArray[np.float32]) -> None:
        self.num_vocab = self.num_logits = len(row)
        self._row = row

    def chunk(self, num_cached: int) -> int:
        return NUM_CTX

    def extend(self, slot: int, tokens: abc.Sequence[int], num_cached: int) -> NDArray[np.float32]:
        return self._row

    def step(self, tokens: abc.Mapping[int, int], num_cached: abc.Sequence[int]) -> dict[int, NDArray[np.float32]]:
        return dict.fromkeys(tokens, self._row)

    def close(self) -> None: ...


class WideTokenizer(FakeTokenizer):
    num_vocab = NUM_VOCAB
    end_tokens: frozenset[int] = frozenset()

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return b"a"


@dataclass(frozen=True)
class Exactly:
    """The default policy at work, and drafts of LENGTH whatever it says."""

    def plans(self, tracks: abc.Sequence[Track], costs: Costs, *, overlapped: bool = False) -> list[Plan]:
        DEFAULT_POLICY.plans(tracks, costs, overlapped=overlapped)
        return [Plan(LENGTH)] * len(tracks)


def settings() -> dict[str, SamplingParams]:
    greedy = SamplingParams(temperature=0.0, max_tokens=None)
    return {"greedy": greedy, "top-k 40": SamplingParams(temperature=0.8, top_k=40, seed=1, max_tokens=None)}


class Bench:
    """The backends, and a Runtime over them that only the chunks are measured with."""

    def __init__(self, num_vocab: int) -> None:
        row = make_rows(1, num_vocab)[0]
        self._verifier = ReadyVerifier(row)
        self._drafter = DraftThread(OnnxDrafter(ReadyModel(row), 1, num_vocab, Path(), None))
        drafter, tokenizer = OnnxDrafter(ReadyModel(row), 1, num_vocab, Path(), None), cast(Tokenizer, WideTokenizer())
        self._runtime = Runtime(self._verifier, drafter, tokenizer, policy=Exactly())

    def close(self) -> None:
        self._drafter.close()
        self._runtime.close()

    def sequential_s(self, params: SamplingParams, num_rounds: int) -> float:
        loop = sequential(self._sequence(params), self._drafter, self._verifier, Guide(Exactly()))
        return _mean_s(loop, num_rounds)

    def overlapped_s(self, params: SamplingParams, num_rounds: int) -> float:
        return _mean_s(overlapped(self._sequence(params), self._drafter, self._verifier, Guide(Exactly())), num_rounds)

    def chunks_s(self, params: SamplingParams, num_rounds: int) -> float:
        """The sequential loop, up to the caller's thread."""
        with self._runtime.stream("abc", params, raw=True, mode="sequential") as stream:
            seconds = _mean_s(stream, num_rounds)
            stream.cancel()
            for _ in stream:  # to its end, so that the next one does not run beside it
                pass
        return seconds

    def _sequence(self, params: SamplingParams) -> Sequence:
        return Sequence([1, 2, 3], replace(params, seed=1), NUM_CTX)


def _mean_s(rounds: abc.Iterator[Round | Chunk], num_rounds: int) -> float:
    """Mean seconds of a round, the first ten left out."""
    for _ in range(10):
        next(rounds)
    began = time.perf_counter()
    for _ in range(num_rounds):
        last = next(rounds)
    seconds = time.perf_counter() - began
    assert len(last.tokens) == LENGTH + 1, "a draft was not accepted whole: the figures would mean something else"
    return seconds / num_rounds


def main(arguments: abc.Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overhead", description="Time outside the runtimes.")
    parser.add_argument("--rounds", type=int, default=400, help="rounds of each repeat (default: 400)")
    parser.add_argument("--repeats", type=int, default=5, help="repeats, the median counts (default: 5)")
    parser.add_argument("--vocabulary", type=int, default=NUM_VOCAB, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    bench, passed = Bench(options.vocabulary), True
    ways = (bench.sequential_s, bench.overlapped_s, bench.chunks_s)
    print("| sampling | sequential loop, ms a round | limit | overlapped loop | sequential, to the caller |")
    print("|---|---|---|---|---|")
    try:
        for name, params in settings().items():
            repeats = [[way(params, options.rounds) for way in ways] for _ in range(options.repeats)]
            loop_s, ahead_s, chunk_s = (statistics.median(times) for times in zip(*repeats, strict=True))
            passed &= loop_s <= LIMITS_S[name]
            cells = (loop_s, LIMITS_S[name], ahead_s, chunk_s)
            print(f"| {name} | {' | '.join(f'{1000 * cell:.2f}' for cell in cells)} |")
    finally:
        bench.close()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
