"""Is speculation ever slower than none? ``python -m tests.bench.never_slower`` (four minutes, two free cores)

The starter pair where speculation has least to win: a prompt of random tokens, temperature 1.5, a draft model that was
never trained (four layers of the verifier's), answers of one word, 64 short requests at once. Each setting is run with
what edgespec chooses by itself (``auto``) and with plain decoding, in turns, from caches without the prompts, and all
tokens count over all the time, the prompts' included. Prints the median of the runs' ratios, and exits with 1 where one
is below 0.98. ``--settings`` runs some of them.
"""

from __future__ import annotations

import argparse
import collections.abc as abc
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from edgespec.bench.rate import drafting_mode, rotated
from edgespec.core.policy import Fixed
from edgespec.core.sequence import SamplingParams
from edgespec.errors import EdgespecError
from edgespec.loading import load
from edgespec.pairs import load_pair
from edgespec.runtime import Mode, Runtime
from quantize import build_draft
from quantize.source import open_source

LEAST = 0.98
WAYS: tuple[Mode | None, ...] = (None, "plain")  # None: what the runtime does if not told otherwise
TEXT = (
    "Write a short poem about the sea.",
    "Why is the sky blue? Explain it to a child.",
    "List five uses of an empty bottle.",
)
ONE_WORD = tuple(
    f"Answer with one word. {question}"
    for question in (
        "What is the capital of France?",
        "What colour is snow?",
        "Is fire hot?",
        "What do bees make?",
        "What is the opposite of up?",
        "Which animal barks?",
        "What falls from clouds?",
        "How many legs has a cat?",
    )
)


@dataclass(frozen=True)
class Setting:
    """``num_slots`` above 1: all prompts at once. ``untrained``: with a draft of four untrained layers."""

    name: str
    prompts: abc.Sequence[str]
    params: SamplingParams
    raw: bool = False
    num_slots: int = 1
    untrained: bool = False


@dataclass(frozen=True)
class Ratios:
    setting: Setting
    plain_rate: float
    ratios: abc.Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)


def settings(max_tokens: int, num_parallel: int) -> dict[str, Setting]:
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=1)
    hot = SamplingParams(temperature=1.5, max_tokens=max_tokens, seed=1)
    short = SamplingParams(temperature=0.0, max_tokens=8, seed=1)
    many = [f"Say something about the number {number}." for number in range(num_parallel)]
    found = (
        Setting("random", (), greedy, raw=True),
        Setting("hot", TEXT, hot),
        Setting("untrained", TEXT, greedy, untrained=True),
        Setting("one word", ONE_WORD, short),
        Setting("parallel", many, short, num_slots=num_parallel),
    )
    return {setting.name: setting for setting in found}


def untrained_draft(verifier: Path, folder: Path) -> Path:
    last = open_source(verifier).dimensions.num_layers - 1
    return build_draft(verifier, folder / "untrained", bits=8, layers=sorted({0, 1, last - 1, last}))


def random_prompt(runtime: Runtime, ids: range, num_tokens: int) -> str:
    return runtime.decode(random.Random(0).choices(ids, k=num_tokens))


def answer_all(runtime: Runtime, setting: Setting, prompts: abc.Sequence[str], mode: Mode | None) -> float:
    """Tokens a second, everything counted."""
    forget(runtime, setting.num_slots)
    began = time.perf_counter()
    with ThreadPoolExecutor(setting.num_slots) as pool:
        answers = pool.map(lambda prompt: runtime.generate(prompt, setting.params, raw=setting.raw, mode=mode), prompts)
        num_tokens = sum(len(answer.tokens) for answer in answers)
    return num_tokens / (time.perf_counter() - began)


def forget(runtime: Runtime, num_slots: int) -> None:
    """Fill every slot of both caches with something else."""
    params, mode = SamplingParams(temperature=0.0, max_tokens=3), drafting_mode(runtime)

    def fill(number: int) -> None:
        runtime.generate(f"{number} x", params, raw=True, mode=mode, policy=Fixed(1))

    with ThreadPoolExecutor(num_slots) as pool:
        list(pool.map(fill, range(num_slots)))


def measure(setting: Setting, draft: Path | None, options: argparse.Namespace) -> Ratios:
    rates: dict[Mode | None, list[float]] = {way: [] for way in WAYS}
    with load(None, options.verifier, draft, num_threads=options.threads, num_slots=setting.num_slots) as runtime:
        prompts = setting.prompts or [random_prompt(runtime, range(*options.ids), options.random_tokens)]
        for turn in range(options.runs + 1):  # the first is not counted
            for way in rotated(WAYS, turn):
                rate = answer_all(runtime, setting, prompts, way)
                if turn:
                    rates[way].append(rate)
    ratios = [auto / plain for auto, plain in zip(rates[None], rates["plain"], strict=True)]
    return Ratios(setting, statistics.median(rates["plain"]), ratios)


def main(arguments: abc.Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.never_slower", description="auto over plain.")
    parser.add_argument("--settings", default="", help="some of them, with commas between (default: all)")
    parser.add_argument("--verifier", type=Path, help="another verifier (default: the starter's)")
    parser.add_argument("--draft", type=Path, help="another draft (default: the starter's)")
    parser.add_argument("--runs", type=int, default=5, help="runs, of which the median counts (default: 5)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of the longer answers (default: 64)")
    parser.add_argument("--parallel", type=int, default=64, help="requests at once (default: 64)")
    parser.add_argument("--ids", type=int, nargs=2, default=(300, 20_000), help="of random tokens (default: 300 20000)")
    parser.add_argument("--random-tokens", type=int, default=200, help="how many of them (default: 200)")
    parser.add_argument("--threads", type=int, help="of either side (default: edgespec's choice)")
    options = parser.parse_args(arguments)
    known = settings(options.max_tokens, options.parallel)
    chosen = [name.strip() for name in options.settings.split(",") if name.strip()] or list(known)
    if wrong := [name for name in chosen if name not in known]:
        parser.error(f"settings: got {wrong[0]!r}; allowed: {', '.join(known)}")
    try:
        found = list(_measure_all([known[name] for name in chosen], options))
    except EdgespecError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print("worst:", f"{min(ratios.median for ratios in found):.3f}", f"(at least {LEAST} is asked for)")
    return 0 if all(ratios.median >= LEAST for ratios in found) else 1


def _measure_all(chosen: abc.Sequence[Setting], options: argparse.Namespace) -> abc.Iterator[Ratios]:
    print("| setting | plain, tokens/s | auto / plain, median | each run |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="edgespec-bench-") as folder:
        for setting in chosen:
            draft = options.draft
            if setting.untrained:
                draft = untrained_draft(options.verifier or load_pair("starter").verifier.find(), Path(folder))
            ratios = measure(setting, draft, options)
            each = ", ".join(f"{ratio:.2f}" for ratio in ratios.ratios)
            print(f"| {setting.name} | {ratios.plain_rate:.1f} | {ratios.median:.3f} | {each} |", flush=True)
            yield ratios


if __name__ == "__main__":
    sys.exit(main())
