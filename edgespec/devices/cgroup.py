"""What control groups leave to this process, versions 1 and 2: the tightest of its group and that group's ancestors.

A file that is missing, unreadable or not as expected says nothing, and nothing fails because of it.
"""

from __future__ import annotations

import collections.abc as abc
from pathlib import Path

MAX_FILE_BYTES = 2**16


def cpu_quota(root: Path) -> float | None:
    """CPUs; None where there is no quota."""
    found = [_quota_v2(folder) if v2 else _quota_v1(folder) for folder, v2 in _folders(root, "cpu")]
    return min((quota for quota in found if quota is not None), default=None)


def memory_limit(root: Path) -> int | None:
    """Bytes; None where there is no limit."""
    names = {True: "memory.max", False: "memory.limit_in_bytes"}
    found = [number(read(folder / names[v2])) for folder, v2 in _folders(root, "memory")]
    return min((limit for limit in found if limit), default=None)


def read(path: Path) -> str:
    """The file's text, at most its first 64 KiB; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return ""


def number(text: str) -> int | None:
    """The whole number a text is, or None."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 25 else None


def _folders(root: Path, controller: str) -> abc.Iterator[tuple[Path, bool]]:
    """The process's groups for this controller, innermost first, and whether each is of version 2."""
    for line in read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = base / group.lstrip("/")
        for candidate in (folder, *folder.parents):
            yield candidate, not controllers
            if candidate == base:
                break


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = read(folder / "cpu.max").strip().partition(" ")
    return _ratio(quota, period)


def _quota_v1(folder: Path) -> float | None:
    return _ratio(read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    top, bottom = number(quota), number(period)
    return top / bottom if top and bottom else None
