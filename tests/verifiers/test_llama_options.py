"""What a LlamaVerifier can be told of its cache and its GPUs, on the CPU: the canary's heads are 32 wide."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from edgespec.errors import BackendError, ParameterError
from edgespec.verifiers import llama_options
from edgespec.verifiers.base import Rows
from edgespec.verifiers.canary import MODEL
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from edgespec.verifiers.llama_options import KV_TYPES, SPLIT_MODES, model_params
from edgespec.verifiers.native_log import load_error
from tests.verifiers.contract import row_at

TOKENS = np.random.default_rng(0).integers(0, 64, 60).tolist()


def options(path: Path = MODEL, **chosen: Any) -> LlamaOptions:
    return LlamaOptions(path, num_threads=1, **chosen)


def rows_and_bytes(**chosen: Any) -> tuple[Rows, int]:
    """Four rows, and the size of the cache behind them."""
    with contextlib.closing(LlamaVerifier(options(**chosen))) as verifier:
        rows = row_at(verifier, TOKENS, 4).copy()
        return rows, verifier._lib.llama_state_seq_get_size(verifier._context, 0)


@pytest.mark.parametrize(
    ("kind", "bytes_a_value"),
    [("f32", 4), ("bf16", 2), ("q8_0", 34 / 32), ("q5_1", 24 / 32), ("q5_0", 22 / 32), ("q4_0", 18 / 32)],
)
def test_the_cache_is_stored_as_asked(kind: str, bytes_a_value: float) -> None:
    plain, plain_bytes = rows_and_bytes()
    rows, num_bytes = rows_and_bytes(kv_type_k=kind, kv_type_v=kind, flash_attention=True)
    num_values = 2 * 64 * len(TOKENS)  # keys and values of one layer
    assert plain_bytes - num_bytes == pytest.approx(num_values * (2 - bytes_a_value), abs=64)
    assert np.isfinite(rows).all()
    if kind != "f32":
        assert np.abs(rows - plain).max() > 0
    coarse = 0.5 if kind.startswith(("q4", "q5")) else 0.1
    assert np.abs(rows - plain).max() < coarse * np.abs(plain).max()


def test_keys_alone_may_be_quantized_without_flash_attention() -> None:
    _, plain_bytes = rows_and_bytes()
    _, num_bytes = rows_and_bytes(kv_type_k="q8_0", flash_attention=False)
    assert num_bytes < plain_bytes


def test_quantized_values_need_flash_attention() -> None:
    with pytest.raises(ParameterError, match=r"got 'q8_0' without flash attention.*allowed: f32, f16, bf16"):
        options(kv_type_v="q8_0", flash_attention=False)


def test_heads_that_the_blocks_do_not_divide_are_named(tiny_gguf: Path) -> None:
    for kind in ("kv_type_k", "kv_type_v"):
        with pytest.raises(BackendError, match=r"head_.=16; choose other KV cache types, such as f16$"):
            LlamaVerifier(options(tiny_gguf, **{kind: "q8_0"}))


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"kv_type_k": "q9"}, "kv_type_k: got 'q9'; allowed: f32, f16, bf16, q8_0"),
        ({"split_mode": "tensor"}, "split_mode: got 'tensor'; allowed: none, layer, row"),
        ({"main_gpu": -1}, "main_gpu: got -1; allowed: a whole number from 0 to 15"),
        ({"tensor_split": (1.0,) * 17}, "GPUs in tensor_split: got 17; allowed: a whole number from 0 to 16"),
        ({"tensor_split": (1.0, -1.0)}, "tensor_split: got -1.0; allowed: a finite number, at least 0"),
        ({"tensor_split": (0.0, 0.0)}, "tensor_split: got only zeros"),
        ({"max_ctx": 0}, "max_ctx: got 0; allowed: a whole number from 1"),
    ],
)
def test_what_is_not_allowed_is_refused(chosen: dict[str, Any], expected: str) -> None:
    with pytest.raises(ParameterError) as caught:
        options(**chosen)
    assert expected in str(caught.value)


def test_the_numbers_are_llama_cpps() -> None:
    assert llama_cpp.llama_max_devices() == llama_options.MAX_GPUS
    for name, number in SPLIT_MODES.items():
        assert getattr(llama_cpp, f"LLAMA_SPLIT_MODE_{name.upper()}") == number
    for name, number in KV_TYPES.items():
        if name != "bf16":  # llama-cpp-python leaves it out
            assert getattr(llama_cpp, f"GGML_TYPE_{name.upper()}") == number
    lib = llama_cpp.llama_cpp._lib
    lib.ggml_type_name.restype, lib.ggml_type_name.argtypes = ctypes.c_char_p, [ctypes.c_int]
    assert {name: lib.ggml_type_name(number).decode() for name, number in KV_TYPES.items()} == {
        name: name for name in KV_TYPES
    }


def test_the_split_reaches_llama_cpp() -> None:
    params = model_params(llama_cpp, options(split_mode="row", main_gpu=3, tensor_split=(3.0, 1.0), num_gpu_layers=7))
    assert (params.split_mode, params.main_gpu, params.n_gpu_layers) == (llama_cpp.LLAMA_SPLIT_MODE_ROW, 3, 7)
    assert [params.tensor_split[i] for i in range(16)] == [3.0, 1.0, *[0.0] * 14]
    assert not model_params(llama_cpp, options()).tensor_split


@pytest.mark.parametrize("split_mode", SPLIT_MODES)
def test_without_a_gpu_the_split_changes_nothing(split_mode: str) -> None:
    plain, _ = rows_and_bytes(num_gpu_layers=0)
    rows, _ = rows_and_bytes(num_gpu_layers=0, split_mode=split_mode, tensor_split=(1.0, 2.0))
    assert np.array_equal(rows, plain)


def test_a_gpu_that_is_not_there_is_no_broken_file() -> None:
    error = load_error(MODEL, "invalid value for main_gpu: 3 (available devices: 1)")
    assert isinstance(error, ParameterError)


def test_the_context_defaults_to_at_most_max_ctx() -> None:
    for max_ctx, num_ctx in ((40, 40), (64, 64), (100, 64)):
        with contextlib.closing(LlamaVerifier(options(max_ctx=max_ctx))) as verifier:
            assert verifier.num_ctx == num_ctx
