"""Host memory: llama.cpp's allocations for real, with the CPU's own buffer type standing for a GPU's host memory."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
import pytest

from edgespec.verifiers import host_memory, llama
from edgespec.verifiers.canary import MODEL
from edgespec.verifiers.host_memory import HostMemory, host_buffer_type
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from edgespec.verifiers.llama_library import native
from tests.verifiers.contract import row_at

FREE = "ggml_backend_buffer_free"


class Library:
    """llama.cpp with its calls counted, and some of them answered by the test."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.answers: dict[str, Any] = {}

    def native(self, name: str, arguments: Any, result: Any) -> Any:
        self.calls.append(name)
        return self.answers.get(name) or native(name, arguments, result)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A device called GPU, whose host buffers come from the real library."""
    library = Library()
    buffer_type = native("ggml_backend_cpu_buffer_type", [], ctypes.c_void_p)()
    monkeypatch.setattr(host_memory, "native", library.native)
    monkeypatch.setattr(host_memory, "host_buffer_type", {"GPU": buffer_type}.get)
    return library


def test_arrays_lie_in_the_devices_memory_and_are_freed_once(gpu: Library) -> None:
    memory = HostMemory("GPU")
    assert not memory.is_page_locked
    arrays = [memory.array((3, 50), np.int32), memory.array(7, np.int8), memory.array((2, 100_000), "float32")]
    assert memory.is_page_locked
    for array in arrays:
        assert array.ctypes.data % 64 == 0
        assert not array.any()
        array += 1
        assert array.all()
    assert [array.shape for array in arrays] == [(3, 50), (7,), (2, 100_000)]
    assert gpu.calls.count("ggml_backend_buft_alloc_buffer") == 3
    memory.close()
    memory.close()
    assert gpu.calls.count(FREE) == 3


def test_memory_that_cannot_be_locked_is_plain(gpu: Library) -> None:
    gpu.answers["ggml_backend_buft_alloc_buffer"] = lambda *_: None
    memory = HostMemory("GPU")
    assert memory.array(5, np.int32).tolist() == [0] * 5
    assert not memory.is_page_locked
    memory.close()
    assert FREE not in gpu.calls


def test_the_librarys_own_way_out_is_not_called_locked(gpu: Library) -> None:
    """It gives plain memory then, of another buffer type."""
    gpu.answers["ggml_backend_buffer_get_type"] = lambda _: 1
    memory = HostMemory("GPU")
    assert memory.array(5, np.int32).tolist() == [0] * 5
    assert not memory.is_page_locked
    memory.close()
    assert gpu.calls.count(FREE) == 1


@pytest.mark.parametrize("device", [None, "CPU", "no such device"])
def test_a_device_without_such_memory_gets_plain_memory(device: str | None) -> None:
    memory = HostMemory(device)
    array = memory.array((4, 9), np.int32)
    memory.close()
    array[:] = 3
    assert array.sum() == 108
    assert array.ctypes.data % 64 == 0
    assert not memory.is_page_locked
    assert device is None or host_buffer_type(device) is None


def test_nothing_can_be_asked_for() -> None:
    assert HostMemory().array((0, 4), np.float32).shape == (0, 4)


def test_a_verifier_takes_its_batches_from_it(gpu: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "gpu_names", lambda: ["GPU"])
    with contextlib.closing(LlamaVerifier(LlamaOptions(MODEL, num_threads=1))) as verifier:
        assert verifier._host_memory.is_page_locked
        rows = row_at(verifier, [1, 2, 3], 2)
    assert gpu.calls.count(FREE) == 2
    for options in (LlamaOptions(MODEL, 1, num_gpu_layers=0), LlamaOptions(MODEL, 1, devices=())):
        with contextlib.closing(LlamaVerifier(options)) as verifier:
            assert not verifier._host_memory.is_page_locked
            assert np.array_equal(row_at(verifier, [1, 2, 3], 2), rows)
