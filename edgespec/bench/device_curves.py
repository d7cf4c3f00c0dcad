"""What a named device would need for a verification and for a drafted token: a roofline over published figures.

A simulation, not a measurement. One pass over a model takes

    max(bytes read / usable bandwidth, 2 x weights x rows / arithmetic) + layers x overhead of a layer

with these assumptions:

- usable bandwidth is ``USABLE`` of what the data sheet says;
- arithmetic is the peak for 32-bit floats, cores x clock x operations a cycle. The units that quantized kernels use
  (dot products of bytes, tensor cores) have several times as much, and small batches use a part of it;
- a layer costs a GPU ``GPU_LAYER_S`` to launch, a fast CPU ``FAST_CPU_LAYER_S`` and a slow one ``SLOW_CPU_LAYER_S`` to
  hand out to its threads; a draft of four layers took two server cores 0.7 to 1.0 ms (tests/bench/LOG.md);
- reading the KV cache is left out: contexts are short.

The draft model is SmolLM2-135M at 8 bits everywhere, on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgespec.core.costs import Curves, Overlap
from edgespec.errors import ParameterError

USABLE = 0.75
GPU_LAYER_S, FAST_CPU_LAYER_S, SLOW_CPU_LAYER_S = 25e-6, 50e-6, 100e-6
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)

# What both sides work on at the same time: nothing, the memory, or all of the processor.
Sharing = Literal["nothing", "memory", "processor"]


@dataclass(frozen=True, slots=True)
class Model:
    """``size_bytes`` are read in every pass."""

    name: str
    size_bytes: float
    num_weights: float
    num_layers: int


@dataclass(frozen=True, slots=True)
class Processor:
    """``bytes_per_s`` is the memory's published bandwidth; ``ops_per_s`` see the module; ``source``: whose figures."""

    name: str
    bytes_per_s: float
    ops_per_s: float
    layer_s: float
    source: str

    def pass_s(self, model: Model, num_rows: int = 1) -> float:
        memory_s = model.size_bytes / (USABLE * self.bytes_per_s)
        compute_s = 2 * model.num_weights * num_rows / self.ops_per_s
        return max(memory_s, compute_s) + model.num_layers * self.layer_s


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """One profile's device; all times in its own seconds."""

    profile: str
    verifier: Processor
    model: Model
    drafter: Processor
    sharing: Sharing = "nothing"

    def verify_s(self, width: int) -> float:
        return self.verifier.pass_s(self.model, width)

    @property
    def step_s(self) -> float:
        """One drafted token."""
        return self.drafter.pass_s(DRAFT)

    @property
    def slowdown(self) -> float:
        """By what factor either side slows down while the other works too.

        A processor halves. A memory serves both in turn once they ask for more than it gives: a verification asks for
        all of it, the drafter for what it reads.
        """
        if self.sharing == "memory":
            return 1.0 + DRAFT.size_bytes / self.step_s / (USABLE * self.verifier.bytes_per_s)
        return 2.0 if self.sharing == "processor" else 1.0

    def curves(self, dilation: float = 1.0) -> Curves:
        """For the policy, every time ``dilation`` times as long."""
        overlap = None if self.sharing == "processor" else Overlap(self.slowdown, self.slowdown)
        verify_s = tuple(dilation * self.verify_s(width) for width in WIDTHS)
        return Curves(WIDTHS, (0,), (verify_s,), (1,), (dilation * self.step_s,), overlap)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.verifier.source, self.drafter.source)))


def simulated_device(profile: str) -> SimulatedDevice:
    """Raises ParameterError for a profile without a device."""
    if profile not in DEVICES:
        raise ParameterError(f"simulated profile: got {profile!r}; allowed: {', '.join(DEVICES)}, all")
    return DEVICES[profile]


def _gpu(name: str, num_cores: int, ghz: float, gb_per_s: float, source: str) -> Processor:
    return Processor(name, gb_per_s * 1e9, num_cores * ghz * 1e9 * 2, GPU_LAYER_S, source)


# Sizes are those of the GGUFs; of the draft, that of the folder that quantize writes.
DRAFT = Model("SmolLM2-135M int8", 0.159e9, 0.1345e9, 30)
SMALL = Model("SmolLM2-1.7B Q4_K_M", 1.1e9, 1.7e9, 24)
THREE = Model("Llama-3.2-3B Q4_K_M", 2.0e9, 3.2e9, 28)
EIGHT = Model("Qwen3-8B Q4_K_M", 5.0e9, 8.2e9, 36)
EIGHT_5 = Model("Qwen3-8B Q5_K_M", 5.9e9, 8.2e9, 36)
FOURTEEN_5 = Model("Qwen3-14B Q5_K_M", 10.5e9, 14.8e9, 40)

# Drafting is bound by memory and overhead, so that its arithmetic is counted as four cores of 16 operations a cycle.
DESKTOP = Processor(
    "desktop CPU, two channels of DDR5-5600", 89.6e9, 4 * 5.0e9 * 16, FAST_CPU_LAYER_S,
    "Intel ARK, Core i9-14900K: DDR5-5600 in two channels, 89.6 GB/s",
)  # fmt: skip
N100 = Processor(
    "Intel N100", 38.4e9, 4 * 3.4e9 * 16, SLOW_CPU_LAYER_S,
    "Intel ARK, Processor N100: 4 cores of 3.4 GHz, one channel of DDR5-4800 (38.4 GB/s)",
)  # fmt: skip
PI_5 = Processor(
    "Raspberry Pi 5", 17.1e9, 4 * 2.4e9 * 16, SLOW_CPU_LAYER_S,
    "Raspberry Pi 5 product brief: 4 Cortex-A76 cores of 2.4 GHz, LPDDR4X-4267 (32 bits wide: 17.1 GB/s)",
)  # fmt: skip
ORIN_64 = _gpu(
    "Jetson AGX Orin 64GB", 2048, 1.3, 204.8,
    "NVIDIA Jetson AGX Orin Series technical brief: 2048 CUDA cores, 1.3 GHz, 204.8 GB/s",
)  # fmt: skip
ORIN_NANO = _gpu(
    "Jetson Orin Nano 8GB", 1024, 0.625, 68,
    "NVIDIA Jetson Orin Nano Series data sheet: 1024 CUDA cores, 625 MHz, 68 GB/s",
)  # fmt: skip
RTX_3050 = _gpu(
    "GeForce RTX 3050 6GB", 2304, 1.47, 168, "NVIDIA, GeForce RTX 3050 (6 GB): 2304 CUDA cores, 1.47 GHz, 168 GB/s"
)
RTX_3060 = _gpu(
    "2 x GeForce RTX 3060 12GB", 3584, 1.78, 360,
    "NVIDIA, GeForce RTX 3060 (12 GB): 3584 CUDA cores, 1.78 GHz, 360 GB/s; layers shared out work one card at a time",
)  # fmt: skip
RTX_4060 = _gpu("GeForce RTX 4060", 3072, 2.46, 272, "NVIDIA, GeForce RTX 4060: 3072 CUDA cores, 2.46 GHz, 272 GB/s")
RTX_4090 = _gpu(
    "GeForce RTX 4090", 16384, 2.52, 1008,
    "NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090: 16384 CUDA cores, 2.52 GHz, 1008 GB/s",
)  # fmt: skip


def _cores_of(module: Processor, num_cores: int, ghz: float) -> Processor:
    """A Jetson's CPU: its clusters are assumed to reach half of the shared memory's bandwidth."""
    name = f"{num_cores} Cortex-A78AE cores of it"
    return Processor(name, module.bytes_per_s / 2, num_cores * ghz * 1e9 * 16, SLOW_CPU_LAYER_S, module.source)


DEVICES = {
    device.profile: device
    for device in (
        # A GPU that no other profile takes, for want of memory.
        SimulatedDevice("auto", RTX_3050, THREE, DESKTOP),
        SimulatedDevice("cpu-small", N100, SMALL, N100, "processor"),
        SimulatedDevice("dual-gpu", RTX_3060, FOURTEEN_5, DESKTOP),
        SimulatedDevice("jetson-agx-orin-64gb", ORIN_64, EIGHT_5, _cores_of(ORIN_64, 6, 2.2), "memory"),
        SimulatedDevice("jetson-orin-nano-8gb", ORIN_NANO, THREE, _cores_of(ORIN_NANO, 4, 1.5), "memory"),
        SimulatedDevice("raspberry-pi-5", PI_5, SMALL, PI_5, "processor"),
        SimulatedDevice("workstation-24gb", RTX_4090, FOURTEEN_5, DESKTOP),
        SimulatedDevice("workstation-8gb", RTX_4060, EIGHT, DESKTOP),
    )
}
