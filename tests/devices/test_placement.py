"""Placement over hand-made boxes: every kind, every cause of a step down by its name, GPU layers fitted to memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgespec.degraded import Degraded
from edgespec.devices.memory import plan_memory
from edgespec.devices.placement import CUDA, Placement, Wanted, lower, place, step_down
from edgespec.devices.probe import Box
from edgespec.devices.profile import GIB, Device, Draft, Profile, Verifier
from edgespec.devices.sizes import Budget, ModelShape
from edgespec.drafters import onnx_providers
from edgespec.verifiers.llama_devices import LlamaDevice
from tests.devices.boxes import BIG, LAPTOP, SMALL, gpu, jetson, times, workstation

AUTO = Profile("auto")
PAIR = Wanted(BIG, SMALL)
BOTH = (CUDA, "CPUExecutionProvider")
CUDA_DRAFT = Profile("x", draft=Draft(provider="cuda"))


def summary(placement: Placement) -> tuple[str, int, str]:
    return placement.kind, placement.num_gpu_layers, placement.draft_provider


def only_step(placement: Placement) -> tuple[str, str, str]:
    (step,) = placement.steps
    return step


# What is had as it is wanted


@pytest.mark.parametrize(
    ("wanted", "profile", "box", "expected"),
    [
        (PAIR, AUTO, workstation(gpu(24)), ("hybrid", -1, "cpu")),
        (PAIR, AUTO, workstation(gpu(8, 0), gpu(8, 1)), ("hybrid", -1, "cpu")),
        (PAIR, AUTO, jetson(free_gib=60, memory_gib=61), ("hybrid", -1, "cpu")),
        (PAIR, Profile("x", verifier=Verifier(gpu_layers=7)), workstation(gpu(24)), ("hybrid", 7, "cpu")),
        (PAIR, Profile("x", verifier=Verifier(gpu_layers=0)), LAPTOP, ("one device", 0, "cpu")),
        (PAIR, Profile("x", verifier=Verifier(gpu_layers=0)), workstation(gpu(24)), ("one device", 0, "cpu")),
        (replace(PAIR, providers=BOTH), CUDA_DRAFT, workstation(gpu(24)), ("one device", -1, "cuda")),
        (
            replace(PAIR, providers=BOTH),
            replace(CUDA_DRAFT, verifier=Verifier(gpu_layers=0)),
            workstation(gpu(24)),
            ("reverse", 0, "cuda"),
        ),
        (Wanted(BIG), AUTO, workstation(gpu(24)), ("lookup", -1, "cpu")),
        (Wanted(BIG), AUTO, LAPTOP, ("lookup", 0, "cpu")),
        (Wanted(BIG, lookup=False), AUTO, workstation(gpu(24)), ("plain", -1, "cpu")),
        (replace(PAIR, mode="plain"), AUTO, workstation(gpu(24)), ("plain", -1, "cpu")),
        (replace(PAIR, mode="plain"), CUDA_DRAFT, LAPTOP, ("plain", 0, "cpu")),
    ],
)
def test_what_can_be_had_is_had_without_a_step(
    wanted: Wanted, profile: Profile, box: Box, expected: tuple[str, int, str]
) -> None:
    placement = place(wanted, profile, box)
    assert (summary(placement), placement.steps) == (expected, ())
    assert placement.plan.fits


def test_a_draft_that_is_not_used_takes_no_memory() -> None:
    for wanted in (replace(PAIR, mode="plain"), replace(PAIR, draft_problem="it is broken; mend it")):
        assert not any("draft" in line.what for line in place(wanted, AUTO, LAPTOP).plan.lines)
    assert any("draft" in line.what for line in place(PAIR, AUTO, LAPTOP).plan.lines)


# Every cause of a step down


def test_no_gpu() -> None:
    placement = place(PAIR, AUTO, LAPTOP)
    assert summary(placement) == ("one device", 0, "cpu")
    assert only_step(placement) == (
        "hybrid",
        "one device",
        "llama.cpp lists no GPU; where none is to be had, a profile with [verifier] gpu_layers 0 says so",
    )


@pytest.mark.parametrize(
    ("box", "what"),
    [(workstation(num_cards=2), "NVIDIA's driver shows 2 of its GPUs"), (replace(jetson(6), devices=()), "a Jetson")],
)
@pytest.mark.parametrize("wanted", [PAIR, Wanted(BIG), Wanted(BIG, lookup=False)])
def test_a_gpu_build_is_missing(wanted: Wanted, box: Box, what: str) -> None:
    placement = place(wanted, AUTO, box)
    assert placement.num_gpu_layers == 0
    reason = placement.steps[0][2]
    assert what in reason
    assert "-DGGML_CUDA=ON" in reason


def test_the_memory_plan_does_not_fit_the_gpu() -> None:
    placement = place(PAIR, AUTO, workstation(gpu(5)))
    wanted, got, reason = only_step(placement)
    count = placement.num_gpu_layers
    assert 0 < count < 33
    assert (placement.kind, wanted, got) == ("hybrid", "hybrid", f"hybrid ({count} of 33 layers on the GPU)")
    assert f"GPU memory are needed and 5.00 GiB may be taken with all 33 layers there, {count} of them fit; " in reason


def test_the_memory_plan_does_not_fit_main_memory() -> None:
    box = replace(LAPTOP, free_memory_bytes=int(5.8 * GIB))
    placement = place(PAIR, AUTO, box)
    assert [step[:2] for step in placement.steps] == [("hybrid", "one device"), ("one device", "lookup")]
    assert (
        "main memory are needed and 5.80 GiB may be taken with the draft model; all would fit with "
        in (placement.steps[-1][2])
    )
    assert placement.plan.fits
    assert place(replace(PAIR, mode="sequential"), AUTO, box).kind == "one device"  # asked for by name


@pytest.mark.parametrize("gain", [1.0, 0.93, 0.0, -1.0, float("nan")])
def test_calibration_says_no_gain(gain: float) -> None:
    placement = place(replace(PAIR, gain=gain), AUTO, workstation(gpu(24)))
    wanted, got, reason = only_step(placement)
    assert (summary(placement), wanted, got) == (("lookup", -1, "cpu"), "hybrid", "lookup")
    assert f"{gain:.2f} of the speed" in reason
    assert "edgespec calibrate" in reason
    for mode in ("sequential", "overlapped"):
        assert place(replace(PAIR, gain=gain, mode=mode), AUTO, workstation(gpu(24))).steps == ()


@pytest.mark.parametrize("gain", [None, 1.01, 3.0, float("inf")])
def test_calibration_says_gain_or_nothing(gain: float | None) -> None:
    assert place(replace(PAIR, gain=gain), AUTO, workstation(gpu(24))).steps == ()


@pytest.mark.parametrize("mode", ["auto", "sequential", "overlapped"])
def test_the_draft_is_incompatible(mode: str) -> None:
    problem = "the draft model has another vocabulary than the verifier; use lookup"
    wanted = replace(PAIR, draft_problem=problem, mode=mode)
    assert only_step(place(wanted, AUTO, workstation(gpu(24)))) == ("hybrid", "lookup", problem)
    assert only_step(place(replace(wanted, lookup=False), AUTO, workstation(gpu(24)))) == ("hybrid", "plain", problem)


def test_the_backend_crashed_in_its_canary() -> None:
    crash = "the GPU's backend died of signal 6 (SIGABRT) in its canary; update the driver"
    placement = place(replace(PAIR, gpu_problem=crash), AUTO, workstation(gpu(24)))
    assert summary(placement) == ("one device", 0, "cpu")
    assert only_step(placement) == ("hybrid", "one device", crash)
    both = place(replace(PAIR, gpu_problem=crash, providers=BOTH), CUDA_DRAFT, workstation(gpu(24)))
    assert [step[:2] for step in both.steps] == [("one device", "hybrid"), ("hybrid", "one device")]
    assert both.draft_provider == "cpu"
    for wanted in (Wanted(BIG, gpu_problem=crash), Wanted(BIG, lookup=False, gpu_problem=crash)):
        (step,) = place(wanted, AUTO, workstation(gpu(24))).steps
        kind = step[0].partition(" ")[0]
        assert step == (kind, f"{kind} (CPU)", crash)


@pytest.mark.parametrize(
    ("providers", "box"),
    [((), workstation(gpu(24))), (("CPUExecutionProvider",), workstation(gpu(24))), (BOTH, LAPTOP)],
)
def test_onnx_runtime_without_cuda(providers: tuple[str, ...], box: Box) -> None:
    placement = place(replace(PAIR, providers=providers), CUDA_DRAFT, box)
    assert placement.draft_provider == "cpu"
    assert placement.steps[0][:2] == ("one device", "hybrid")
    assert "ONNX Runtime cannot use CUDA here" in placement.steps[0][2]


def test_a_draft_on_the_gpu_gives_way_to_the_verifiers_layers() -> None:
    placement = place(replace(PAIR, providers=BOTH), CUDA_DRAFT, workstation(gpu(6)))
    assert summary(placement) == ("hybrid", -1, "cpu")
    assert only_step(placement)[:2] == ("one device", "hybrid")


def test_a_main_gpu_that_is_not_there() -> None:
    profile = Profile("x", verifier=Verifier(split_mode="none", main_gpu=3))
    assert (
        "lists no GPU 3; choose another [verifier] main_gpu" in only_step(place(PAIR, profile, workstation(gpu(24))))[2]
    )


# Reverse


def test_reverse_where_next_to_nothing_of_the_verifier_fits_the_gpu() -> None:
    wanted = Wanted(times(BIG, 8), SMALL, providers=BOTH)
    placement = place(wanted, AUTO, workstation(gpu(8)))
    assert summary(placement) == ("reverse", 0, "cuda")
    assert only_step(placement)[:2] == ("hybrid", "reverse")
    assert placement.plan.fits
    assert {line.where for line in placement.plan.lines if line.what.startswith("draft")} == {"gpu"}
    assert {line.where for line in placement.plan.lines if line.what.startswith("verifier")} == {"main"}


@pytest.mark.parametrize(
    ("change", "box"),
    [
        ({"providers": ("CPUExecutionProvider",)}, workstation(gpu(8))),  # ONNX Runtime without CUDA
        ({"verifier": times(BIG, 2)}, workstation(gpu(8))),  # many layers fit
        ({"draft": times(SMALL, 20)}, workstation(gpu(8))),  # the draft model does not fit either
        ({"draft": None}, workstation(gpu(8))),
        ({}, workstation(replace(gpu(8), name="Vulkan0"), num_cards=0)),  # a GPU that CUDA does not know
        ({}, jetson(6)),
    ],
)
def test_no_reverse_where_it_cannot_be_or_does_not_pay(change: dict[str, Any], box: Box) -> None:
    wanted = replace(Wanted(times(BIG, 8), SMALL, providers=BOTH), **change)
    assert place(wanted, AUTO, box).kind != "reverse"


# GPU layers


@pytest.mark.parametrize("seed", range(40))
def test_fitted_layers_never_exceed_the_budget_and_grow_with_it(seed: int) -> None:
    random = np.random.default_rng(seed)
    profile = Profile(
        "x",
        verifier=Verifier(
            kv_type_k=str(random.choice(["f16", "q8_0"])), split_mode=str(random.choice(["none", "layer", "row"]))
        ),
    )
    wanted = Wanted(times(BIG, random.uniform(0.1, 8)), SMALL, context=int(random.integers(256, 32768)))
    num_gpus, free = int(random.integers(1, 4)), 60 * random.uniform(0.1, 3)
    counts = []
    for gib in np.linspace(0.05, 40, 25):
        gpus = [gpu(float(gib) / (number + 1), number) for number in range(num_gpus)]
        placement = place(wanted, profile, workstation(*gpus, free_gib=free))
        setup = placement.plan.setup
        counts.append(setup.num_gpu_layers)
        assert placement.plan.used_bytes("gpu") <= setup.budget.gpu_bytes or placement.num_gpu_layers == 0
        assert placement.plan.used_bytes("gpu") <= sum(device.free_bytes for device in gpus)
        if placement.num_gpu_layers >= 0:  # one more would have been too much
            more = plan_memory(replace(setup, gpu_layers=setup.num_gpu_layers + 1))
            assert more.missing_bytes("gpu")
    assert counts == sorted(counts)


def test_as_many_layers_as_fit_and_not_one_more() -> None:
    whole = plan_memory(place(PAIR, AUTO, workstation(gpu(24))).plan.setup).used_bytes("gpu")
    exactly = LlamaDevice("CUDA0", "", "gpu", whole, 2 * whole)
    assert place(PAIR, AUTO, workstation(exactly)).num_gpu_layers == -1
    assert place(PAIR, AUTO, workstation(replace(exactly, free_bytes=whole - 1))).num_gpu_layers == 32


def test_a_full_gpu_gets_nothing() -> None:
    placement = place(PAIR, AUTO, workstation(gpu(0, all_gib=24)))
    assert summary(placement) == ("one device", 0, "cpu")
    assert only_step(placement)[:2] == ("hybrid", "one device")


def test_a_number_of_layers_is_taken_as_it_is() -> None:
    profile = Profile("x", verifier=Verifier(gpu_layers=33))
    placement = place(PAIR, profile, workstation(gpu(2)))
    assert (placement.num_gpu_layers, placement.steps) == (33, ())
    assert not placement.plan.fits


def test_a_device_that_does_not_say_its_memory_gets_all() -> None:
    silent = LlamaDevice("RPC0", "", "gpu", 0, 0)
    placement = place(PAIR, AUTO, workstation(silent, num_cards=0))
    assert summary(placement) == ("hybrid", -1, "cpu")
    assert place(Wanted(times(BIG, 100), SMALL), AUTO, workstation(gpu(8), silent, num_cards=1)).num_gpu_layers == -1


def test_a_model_of_which_only_the_size_is_known() -> None:
    wanted = Wanted(ModelShape.of_file(4 * GIB), ModelShape.of_file(GIB))
    assert place(wanted, AUTO, workstation(gpu(6))).num_gpu_layers == -1
    assert place(wanted, AUTO, workstation(gpu(3))).num_gpu_layers == 0  # one layer: all or nothing
    layered = replace(wanted, verifier=ModelShape.of_file(4 * GIB, num_layers=8))
    assert 0 < place(layered, AUTO, workstation(gpu(3))).num_gpu_layers < 8


# Unified memory


def test_unified_memory_is_counted_once() -> None:
    profile = Profile("x", Device(unified_memory=True, memory_budget_gib=6.5))
    placement = place(Wanted(BIG, times(SMALL, 0.2)), profile, jetson(7))
    assert summary(placement) == ("hybrid", -1, "cpu")
    plan = placement.plan
    assert plan.setup.budget == Budget(int(6.5 * GIB), 0, 1)
    assert plan.used_bytes("gpu") == 0
    assert plan.fits


@pytest.mark.parametrize("profile", [AUTO, Profile("x", Device(unified_memory=True))])
def test_in_unified_memory_the_draft_goes_before_the_layers(profile: Profile) -> None:
    placement = place(Wanted(BIG, times(SMALL, 3)), profile, jetson(6.6))
    assert summary(placement) == ("lookup", -1, "cpu")
    assert only_step(placement)[:2] == ("hybrid", "lookup")
    assert placement.plan.fits


def test_in_unified_memory_that_is_too_small_anyway_the_layers_stay() -> None:
    placement = place(PAIR, AUTO, jetson(3))
    assert summary(placement) == ("lookup", -1, "cpu")
    assert not placement.plan.fits


def test_in_unified_memory_fewer_layers_help_against_the_copied_head() -> None:
    tied = replace(times(BIG, 1.0), output_bytes=0, embedding_bytes=2 * GIB)
    need = place(Wanted(tied), AUTO, jetson(60, 60)).plan.used_bytes("main") / GIB
    placement = place(Wanted(tied), AUTO, jetson(need - 1, 60))
    assert placement.num_gpu_layers == 32
    assert placement.plan.fits


# Lower, and what is said of it


def test_what_is_tried_when_the_gpu_fails() -> None:
    placement = place(PAIR, AUTO, workstation(gpu(24)))
    half, none = lower(placement)
    assert [(one.kind, one.num_gpu_layers) for one in (half, none)] == [("hybrid", 16), ("one device", 0)]
    assert plan_memory(half.plan.setup).used_bytes("gpu") < placement.plan.used_bytes("gpu")
    assert [one.num_gpu_layers for one in lower(half)] == [8, 0]
    assert lower(none) == []
    assert lower(place(PAIR, AUTO, LAPTOP)) == []
    one_layer = place(PAIR, Profile("x", verifier=Verifier(gpu_layers=1)), workstation(gpu(24)))
    assert [one.num_gpu_layers for one in lower(one_layer)] == [0]


def test_steps_are_what_degraded_takes() -> None:
    degraded = Degraded()
    for step in place(PAIR, AUTO, LAPTOP).steps:
        degraded.add(*step)
    assert [set(step) for step in degraded.as_list()] == [{"from", "to", "reason"}]
    upper = place(PAIR, AUTO, workstation(gpu(24)))
    half, none = lower(upper)
    assert step_down(upper, half, "why") == ("hybrid", "hybrid (16 of 33 layers on the GPU)", "why")
    assert step_down(half, none, "why") == ("hybrid", "one device", "why")
    assert [one.name for one in (upper, half, none)] == ["hybrid", "hybrid (16 of 33 layers on the GPU)", "one device"]
    looked_up = place(Wanted(BIG), AUTO, workstation(gpu(24)))
    assert [one.name for one in (looked_up, lower(looked_up)[1])] == ["lookup", "lookup (CPU)"]


def test_one_fact_one_name() -> None:
    assert CUDA == onnx_providers.CUDA
    assert set(onnx_providers.providers()) >= {onnx_providers.CPU}
