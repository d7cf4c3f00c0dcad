"""How the usable CPUs are shared between the verifier and the draft model."""

from __future__ import annotations

import collections.abc as abc
import os
from dataclasses import dataclass

import psutil

DRAFT_SHARE = 4  # the draft model gets one CPU of so many, where the verifier computes on the CPU as well


@dataclass(frozen=True, slots=True)
class Threads:
    """What either side starts, its calling thread counted.

    verifier, draft  threads. Where both work at the same time, together no more than the usable CPUs; where they take
                     turns, each may have all of them
    spin             whether the draft model's threads may wait actively within a run
    together         whether both may work at the same time
    """

    verifier: int
    draft: int
    spin: bool = True
    together: bool = False


def split(
    num_cpus: int,
    *,
    verifier_on_gpu: bool = False,
    draft_on_gpu: bool = False,
    together: bool = False,
    asked_verifier: int | None = None,
    asked_draft: int | None = None,
) -> Threads:
    """Threads for both sides.

    num_cpus  usable ones
    verifier_on_gpu, draft_on_gpu  that side computes elsewhere, and needs one thread to say what
    together  both sides are to work at the same time. One CPU cannot: the answer's ``together`` is then False, and
              whoever asked has them take turns
    asked_verifier, asked_draft  wishes; None: none. Two that do not fit together are cut to a usual split
    """
    verifier, draft = (num_cpus if asked is None else min(asked, num_cpus) for asked in (asked_verifier, asked_draft))
    if not together or num_cpus < 2:
        return Threads(verifier, draft)
    if verifier + draft > num_cpus:
        usual = _usual_draft(num_cpus, verifier_on_gpu, draft_on_gpu)
        if asked_draft is None and verifier < num_cpus:
            usual = num_cpus - verifier
        elif asked_verifier is None and draft < num_cpus:
            usual = draft
        verifier, draft = min(verifier, num_cpus - usual), min(draft, usual)
    if verifier_on_gpu and asked_verifier is None:
        verifier = 1
    return Threads(verifier, draft, spin=verifier_on_gpu or draft_on_gpu, together=True)


def splits(
    num_cpus: int,
    *,
    verifier_on_gpu: bool = False,
    draft_on_gpu: bool = False,
    asked_verifier: int | None = None,
    asked_draft: int | None = None,
) -> tuple[Threads, ...]:
    """Ways to have both sides work at the same time that are worth a measurement; none with one CPU."""
    counts = (1, num_cpus // DRAFT_SHARE, num_cpus // 2)
    is_open = all(asked is None or asked >= num_cpus for asked in (asked_verifier, asked_draft))
    is_open = is_open and not (verifier_on_gpu or draft_on_gpu)
    drafts = sorted({max(1, count) for count in counts}) if is_open else [asked_draft]
    found = (
        split(
            num_cpus,
            verifier_on_gpu=verifier_on_gpu,
            draft_on_gpu=draft_on_gpu,
            together=True,
            asked_verifier=asked_verifier,
            asked_draft=draft,
        )
        for draft in drafts
    )
    return tuple(threads for threads in found if threads.together)


def _usual_draft(num_cpus: int, verifier_on_gpu: bool, draft_on_gpu: bool) -> int:
    """Each side keeps a CPU."""
    if draft_on_gpu:
        return 1
    return num_cpus - 1 if verifier_on_gpu else max(1, num_cpus // DRAFT_SHARE)


def busy_cpus(interval_s: float = 0.2) -> float:
    """How many of the box's CPUs work just now, this process not counted while it waits here."""
    return float(psutil.cpu_percent(interval=interval_s)) / 100 * (psutil.cpu_count() or 1)


def places(threads: Threads) -> tuple[frozenset[int], frozenset[int]] | None:
    """CPUs for the verifier and others for the draft model, of those the calling thread may use, for ``pin``.

    None where that is not possible or no use: the sides take turns, CPUs cannot be chosen here, or there are not as
    many as threads, because of a quota or since two of them are one core.
    """
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not threads.together or len(cpus) != threads.verifier + threads.draft:
        return None
    return frozenset(cpus[: threads.verifier]), frozenset(cpus[threads.verifier :])


def pin(cpus: abc.Collection[int]) -> bool:
    """Keep the calling thread, and threads it starts from now on, on these CPUs; whether that was possible.

    Backends start theirs on the thread that calls them. Afterwards ``usable_cpus`` counts, on this thread, what is left
    to it.
    """
    if not hasattr(os, "sched_setaffinity"):
        return False
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError, OverflowError):
        return False
    return True
