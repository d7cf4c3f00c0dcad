"""The pipeline on a real GPU: the same rows and tokens as on the CPU, page-locked memory, drafting that is hidden."""

from __future__ import annotations

import collections.abc as abc
from pathlib import Path

import numpy as np
import pytest

from edgespec.core.policy import Fixed
from edgespec.core.sequence import SamplingParams
from edgespec.loading import load
from edgespec.runtime import Mode, Runtime
from edgespec.verifiers.base import Rows, ScoreRequest
from edgespec.verifiers.host_memory import HostMemory
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from edgespec.verifiers.llama_devices import LlamaDevice, list_devices

pytestmark = pytest.mark.gpu

Pair = tuple[Path, Path]
PROMPT = "Why does the moon change its shape?"
TOKENS = [3 + i * 7 % 200 for i in range(48)]
MODES: tuple[Mode, ...] = ("plain", "sequential", "overlapped")
PARAMS = {
    "greedy": SamplingParams(max_tokens=64, temperature=0.0),
    "sampled": SamplingParams(max_tokens=64, temperature=0.8, seed=5),
}


def rows(path: Path, num_layers: int, num_rows: int) -> Rows:
    verifier = LlamaVerifier(LlamaOptions(path, 2, num_ctx=256, num_gpu_layers=num_layers))
    try:
        return np.array(verifier.score([ScoreRequest(0, TOKENS, num_rows)])[0])
    finally:
        verifier.close()


@pytest.fixture(scope="module")
def runtime(pair: Pair) -> abc.Iterator[Runtime]:
    with load(None, *pair, mode="overlapped", policy=Fixed(5)) as opened:
        yield opened


def test_the_gpu_has_memory_of_its_own_or_shares_it(gpu: LlamaDevice) -> None:
    assert gpu.memory_bytes >= gpu.free_bytes > 0


def test_the_gpu_gives_the_rows_that_the_cpu_gives(gpu: LlamaDevice, tiny_gguf: Path) -> None:
    """Unquantized: what differs is the order of sums, and tensor cores' shorter mantissas."""
    expected, got = rows(tiny_gguf, 0, 48), rows(tiny_gguf, 99, 48)
    assert np.abs(got - expected).max() < 0.05 * expected.std()
    assert np.mean(got.argmax(axis=1) == expected.argmax(axis=1)) > 0.9


def test_a_quantized_verifier_agrees_too(pair: Pair) -> None:
    expected, got = rows(pair[0], 0, 48), rows(pair[0], 99, 48)
    assert np.median(np.abs(got - expected)) < 0.1 * expected.std()
    assert np.mean(got.argmax(axis=1) == expected.argmax(axis=1)) > 0.8


def test_a_model_on_the_gpu_takes_its_memory(gpu: LlamaDevice, pair: Pair) -> None:
    before = _free(gpu)
    verifier = LlamaVerifier(LlamaOptions(pair[0], 2, num_ctx=256, num_gpu_layers=99))
    try:
        assert _free(gpu) < before
    finally:
        verifier.close()


def _free(gpu: LlamaDevice) -> int:
    return next(device.free_bytes for device in list_devices() if device.name == gpu.name)


@pytest.mark.parametrize("params", PARAMS.values(), ids=list(PARAMS))
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_plains_tokens_but_for_near_ties(runtime: Runtime, mode: Mode, params: SamplingParams) -> None:
    result = runtime.generate(PROMPT, params, mode=mode, check_lossless=True)
    assert result.tokens
    assert result.divergences is not None
    assert [str(found) for found in result.divergences if not found.explained] == []


def test_the_verifier_is_on_the_gpu_and_nothing_was_stepped_down(runtime: Runtime) -> None:
    assert runtime.placement == "hybrid"
    assert runtime.degraded.as_list() == []


def test_drafting_is_hidden_behind_the_gpu(runtime: Runtime) -> None:
    result = runtime.generate(PROMPT, PARAMS["greedy"], mode="overlapped")
    assert result.stats.drafted > 0
    assert result.stats.hidden_s > 0


def test_host_memory_is_page_locked(gpu: LlamaDevice) -> None:
    memory = HostMemory(gpu.name)
    try:
        array = memory.array((7, 4099), np.float32)
        assert memory.is_page_locked
        assert array.ctypes.data % 64 == 0
        assert not array.any()
        array[:] = 3.0
        assert float(array.sum()) == 3.0 * array.size
    finally:
        memory.close()


def test_many_sequences_share_the_gpu(pair: Pair) -> None:
    with load(None, *pair, num_slots=4, mode="overlapped", policy=Fixed(3)) as runtime:
        streams = [runtime.stream(f"{PROMPT} {number}", PARAMS["greedy"]) for number in range(4)]
        first = [next(stream) for stream in streams]
        rest = [list(stream) for stream in streams]
    assert all(chunk.tokens for chunk in first)
    assert all(chunks[-1].finish_reason in ("stop", "length") for chunks in rest)
