"""What this process may use of the box, and what box it is. ``root`` is where /proc and /sys are looked for.

Nothing here fails: what cannot be read is not there.
"""

from __future__ import annotations

import collections.abc as abc
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from edgespec.devices.cgroup import cpu_quota, memory_limit, number, read

logger = logging.getLogger("edgespec")

ROOT = Path("/")
DEVICE_TREE = ("model", "compatible")  # texts that end with NUL, one after the other
DMI = ("sys_vendor", "product_name", "product_version", "board_vendor", "board_name")
JETSON_RELEASE = "etc/nv_tegra_release"
# The device tree's name of the board once more, which containers see: Docker hides the device tree from them.
SOC_MACHINE, CPU_INFO, CPU_INFO_KEY = "sys/devices/soc0/machine", "proc/cpuinfo", "Model\t"


class ListedDevice(Protocol):
    """What llama.cpp says of a device; see verifiers/llama_devices.py. ``kind``: cpu, gpu, igpu, accel or meta.

    Bytes are 0 where it does not say.
    """

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def free_bytes(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Box:
    """What there is.

    num_cpus           usable ones
    memory_bytes       main memory this process can have at most
    free_memory_bytes  of it, what is free now
    machine            what the board and its firmware call themselves
    is_jetson          a Jetson: its GPU shares the main memory
    num_nvidia_cards   cards NVIDIA's driver shows, whether llama.cpp can use them or not
    devices            llama.cpp's list
    """

    num_cpus: int
    memory_bytes: int
    free_memory_bytes: int
    machine: tuple[str, ...] = ()
    is_jetson: bool = False
    num_nvidia_cards: int = 0
    devices: tuple[ListedDevice, ...] = ()

    @property
    def gpus(self) -> tuple[ListedDevice, ...]:
        """With memory of their own."""
        return () if self.is_jetson else tuple(device for device in self.devices if device.kind == "gpu")

    @property
    def shared_gpus(self) -> tuple[ListedDevice, ...]:
        """Those that take the main memory."""
        kinds = ("gpu", "igpu") if self.is_jetson else ("igpu",)
        return tuple(device for device in self.devices if device.kind in kinds)


def probe(root: Path = ROOT, devices: abc.Sequence[ListedDevice] = ()) -> Box:
    """Look at everything but ``devices``, which are llama.cpp's to list."""
    memory_bytes, free_bytes = usable_memory(root)
    compatible = read(root / "proc/device-tree/compatible")
    return Box(
        num_cpus=usable_cpus(root),
        memory_bytes=memory_bytes,
        free_memory_bytes=free_bytes,
        machine=_machine(root),
        is_jetson=bool(read(root / JETSON_RELEASE)) or "nvidia,tegra" in compatible,
        num_nvidia_cards=_num_entries(root / "proc/driver/nvidia/gpus"),
        devices=tuple(devices),
    )


def usable_cpus(root: Path = ROOT) -> int:
    """CPUs this process may really use, at least 1: affinity mask and cgroup quota, not the box's total.

    Hardware threads that share a core count once where the mask covers the whole box: two matrix threads on one core
    only take turns.
    """
    affinity = _affinity()
    physical = psutil.cpu_count(logical=False) or affinity
    count = min(affinity, physical) if affinity == (os.cpu_count() or 1) else affinity
    quota = cpu_quota(root)
    return max(1, count if quota is None else min(count, int(quota + 0.5)))


def usable_threads(asked: int | None) -> int:
    """``asked`` threads, but no more than the usable CPUs: those beyond would only wait for each other, actively. None:
    as many as there are. Whoever starts them checks that it is a number of 1 or more.
    """
    usable = usable_cpus()
    if not isinstance(asked, int) or asked <= usable:
        return usable if asked is None else asked
    logger.warning("%d threads asked for, but only %d CPUs are usable: %d are started", asked, usable, usable)
    return usable


def usable_memory(root: Path = ROOT) -> tuple[int, int]:
    """Main memory in bytes: what this process can have at most, by the box and its control groups, and what is free."""
    stated = _meminfo(root)
    total, free = (stated.get(name) for name in ("MemTotal", "MemAvailable"))
    if total is None or free is None:
        memory = psutil.virtual_memory()
        total, free = total or int(memory.total), free or int(memory.available)
    limit = memory_limit(root)
    most = total if limit is None else min(total, limit)
    return most, min(most, free)


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes by name."""
    found = {}
    for line in read(root / "proc/meminfo").splitlines():
        name, _, amount = line.partition(":")
        kib = number(amount.removesuffix("kB"))
        if kib:
            found[name] = kib * 1024
    return found


def _machine(root: Path) -> tuple[str, ...]:
    texts = [text for name in DEVICE_TREE for text in read(root / "proc/device-tree" / name).split("\0")]
    texts += [read(root / SOC_MACHINE)]
    texts += [line.partition(":")[2] for line in read(root / CPU_INFO).splitlines() if line.startswith(CPU_INFO_KEY)]
    texts += [read(root / "sys/class/dmi/id" / name) for name in DMI]
    texts += read(root / JETSON_RELEASE).splitlines()[:1]
    cleaned = [" ".join("".join(c if c.isprintable() else " " for c in text).split()) for text in texts]
    return tuple(dict.fromkeys(text for text in cleaned if text))


def _num_entries(folder: Path) -> int:
    try:
        return sum(1 for _ in folder.iterdir())
    except OSError:
        return 0
