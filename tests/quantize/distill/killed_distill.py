"""A distillation that is killed in a stage, at its COUNT-th report:
``python -m tests.quantize.distill.killed_distill SETTINGS STAGE COUNT``, SETTINGS as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from quantize.distill import DistillSettings, distill


def main(settings: str, stage: str, count: str) -> None:
    left = int(count)

    def progress(at: str, _: float) -> None:
        nonlocal left
        left -= at.partition(":")[0] == stage
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    content = json.loads(settings)
    paths = {name: Path(content[name]) for name in ("verifier", "out")}
    distill(DistillSettings(**{**content, **paths}), progress)


if __name__ == "__main__":
    main(*sys.argv[1:])
