"""Which profile a box is for, and why."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass

from edgespec.devices.probe import Box, ListedDevice
from edgespec.devices.profile import DEFAULT_PROFILE, GIB, Device, Profile


@dataclass(frozen=True, slots=True)
class Choice:
    """reasons: a line for the profile chosen, one for every other, then what else should be known."""

    profile: Profile
    reasons: tuple[str, ...]


def detect(box: Box, profiles: abc.Sequence[Profile]) -> Choice:
    """The most specific profile whose ``[device]`` section the box answers to.

    A board's own name goes before GPUs, more GPUs before fewer, more GPU memory before less, any GPU before the small
    boxes without one; between equals the first. Where none fits it is ``auto``.
    """
    lacking = {profile.name: _lacks(box, profile.device) for profile in profiles}
    fitting = [profile for profile in profiles if _says_something(profile.device) and not lacking[profile.name]]
    default = next((profile for profile in profiles if profile.name == DEFAULT_PROFILE), Profile(DEFAULT_PROFILE))
    chosen = max(fitting, key=lambda profile: _rank(box, profile.device), default=default)
    why = _why(box, chosen.device) if fitting else "no other profile fits"
    others = [_other(profile, lacking[profile.name], chosen) for profile in profiles if profile is not chosen]
    return Choice(chosen, (f"{chosen.name}: {why}", *others, *_notes(box)))


def _says_something(device: Device) -> bool:
    return bool(device.machines) or _wants_gpu(device) or _wants_small(device)


def _wants_gpu(device: Device) -> bool:
    return bool(device.min_gpus or device.min_gpu_memory_gib)


def _wants_small(device: Device) -> bool:
    return bool(device.max_cpus or device.max_memory_gib)


def _rank(box: Box, device: Device) -> tuple[float, ...]:
    name = max((len(part) for part in _named(box, device)), default=0)
    return (name, device.min_gpus, device.min_gpu_memory_gib, device.min_memory_gib)


def _named(box: Box, device: Device) -> list[str]:
    """The parts of names that this box's name has."""
    return [part for part in device.machines if any(part.lower() in name.lower() for name in box.machine)]


def _lacks(box: Box, device: Device) -> list[str]:
    """What the box would need for this profile, in words; empty where it has all."""
    return [
        *_lacks_name(box, device),
        *(_lacks_gpus(box, device) if _wants_gpu(device) else ()),
        *_lacks_memory(box, device),
        *(_not_small(box, device) if _wants_small(device) else ()),
    ]


def _lacks_name(box: Box, device: Device) -> abc.Iterator[str]:
    if device.machines and not _named(box, device):
        yield f"the board's name has no {' or '.join(repr(part) for part in device.machines)}"


def _lacks_gpus(box: Box, device: Device) -> abc.Iterator[str]:
    gpus = [*box.gpus, *(box.shared_gpus if device.unified_memory else ())]
    enough = [gpu for gpu in gpus if gpu.memory_bytes >= device.min_gpu_memory_gib * GIB]
    wanted = max(device.min_gpus, 1)
    if len(enough) < wanted:
        size = f" of {device.min_gpu_memory_gib:g} GiB or more" if device.min_gpu_memory_gib else ""
        yield f"it needs {wanted} GPU{'s' * (wanted > 1)}{size}, llama.cpp lists {_listed(gpus) or 'none'}"


def _lacks_memory(box: Box, device: Device) -> abc.Iterator[str]:
    if box.memory_bytes < device.min_memory_gib * GIB:
        yield f"it needs {device.min_memory_gib:g} GiB of memory, the process can have {_gib(box.memory_bytes)}"


def _not_small(box: Box, device: Device) -> abc.Iterator[str]:
    gpus = [*box.gpus, *box.shared_gpus]
    if gpus:
        yield f"it is for boxes without a GPU, llama.cpp lists {_listed(gpus)}"
    elif not _small(box, device):
        limits = [f"{device.max_cpus} usable CPUs"] if device.max_cpus else []
        limits += [f"{device.max_memory_gib:g} GiB of memory"] if device.max_memory_gib else []
        yield f"it is for at most {' or '.join(limits)}, there are {_cpus_and_memory(box)}"


def _small(box: Box, device: Device) -> bool:
    return box.num_cpus <= device.max_cpus or box.memory_bytes <= device.max_memory_gib * GIB


def _why(box: Box, device: Device) -> str:
    """What of the box answers to this profile."""
    found = [f"the board's name has {part!r}" for part in _named(box, device)[:1]]
    if _wants_gpu(device):
        gpus = [*box.gpus, *(box.shared_gpus if device.unified_memory else ())]
        found.append(f"llama.cpp lists {_listed(gpus)}")
    if _wants_small(device):
        found.append(f"llama.cpp lists no GPU, there are {_cpus_and_memory(box)}")
    return ", ".join(found)


def _other(profile: Profile, lacking: list[str], chosen: Profile) -> str:
    if profile.name == DEFAULT_PROFILE:
        return f"{profile.name}: it is for boxes that no other profile fits"
    if not _says_something(profile.device):
        return f"{profile.name}: its [device] recognises no box; it is chosen by name only"
    return f"{profile.name}: {', '.join(lacking) or f'it fits too, {chosen.name} goes before it'}"


def unused_gpu(box: Box) -> str:
    """Which GPU the box has and llama.cpp does not, and what to do about it; "" where there is none."""
    if not (box.num_nvidia_cards or box.is_jetson) or box.gpus or box.shared_gpus:
        return ""
    what = "this is a Jetson" if box.is_jetson else f"NVIDIA's driver shows {box.num_nvidia_cards} of its GPUs"
    return (
        f"{what}, but llama.cpp lists none: hidden by CUDA_VISIBLE_DEVICES, or built without CUDA; unset the "
        "one, or build llama-cpp-python again with -DGGML_CUDA=ON in CMAKE_ARGS"
    )


def _notes(box: Box) -> list[str]:
    unused = unused_gpu(box)
    return [f"note: {unused}"] if unused else []


def _listed(gpus: abc.Sequence[ListedDevice]) -> str:
    return ", ".join(f"{gpu.name} ({gpu.description}, {_gib(gpu.memory_bytes)})" for gpu in gpus)


def _cpus_and_memory(box: Box) -> str:
    return f"{box.num_cpus} usable CPU{'s' * (box.num_cpus > 1)} and {_gib(box.memory_bytes)} of memory"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
