"""``auto`` over plain by category, and over llama.cpp's own server, in one run.

    python -m tests.bench.pipeline PROMPTS.jsonl --verifier STANDIN --draft DRAFT
        [--llama-server BINARY --draft-gguf SmolLM2-135M-Instruct.Q4_1.gguf]

The first turn of every n-th prompt is answered in plain mode and as edgespec chooses by itself, in turns, at each
temperature. The rate is that of decoding: tokens after the first round over the time after it, a category's the sum of
its tokens over the sum of its seconds. Then llama-server answers the same tokens with the same GGUF, threads and
context: plain, with the draft GGUF at each draft length, and in each n-gram mode its --help lists; its rate is that of
its own timings, the first token left out there too. "best" is the fastest of those over all prompts of a temperature.

12 prompts of 64 tokens on two cores: 3 minutes a temperature, and 2 for each way of the server.
"""

from __future__ import annotations

import collections.abc as abc
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import click

from edgespec.bench.rate import Run, acceptance, drafting_mode, rate, rotated, timed
from edgespec.bench.suite import Question, read_suite
from edgespec.core.policy import Fixed
from edgespec.core.sequence import SamplingParams
from edgespec.loading import load
from edgespec.runtime import Mode, Runtime
from tests.bench.llama_server import ServerModels, complete, draft_way, plain_way, running, spec_types

TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
ALL = "all"
NUM_CTX = 2048


class Way(NamedTuple):
    """One way to answer: of edgespec, or with ``server`` of llama-server."""

    name: str
    mode: Mode | None = None
    server: tuple[str, ...] = ()


PLAIN, AUTO = Way("plain", "plain"), Way("auto")


@dataclass
class Table:
    """runs[temperature][category][way]"""

    runs: dict[float, dict[str, dict[str, list[Run]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    )

    def add(self, temperature: float, question: Question, way: str, run: Run) -> None:
        category = question.category if question.category in TASKS else "multi-turn"
        for row in (category, ALL):
            self.runs[temperature][row][way].append(run)

    def best(self, temperature: float, ways: abc.Iterable[Way]) -> str | None:
        """The fastest of the ways over all prompts; None for none."""
        rates = {way.name: rate(self.runs[temperature][ALL][way.name]) for way in ways}
        return max(rates, key=lambda name: rates[name], default=None)

    def lines(self, temperature: float, servers: abc.Sequence[Way]) -> abc.Iterator[str]:
        shown = [way.name for way in servers if way.server == tuple(plain_way())]
        shown += [name for name in (self._best_of(temperature, servers, kind) for kind in ("draft", "ngram")) if name]
        best = self.best(temperature, servers)
        titles = [f"T={temperature:g}", "plain, tokens/s", "auto / plain", "acceptance"]
        titles += [f"{name} / plain" for name in shown] + ["auto / its best"] * bool(best)
        yield f"| {' | '.join(titles)} |"
        yield "|---" * len(titles) + "|"
        by_category = self.runs[temperature]
        for category in [*sorted(set(by_category) - {ALL}), ALL]:
            row = by_category[category]
            rates = {way: rate(runs) for way, runs in row.items()}
            cells = [f"{category} ({len(row[AUTO.name])})", f"{rates[PLAIN.name]:.1f}"]
            cells += [_ratio(rates[AUTO.name], rates[PLAIN.name]), f"{acceptance(row[AUTO.name]):.2f}"]
            cells += [_ratio(rates[name], rates[PLAIN.name]) for name in shown]
            cells += [_ratio(rates[AUTO.name], rates[best])] if best else []
            yield f"| {' | '.join(cells)} |"
        for way in servers:
            speed = rate(by_category[ALL][way.name])
            yield f"{way.name}: {speed:.1f} tokens/s, acceptance {acceptance(by_category[ALL][way.name]):.2f}"

    def _best_of(self, temperature: float, servers: abc.Sequence[Way], kind: str) -> str | None:
        return self.best(temperature, [way for way in servers if way.name.startswith(f"server {kind}")])


def _ratio(speed: float, base: float) -> str:
    return f"{speed / base:.2f}" if base else "-"


def server_ways(binary: Path, draft: Path | None, lengths: abc.Sequence[int], num_threads: int) -> list[Way]:
    """Plain, each draft length, and each n-gram mode of this build."""
    ways = [Way("server plain", server=tuple(plain_way()))]
    if draft is not None:
        ways += [Way(f"server draft {n}", server=tuple(draft_way(draft, n, num_threads))) for n in lengths]
    ngrams = [kind for kind in spec_types(binary) if kind.startswith("ngram")]
    return [*ways, *(Way(f"server {kind}", server=("--spec-type", kind)) for kind in ngrams)]


def run_edgespec(
    runtime: Runtime, questions: abc.Sequence[Question], params: abc.Sequence[SamplingParams], table: Table
) -> list[list[int]]:
    """Both modes in turns; gives the tokens of each prompt."""
    warm = SamplingParams(temperature=0.0, max_tokens=3)
    prompts = []
    for turn, question in enumerate(questions):
        prompts.append(runtime.encode(question.prompt))
        runtime.generate(
            question.prompt, warm, mode=drafting_mode(runtime), policy=Fixed(1)
        )  # both caches then hold the prompt
        for one in params:
            for way in rotated((PLAIN, AUTO), turn):
                table.add(one.temperature, question, way.name, timed(runtime, question.prompt, one, way.mode))
        print(".", end="", flush=True, file=sys.stderr)
    return prompts


def run_server(
    models: ServerModels,
    way: Way,
    prompts: abc.Sequence[list[int]],
    questions: abc.Sequence[Question],
    params: abc.Sequence[SamplingParams],
    table: Table,
) -> None:
    print(f"\n{way.name} ", end="", flush=True, file=sys.stderr)
    with running(models, way.server) as address:
        complete(address, prompts[0], SamplingParams(temperature=0.0, max_tokens=8))  # a first answer is slower
        for tokens, question in zip(prompts, questions, strict=True):
            for one in params:
                timings = complete(address, tokens, one)
                run = Run(
                    int(timings["predicted_n"]) - 1,
                    timings["predicted_ms"] / 1000,
                    int(timings.get("draft_n", 0)),
                    int(timings.get("draft_n_accepted", 0)),
                )
                table.add(one.temperature, question, way.name, run)
            print(".", end="", flush=True, file=sys.stderr)


@click.command()
@click.argument("prompts", type=click.Path(exists=True, path_type=Path))
@click.option("--verifier", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--draft", required=True)
@click.option("--every", default=20, show_default=True, help="Take every n-th prompt.")
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--temperature", multiple=True, type=float, default=(0.0, 0.8), show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--llama-server", type=click.Path(exists=True, path_type=Path))
@click.option("--draft-gguf", type=click.Path(exists=True, path_type=Path), help="The server's draft model.")
@click.option("--draft-max", default="3,5,7,11,16", show_default=True, help="The server's draft lengths.")
@click.option("--ways", default="", help="Only these of the server's, with commas between, such as 'server draft 7'.")
def main(
    prompts: Path,
    verifier: Path,
    draft: str,
    every: int,
    max_tokens: int,
    temperature: tuple[float, ...],
    threads: int,
    llama_server: Path | None,
    draft_gguf: Path | None,
    draft_max: str,
    ways: str,
) -> None:
    questions, table = read_suite(prompts, every), Table()
    params = [SamplingParams(max_tokens=max_tokens, temperature=value, seed=1) for value in temperature]
    with load(None, verifier, draft, num_ctx=NUM_CTX, num_threads=threads) as runtime:
        encoded = run_edgespec(runtime, questions, params, table)
        print(f"auto is: {runtime.placement}, {runtime.mode}, draft {runtime.draft_name}\n")
    servers: list[Way] = []
    if llama_server is not None:
        models = ServerModels(llama_server, verifier, draft_gguf, NUM_CTX, threads)
        servers = server_ways(llama_server, draft_gguf, [int(text) for text in draft_max.split(",")], threads)
        wanted = [name.strip() for name in ways.split(",") if name.strip()]
        servers = [way for way in servers if not wanted or way.name in wanted]
        for way in servers:
            run_server(models, way, encoded, questions, params, table)
    print(file=sys.stderr)
    for value in temperature:
        print("\n".join(table.lines(value, servers)), end="\n\n")


if __name__ == "__main__":
    main()
