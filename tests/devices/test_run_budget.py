"""What may be taken on a box now; and placements of random boxes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgespec.devices import profile as profiles
from edgespec.devices.placement import CUDA, Wanted, place
from edgespec.devices.probe import Box
from edgespec.devices.profile import GIB, Device, Draft, Profile, Verifier
from edgespec.devices.run_budget import UNSAID, run_budget, usable_gpus
from edgespec.devices.sizes import Budget, ModelShape
from edgespec.verifiers.llama_devices import LlamaDevice
from tests.devices.boxes import BIG, LAPTOP, SMALL, gpu, times, workstation

AUTO = Profile("auto")
BOTH = (CUDA, "CPUExecutionProvider")


@pytest.mark.parametrize(
    ("profile", "box", "expected"),
    [
        (AUTO, LAPTOP, Budget(12 * GIB)),
        (AUTO, replace(LAPTOP, free_memory_bytes=16 * GIB), Budget(int(0.9 * 16 * GIB))),
        (Profile("x", Device(memory_budget_gib=5)), LAPTOP, Budget(5 * GIB)),
        (Profile("x", Device(memory_budget_gib=50)), LAPTOP, Budget(12 * GIB)),
        (AUTO, workstation(gpu(10, all_gib=20)), Budget(int(57.6 * GIB), 10 * GIB, 1)),
        (AUTO, workstation(gpu(20, all_gib=20)), Budget(int(57.6 * GIB), 18 * GIB, 1)),
        (Profile("x", Device(gpu_memory_budget_gib=7)), workstation(gpu(20)), Budget(int(57.6 * GIB), 7 * GIB, 1)),
        (Profile("x", Device(gpu_memory_budget_gib=7)), workstation(gpu(4)), Budget(int(57.6 * GIB), 4 * GIB, 1)),
        (Profile("x", Device(min_gpus=2, min_gpu_memory_gib=20)), LAPTOP, Budget(12 * GIB)),
        (AUTO, workstation(gpu(8, 0), gpu(4, 1)), Budget(int(57.6 * GIB), 12 * GIB, 2)),
        (
            Profile("x", verifier=Verifier(tensor_split=(3.0, 1.0))),
            workstation(gpu(8, 0), gpu(4, 1)),
            Budget(int(57.6 * GIB), 32 * GIB // 3, 2),
        ),
        (
            Profile("x", verifier=Verifier(tensor_split=(0.0, 1.0))),
            workstation(gpu(8, 0), gpu(4, 1)),
            Budget(int(57.6 * GIB), 4 * GIB, 2),
        ),
        (
            Profile("x", verifier=Verifier(split_mode="none", main_gpu=1)),
            workstation(gpu(8, 0), gpu(4, 1)),
            Budget(int(57.6 * GIB), 4 * GIB, 1),
        ),
    ],
)
def test_what_may_be_taken_on_this_box(profile: Profile, box: Box, expected: Budget) -> None:
    got = run_budget(profile, box)
    assert (got.main_bytes, got.num_gpus) == (expected.main_bytes, expected.num_gpus)
    assert got.gpu_bytes == pytest.approx(expected.gpu_bytes, abs=2)


def test_a_gpu_beside_an_integrated_one_is_taken_alone() -> None:
    box = workstation(gpu(8), replace(gpu(30, 1), kind="igpu"), num_cards=1)
    assert [device.name for device in usable_gpus(AUTO, box)] == ["CUDA0"]
    assert run_budget(AUTO, box).num_gpus == 1
    assert run_budget(Profile("x", Device(unified_memory=True)), box) == Budget(int(57.6 * GIB), 0, 2)


def test_devices_that_say_nothing_are_no_limit() -> None:
    assert run_budget(AUTO, workstation(LlamaDevice("RPC0", "", "gpu", 0, 0))).gpu_bytes >= UNSAID


@pytest.mark.parametrize("seed", range(100))
def test_any_box_gets_a_placement_whose_steps_hang_together(seed: int) -> None:
    random = np.random.default_rng(seed)
    gpus = [
        LlamaDevice(
            f"{random.choice(['CUDA', 'Vulkan', 'RPC'])}{number}",
            "",
            str(random.choice(["gpu", "igpu", "accel"])),
            int(random.uniform(0, 30) * GIB),
            int(random.choice([0, 8, 30]) * GIB),
        )
        for number in range(random.integers(0, 4))
    ]
    box = Box(
        int(random.integers(1, 64)),
        64 * GIB,
        int(random.uniform(0, 64) * GIB),
        is_jetson=bool(random.integers(2)),
        num_nvidia_cards=int(random.integers(0, 3)),
        devices=tuple(gpus),
    )
    shapes = [BIG, times(BIG, 10), SMALL, ModelShape.of_file(0), ModelShape.of_file(10 * GIB)]
    wanted = Wanted(
        shapes[random.integers(5)],
        [None, *shapes][random.integers(6)],
        lookup=bool(random.integers(2)),
        mode=str(random.choice(profiles.MODES)),
        num_slots=int(random.integers(1, 9)),
        providers=BOTH if random.integers(2) else (),
        gain=[None, 0.5, 2.0][random.integers(3)],
        draft_problem=str(random.choice(["", "", "broken; mend it"])),
        gpu_problem=str(random.choice(["", "", "crashed; mend it"])),
    )
    profile = Profile(
        "x",
        Device(unified_memory=bool(random.integers(2))),
        Draft(provider=str(random.choice(["cpu", "cuda"]))),
        Verifier(
            gpu_layers=int(random.choice([-1, -1, 0, 9])),
            split_mode=str(random.choice(["none", "layer"])),
            main_gpu=int(random.integers(0, 3)),
        ),
    )
    placement = place(wanted, profile, box)
    assert place(wanted, profile, box) == placement
    names = [name for step in placement.steps for name in step[:2]]
    assert all(upper != lower for upper, lower, _ in placement.steps)
    assert all(reason and "\n" not in reason and "; " in reason for *_, reason in placement.steps)
    assert not names or names[-1] in (placement.kind, placement.name)
    assert placement.draft_provider == "cpu" or placement.drafter == "model"
    assert (placement.plan.setup.draft is not None) == (placement.drafter == "model")
    assert placement.num_gpu_layers == 0 or placement.plan.setup.num_gpu_layers > 0
    assert set(placement.as_dict()) == {"kind", "num_gpu_layers", "draft_provider", "memory"}
