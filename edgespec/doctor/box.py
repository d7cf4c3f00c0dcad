"""The box against what the profile asks of it."""

from __future__ import annotations

import collections.abc as abc

from edgespec.devices.detect import unused_gpu
from edgespec.devices.memory import size_text
from edgespec.devices.probe import probe
from edgespec.devices.profile import Profile
from edgespec.doctor.finding import Finding, ok, said
from edgespec.doctor.job import Case
from edgespec.errors import BackendError, EdgespecError, ParameterError, ProfileError
from edgespec.loading import NO_PROFILE, choose_profile
from edgespec.survey import look_at_box


def profile(case: Case) -> abc.Iterator[Finding]:
    """The one asked for, else the pair's."""
    job = case.job
    if job.profile is None and job.verifier is None and case.pair is None:
        return
    case.profile = choose_profile(job.profile, job.pair, job.verifier)
    name = case.profile.name
    about = case.profile.device.description or "no description"
    if case.profile is NO_PROFILE:
        about = "all defaults; `edgespec profiles detect` finds the one of this box"
    yield ok("profile", f"{name}: {about}")


def devices(case: Case) -> Finding:
    """What the process may use of the box."""
    case.box = box = look_at_box(_workers(case)) if case.llama else probe()
    what, gpus = "GPU", [*box.gpus, *box.shared_gpus]
    if unused := unused_gpu(box):
        wants = case.profile is None or case.profile.verifier.gpu_layers != 0
        return said(what, "problem" if wants else "note", unused, BackendError)
    if not gpus and case.profile is not None and needs_gpu(case.profile):
        message = f"llama.cpp lists none, and profile {case.profile.name} is for a box with one"
        return said(what, "problem", f"{message}; find yours: edgespec profiles detect", ProfileError)
    if not gpus:
        return said(what, "note", "llama.cpp lists none: both models run on the CPU")
    listed = (f"{gpu.name} ({gpu.description}), {_memory(gpu.free_bytes, gpu.memory_bytes)}" for gpu in gpus)
    return ok(what, ", ".join(listed))


def needs_gpu(profile: Profile) -> bool:
    """Whether it is for boxes with a GPU only."""
    device = profile.device
    return bool(device.min_gpus or device.min_gpu_memory_gib or device.unified_memory)


def _memory(free_bytes: int, memory_bytes: int) -> str:
    return f"{size_text(free_bytes)} of {size_text(memory_bytes)} free" if memory_bytes else "memory not known"


def cpus(case: Case) -> abc.Iterator[Finding]:
    """Usable ones against the threads that are asked for."""
    what, usable, chosen = "CPUs", case.known(case.box).num_cpus, case.known(case.profile)
    asked = {"[verifier] threads": chosen.verifier.threads, "[draft] threads": chosen.draft.threads}
    remedy = "set it to 0, which is all of them"
    error: type[EdgespecError] = ProfileError
    if case.job.threads is not None:
        asked, remedy, error = {"--threads": case.job.threads}, "leave it out", ParameterError
    too_many = {name: count for name, count in asked.items() if count > usable}
    for name, count in too_many.items():
        yield said(what, "problem", f"{name} is {count}, but only {usable} are usable; {remedy}", error)
    if too_many:
        return
    if sum(asked.values()) > usable:
        shares = " and ".join(f"{name} {count}" for name, count in asked.items())
        yield said(what, "note", f"{shares} are more than the {usable} usable ones: both sides cannot work at once")
        return
    yield ok(what, f"{usable} usable (affinity mask and control groups counted)")


def workers(case: Case) -> abc.Iterator[Finding]:
    """RPC workers, whether anybody answers there."""
    from edgespec.verifiers.llama_rpc import check_reachable, check_supported, parse_endpoints

    endpoints = parse_endpoints(_workers(case))
    if endpoints:
        check_supported()
        check_reachable(endpoints)
        yield ok("workers", f"{', '.join(map(str, endpoints))} answer")


def _workers(case: Case) -> tuple[str, ...]:
    """Those on the command line, else the profile's."""
    return case.job.rpc or (() if case.profile is None else case.profile.verifier.rpc)
