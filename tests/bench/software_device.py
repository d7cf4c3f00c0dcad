"""Overlapped over sequential on a device that leaves this process's core alone, as a GPU would.

    python -m tests.bench.software_device PROMPTS.jsonl --verifier STANDIN --draft INT8 --draft FP32

The verifier runs on llama.cpp's RPC worker on loopback, with one thread on a core of its own; the ONNX draft model has
another core. Each draft model and draft length is a row: what a draft and a verification cost, the overlapped loop over
the sequential one with that same length, and the overlapped loop with the lengths that the policy picks over that
sequential loop; all in turns, decoding rates, medians over the prompts. Draft models of several costs make the rows
differ: the starter's at 8 bits, and unquantized (edgespec quantize draft SmolLM2-135M-Instruct.Q4_1.gguf --bits 32
--out FP32).

Exits with 1 where overlapped is below 1.15 though the draft costs 30 to 100 % of a verification, or where the policy's
choice is below 0.98. Needs two cores and a llama.cpp built with -DGGML_RPC=ON. Two drafts, lengths 3 and 7, four
prompts of 48 tokens: 10 minutes.
"""

from __future__ import annotations

import collections.abc as abc
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import click

from edgespec.bench.rate import rotated
from edgespec.bench.suite import Question, read_suite
from edgespec.core.policy import Fixed, Policy
from edgespec.core.sequence import SamplingParams
from edgespec.loading import load
from edgespec.runtime import Mode, Runtime
from tests.bench.llama_server import free_port

NUM_CTX = 1024
START_S = 60.0
LEAST_OVERLAPPED, LEAST_CHOSEN = 1.15, 0.98
SHARES = (0.3, 1.0)  # of a verification that a draft costs: here overlapping has the most to hide


@dataclass
class Row:
    """One draft and length. Rates are per prompt, in order."""

    draft: str
    length: int
    sequential: list[float] = field(default_factory=list)
    overlapped: list[float] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0
    num_rounds: int = 0

    @property
    def share(self) -> float:
        return self.draft_s / self.verify_s if self.verify_s else 0.0

    def ratio(self, rates: list[float]) -> float:
        return statistics.median(one / base for one, base in zip(rates, self.sequential, strict=True))

    @property
    def passed(self) -> bool:
        hides = not SHARES[0] <= self.share <= SHARES[1] or self.ratio(self.overlapped) >= LEAST_OVERLAPPED
        return hides and self.ratio(self.chosen) >= LEAST_CHOSEN

    def line(self) -> str:
        cells = [self.draft, str(self.length)]
        cells += [f"{1000 * seconds / max(1, self.num_rounds):.0f}" for seconds in (self.draft_s, self.verify_s)]
        cells += [f"{self.share:.2f}", f"{statistics.median(self.sequential):.1f}"]
        cells += [f"{self.ratio(rates):.2f}" for rates in (self.overlapped, self.chosen)]
        return f"| {' | '.join([*cells, 'ok' if self.passed else 'BELOW'])} |"


@contextlib.contextmanager
def worker(cpu: int | None) -> abc.Iterator[str]:
    """A worker with one thread, on that CPU; gives its host:port once it listens."""
    port = free_port()
    command = [sys.executable, "-m", "edgespec", "worker", "--port", str(port), "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        if cpu is not None:
            os.sched_setaffinity(process.pid, {cpu})
        _wait(process, port)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    last = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < last:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise RuntimeError("the worker does not start; see: edgespec worker")


@contextlib.contextmanager
def separate_cpus() -> abc.Iterator[int | None]:
    """Keep this process to one CPU and give another; None where there is only one, or the system cannot."""
    if not hasattr(os, "sched_setaffinity") or len(before := os.sched_getaffinity(0)) < 2:
        yield None
        return
    own, other, *_ = sorted(before, reverse=True)
    os.sched_setaffinity(0, {own})
    try:
        yield other
    finally:
        os.sched_setaffinity(0, before)


def measure(
    runtime: Runtime, draft: str, length: int, questions: abc.Sequence[Question], params: SamplingParams
) -> Row:
    row, fixed = Row(draft, length), Fixed(length)
    ways: list[tuple[list[float], Mode | None, Policy | None]] = [
        (row.sequential, "sequential", fixed),
        (row.overlapped, "overlapped", fixed),
        (row.chosen, None, None),
    ]
    for turn, question in enumerate(questions):
        warm = SamplingParams(temperature=0.0, max_tokens=3)
        runtime.generate(question.prompt, warm, mode="sequential", policy=Fixed(1))  # both caches hold the prompt
        for rates, mode, policy in rotated(ways, turn):
            stats = runtime.generate(question.prompt, params, mode=mode, policy=policy).stats
            rates.append(stats.tokens_per_s)
            if mode == "sequential":
                row.draft_s, row.verify_s = row.draft_s + stats.draft_s, row.verify_s + stats.verify_s
                row.num_rounds += stats.rounds
    return row


def _load(verifier: Path, draft: Path, worker: str) -> Runtime:
    return load(None, verifier, draft, num_ctx=NUM_CTX, num_threads=1, mode="overlapped", workers=[worker])


@click.command()
@click.argument("prompts", type=click.Path(exists=True, path_type=Path))
@click.option("--verifier", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--draft", "drafts", multiple=True, type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--draft-lengths", default="3,7", show_default=True)
@click.option("--every", default=60, show_default=True, help="Take every n-th prompt.")
@click.option("--max-tokens", default=48, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
def main(
    prompts: Path,
    verifier: Path,
    drafts: tuple[Path, ...],
    draft_lengths: str,
    every: int,
    max_tokens: int,
    temperature: float,
) -> None:
    questions = read_suite(prompts, every)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
    titles = (
        "draft | length | draft, ms a round | verify | share | sequential, tokens/s | overlapped / it | policy / it"
    )
    print(f"| {titles} | verdict |\n{'|---' * 9}|", flush=True)
    passed = True
    with separate_cpus() as cpu, worker(cpu) as address:
        for draft in drafts:
            with _load(verifier, draft, address) as runtime:
                for length in map(int, draft_lengths.split(",")):
                    row = measure(runtime, draft.name, length, questions, params)
                    print(row.line(), flush=True)
                    passed &= row.passed
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
