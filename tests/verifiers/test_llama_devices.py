"""The devices of the real llama.cpp, and what is made of what a library says."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import psutil
import pytest

from edgespec.errors import ParameterError
from edgespec.verifiers import llama_devices
from edgespec.verifiers.llama_devices import LlamaDevice, gpu_names, handles, list_devices
from edgespec.verifiers.llama_library import native_log


def test_the_cpu_is_listed_with_its_memory() -> None:
    devices = list_devices()
    (cpu,) = [device for device in devices if device.kind == "cpu"]
    assert cpu.name == "CPU"
    assert cpu.description
    assert 0.5 < cpu.memory_bytes / psutil.virtual_memory().total < 1.5
    assert cpu.free_bytes <= cpu.memory_bytes
    assert list_devices()[0].name == devices[0].name


def test_llama_cpps_log_is_given_back() -> None:
    list_devices()
    assert native_log()._num_users == 0


def test_nothing_is_printed() -> None:
    code = "from edgespec.verifiers.llama_devices import list_devices; list_devices()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


def test_what_a_backend_says_becomes_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(handle: int, free: Any, total: Any) -> None:
        ctypes.cast(free, ctypes.POINTER(ctypes.c_size_t))[0] = 3
        ctypes.cast(total, ctypes.POINTER(ctypes.c_size_t))[0] = 4

    said: dict[str, Any] = {
        "ggml_backend_dev_count": lambda: 3,
        "ggml_backend_dev_get": lambda index: index,
        "ggml_backend_dev_name": lambda handle: b"CUDA%d" % handle,
        "ggml_backend_dev_description": lambda handle: None if handle else b"NVIDIA\n \xff",
        "ggml_backend_dev_type": lambda handle: [1, 2, 99][handle],
        "ggml_backend_dev_memory": memory,
    }
    monkeypatch.setattr(llama_devices, "_call", said.__getitem__)
    assert list_devices() == (
        LlamaDevice("CUDA0", "NVIDIA \ufffd", "gpu", 3, 4),
        LlamaDevice("CUDA1", "", "igpu", 3, 4),
        LlamaDevice("CUDA2", "", "unknown 99", 3, 4),
    )
    assert gpu_names() == ["CUDA0", "CUDA1"]


def test_devices_are_found_by_their_names() -> None:
    assert len(handles(["CPU"])) == 1
    assert handles([]) == []
    with pytest.raises(ParameterError, match=r"device: got 'CUDA9'; llama\.cpp has here: CPU"):
        handles(["CPU", "CUDA9"])
