"""GPU tests run where llama.cpp lists a GPU, and say why they do not elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.errors import ModelNotFoundError
from edgespec.pairs import load_pair
from edgespec.verifiers.llama_devices import LlamaDevice, list_devices


def gpus() -> list[LlamaDevice]:
    return [device for device in list_devices() if device.kind in ("gpu", "igpu")]


@pytest.fixture(scope="session")
def gpu() -> LlamaDevice:
    """The first GPU."""
    found = gpus()
    if not found:
        listed = ", ".join(f"{device.name} ({device.kind})" for device in list_devices()) or "no device"
        pytest.skip(f"llama.cpp lists no GPU here, only: {listed}; tests/gpu/run.sh builds it with CUDA")
    return found[0]


@pytest.fixture(scope="session")
def pair(gpu: LlamaDevice, tiny_gguf: Path, own_folder: Path) -> tuple[Path, Path]:
    """A verifier and its draft: the starter pair where it is installed, else tiny models."""
    try:
        starter = load_pair("starter")
        return starter.verifier.find(), starter.ensure_draft()
    except ModelNotFoundError:
        return tiny_gguf, own_folder
