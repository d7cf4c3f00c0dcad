"""How much memory a pair may take on this box now, on which GPUs."""

from __future__ import annotations

import collections.abc as abc

from edgespec.devices.probe import Box, ListedDevice
from edgespec.devices.profile import GIB, Profile
from edgespec.devices.sizes import USABLE, Budget

UNSAID = 2**50  # bytes of a device that does not say how many it has: whether they are enough shows when it is loaded


def run_budget(profile: Profile, box: Box) -> Budget:
    """What may be taken on this box now: the profile's budgets, nine tenths of what there is where it leaves them open,
    and no more than is free."""
    device, gpus = profile.device, usable_gpus(profile, box)
    main_bytes = int(device.memory_budget_gib * GIB) or int(USABLE * box.memory_bytes)
    main_bytes = min(main_bytes, box.free_memory_bytes)
    if not gpus or _is_shared(profile, box):
        return Budget(main_bytes, 0, len(gpus))
    most = int(device.gpu_memory_budget_gib * GIB) or UNSAID * len(gpus)
    share = 1.0 if device.gpu_memory_budget_gib else USABLE
    gpu_bytes = _together([_free_bytes(gpu, share) for gpu in gpus], profile.verifier.tensor_split)
    return Budget(main_bytes, max(1, min(most, gpu_bytes)), len(gpus))


def usable_gpus(profile: Profile, box: Box) -> tuple[ListedDevice, ...]:
    """Those llama.cpp would put layers on: with memory of their own before those without; ``main_gpu`` alone with split
    mode none."""
    gpus = (*box.gpus, *box.shared_gpus) if profile.device.unified_memory else box.gpus or box.shared_gpus
    if profile.verifier.split_mode != "none":
        return gpus
    return gpus[profile.verifier.main_gpu :][:1]


def _is_shared(profile: Profile, box: Box) -> bool:
    """Whether the GPU takes the main memory, which then counts once."""
    return profile.device.unified_memory or not box.gpus


def _free_bytes(gpu: ListedDevice, share: float) -> int:
    return min(gpu.free_bytes, int(share * gpu.memory_bytes)) if gpu.memory_bytes else UNSAID


def _together(free_bytes: list[int], shares: abc.Sequence[float]) -> int:
    """What several GPUs hold: by free memory all of it, by given shares until the first of them is full."""
    given = [(size, part) for size, part in zip(free_bytes, shares, strict=False) if part > 0]
    if not given:
        return sum(free_bytes)
    whole = sum(part for _, part in given)
    return min(int(size * whole / part) for size, part in given)
