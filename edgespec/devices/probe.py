"""What this process may use of the box. ``root`` is where /proc and /sys are looked for; tests point it elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs this process may really use, at least 1: affinity mask and cgroup quota, not the box's total.

    Hardware threads that share a core count once where the mask covers the whole box: two matrix threads on one core
    only take turns.
    """
    affinity = _affinity()
    physical = psutil.cpu_count(logical=False) or affinity
    count = min(affinity, physical) if affinity == (os.cpu_count() or 1) else affinity
    quota = _cgroup_quota(root)
    return max(1, count if quota is None else min(count, int(quota + 0.5)))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cgroup_quota(root: Path) -> float | None:
    """The tightest CPU quota, in CPUs, of this process's control group and its ancestors; None where there is none."""
    quotas: list[float] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, read = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = root / "sys/fs/cgroup/cpu", _quota_v1
        else:
            continue
        folder = base / group.lstrip("/")
        for candidate in (folder, *folder.parents):
            quota = read(candidate)
            if quota is not None:
                quotas.append(quota)
            if candidate == base:
                break
    return min(quotas, default=None)


def _quota_v2(folder: Path) -> float | None:
    fields = _read(folder / "cpu.max").split()
    return int(fields[0]) / int(fields[1]) if len(fields) == 2 and fields[0].isdigit() else None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
