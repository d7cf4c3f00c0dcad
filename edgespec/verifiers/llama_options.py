"""What a LlamaVerifier can be told, and llama.cpp's parameters made of it. Imports nothing of llama.cpp."""

from __future__ import annotations

import collections.abc as abc
import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.core.check import check_float, check_int
from edgespec.errors import ParameterError

NUM_CTX = 4096  # the most that is reserved without being asked for: the KV cache costs memory for every token of it
MAX_THREADS = 1024
MAX_SLOTS = 256  # LLAMA_MAX_SEQ
MAX_GPUS = 16  # llama_max_devices()
MAX_TOKENS = 2**24  # of all slots: more than any model is trained for, and a typing error before it fills the memory
# What a KV cache can be stored in, and llama.cpp's number of it. Those beyond the first three are quantized.
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2, "iq4_nl": 20}
PLAIN_KV_TYPES = ("f32", "f16", "bf16")
SPLIT_MODES = {"none": 0, "layer": 1, "row": 2}


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """What to load and how to run it.

    path               a GGUF file; of a split model, its first file
    num_threads        CPU threads for a batch of one token
    num_threads_batch  for wider batches; None: as many
    num_ctx            most tokens a slot holds; None: what the model was trained for, at most ``max_ctx``. More than it
                       was trained for is allowed and logged as a warning
    num_slots          sequences held at once; each gets ``num_ctx`` tokens of its own
    num_batch          most tokens one llama_decode evaluates; a longer prompt takes several
    num_gpu_layers     layers kept on the GPU; negative: all of them. Without a GPU it changes nothing
    use_extra_bufts    weights repacked for this CPU: faster, and broken in some builds (see verifiers/canary.py)
    flash_attention    None: where the device supports it
    kv_type_k, kv_type_v  what the cache's keys and values are stored in, see KV_TYPES. Quantized they take less memory
                       and give other rows; quantized values need flash attention
    split_mode         several GPUs: "layer" or "row" spreads the weights, "none" takes ``main_gpu`` alone
    tensor_split       each GPU's share, in llama.cpp's order; empty: by free memory
    devices            the GPUs to use, by the names llama.cpp lists them with (verifiers/llama_devices.py); None: all
                       of them; empty: none, not even for scratch memory, which ``num_gpu_layers=0`` still takes there
    """

    path: Path
    num_threads: int
    num_threads_batch: int | None = None
    num_ctx: int | None = None
    max_ctx: int = NUM_CTX
    num_slots: int = 1
    num_batch: int = 512
    num_gpu_layers: int = -1
    use_extra_bufts: bool = True
    flash_attention: bool | None = None
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    devices: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        threads_batch = self.num_threads if self.num_threads_batch is None else self.num_threads_batch
        check_int("num_threads", self.num_threads, 1, MAX_THREADS)
        check_int("num_threads_batch", threads_batch, 1, MAX_THREADS)
        check_int("num_slots", self.num_slots, 1, MAX_SLOTS)
        check_int("num_batch", self.num_batch, self.num_slots, 2**20)
        check_int("max_ctx", self.max_ctx, 1, MAX_TOKENS // self.num_slots)
        if self.num_ctx is not None:
            check_int("context (num_ctx)", self.num_ctx, 1, MAX_TOKENS // self.num_slots)
        self._check_cache()
        self._check_split()

    def _check_cache(self) -> None:
        for name, value in (("kv_type_k", self.kv_type_k), ("kv_type_v", self.kv_type_v)):
            _check_one_of(name, value, KV_TYPES)
        if self.kv_type_v not in PLAIN_KV_TYPES and self.flash_attention is False:
            raise ParameterError(
                f"kv_type_v: got {self.kv_type_v!r} without flash attention, which llama.cpp cannot do; "
                f"allowed: {', '.join(PLAIN_KV_TYPES)}, or with flash attention"
            )

    def _check_split(self) -> None:
        _check_one_of("split_mode", self.split_mode, SPLIT_MODES)
        check_int("main_gpu", self.main_gpu, 0, MAX_GPUS - 1)
        check_int("GPUs in tensor_split", len(self.tensor_split), 0, MAX_GPUS)
        check_int("number of devices", len(self.devices or ()), 0, MAX_GPUS)
        for share in self.tensor_split:
            check_float("tensor_split", share, 0.0)
        if self.tensor_split and not any(self.tensor_split):
            raise ParameterError("tensor_split: got only zeros; allowed: a share per GPU, one of them above 0")

    @property
    def max_rows(self) -> int:
        """Most rows one llama_decode gives. Memory is reserved for them twice: 4 bytes x vocabulary x rows."""
        return min(self.num_batch, 32 * (self.num_slots + 1))


def model_params(lib: Any, options: LlamaOptions) -> Any:
    params = lib.llama_model_default_params()
    params.n_gpu_layers = options.num_gpu_layers
    params.use_extra_bufts = options.use_extra_bufts
    params.split_mode, params.main_gpu = SPLIT_MODES[options.split_mode], options.main_gpu
    if options.tensor_split:
        params.tensor_split = (ctypes.c_float * MAX_GPUS)(*options.tensor_split)  # the structure keeps it alive
    return params


def context_params(lib: Any, options: LlamaOptions, num_ctx: int) -> Any:
    params = lib.llama_context_default_params()
    params.n_ctx = num_ctx * options.num_slots
    params.n_batch = params.n_ubatch = options.num_batch
    params.n_seq_max = options.num_slots
    params.n_outputs_max = options.max_rows  # llama.cpp aborts the process beyond it
    params.n_threads = options.num_threads
    params.n_threads_batch = options.num_threads_batch or options.num_threads
    params.kv_unified = True  # separate caches would evaluate slots of unequal width one after the other
    params.swa_full = True  # a cache of the window only could not go back to a shorter prefix
    params.type_k, params.type_v = KV_TYPES[options.kv_type_k], KV_TYPES[options.kv_type_v]
    if options.flash_attention is not None:
        params.flash_attn_type = int(options.flash_attention)
    return params


def _check_one_of(name: str, value: str, allowed: abc.Iterable[str]) -> None:
    if value not in allowed:
        raise ParameterError(f"{name}: got {value!r}; allowed: {', '.join(allowed)}")
