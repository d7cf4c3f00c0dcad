"""A small draft model for a verifier, trained on what the verifier itself writes."""

from __future__ import annotations

import collections.abc as abc

from quantize.distill.result import DistillResult
from quantize.distill.settings import DistillSettings

__all__ = ["DistillResult", "DistillSettings", "distill"]

Progress = abc.Callable[[str, float], None]


def distill(settings: DistillSettings, progress: Progress | None = None) -> DistillResult:
    """Have the verifier write text, train a student on it, and export that as draft folders of 8 and of 4 bits.

    progress  called on this thread with the stage ("generate", "train", "export"; what follows a colon is how it goes)
              and its finished fraction, 0 to 1

    Everything is kept in ``settings.out``. A process that is killed anywhere loses the text of the shard under way, or
    the training since the last checkpoint; ``settings.resume`` goes on from there. SIGINT and SIGTERM in the training
    wait for a checkpoint. Sets torch's number of threads, for the whole process.

    Raises ParameterError (settings, also those that differ from an earlier sitting's), FileAccessError (an ``out`` that
    is there, a full disk), ModelNotFoundError, ModelFormatError (also a damaged checkpoint or shard, naming what to
    delete), MemoryBudgetError, or MissingDependencyError when the extra is not installed.
    """
    from quantize.extras import require

    require("torch", "gguf", "onnx", "onnx_ir")
    from quantize.distill.stages import run

    return run(settings, progress or (lambda stage, fraction: None))
