"""What a round of the overlapped loop takes where both sides' times are known: ``python -m tests.bench.overlap``.

Scripted backends that sleep, the drafter for every token of a draft of 16, the verifier for a verification; everything
is accepted. A perfect overlap takes the longer of the two: 17 tokens come out of a round, of which 16 are the draft's,
so that a drafter which is the slower side still has to draw the 17th. Prints a row for each draft : verify, and exits
with 1 where the median round took more than 1.10 x max(draft, verify) + 0.3 ms. Takes about 25 s.
"""

from __future__ import annotations

import argparse
import collections.abc as abc
import itertools
import statistics
import sys
import time
from typing import NamedTuple

import numpy as np

from edgespec.core.policy import Fixed
from edgespec.core.sequence import Cancelled, Draft, SamplingParams, Sequence, never
from edgespec.drafters.base import DraftRequest
from edgespec.engine.draft_thread import DraftThread
from edgespec.engine.loops import overlapped, sequential
from edgespec.engine.rounds import Guide
from edgespec.verifiers.base import Rows, ScoreRequest

RATIOS = ((1, 4), (1, 2), (1, 1), (2, 1), (4, 1))  # draft : verify
LENGTH = 16
LIMIT, SLACK_S = 1.10, 0.3e-3
NUM_VOCAB, NUM_CTX = 64, 1 << 14
NEXT = np.eye(NUM_VOCAB, dtype=np.float32)[(np.arange(NUM_VOCAB) + 1) % NUM_VOCAB]  # the row that follows a token


def sleep_until(when: float) -> None:
    if (left_s := when - time.perf_counter()) > 0:
        time.sleep(left_s)


class ScriptedVerifier:
    """The next token is one more than the last; every call takes ``call_s``."""

    num_vocab, num_ctx, num_slots = NUM_VOCAB, NUM_CTX, 1

    def __init__(self, call_s: float) -> None:
        self._call_s = call_s

    def score(self, requests: abc.Sequence[ScoreRequest], cancelled: Cancelled = never) -> list[Rows]:
        done = time.perf_counter() + self._call_s
        rows = [NEXT[list(request.tokens[-request.num_rows :])] for request in requests]
        sleep_until(done)
        return rows

    def close(self) -> None: ...


class ScriptedDrafter:
    """Knows the rule; a token takes ``step_s``."""

    name, num_slots = "scripted", 1

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def propose(self, requests: abc.Sequence[DraftRequest], cancelled: Cancelled = never) -> list[Draft]:
        return [self._propose(request, cancelled) for request in requests]

    def _propose(self, request: DraftRequest, cancelled: Cancelled) -> Draft:
        began, last = time.perf_counter(), request.tokens[-1]
        tokens: list[int] = []
        while len(tokens) < request.num_draft and not cancelled():
            tokens.append((last + 1 + len(tokens)) % NUM_VOCAB)
            sleep_until(began + len(tokens) * self._step_s)
        return Draft(len(request.tokens), tuple(tokens))

    def close(self) -> None: ...


class Times(NamedTuple):
    """Seconds: what was scripted; the overlapped loop's median and worst round; the sequential loop's median."""

    draft_s: float
    verify_s: float
    overlapped_s: float
    worst_s: float
    sequential_s: float

    @property
    def best_s(self) -> float:
        return max(self.draft_s, self.verify_s)

    @property
    def passed(self) -> bool:
        return self.overlapped_s <= LIMIT * self.best_s + SLACK_S


def measure(draft_s: float, verify_s: float, num_rounds: int) -> Times:
    """Both loops, the first two rounds of each left out."""
    verifier, drafter = ScriptedVerifier(verify_s), DraftThread(ScriptedDrafter(draft_s / LENGTH))
    guide = Guide(Fixed(LENGTH))
    try:
        ahead = _rounds(overlapped(_sequence(num_rounds), drafter, verifier, guide, max_ahead=LENGTH + 1))
        after = _rounds(sequential(_sequence(num_rounds), drafter, verifier, guide))
    finally:
        drafter.close()
    return Times(draft_s, verify_s, statistics.median(ahead), max(ahead), statistics.median(after))


def _sequence(num_rounds: int) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=(num_rounds + 3) * (LENGTH + 1))
    return Sequence([0, 1, 2], params, NUM_CTX)


def _rounds(loop: abc.Iterator[object]) -> list[float]:
    """Seconds of each round; the last is left out too: it is cut short."""
    ends = [time.perf_counter() for _ in loop]
    return [after - before for before, after in itertools.pairwise(ends[1:-1])]


def table(found: abc.Sequence[Times]) -> str:
    lines = [
        "| draft : verify | draft, ms | verify, ms | round, ms | / the longer | worst round | sequential | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (draft, verify), times in zip(RATIOS, found, strict=True):
        cells = (times.draft_s, times.verify_s, times.overlapped_s)
        ratios = (times.overlapped_s, times.worst_s, times.sequential_s)
        columns = [f"{draft}:{verify}", *(f"{1000 * cell:.1f}" for cell in cells)]
        columns += [f"{ratio / times.best_s:.3f}" for ratio in ratios]
        lines.append(f"| {' | '.join([*columns, 'ok' if times.passed else 'OVER THE LIMIT'])} |")
    return "\n".join(lines)


def main(arguments: abc.Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overlap", description="Overlap efficiency.")
    parser.add_argument("--shorter-ms", type=float, default=20.0, help="time of the faster side (default: 20)")
    parser.add_argument("--rounds", type=int, default=30, help="rounds for each ratio (default: 30)")
    options = parser.parse_args(arguments)
    unit_s = options.shorter_ms / 1000
    found = [measure(draft * unit_s, verify * unit_s, options.rounds) for draft, verify in RATIOS]
    print(table(found))
    worst = max(found, key=lambda times: times.overlapped_s / times.best_s)
    print(f"worst: {worst.overlapped_s / worst.best_s:.3f} of the longer side; the limit is {LIMIT} and 0.3 ms")
    return 0 if all(times.passed for times in found) else 1


if __name__ == "__main__":
    sys.exit(main())
