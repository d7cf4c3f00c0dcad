"""Whether `edgespec run` would run here as it is configured, and what mends it where not. Prints nothing."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass

from edgespec.doctor import box, costs, models, software
from edgespec.doctor.finding import Finding, as_json, first_problem, of_error
from edgespec.doctor.job import Case, Job, Progress

__all__ = ["Finding", "Job", "as_json", "diagnose", "first_problem"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to look at; left out where what it ``needs`` of a Case is not known: who looked for that said why."""

    what: str
    look: abc.Callable[[Case], Finding | abc.Iterable[Finding]]
    needs: tuple[str, ...] = ()


CHECKS = (
    Check("Python and packages", software.packages),
    Check("llama.cpp", software.llama),
    Check("repacked weights (AMX canary)", software.canary, ("llama",)),
    Check("ONNX Runtime", software.onnx_runtime),
    Check("cache folder", software.cache_folder),
    Check("pair", models.pair),
    Check("profile", box.profile),
    Check("GPU", box.devices),
    Check("CPUs", box.cpus, ("profile", "box")),
    Check("workers", box.workers, ("llama",)),
    Check("verifier", models.verifier),
    Check("draft model", models.draft),
    Check("disk", models.disk, ("draft",)),
    Check("tokenizer", models.tokenizer, ("llama", "gguf", "draft", "profile")),
    Check("context", models.context, ("verifier", "profile", "box")),
    Check("memory", models.memory, ("verifier", "profile", "box")),
    Check("placement", models.placement, ("verifier", "profile", "box")),
    Check("calibration", costs.calibrated, ("llama", "profile", "box", "verifier")),
    Check("trial run", models.trial),
)


def diagnose(job: Job, progress: Progress = lambda stage, fraction: None) -> abc.Iterator[Finding]:
    """Every check that can be made, in order. A check that fails is a finding of its own, and ends nothing else.

    progress  called with (stage, finished fraction) while something takes long
    """
    case = Case(job, progress)
    for check in CHECKS:
        if all(getattr(case, need) is not None for need in check.needs):
            yield from _made(check, case)


def _made(check: Check, case: Case) -> abc.Iterator[Finding]:
    try:
        found = check.look(case)
        yield from [found] if isinstance(found, Finding) else found
    except Exception as error:  # whatever it is, the other checks go on
        yield of_error(check.what, error)
