"""Memory plans: against what llama.cpp really reserves, and the arithmetic of budgets and of what would fit."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgespec.devices import memory
from edgespec.devices.memory import GPU_BYTES, PROCESS_BYTES, compute_bytes, num_rows, plan_memory, what_fits
from edgespec.devices.profile import GIB, KV_TYPES, Device, Profile, Serving, Verifier
from edgespec.devices.sizes import CONTEXT_STEP, KV_BLOCKS, Budget, ModelShape, Setup
from edgespec.drafters import onnx_fixed
from edgespec.errors import MemoryBudgetError
from edgespec.verifiers import llama
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from edgespec.verifiers.llama_library import library
from edgespec.verifiers.native_log import NativeLog
from quantize.gguf_shape import draft_shape, read_gguf
from quantize.source import open_source
from tests.tiny import TinyConfig, write_gguf

MIB = 2**20
PLENTY = Budget(2**50)

# 7B, 32 layers, grouped heads, and a 0.5B that shares its head with its embedding
BIG = ModelShape((8,) * 32, 32, 128, 128, 4096, 14336, 128_256, 32768, 4_900_000_000, 300_000_000, 430_000_000)
SMALL = ModelShape((2,) * 24, 14, 64, 64, 896, 4864, 151_936, 32768, 500_000_000, 140_000_000)


# -------------------------------------------------------------------------------------------------- against llama.cpp


class Recorder(NativeLog):
    """Keeps all that llama.cpp says."""

    def __init__(self) -> None:
        self.text = ""
        super().__init__(library())

    def _keep(self, level: int, text: bytes | None, _: object) -> None:
        self.text += (text or b"").decode("utf-8", "replace")

    def bytes(self, kind: str) -> float:
        """The sum of the buffers of a kind."""
        return MIB * sum(map(float, re.findall(kind + r" buffer size += +([\d.]+) MiB", self.text)))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(llama, "native_log", lambda: recorder)
    return recorder


def setup_of(path: Path, **options: Any) -> Setup:
    """The plan's view of a verifier's options."""
    options["flash_attention"] = options.get("flash_attention") is not False
    context = options.pop("num_ctx")
    return Setup(read_gguf(path).shape, None, PLENTY, context, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {"num_ctx": 256},
        {"num_ctx": 100},
        {"num_ctx": 3000, "num_slots": 3},
        {"num_ctx": 2048, "flash_attention": False},
        {"num_ctx": 2048, "kv_type_k": "q8_0", "kv_type_v": "q4_0"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "config",
    [
        TinyConfig(num_layers=3, num_heads=2),
        TinyConfig(num_layers=3, num_heads=2, num_hidden=1024, tied=True, q8_0=True),
        TinyConfig(num_layers=3, num_heads=2, num_vocab=20_000),
        TinyConfig("qwen3", num_layers=3, num_heads=8, num_kv_heads=8, key_length=64),
        TinyConfig("gemma3", num_layers=6, window=64, key_length=32, tied=True),
    ],
    ids=lambda config: f"{config.architecture}-{config.num_vocab}-{config.num_hidden}",
)
def test_the_plan_is_what_llama_cpp_reserves(
    config: TinyConfig, options: dict[str, Any], log: Recorder, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", config)
    LlamaVerifier(LlamaOptions(path, 1, **options)).close()
    setup = setup_of(path, **options)
    lines = {line.what.partition(",")[0]: line.bytes for line in plan_memory(setup).lines}
    assert lines["verifier KV cache"] == pytest.approx(log.bytes("KV"), abs=0.02 * MIB)
    assert log.bytes("compute") * 0.97 <= compute_bytes(setup) <= log.bytes("compute") * 1.2 + 0.1 * MIB
    assert log.bytes("model") * 0.99 <= setup.verifier.weights_bytes <= log.bytes("model") + MIB  # the vocabulary's


@pytest.mark.model
@pytest.mark.parametrize("options", [{"num_ctx": 4096}, {"num_ctx": 2048, "num_slots": 5}], ids=str)
def test_the_plan_of_the_starter_verifier(options: dict[str, Any], log: Recorder, starter_gguf: Path) -> None:
    LlamaVerifier(LlamaOptions(starter_gguf, 1, **options)).close()
    setup = setup_of(starter_gguf, **options)
    assert setup.verifier.kv_bytes(setup.num_cells, "f16", "f16") == pytest.approx(log.bytes("KV"), abs=0.02 * MIB)
    assert log.bytes("compute") <= compute_bytes(setup) * 1.01 <= log.bytes("compute") * 1.1


PEAK = """
import sys
from edgespec.core.sequence import SamplingParams
from edgespec.loading import load
with load("starter", num_ctx=256, num_threads=1) as runtime:
    list(runtime.stream("word " * 200, SamplingParams(max_tokens=8, temperature=0), raw=True))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024)
"""


@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_plan_of_the_starter_pair_is_what_the_process_takes(starter_gguf: Path, starter_draft: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    draft = draft_shape(open_source(starter_gguf), 8, 32)
    plan = plan_memory(Setup(read_gguf(starter_gguf).shape, draft, PLENTY, 256))
    assert 0.9 * int(done.stdout) <= plan.used_bytes("main") <= 1.25 * int(done.stdout)


# ----------------------------------------------------------------------------------------------------------- constants


def test_facts_that_live_elsewhere_are_the_same_here() -> None:
    options = [LlamaOptions(Path("x"), 1, num_slots=slots) for slots in range(1, 40)]
    assert [num_rows(each.num_slots) for each in options] == [each.max_rows for each in options]
    assert {each.num_batch for each in options} == {memory.NUM_BATCH}
    assert onnx_fixed.CHUNK == memory.CHUNK


def test_every_cache_type_has_its_size() -> None:
    assert set(KV_BLOCKS) == set(KV_TYPES)
    for kind, (num_bytes, num_values) in KV_BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]] == (num_values, num_bytes)


# -------------------------------------------------------------------------------------------------------------- places


def where(setup: Setup, what: str) -> dict[str, int]:
    return {line.where: line.bytes for line in plan_memory(setup).lines if line.what.startswith(what)}


def test_without_a_gpu_everything_is_in_main_memory() -> None:
    setup = Setup(BIG, SMALL, Budget(64 * GIB), 4096)
    plan = plan_memory(setup)
    assert {line.where for line in plan.lines} == {"main"}
    assert where(setup, "verifier weights") == {"main": BIG.weights_bytes}
    assert where(setup, "verifier KV cache") == {"main": 4096 * 32 * 8 * 256 * 2}
    assert where(setup, "draft KV cache") == {"main": 4096 * 24 * 2 * 128 * 4}
    assert where(setup, "verify buffer") == {"main": 64 * 128_256 * 4}
    assert sum(line.bytes for line in plan.lines) == plan.used_bytes("main")


def test_a_gpu_takes_all_layers_and_the_head_but_not_the_embedding() -> None:
    setup = Setup(BIG, SMALL, Budget(64 * GIB, 24 * GIB, 1), 4096)
    assert where(setup, "verifier weights") == {"main": 300_000_000, "gpu": 4_600_000_000}
    assert set(where(setup, "verifier KV cache")) == {"gpu"}
    assert set(where(setup, "draft weights")) == {"main"}
    assert where(setup, "GPU runtime") == {"gpu": GPU_BYTES}
    assert where(setup, "runtime") == {"main": PROCESS_BYTES}


def test_a_head_that_is_the_embedding_is_copied_to_the_gpu() -> None:
    setup = Setup(SMALL, None, Budget(64 * GIB, 24 * GIB, 1), 4096)
    assert where(setup, "verifier weights") == {"main": SMALL.embedding_bytes, "gpu": SMALL.weights_bytes}


def test_some_layers_on_the_gpu() -> None:
    setup = Setup(BIG, None, Budget(64 * GIB, 24 * GIB, 1), 4096, gpu_layers=8)
    layers = BIG.weights_bytes - BIG.embedding_bytes - BIG.output_bytes
    assert where(setup, "verifier weights") == {"gpu": layers // 4, "main": BIG.weights_bytes - layers // 4}
    whole = 4096 * 32 * 8 * 256 * 2
    assert where(setup, "verifier KV cache") == {"gpu": whole // 4, "main": whole * 3 // 4}
    assert where(replace(setup, gpu_layers=0), "verifier weights") == {"main": BIG.weights_bytes}
    assert plan_memory(replace(setup, gpu_layers=0)).used_bytes("gpu") == 0
    every = [plan_memory(replace(setup, gpu_layers=count)).used_bytes("gpu") for count in range(34)]
    assert every == sorted(every)
    assert plan_memory(replace(setup, gpu_layers=-1)).used_bytes("gpu") == every[-1]


def test_unified_memory_counts_once() -> None:
    profile = Profile("jetson", Device(unified_memory=True, memory_budget_gib=6))
    setup = Setup.of(profile, BIG, SMALL, Budget.of(profile.device, 8 * GIB))
    plan = plan_memory(setup)
    assert setup.budget == Budget(6 * GIB, 0, 1)
    assert plan.used_bytes("gpu") == 0
    assert any(line.what == "GPU runtime" for line in plan.lines)
    assert plan.used_bytes("main") > BIG.weights_bytes + SMALL.weights_bytes


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [
        (Device(), [], Budget(int(7.2 * GIB), 0, 0)),
        (Device(memory_budget_gib=5), [], Budget(5 * GIB, 0, 0)),
        (Device(), [10 * GIB], Budget(int(7.2 * GIB), 9 * GIB, 1)),
        (Device(), [10 * GIB, 20 * GIB], Budget(int(7.2 * GIB), 27 * GIB, 2)),
        (Device(min_gpus=1, min_gpu_memory_gib=20), [], Budget(int(7.2 * GIB), 18 * GIB, 1)),
        (Device(min_gpu_memory_gib=20), [], Budget(int(7.2 * GIB), 18 * GIB, 1)),
        (Device(min_gpus=1, min_gpu_memory_gib=20), [10 * GIB], Budget(int(7.2 * GIB), 18 * GIB, 1)),
        (Device(min_gpus=2, min_gpu_memory_gib=10), [10 * GIB, 30 * GIB], Budget(int(7.2 * GIB), 36 * GIB, 2)),
        (Device(min_gpus=1, min_gpu_memory_gib=20, gpu_memory_budget_gib=19), [], Budget(int(7.2 * GIB), 19 * GIB, 1)),
    ],
)
def test_budgets_are_the_profiles_else_the_boxs(device: Device, gpus: list[int], expected: Budget) -> None:
    assert Budget.of(device, 8 * GIB, gpus) == expected


def test_a_setup_follows_the_profile() -> None:
    verifier = Verifier(gpu_layers=3, kv_type_k="q8_0", kv_type_v="q4_0", flash_attention="on")
    profile = Profile("x", verifier=verifier, serving=Serving(max_batch_size=4, context=2048))
    setup = Setup.of(profile, BIG, None, PLENTY)
    assert (setup.gpu_layers, setup.kv_type_k, setup.kv_type_v, setup.flash_attention) == (3, "q8_0", "q4_0", True)
    assert (setup.num_slots, setup.context) == (4, 2048)
    assert Setup.of(profile, replace(BIG, num_ctx=512), None, PLENTY).context == 512
    assert not Setup.of(Profile("x", verifier=Verifier(flash_attention="off")), BIG, None, PLENTY).flash_attention


# ------------------------------------------------------------------------------------------------------ what would fit

TYPES = {"Q8_0": 8_500_000_000, "Q4_K_M": 4_900_000_000, "Q3_K_M": 4_000_000_000, "Q2_K": 3_200_000_000}


def tight(used: Setup, missing_bytes: int) -> Setup:
    """The same with a budget that lacks so much."""
    return replace(used, budget=Budget(plan_memory(used).used_bytes("main") - missing_bytes))


def test_a_plan_that_fits_says_nothing() -> None:
    plan = plan_memory(tight(Setup(BIG, SMALL, PLENTY, 4096), 0))
    assert plan.fits
    plan.check()
    assert plan.text()[-1].endswith("fits")


def test_a_plan_that_does_not_fit_says_what_would() -> None:
    plan = plan_memory(tight(Setup(BIG, SMALL, PLENTY, 4096, num_slots=2), 100 * MIB))
    with pytest.raises(MemoryBudgetError, match="may be taken; would fit: ") as error:
        plan.check(TYPES)
    assert "\n" not in str(error.value)
    shown = "\n".join(error.value.plan)
    for line in plan.lines:
        assert line.what in shown
    assert "100 MiB too much" in shown
    assert "would fit: type Q3_K_M (3.73 GiB)" in shown  # the largest that does, Q4_K_M being what it is
    assert "would fit: [verifier] kv_type_k/kv_type_v q8_0/q8_0" in shown
    assert "would fit: [serving] max_batch_size 1 instead of 2" in shown


def test_the_longest_context_that_fits_is_found() -> None:
    setup = tight(Setup(BIG, SMALL, PLENTY, 8192), 300 * MIB)
    found = re.search(r"context (\d+) instead of 8192", "\n".join(what_fits(setup, {})))
    assert found is not None
    context = int(found[1])
    assert context % CONTEXT_STEP == 0
    assert plan_memory(replace(setup, context=context)).fits
    assert not plan_memory(replace(setup, context=context + CONTEXT_STEP)).fits


def test_a_quantized_cache_is_not_proposed_for_heads_its_blocks_do_not_divide() -> None:
    assert any("kv_type_k" in remedy for remedy in what_fits(tight(Setup(BIG, SMALL, PLENTY, 4096), MIB), {}))
    odd = replace(BIG, head_size_k=80, head_size_v=80)
    assert not any("kv_type_k" in remedy for remedy in what_fits(tight(Setup(odd, SMALL, PLENTY, 4096), MIB), {}))


def test_fewer_layers_go_to_a_gpu_that_is_too_small() -> None:
    setup = Setup(BIG, SMALL, Budget(64 * GIB, 4 * GIB, 1), 4096)
    found = re.search(r"gpu_layers (\d+) of 32", "\n".join(what_fits(setup, {})))
    assert found is not None
    assert plan_memory(replace(setup, gpu_layers=int(found[1]))).fits
    assert not plan_memory(replace(setup, gpu_layers=int(found[1]) + 1)).fits
    with pytest.raises(MemoryBudgetError, match="GPU memory"):
        plan_memory(setup).check()


def test_where_no_single_change_is_enough_several_are() -> None:
    setup = Setup(BIG, SMALL, Budget(6 * GIB), 32768, num_slots=4)
    (remedy,) = what_fits(setup, TYPES)
    assert "max_batch_size 1 instead of 4" in remedy
    assert plan_memory(applied(setup, remedy)).fits
    assert 4 * applied(setup, remedy).context >= setup.context


def applied(setup: Setup, remedy: str) -> Setup:
    """The setup a remedy describes."""
    patterns = {
        "num_slots": r"max_batch_size (\d+) instead",
        "context": r"context (\d+) instead",
        "gpu_layers": r"gpu_layers (\d+) of",
    }
    found = {name: re.search(pattern, remedy) for name, pattern in patterns.items()}
    changes: dict[str, Any] = {name: int(match[1]) for name, match in found.items() if match}
    if kind := re.search(r"type (\w+)", remedy):
        changes["verifier"] = setup.verifier.resized(TYPES[kind[1]], kind[1])
    if cache := re.search(r"KV cache (\w+)/(\w+)", remedy):
        changes |= {"kv_type_k": cache[1], "kv_type_v": cache[2]}
    return replace(setup, **changes)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_said_to_fit_fits(seed: int) -> None:
    random = np.random.default_rng(seed)
    budget = Budget(int(random.integers(1, 9) * GIB), int(random.integers(0, 7) * GIB), 1)
    setup = Setup(
        BIG,
        SMALL,
        budget if budget.gpu_bytes else replace(budget, num_gpus=0),
        context=int(2 ** random.integers(9, 17)),
        num_slots=int(random.integers(1, 9)),
        flash_attention=bool(random.integers(2)),
        gpu_layers=int(random.choice([-1, 0, 10])),
    )
    plan, remedies = plan_memory(setup), what_fits(setup, TYPES)
    if plan.fits:
        plan.check(TYPES)
        return
    for remedy in remedies:
        assert plan_memory(applied(setup, remedy)).fits, remedy
    if not remedies:
        smallest = replace(setup, verifier=BIG.resized(TYPES["Q2_K"], "Q2_K"), num_slots=1, context=CONTEXT_STEP)
        assert not plan_memory(smallest).fits


def test_where_nothing_fits_it_says_so() -> None:
    setup = Setup(BIG, SMALL, Budget(GIB), 4096)
    assert what_fits(setup, TYPES) == ()
    with pytest.raises(MemoryBudgetError, match="smaller models"):
        plan_memory(setup).check(TYPES)


def test_more_of_anything_never_takes_less() -> None:
    setup = Setup(BIG, SMALL, Budget(64 * GIB, 24 * GIB, 1), 1024)
    for change in ({"context": 1025}, {"num_slots": 2}, {"flash_attention": False}, {"kv_type_k": "f32"}):
        more, less = plan_memory(replace(setup, **change)), plan_memory(setup)
        assert more.used_bytes("main") + more.used_bytes("gpu") >= less.used_bytes("main") + less.used_bytes("gpu")


def test_a_plan_as_json_adds_up() -> None:
    content = plan_memory(Setup(BIG, SMALL, Budget(64 * GIB, 4 * GIB, 1), 4096)).as_dict()
    assert not content["fits"]
    for place in ("main", "gpu"):
        assert sum(line["bytes"] for line in content["lines"] if line["where"] == place) == content[f"{place}_bytes"]
    assert content["gpu_budget_bytes"] == 4 * GIB
