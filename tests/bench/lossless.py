"""Is the output plain's? ``python -m tests.bench.lossless PROMPTS.jsonl [--verifier GGUF --draft DIR]``.

Answers prompts (first turns), compares every token with plain decoding at width 1, and prints each
difference with its top-2 margin and the rows' difference between the two widths. Exit code 1 if one is not explained.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from edgespec.core.policy import Fixed
from edgespec.core.sequence import RULES, SamplingParams
from edgespec.loading import MIN_CONFIDENCE, load
from edgespec.runtime import Mode


@click.command()
@click.argument("prompts", type=click.Path(exists=True, path_type=Path))
@click.option("--verifier", type=click.Path(exists=True, path_type=Path))
@click.option("--draft")
@click.option("--count", default=20, show_default=True, help="Prompts, spread evenly over the file.")
@click.option("--max-tokens", default=128, show_default=True)
@click.option("--temperature", multiple=True, type=float, default=(0.0, 0.8), show_default=True)
@click.option("--rule", type=click.Choice(RULES), default="coupled", show_default=True)
@click.option("--draft-length", default=7, show_default=True)
@click.option("--min-confidence", default=MIN_CONFIDENCE, show_default=True)
@click.option("--mode", type=click.Choice(("sequential", "overlapped")), default="sequential", show_default=True)
@click.option("--threads", type=int)
def main(
    prompts: Path,
    verifier: Path | None,
    draft: str | None,
    count: int,
    max_tokens: int,
    temperature: tuple[float, ...],
    rule: str,
    draft_length: int,
    min_confidence: float,
    mode: Mode,
    threads: int | None,
) -> None:
    lines = prompts.read_text(encoding="utf-8").splitlines()
    questions = [json.loads(lines[i * len(lines) // count])["turns"][0] for i in range(count)]
    unexplained = 0
    columns = ("temperature", "prompts", "tokens", "acceptance", "answers equal", "differences", "unexplained")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    policy = Fixed(draft_length, min_confidence)
    with load(None, verifier, draft, num_threads=threads, mode=mode, policy=policy) as runtime:
        for value in temperature:
            params = SamplingParams(max_tokens=max_tokens, temperature=value, seed=1, rule=rule)  # type: ignore[arg-type]
            results = [runtime.generate(question, params, check_lossless=True) for question in questions]
            found = [divergence for result in results for divergence in result.divergences or ()]
            wrong = sum(not divergence.explained for divergence in found)
            unexplained += wrong
            tokens = sum(result.stats.completion_tokens for result in results)
            drafted = sum(result.stats.drafted for result in results)
            accepted = sum(result.stats.accepted for result in results)
            equal = sum(not result.divergences for result in results)
            rate = accepted / max(drafted, 1)
            print(f"| {value} | {count} | {tokens} | {rate:.3f} | {equal} | {len(found)} | {wrong} |")
            for divergence in found:
                print(f"  {divergence}", file=sys.stderr)
    sys.exit(1 if unexplained else 0)


if __name__ == "__main__":
    main()
