"""Sequential over plain, by category: ``python -m tests.bench.speedup PROMPTS.jsonl --verifier GGUF --draft DIR``.

Every prompt (its first turn, chat template applied) is answered in plain mode and with each draft length, in one
process, in an order that rotates from prompt to prompt. The rate is that of decoding: tokens after the first round
over the time after it; a category's is the sum of its tokens over the sum of its seconds. The prompt stays in both
caches, so that no time goes into evaluating it; with ``--cold`` both caches are emptied before each run, and a second
table gives end-to-end rates: all tokens over all the time.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import click

from edgespec.core.policy import Fixed
from edgespec.core.sequence import SamplingParams
from edgespec.loading import load
from edgespec.runtime import Mode, Runtime

TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass
class Cost:
    """Tokens and seconds, added up."""

    tokens: int = 0
    seconds: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    same: int = 0
    runs: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


@dataclass
class Table:
    """costs[category][draft length]; length 0 is plain."""

    costs: dict[str, dict[int, Cost]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(Cost)))

    def print(self, lengths: list[int], cold: bool) -> None:
        for title, rate in (("decode", "decode_rate"), ("end to end", "rate"))[: 1 + cold]:
            print(f"\n| {title} | plain, tokens/s |" + "".join(f" length {n} |" for n in lengths))
            print("|---|---|" + "---|" * len(lengths))
            for category, row in self.costs.items():
                plain = getattr(row[0], rate)
                cells = "".join(f" {getattr(row[n], rate) / plain:.2f} |" for n in lengths)
                print(f"| {category} ({row[0].runs}) | {plain:.1f} |{cells}")
        every = self.costs["all"]
        for n in lengths:
            acceptance = every[n].accepted / max(every[n].drafted, 1)
            print(f"length {n}: acceptance {acceptance:.2f}, {every[n].same} of {every[n].runs} answers equal plain's")


def measure(
    runtime: Runtime, prompt: str, params: SamplingParams, policy: Fixed, cold: bool
) -> tuple[Cost, tuple[int, ...]]:
    if cold:
        runtime.generate("x", SamplingParams(max_tokens=1, temperature=0.0), raw=True)
    mode: Mode = "sequential" if policy.length else "plain"
    began = time.perf_counter()
    tokens: list[int] = []
    first, num_first = 0.0, 0
    for chunk in runtime.stream(prompt, params, mode=mode, policy=policy):
        tokens += chunk.tokens
        if not first:
            first, num_first = time.perf_counter() - began, len(tokens)
    total = time.perf_counter() - began
    stats = chunk.stats
    cost = Cost(len(tokens), total, len(tokens) - num_first, total - first, stats.drafted, stats.accepted)
    return cost, tuple(tokens)


def add(total: Cost, cost: Cost, same: bool) -> None:
    for name in ("tokens", "seconds", "decode_tokens", "decode_s", "drafted", "accepted"):
        setattr(total, name, getattr(total, name) + getattr(cost, name))
    total.runs += 1
    total.same += same


@click.command()
@click.argument("prompts", type=click.Path(exists=True, path_type=Path))
@click.option("--verifier", type=click.Path(exists=True, path_type=Path))
@click.option("--draft")
@click.option("--every", default=20, show_default=True, help="Take every n-th prompt.")
@click.option("--offset", default=0, show_default=True)
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--draft-lengths", default="3,5,7,11", show_default=True)
@click.option("--min-confidence", default=0.0, show_default=True, help="0 keeps the lengths fixed.")
@click.option("--threads", type=int)
@click.option("--cold", is_flag=True)
def main(
    prompts: Path,
    verifier: Path | None,
    draft: str | None,
    every: int,
    offset: int,
    max_tokens: int,
    temperature: float,
    draft_lengths: str,
    min_confidence: float,
    threads: int | None,
    cold: bool,
) -> None:
    lengths = [int(text) for text in draft_lengths.split(",")]
    questions = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()][offset::every]
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
    table = Table()
    with load(None, verifier, draft, num_threads=threads, mode="sequential", policy=Fixed(7)) as runtime:
        for turn, question in enumerate(questions):
            category = question["category"] if question["category"] in TASKS else "multi-turn"
            order = [0, *lengths]
            order = order[turn % len(order) :] + order[: turn % len(order)]
            runs = {
                length: measure(runtime, question["turns"][0], params, Fixed(length, min_confidence), cold)
                for length in order
            }
            for length, (cost, tokens) in runs.items():
                for row in (category, "all"):
                    add(table.costs[row][length], cost, tokens == runs[0][1])
            print(".", end="", flush=True)
    table.costs["all"] = table.costs.pop("all")
    table.print(lengths, cold)


if __name__ == "__main__":
    main()
