"""Two bare runners for parity tests: llama.cpp over a GGUF, ONNX Runtime over a draft folder."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import ctypes
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime import OrtValue

Rows = NDArray[np.float32]


@llama.llama_log_callback
def _silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """llama.cpp keeps a pointer to it, so it lives as long as the module."""


class Llama:
    """One sequence of one model; the plain kernels, whose results do not depend on the CPU's matrix unit."""

    def __init__(self, path: Path, num_ctx: int = 256) -> None:
        llama.llama_log_set(_silent, ctypes.c_void_p(0))
        model_params = llama.llama_model_default_params()
        model_params.use_extra_bufts = False
        self.model = llama.llama_model_load_from_file(str(path).encode(), model_params)
        assert self.model, f"llama.cpp does not load {path}"
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = num_ctx
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = 0  # float32 caches, as in the draft
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama.llama_init_from_model(self.model, params)
        self.batch = llama.llama_batch_init(num_ctx, 0, 1)
        self.num_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.num_cached = 0

    def feed(self, tokens: abc.Sequence[int]) -> Rows:
        """Logits after each of the tokens, (len(tokens), num_vocab)."""
        self.batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            self.batch.token[i], self.batch.pos[i], self.batch.logits[i] = token, self.num_cached + i, 1
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, 0
        assert llama.llama_decode(self.context, self.batch) == 0
        self.num_cached += len(tokens)
        logits = llama.llama_get_logits(self.context)
        return np.array(np.ctypeslib.as_array(logits, (len(tokens), self.num_vocab)))

    def tokenize(self, text: str) -> list[int]:
        ids, raw = (ctypes.c_int32 * 512)(), text.encode()
        vocab = llama.llama_model_get_vocab(self.model)
        return list(ids[: llama.llama_tokenize(vocab, raw, len(raw), ids, 512, False, True)])

    def close(self) -> None:
        llama.llama_batch_free(self.batch)
        llama.llama_free(self.context)
        llama.llama_model_free(self.model)


def llama_rows(path: Path, tokens: abc.Sequence[int]) -> Rows:
    with contextlib.closing(Llama(path)) as model:
        return model.feed(tokens)


class Draft:
    """A draft model with one buffer per cache, bound as input and output."""

    def __init__(self, folder: Path, batch: int = 1, num_ctx: int = 256) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
        inputs = {value.name: value.shape for value in self.session.get_inputs()}
        self.caches = {
            name.removeprefix("past_key_values"): np.zeros((batch, shape[1], num_ctx, shape[3]), np.float32)
            for name, shape in inputs.items()
            if name.startswith("past_key_values")
        }

    def feed(self, tokens: abc.Sequence[abc.Sequence[int]], num_cached: abc.Sequence[int]) -> Rows:
        """Logits after the last token of each row, (batch, num_head_vocab)."""
        ids = np.asarray(tokens, dtype=np.int64)
        totals = np.asarray(num_cached, dtype=np.int32) + ids.shape[1]
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_cpu_input("seqlens_k", totals - 1)
        binding.bind_cpu_input("total_sequence_length", np.array(totals.max()))
        binding.bind_output("logits")
        for name, cache in self.caches.items():
            value = OrtValue.ortvalue_from_numpy(cache)
            binding.bind_ortvalue_input(f"past_key_values{name}", value)
            binding.bind_ortvalue_output(f"present{name}", value)
        self.session.run_with_iobinding(binding)
        return np.array(binding.get_outputs()[0].numpy()[:, 0])

    def rows(self, tokens: abc.Sequence[int], step: int) -> Rows:
        """One sequence from its start, ``step`` tokens a call: a row per call."""
        starts = range(0, len(tokens), step)
        return np.concatenate([self.feed([tokens[start : start + step]], [start]) for start in starts])


def relative_error(got: Rows, expected: Rows) -> float:
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max() / np.abs(expected).max())
