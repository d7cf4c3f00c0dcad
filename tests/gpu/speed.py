"""How fast pairs are on this box's GPU: ``python -m tests.gpu.speed [GGUF DRAFT ...]``; without a pair, the starter.

Two tables: tokens a second of every mode by its ratio to plain (the built-in prompts, decoding rates, in turns), and
what a verification costs by its rows, which is what the modes live on. Takes half a minute a pair, and its loading.
"""

from __future__ import annotations

import argparse
import collections.abc as abc
import sys
from dataclasses import replace
from pathlib import Path

from edgespec.bench.rate import Run, acceptance, drafting_mode, rate, rotated, timed
from edgespec.bench.suite import read_suite
from edgespec.core.policy import Fixed
from edgespec.core.sequence import SamplingParams
from edgespec.errors import EdgespecError
from edgespec.loading import load
from edgespec.pairs import load_pair
from edgespec.runtime import Mode, Runtime
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from tests.bench import widths

MODES: tuple[Mode, ...] = ("plain", "sequential", "overlapped")
AUTO = "auto"
TITLES = ("verifier", "plain, tokens/s", "sequential", "overlapped", AUTO, "acceptance", "auto chose")
WIDTHS = (1, 2, 4, 8, 16, 32)


def speeds(verifier: Path, draft: str | Path, max_tokens: int) -> str:
    """One row. ``auto`` is loaded by itself, as it may leave the draft model out, with a plain of its own beside it."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    with load(None, verifier, draft, mode="overlapped") as runtime:
        runs = in_turns(runtime, {mode: mode for mode in MODES}, params)
    with load(None, verifier, draft) as runtime:
        auto = in_turns(runtime, {AUTO: None, "plain": "plain"}, params)
        chosen = f"{runtime.placement}, {runtime.mode}, draft {runtime.draft_name}"
    plain = rate(runs["plain"])
    ratios = [rate(runs[name]) / plain for name in MODES[1:]] + [rate(auto[AUTO]) / rate(auto["plain"])]
    cells = [verifier.stem, f"{plain:.1f}", *(f"{ratio:.2f}" for ratio in ratios)]
    return f"| {' | '.join([*cells, f'{acceptance(runs[MODES[1]]):.2f}', chosen])} |"


def in_turns(runtime: Runtime, ways: dict[str, Mode | None], params: SamplingParams) -> dict[str, list[Run]]:
    """Every built-in prompt in every way."""
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    warm = replace(params, max_tokens=3)
    for turn, question in enumerate(read_suite()):
        # Both caches then hold the prompt.
        runtime.generate(question.prompt, warm, mode=drafting_mode(runtime), policy=Fixed(1))
        for name in rotated(list(ways), turn):
            runs[name].append(timed(runtime, question.prompt, params, ways[name]))
    return runs


def costs(verifier: Path, num_rounds: int) -> dict[int, float]:
    opened = LlamaVerifier(LlamaOptions(verifier, 2, num_ctx=512, num_gpu_layers=-1))
    try:
        return widths.measure(opened, WIDTHS, 256 if opened.num_ctx > 300 else 64, num_rounds)
    finally:
        opened.close()


def main(arguments: abc.Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.speed", description="Modes on this box's GPU.")
    parser.add_argument("pairs", nargs="*", metavar="GGUF DRAFT", help="verifiers, each with its draft (or lookup)")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer (default: 96)")
    parser.add_argument("--rounds", type=int, default=9, help="measurements a width (default: 9)")
    options = parser.parse_args(arguments)
    if len(options.pairs) % 2:
        parser.error(f"pairs: got {len(options.pairs)} paths; allowed: a draft after every GGUF")
    pairs = [(Path(gguf), draft) for gguf, draft in zip(options.pairs[::2], options.pairs[1::2], strict=True)]
    try:
        if not pairs:
            starter = load_pair("starter")
            pairs = [(starter.verifier.find(), str(starter.ensure_draft()))]
        print(f"| {' | '.join(TITLES)} |\n{'|---' * len(TITLES)}|")
        for gguf, draft in pairs:
            print(speeds(gguf, draft, options.max_tokens), flush=True)
        print(f"\n{widths.table({gguf.stem: costs(gguf, options.rounds) for gguf, _ in pairs})}")
    except EdgespecError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
