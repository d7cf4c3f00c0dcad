"""Which profile a box is for: file trees of boards and containers, devices as llama.cpp lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.devices.detect import Choice, detect
from edgespec.devices.probe import probe
from edgespec.devices.profile import GIB, Device, Profile, profile_files, read_profile
from edgespec.verifiers.llama_devices import LlamaDevice
from tests.devices import trees
from tests.devices.conftest import pretend_cpus
from tests.devices.trees import Files, plant

SHIPPED = [read_profile(file.path) for file in profile_files() if not file.is_user]
CPU = LlamaDevice("CPU", "Some CPU", "cpu", 0, 64 * GIB)


def gpu(gib: float, number: int = 0, kind: str = "gpu") -> LlamaDevice:
    return LlamaDevice(f"CUDA{number}", "NVIDIA Something", kind, 0, int(gib * GIB))


class Bench:
    """Puts a box up and asks for its profile."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._root, self._patch = root, patch

    def __call__(
        self, files: Files, *devices: LlamaDevice, num_cpus: int = 16, profiles: list[Profile] = SHIPPED
    ) -> Choice:
        pretend_cpus(self._patch, num_cpus)
        return detect(probe(plant(self._root, files), [CPU, *devices]), profiles)


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def reason(choice: Choice, name: str) -> str:
    (found,) = [line for line in choice.reasons if line.startswith(f"{name}: ")]
    return found


@pytest.mark.parametrize(
    ("files", "devices", "num_cpus", "name"),
    [
        (trees.JETSON_ORIN_NANO, [gpu(7.4)], 6, "jetson-orin-nano-8gb"),
        (trees.JETSON_ORIN_NANO, [gpu(7.4, kind="igpu")], 6, "jetson-orin-nano-8gb"),
        (trees.JETSON_ORIN_NANO, [], 6, "jetson-orin-nano-8gb"),
        (trees.JETSON_AGX_ORIN, [gpu(61.4)], 12, "jetson-agx-orin-64gb"),
        (trees.RASPBERRY_PI_5, [], 4, "raspberry-pi-5"),
        (trees.RASPBERRY_PI_5_CONTAINER, [], 4, "raspberry-pi-5"),
        (trees.JETSON_ORIN_NANO_CONTAINER, [gpu(7.4)], 6, "jetson-orin-nano-8gb"),
        (trees.RASPBERRY_PI_5_4GB, [], 4, "cpu-small"),
        (trees.UNKNOWN_BOARD, [], 8, "cpu-small"),
        (trees.CONTAINER_V2, [], 16, "cpu-small"),
        (trees.CONTAINER_V1, [], 16, "cpu-small"),
        (trees.CONTAINER_V2, [gpu(24)], 16, "workstation-24gb"),
        (trees.WORKSTATION, [], 16, "auto"),
        (trees.WORKSTATION, [], 8, "cpu-small"),
        (trees.WORKSTATION, [gpu(7.79)], 16, "workstation-8gb"),
        (trees.WORKSTATION, [gpu(16)], 16, "workstation-8gb"),
        (trees.WORKSTATION, [gpu(32, 1, "igpu"), gpu(7.5)], 16, "workstation-8gb"),
        (trees.WORKSTATION, [gpu(7)], 16, "workstation-8gb"),
        (trees.WORKSTATION, [gpu(6.9)], 16, "auto"),
        (trees.WORKSTATION, [gpu(22.5)], 16, "workstation-24gb"),
        (trees.WORKSTATION, [gpu(139)], 16, "workstation-24gb"),
        (trees.WORKSTATION, [gpu(24), gpu(24, 1)], 16, "dual-gpu"),
        (trees.WORKSTATION, [gpu(8), gpu(12, 1), gpu(8, 2)], 16, "dual-gpu"),
        (trees.WORKSTATION, [gpu(2), gpu(24, 1)], 16, "workstation-24gb"),
        (trees.WORKSTATION, [gpu(4)], 16, "auto"),
        (trees.WORKSTATION, [gpu(4)], 4, "auto"),
        (trees.WORKSTATION, [gpu(32, kind="igpu")], 16, "auto"),
        (trees.WORKSTATION, [LlamaDevice("BLAS", "OpenBLAS", "accel", 0, 0)], 4, "cpu-small"),
        ({}, [], 16, "auto"),
    ],
)
def test_the_profile_of_a_box(ask: Bench, files: Files, devices: list[LlamaDevice], num_cpus: int, name: str) -> None:
    if not files:
        files = {"proc/meminfo": trees.meminfo(65600000, 58000000)}
    choice = ask(files, *devices, num_cpus=num_cpus)
    assert choice.profile.name == name
    assert choice.reasons[0].startswith(f"{name}: ")
    assert [line.split(":")[0] for line in choice.reasons[1:] if not line.startswith("note")] == [
        profile.name for profile in SHIPPED if profile.name != name
    ]
    assert all("\n" not in line for line in choice.reasons)


def test_the_choice_is_explained(ask: Bench) -> None:
    choice = ask(trees.JETSON_ORIN_NANO, gpu(7.4), num_cpus=6)
    assert choice.reasons[0] == "jetson-orin-nano-8gb: the board's name has 'Jetson Orin Nano'"
    assert reason(choice, "raspberry-pi-5") == (
        "raspberry-pi-5: the board's name has no 'Raspberry Pi 5' or 'Raspberry Pi Compute Module 5'"
    )
    assert "llama.cpp lists none" in reason(choice, "workstation-8gb")
    assert "boxes without a GPU, llama.cpp lists CUDA0 (NVIDIA Something, 7.4 GiB)" in reason(choice, "cpu-small")


def test_a_gpu_that_is_too_small_is_named(ask: Bench) -> None:
    choice = ask(trees.WORKSTATION, gpu(4))
    assert reason(choice, "auto") == "auto: no other profile fits"
    for name, needed in (("workstation-8gb", "1 GPU of 7 GiB"), ("dual-gpu", "2 GPUs of 7 GiB")):
        assert reason(choice, name) == (
            f"{name}: it needs {needed} or more, llama.cpp lists CUDA0 (NVIDIA Something, 4.0 GiB)"
        )


def test_a_board_of_the_name_with_less_memory_is_told_so(ask: Bench) -> None:
    assert ask(trees.JETSON_ORIN_NANO_4GB, gpu(3.5), num_cpus=6).profile.name == "auto"
    choice = ask(trees.RASPBERRY_PI_5_4GB, num_cpus=4)
    assert reason(choice, "raspberry-pi-5") == (
        "raspberry-pi-5: it needs 7 GiB of memory, the process can have 4.0 GiB"
    )


def test_a_jetsons_gpu_is_no_workstations(ask: Bench) -> None:
    """It shares the main memory, whatever llama.cpp calls it."""
    assert ask(trees.JETSON_ORIN_NX, gpu(15.2), num_cpus=8).profile.name == "auto"


def test_a_container_on_a_board_has_only_its_limit(ask: Bench) -> None:
    limit = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": str(8 * GIB)}
    choice = ask(trees.JETSON_AGX_ORIN | limit, num_cpus=12)
    assert choice.profile.name == "cpu-small"
    assert "the process can have 8.0 GiB" in reason(choice, "jetson-agx-orin-64gb")


def test_several_that_fit_say_which_goes_before(ask: Bench) -> None:
    choice = ask(trees.WORKSTATION, gpu(24), gpu(24, 1))
    assert reason(choice, "workstation-24gb") == "workstation-24gb: it fits too, dual-gpu goes before it"


@pytest.mark.parametrize(
    ("files", "what"), [(trees.NVIDIA_WORKSTATION, "1 of its GPUs"), (trees.JETSON_AGX_ORIN, "a Jetson")]
)
def test_a_gpu_that_llama_cpp_does_not_list_is_noted(ask: Bench, files: Files, what: str) -> None:
    assert what in reason(ask(files), "note")
    assert "GGML_CUDA" in reason(ask(files), "note")
    assert not [line for line in ask(files, gpu(24)).reasons if line.startswith("note")]


# Profiles of one's own


def test_the_longer_name_of_a_board_goes_before(ask: Bench) -> None:
    mine = Profile("mine", Device(machines=("pi 5 model b rev 1.0",)))
    assert ask(trees.RASPBERRY_PI_5, profiles=[*SHIPPED, mine]).profile is mine


def test_between_equals_the_first_wins(ask: Bench) -> None:
    one, other = (Profile(name, Device(min_gpus=1)) for name in ("one", "other"))
    for profiles in ([one, other], [other, one]):
        assert ask(trees.WORKSTATION, gpu(2), profiles=profiles).profile is profiles[0]


def test_all_that_is_said_must_hold(ask: Bench) -> None:
    mine = Profile("mine", Device(machines=("MS-7D25",), min_gpus=1))
    assert ask(trees.WORKSTATION, profiles=[*SHIPPED, mine]).profile.name == "auto"
    assert ask(trees.WORKSTATION, gpu(1), profiles=[*SHIPPED, mine]).profile is mine


def test_unified_memory_takes_any_gpu(ask: Bench) -> None:
    mine = Profile("mine", Device(min_gpus=1, unified_memory=True))
    assert ask(trees.WORKSTATION, gpu(30, kind="igpu"), profiles=[mine]).profile is mine


def test_a_profile_that_says_nothing_is_never_found(ask: Bench) -> None:
    choice = ask(trees.WORKSTATION, profiles=[Profile("mine", Device(min_memory_gib=1)), *SHIPPED])
    assert choice.profile.name == "auto"
    assert "chosen by name only" in reason(choice, "mine")


def test_without_any_profile_it_is_auto(ask: Bench) -> None:
    assert ask(trees.WORKSTATION, profiles=[]) == Choice(Profile("auto"), ("auto: no other profile fits",))
