"""Hand-made boxes, devices and models for placement."""

from __future__ import annotations

from dataclasses import replace

from edgespec.devices.probe import Box
from edgespec.devices.profile import GIB
from edgespec.devices.sizes import ModelShape
from edgespec.verifiers.llama_devices import LlamaDevice

# 8B with 32 layers and grouped heads, and a 0.5B that shares its head with its embedding
BIG = ModelShape((8,) * 32, 32, 128, 128, 4096, 14336, 128_256, 32768, 4_900_000_000, 300_000_000, 430_000_000)
SMALL = ModelShape((2,) * 24, 14, 64, 64, 896, 4864, 151_936, 32768, 500_000_000, 140_000_000)
CPU = LlamaDevice("CPU", "Some CPU", "cpu", 60 * GIB, 64 * GIB)
LAPTOP = Box(8, 16 * GIB, 12 * GIB, devices=(CPU,))


def gpu(free_gib: float, number: int = 0, kind: str = "gpu", all_gib: float = 0) -> LlamaDevice:
    """Free, and a tenth more in all."""
    all_bytes = int((all_gib or free_gib / 0.9) * GIB)
    return LlamaDevice(f"CUDA{number}", "NVIDIA Something", kind, int(free_gib * GIB), all_bytes)


def workstation(*gpus: LlamaDevice, num_cards: int | None = None, free_gib: float = 60) -> Box:
    """64 GiB, 16 CPUs, and as many NVIDIA cards as GPUs unless it says otherwise."""
    cards = len(gpus) if num_cards is None else num_cards
    return Box(16, 64 * GIB, int(free_gib * GIB), num_nvidia_cards=cards, devices=(CPU, *gpus))


def jetson(free_gib: float, memory_gib: float = 7.4) -> Box:
    memory, free = int(memory_gib * GIB), int(free_gib * GIB)
    shared = LlamaDevice("CUDA0", "Orin", "gpu", free, memory)
    return Box(6, memory, free, is_jetson=True, devices=(CPU, shared))


def times(shape: ModelShape, factor: float) -> ModelShape:
    """The same model with so many times the bytes."""
    return replace(shape.resized(int(shape.weights_bytes * factor), shape.kind))
