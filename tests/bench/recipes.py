"""What each way to quantize a draft model costs: size, agreement with its source, KL, milliseconds a token.

    python -m tests.bench.recipes MODEL.gguf [--few-layers] [--corpus TEXT ...] [--text TEXTS.jsonl]

Prints one markdown table. Drafts are built in a temporary folder. Agreement and KL are teacher-forced on the texts of
``edgespec quantize report`` (or --text), against llama.cpp over the same GGUF. Times are single-token steps with 200
tokens in the cache, medians; all models take turns in a new order every round, llama.cpp over the source among them.
Heads are chosen by --corpus, else by what the model writes itself.
"""

from __future__ import annotations

import argparse
import collections.abc as abc
import contextlib
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from edgespec.agreement import Agreement, compare
from edgespec.drafters.onnx_open import open_model
from edgespec.errors import EdgespecError
from edgespec.verifiers.base import ScoreRequest
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from quantize import build_draft
from quantize.head import choose_head
from quantize.source import open_source

NUM_CACHED, NUM_STEPS = 200, 8
HEADS = (16384, 8192)
FEW_LAYERS = "the first two and the last two layers"

Step = abc.Callable[[], object]


class Recipe(NamedTuple):
    """``block_size`` 0: unquantized. ``num_head`` 0: the whole vocabulary."""

    bits: int
    block_size: int
    num_head: int
    few_layers: bool = False

    def cells(self, num_vocab: int) -> tuple[str, str, str]:
        bits = "fp32" if self.bits == 32 else f"int{self.bits}"
        layers = f", {FEW_LAYERS}" if self.few_layers else ""
        return f"{bits}{layers}", str(self.block_size or ""), str(self.num_head or num_vocab)


def recipes(few_layers: bool) -> list[Recipe]:
    widths = [(32, 0), (8, 32), (8, 128), (4, 32), (4, 128)]
    if few_layers:
        return [Recipe(bits, block, HEADS[-1], few_layers=True) for bits, block in widths[1:]]
    return [Recipe(bits, block, head) for bits, block in widths for head in (0, *HEADS)]


def build(wanted: abc.Sequence[Recipe], source: Path, folder: Path, corpus: abc.Sequence[Path]) -> dict[Recipe, Path]:
    heads: dict[int, list[int] | None] = {0: None}
    for num_ids in sorted({recipe.num_head for recipe in wanted} - {0}):
        choice = choose_head(source, num_ids, corpus=corpus)
        print(f"head {num_ids}: {choice.coverage:.2%} of {choice.num_counted} tokens", file=sys.stderr)
        heads[num_ids] = choice.ids
    last = open_source(source).dimensions.num_layers - 1
    built = {}
    for i, recipe in enumerate(wanted):
        layers = [0, 1, last - 1, last] if recipe.few_layers else None
        out, head = folder / f"draft{i}", heads[recipe.num_head]
        built[recipe] = build_draft(
            source, out, bits=recipe.bits, block_size=recipe.block_size or 32, layers=layers, head=head
        )
    return built


def step_ms(steps: abc.Mapping[str, Step], num_rounds: int) -> dict[str, float]:
    """Median milliseconds of a step; the models take turns, and each one's first step of a turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(num_rounds):
        for name in order.sample(list(steps), len(steps)):
            steps[name]()
            for _ in range(NUM_STEPS):
                start = time.perf_counter()
                steps[name]()
                times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(times[name]) for name in steps}


@contextlib.contextmanager
def opened_steps(drafts: abc.Mapping[str, Path], source: Path, num_threads: int) -> abc.Iterator[dict[str, Step]]:
    """One step of each model, and of llama.cpp over the source as ``source``; closed when the block ends."""
    with contextlib.ExitStack() as undo:
        steps: dict[str, Step] = {}
        for name, path in drafts.items():
            model = open_model(path, num_ctx=NUM_CACHED + 2, num_threads=num_threads).model
            undo.callback(model.close)
            tokens = [i % 97 + 3 for i in range(NUM_CACHED)]
            for start in range(0, NUM_CACHED, model.chunk(0)):
                model.extend(0, tokens[start : start + model.chunk(0)], start)
            steps[name] = lambda model=model: model.extend(0, [5], NUM_CACHED)  # type: ignore[misc]
        verifier = LlamaVerifier(LlamaOptions(source, num_threads, num_ctx=NUM_CACHED + 8))
        undo.callback(verifier.close)
        prefix = [i % 97 + 3 for i in range(NUM_CACHED)]
        ends = [[5], [7]]  # in turn, so that the last token has to be evaluated each time
        request = ScoreRequest(0, prefix, 1)
        verifier.score([request])

        def step() -> None:
            ends.reverse()
            verifier.score([ScoreRequest(0, prefix + ends[0], 1)])

        steps["source"] = step
        yield steps


def table(
    source: Path, num_vocab: int, reports: abc.Mapping[Recipe, Agreement], costs: abc.Sequence[abc.Mapping[str, float]]
) -> str:
    titles = "weights | block | head | MB | agreement | KL | ms, 1 thread | ms, 2 threads | llama.cpp's / its (2)"
    lines = [titles, " | ".join(["---"] * 9)]
    for recipe, report in reports.items():
        one, two = (by_name[str(recipe)] for by_name in costs)
        ratio = costs[1]["source"] / two
        cells = [*recipe.cells(num_vocab), f"{report.subject_bytes / 1e6:.0f}", f"{report.total.agreement:.3f}"]
        lines.append(" | ".join([*cells, f"{report.total.kl:.3f}", f"{one:.2f}", f"{two:.2f}", f"{ratio:.2f}"]))
    one, two = (by_name["source"] for by_name in costs)
    size = source.stat().st_size / 1e6
    lines.append(f"{source.stem} in llama.cpp | | {num_vocab} | {size:.0f} | | | {one:.2f} | {two:.2f} | 1.00")
    return "\n".join(f"| {line} |" for line in lines)


def main(arguments: abc.Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.recipes", description="Ways to quantize a draft.")
    parser.add_argument("source", type=Path, metavar="GGUF")
    parser.add_argument("--few-layers", action="store_true", help=f"drafts of {FEW_LAYERS} only")
    parser.add_argument("--corpus", type=Path, nargs="*", default=[], help="texts to choose heads by")
    parser.add_argument("--text", type=Path, help="texts to compare on (default: the shipped ones)")
    parser.add_argument("--max-tokens", type=int, default=2000, help="tokens to compare on (default: 2000)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each model in timing (default: 9)")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="edgespec-recipes-") as folder:
            print(measure(options, Path(folder)))
    except EdgespecError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def measure(options: argparse.Namespace, folder: Path) -> str:
    built = build(recipes(options.few_layers), options.source, folder, options.corpus)
    reports = {}
    for recipe, path in built.items():
        print(f"{recipe} ...", file=sys.stderr)
        reports[recipe] = compare(path, options.source, texts=options.text, max_tokens=options.max_tokens)
    costs = []
    for num_threads in (1, 2):
        with opened_steps({str(recipe): path for recipe, path in built.items()}, options.source, num_threads) as steps:
            costs.append(step_ms(steps, options.rounds))
    num_vocab = open_source(options.source).dimensions.num_vocab
    return table(options.source, num_vocab, reports, costs)


if __name__ == "__main__":
    sys.exit(main())
