"""What verifying costs by width: how long one llama_decode of 1, 2, 3, ... rows takes.

    python -m tests.bench.widths MODEL.gguf ...

Prints one markdown table, milliseconds, a row per model. The widths take turns, in a new order every round, and the
median of the rounds is shown, so that a busy moment falls on all widths alike.
"""

from __future__ import annotations

import argparse
import collections.abc as abc
import random
import statistics
import sys
import time
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.verifiers.base import ScoreRequest, Verifier
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)


def measure(verifier: Verifier, widths: abc.Sequence[int], num_ctx: int, num_rounds: int) -> dict[int, float]:
    """Median seconds of one ``score`` by width, after ``num_ctx`` tokens in the cache; a first round is not counted."""
    random_tokens = random.Random(0)
    prefix = random_tokens.choices(range(verifier.num_vocab), k=num_ctx)
    times: dict[int, list[float]] = {width: [] for width in widths}
    for round_index in range(num_rounds + 1):
        for width in random_tokens.sample(widths, len(widths)):
            draft = random_tokens.choices(range(verifier.num_vocab), k=width)
            seconds = _score_s(verifier, prefix, draft)
            if round_index:
                times[width].append(seconds)
    return {width: statistics.median(times[width]) for width in widths}


def _score_s(verifier: Verifier, prefix: list[int], draft: list[int]) -> float:
    """Seconds to score the draft alone: the cache is cut back to the prefix before the clock starts."""
    verifier.score([ScoreRequest(0, prefix, 1)])
    start = time.perf_counter()
    verifier.score([ScoreRequest(0, prefix + draft, len(draft))])
    return time.perf_counter() - start


def table(costs: abc.Mapping[str, abc.Mapping[int, float]]) -> str:
    """Markdown, milliseconds with three digits."""
    widths = list(next(iter(costs.values())))
    lines = [["model", *map(str, widths)], ["---"] * (len(widths) + 1)]
    lines += [[name, *(f"{1000 * by_width[width]:.3g}" for width in widths)] for name, by_width in costs.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(arguments: abc.Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.widths", description="Verify cost by width.")
    parser.add_argument("models", type=Path, nargs="+", metavar="GGUF")
    parser.add_argument("--threads", type=int, default=2, help="llama.cpp threads (default: 2)")
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache (default: 256)")
    parser.add_argument("--rounds", type=int, default=15, help="measurements per width (default: 15)")
    parser.add_argument("--no-extra-bufts", action="store_true", help="without repacked weights and AMX")
    options = parser.parse_args(arguments)
    costs = {}
    try:
        for path in options.models:
            print(f"{path.name} ...", file=sys.stderr)
            costs[path.stem] = _measure_model(path, options)
    except EdgespecError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(table(costs))
    return 0


def _measure_model(path: Path, options: argparse.Namespace) -> dict[int, float]:
    verifier = LlamaVerifier(
        LlamaOptions(
            path=path,
            num_threads=options.threads,
            num_ctx=options.context + max(WIDTHS),
            use_extra_bufts=not options.no_extra_bufts,
        )
    )
    try:
        return measure(verifier, WIDTHS, options.context, options.rounds)
    finally:
        verifier.close()


if __name__ == "__main__":
    sys.exit(main())
