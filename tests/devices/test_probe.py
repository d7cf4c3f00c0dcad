"""Usable CPUs and memory, and a box's name, over file trees."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from edgespec.devices import cgroup
from edgespec.devices.probe import Box, probe, usable_cpus, usable_memory, usable_threads
from tests.devices import trees
from tests.devices.trees import plant

pytestmark = pytest.mark.usefixtures("eight_cpus")
KIB, GIB = 2**10, 2**30


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
    plant(tmp_path, {"proc/self/cgroup": "0::/app\n", "sys/fs/cgroup/app/cpu.max": quota + "\n"})
    assert usable_cpus(tmp_path) == cpus


def test_the_tightest_ancestor_decides(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slice/app\n",
        "sys/fs/cgroup/slice/cpu.max": "300000 100000\n",
        "sys/fs/cgroup/slice/app/cpu.max": "max 100000\n",
    }
    assert usable_cpus(plant(tmp_path, files)) == 3


def test_quota_of_a_version_1_control_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/docker/1\n2:memory:/docker/1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert usable_cpus(plant(tmp_path, files)) == 4


def test_no_quota_in_a_version_1_control_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert usable_cpus(plant(tmp_path, files)) == 8


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "garbage\n:::\n\n0\n7:cpu\n"},
        {"proc/self/cgroup": "0::/a\0b\n"},
        {"proc/self/cgroup": "0::/" + "a" * 5000 + "\n"},
        {"proc/self/cgroup": "0::/../..\n"},
        {"proc/self/cgroup": "0::/app", "sys/fs/cgroup/app/cpu.max": "100000 0"},
        {"proc/self/cgroup": "0::/app", "sys/fs/cgroup/app/cpu.max": "100000 many"},
        {"proc/self/cgroup": "0::/app", "sys/fs/cgroup/app/cpu.max": "² 100000"},
        {"proc/self/cgroup": "0::/app", "sys/fs/cgroup/app/cpu.max": f"{'9' * 5000} 100000"},
        {"proc/self/cgroup": "0::/app", "sys/fs/cgroup/app/cpu.max/folder": ""},
        {"proc/self/cgroup": "0::/app", "sys/fs/cgroup/app/memory.max": "-5"},
        {"proc/self/cgroup": "1:cpu:/", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "1e5"},
        {"proc/self/cgroup/folder": ""},
        {"proc/meminfo": "MemTotal: lots kB\nMemAvailable\n\0\0"},
        {"proc/device-tree/model": "", "proc/device-tree/compatible": "\0\0\0"},
        {"sys/class/dmi/id": "a file", "proc/driver/nvidia/gpus": "a file"},
    ],
)
def test_files_that_are_not_as_expected_say_nothing(tmp_path: Path, files: dict[str, str]) -> None:
    box, nothing = probe(plant(tmp_path, files)), probe(tmp_path / "empty")
    assert (box.num_cpus, box.memory_bytes, box.machine) == (8, nothing.memory_bytes, ())
    assert (box.is_jetson, box.num_nvidia_cards, box.devices) == (False, 0, ())


def test_bytes_that_are_no_text_say_nothing(tmp_path: Path) -> None:
    noise = bytes(range(256)) * 300
    for name in {name for files in (trees.JETSON_ORIN_NANO, trees.CONTAINER_V1, trees.WORKSTATION) for name in files}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(noise)
    box = probe(tmp_path)
    assert box.num_cpus == 8
    assert all(text.isprintable() and text for text in box.machine)


def test_a_file_that_may_not_be_read_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, trees.CONTAINER_V2)

    def denied(*_: object) -> None:  # root, whom tests often run as, may read everything
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    monkeypatch.setattr(Path, "iterdir", denied)
    assert probe(tmp_path).num_cpus == 8


# Memory


def test_memory_is_the_boxs_where_nothing_limits_it(tmp_path: Path) -> None:
    assert usable_memory(plant(tmp_path, trees.RASPBERRY_PI_5)) == (8245472 * KIB, 7300000 * KIB)


@pytest.mark.parametrize("files", [trees.CONTAINER_V1, trees.CONTAINER_V2])
def test_a_container_has_its_limit(tmp_path: Path, files: dict[str, str]) -> None:
    assert usable_memory(plant(tmp_path, files)) == (4 * GIB, 4 * GIB)
    assert usable_cpus(tmp_path) == 2


def test_the_tightest_limit_of_the_ancestors_decides(tmp_path: Path) -> None:
    limits = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": f"{3 * GIB}\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
    }
    assert usable_memory(plant(tmp_path, trees.WORKSTATION | limits)) == (3 * GIB, 3 * GIB)


def test_a_version_1_group_without_a_limit(tmp_path: Path) -> None:
    unlimited = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert usable_memory(plant(tmp_path, trees.CONTAINER_V1 | unlimited)) == (65600000 * KIB, 58000000 * KIB)


def test_what_others_use_is_not_free(tmp_path: Path) -> None:
    busy = {"proc/meminfo": trees.meminfo(65600000, 1000000)}
    assert usable_memory(plant(tmp_path, trees.CONTAINER_V2 | busy)) == (4 * GIB, 1000000 * KIB)


def test_without_meminfo_the_platform_is_asked(tmp_path: Path) -> None:
    most, free = usable_memory(tmp_path)
    assert most == psutil.virtual_memory().total
    assert 0 < free <= most


# The box


@pytest.mark.parametrize(
    ("files", "machine"),
    [
        (trees.RASPBERRY_PI_5, ("Raspberry Pi 5 Model B Rev 1.0", "raspberrypi,5-model-b", "brcm,bcm2712")),
        (trees.WORKSTATION, ("Micro-Star International Co., Ltd.", "MS-7D25", "PRO Z690-A")),
    ],
)
def test_what_the_board_calls_itself(tmp_path: Path, files: dict[str, str], machine: tuple[str, ...]) -> None:
    assert probe(plant(tmp_path, files)).machine == machine


def test_a_jetson_is_known_by_either_of_its_files(tmp_path: Path) -> None:
    whole = probe(plant(tmp_path / "whole", trees.JETSON_ORIN_NANO))
    assert whole.is_jetson
    assert whole.machine[0] == "NVIDIA Jetson Orin Nano Developer Kit"
    assert whole.machine[-1].startswith("# R36 (release)")
    for left_out in ("etc/nv_tegra_release", "proc/device-tree/compatible"):
        files = {name: text for name, text in trees.JETSON_ORIN_NANO.items() if name != left_out}
        assert probe(plant(tmp_path / left_out, files)).is_jetson
    assert not probe(plant(tmp_path / "pi", trees.RASPBERRY_PI_5)).is_jetson


def test_nvidias_driver_shows_its_cards(tmp_path: Path) -> None:
    assert probe(plant(tmp_path, trees.NVIDIA_WORKSTATION)).num_nvidia_cards == 1


def test_this_very_box() -> None:
    box = probe()
    assert isinstance(box, Box)
    assert box.memory_bytes >= box.free_memory_bytes > 2**20
    assert cgroup.read(Path("/proc/self/no-such-file")) == ""


def test_threads_beyond_the_usable_cpus_are_not_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("edgespec.devices.probe.usable_cpus", lambda: 3)
    assert [usable_threads(asked) for asked in (None, 1, 3)] == [3, 1, 3]
    assert caplog.messages == []
    assert usable_threads(500) == 3
    assert caplog.messages == ["500 threads asked for, but only 3 CPUs are usable: 3 are started"]
