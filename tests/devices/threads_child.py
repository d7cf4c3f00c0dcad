"""Loads a verifier and a draft model with the threads that are their share, has them work, and prints as JSON how many
threads worked for each: python -m tests.devices.threads_child GGUF DRAFT ROOT together|turns

ROOT is where /proc and /sys are looked for.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

from edgespec.core.sequence import SamplingParams
from edgespec.devices.probe import usable_cpus
from edgespec.devices.threads import Threads, split
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.onnx import OnnxDrafter
from edgespec.owner import Owner
from edgespec.verifiers.base import ScoreRequest
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier

NUM_ROUNDS = 20
BUSY_SHARE = 0.2  # of the time of the thread that worked most: what others did meanwhile is less
STILL_S = 0.1  # OpenMP's threads wait some milliseconds
TASKS = Path("/proc/self/task")


def worked() -> dict[str, int]:
    """Nanoseconds every thread of this process has run, once those are still that wait for more work actively."""
    time.sleep(STILL_S)
    found = {}
    for task in TASKS.iterdir():
        try:
            found[task.name] = int((task / "schedstat").read_text().split()[0])
        except OSError:  # it has just ended
            continue
    return found


def num_hot(before: dict[str, int], after: dict[str, int]) -> int:
    spent = [nanoseconds - before.get(name, 0) for name, nanoseconds in after.items()]
    return sum(nanoseconds > BUSY_SHARE * max(spent) for nanoseconds in spent)


class Sides:
    def __init__(self, gguf: str, draft: str, threads: Threads) -> None:
        self.verifier = LlamaVerifier(LlamaOptions(Path(gguf), threads.verifier, num_gpu_layers=0))
        self.owner = Owner("drafts")
        self.drafter = self.owner.submit(lambda: self._open(draft, threads)).result()

    def _open(self, draft: str, threads: Threads) -> OnnxDrafter:
        return OnnxDrafter.open(draft, num_ctx=256, num_threads=threads.draft, spin=threads.spin)

    def verify(self) -> None:
        for _ in range(NUM_ROUNDS):
            self.verifier.score([ScoreRequest(0, list(range(100)), 8)])

    def draft(self, stop: threading.Event) -> None:
        request = DraftRequest(0, list(range(100)), 100, 8, SamplingParams(temperature=0.0))
        for _ in range(NUM_ROUNDS):
            if stop.is_set():
                return
            self.drafter.propose([request])


def main(gguf: str, draft: str, root: str, how: str) -> None:
    threads = split(usable_cpus(Path(root)), together=how == "together")
    sides, never = Sides(gguf, draft, threads), threading.Event()
    sides.verify()  # all threads are started when first used
    sides.owner.submit(lambda: sides.draft(never)).result()
    hot: dict[str, int] = {}
    before = worked()
    sides.verify()
    hot["verifier"] = num_hot(before, worked())
    before = worked()
    sides.owner.submit(lambda: sides.draft(never)).result()
    hot["draft"] = num_hot(before, worked())
    if threads.together:
        before, stop = worked(), threading.Event()
        drafting = sides.owner.submit(lambda: sides.draft(stop))
        sides.verify()
        stop.set()
        drafting.result()
        hot["both"] = num_hot(before, worked())
    sides.drafter.close()
    sides.verifier.close()
    print(json.dumps(asdict(threads) | {"hot": hot}))


if __name__ == "__main__":
    main(*sys.argv[1:])
