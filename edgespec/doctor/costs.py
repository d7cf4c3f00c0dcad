"""Whether it is known what rounds cost here: what decides how much is drafted, and whether anything is."""

from __future__ import annotations

import collections.abc as abc

from edgespec import calibration
from edgespec.doctor.finding import Finding, ok, said
from edgespec.doctor.job import Case
from edgespec.errors import EdgespecError
from edgespec.loading import resolve

COMMAND = "edgespec calibrate"


def calibrated(case: Case) -> abc.Iterator[Finding]:
    """Of a draft model that is there; of nothing else anything needs to be known."""
    job, what = case.job, "calibration"
    if case.draft_model is None:
        return
    try:
        order = resolve(
            job.pair,
            job.verifier,
            job.draft,
            profile=case.profile,
            num_ctx=job.context,
            num_threads=job.threads,
            mode=job.mode,
            workers=job.rpc,
        )
    except EdgespecError:  # whoever looked at that before said why
        return
    if not order.needs_costs:
        return
    key = calibration.key_of(order.options, order.draft, order.profile, case.known(case.box).devices, job.threads)
    found = calibration.load(key)
    if found is None:
        yield said(what, "note", f"none yet: the first run measures for three seconds; better, once: {COMMAND}")
    elif found.is_quick:
        yield said(what, "note", f"the quick one of a first run, {found.mode}; better, once: {COMMAND}")
    else:
        yield ok(what, f"{found.mode}: {found.reason}")
