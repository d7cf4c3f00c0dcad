"""Usable CPUs over recorded file trees."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from edgespec.devices.probe import usable_cpus


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def test_without_control_groups_the_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cpus(tmp_path) == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3}, raising=False)
    assert usable_cpus(tmp_path) == 2


def test_hardware_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 4)
    assert usable_cpus(tmp_path) == 4


@pytest.mark.parametrize(
    ("quota", "cpus"), [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("5000 100000", 1)]
)
def test_quota_of_a_version_2_control_group(tmp_path: Path, quota: str, cpus: int) -> None:
    tree(tmp_path, {"proc/self/cgroup": "0::/app\n", "sys/fs/cgroup/app/cpu.max": quota + "\n"})
    assert usable_cpus(tmp_path) == cpus


def test_the_tightest_ancestor_decides(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slice/app\n",
        "sys/fs/cgroup/slice/cpu.max": "300000 100000\n",
        "sys/fs/cgroup/slice/app/cpu.max": "max 100000\n",
    }
    assert usable_cpus(tree(tmp_path, files)) == 3


def test_quota_of_a_version_1_control_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/docker/1\n2:memory:/docker/1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert usable_cpus(tree(tmp_path, files)) == 4


def test_no_quota_in_a_version_1_control_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert usable_cpus(tree(tmp_path, files)) == 8
