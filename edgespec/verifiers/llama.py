"""The verifier in llama.cpp, through the low-level functions of llama-cpp-python.

llama.cpp is loaded when the first verifier is made, not when this module is imported.
"""

from __future__ import annotations

import collections.abc as abc
import ctypes
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.core.check import check_int
from edgespec.core.prefix import num_common
from edgespec.core.sequence import Cancelled, never
from edgespec.errors import (
    BackendError,
    ClosedError,
    FileAccessError,
    ModelFormatError,
    ModelNotFoundError,
)
from edgespec.verifiers.base import Interrupted, Rows, ScoreRequest, check_requests, check_tokens
from edgespec.verifiers.batch import Batch, Span, collected, split
from edgespec.verifiers.host_memory import HostMemory
from edgespec.verifiers.llama_devices import gpu_names, handles
from edgespec.verifiers.llama_library import library, native_log
from edgespec.verifiers.llama_options import MAX_THREADS, LlamaOptions, context_params, model_params
from edgespec.verifiers.native_log import context_error, decode_error, load_error

__all__ = ["LlamaOptions", "LlamaVerifier", "check_file"]

logger = logging.getLogger("edgespec")

LONG_BATCH = 64  # a decode of more tokens than this can be interrupted; asking costs too much in a shorter one
ABORTED = 2  # llama_decode's code after the abort callback said so


class LlamaVerifier:
    """See verifiers/base.py for the contract of ``score``.

    All requests' rows come from one llama_decode while they are at most ``options.max_rows``. Beyond that the earlier
    rows are copied out before the next decode: as correct, but slower.

    A row at batch width 1: score the same tokens again with num_rows=1. The cache then holds all of them, so the last
    token is evaluated, and alone.

    num_vocab, num_ctx, num_slots  see base.py
    num_ctx_train  tokens the model was trained on
    description    name, architecture, quantization and size, for people
    """

    def __init__(self, options: LlamaOptions, on_progress: abc.Callable[[], object] = never) -> None:
        """Raises ModelNotFoundError, FileAccessError, ModelFormatError; BackendError when memory or a device fails.

        ``on_progress`` is called now and then while the weights are read.
        """
        self._lib = library()
        self._log = native_log()
        self._model: Any = None
        self._context: Any = None
        self._closed = False
        self._host_memory = HostMemory()
        self._log.acquire()
        try:
            check_file(options.path)
            self._load_model(options, on_progress)
            self._make_context(options)
        except BaseException:
            self.close()
            raise

    def _load_model(self, options: LlamaOptions, on_progress: abc.Callable[[], object]) -> None:
        params = model_params(self._lib, options)
        if options.devices is not None:
            devices = (ctypes.c_void_p * (len(options.devices) + 1))(*handles(options.devices))  # NULL ends the list
            params.devices = ctypes.addressof(devices)
        params.progress_callback = self._lib.llama_progress_callback(lambda *_: on_progress() or True)
        self._log.clear()
        self._model = self._lib.llama_model_load_from_file(os.fsencode(options.path), params)
        if not self._model:
            raise load_error(options.path, self._log.reason())
        if self._lib.llama_model_has_encoder(self._model) or not self._lib.llama_model_has_decoder(self._model):
            raise ModelFormatError(f"{options.path}: not a decoder-only language model; choose another GGUF")
        self.num_vocab: int = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))
        self.num_ctx_train: int = self._lib.llama_model_n_ctx_train(self._model)
        self.description = _describe(self._lib, self._model, options.path)

    def _make_context(self, options: LlamaOptions) -> None:
        self.num_slots = options.num_slots
        self.num_ctx = options.num_ctx or min(self.num_ctx_train, options.max_ctx)
        if self.num_ctx > self.num_ctx_train:
            logger.warning(
                "a context of %d tokens is more than the %d this model was trained on; expect worse text beyond them",
                self.num_ctx,
                self.num_ctx_train,
            )
        self._log.clear()
        self._context = self._lib.llama_init_from_model(self._model, context_params(self._lib, options, self.num_ctx))
        if not self._context:
            raise context_error(self.num_slots, self.num_ctx, self._log.reason())
        self._memory = self._lib.llama_get_memory(self._context)
        if not self._memory:
            raise ModelFormatError(f"{options.path}: a model without a KV cache generates no text; choose another GGUF")
        self._host_memory = HostMemory(_gpu(options))
        self._batch = Batch(self._lib, self._lib.llama_n_batch(self._context), self._host_memory)
        self._max_rows = min(options.max_rows, self._batch.size)
        self._held: list[list[int]] = [[] for _ in range(self.num_slots)]
        self._cancelled: Cancelled = never
        self._ask = self._lib.ggml_abort_callback(lambda _: self._cancelled())
        self._no_question = self._lib.ggml_abort_callback()

    @property
    def model(self) -> Any:
        """The ``llama_model*`` (a ctypes pointer), for a tokenizer; valid until ``close``. Raises ClosedError."""
        self._check_open()
        return self._model

    def set_threads(self, num_threads: int, num_threads_batch: int | None = None) -> None:
        """From the next ``score`` on: CPU threads for a batch of one token, and for wider ones (None: as many).

        Raises ParameterError, ClosedError.
        """
        self._check_open()
        num_threads_batch = num_threads if num_threads_batch is None else num_threads_batch
        check_int("num_threads", num_threads, 1, MAX_THREADS)
        check_int("num_threads_batch", num_threads_batch, 1, MAX_THREADS)
        self._lib.llama_set_n_threads(self._context, num_threads, num_threads_batch)

    def score(self, requests: abc.Sequence[ScoreRequest], cancelled: Cancelled = never) -> list[Rows]:
        """See Verifier.score. Rows are views of llama.cpp's own buffer: do not write, and do not use after ``close``.

        ``cancelled`` is asked before each batch of a prompt that takes several, and by llama.cpp itself within a batch
        of more than 64 tokens, as far as it runs on the CPU.
        """
        self._check_open()
        check_requests(self, requests)
        spans = [self._span(request) for request in requests]
        for span in spans:
            check_tokens(span.tokens[span.start :], self.num_vocab)
        self._cancelled = cancelled
        try:
            return self._rows([self._trim(span) for span in spans])
        except Interrupted:
            raise
        except BaseException:
            for span in spans:
                self._empty(span.slot)
            raise

    def close(self) -> None:
        """Free context and model; a second call does nothing. Rows and ``model`` handed out before are then invalid."""
        if self._closed:
            return
        self._closed = True
        if self._context:
            self._lib.llama_free(self._context)
        if self._model:
            self._lib.llama_model_free(self._model)
        self._host_memory.close()
        self._context = self._model = self._memory = None
        self._log.release()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this verifier is closed; open a new one")

    def _span(self, request: ScoreRequest) -> Span:
        """What must be evaluated: all that the cache does not hold yet, the wanted rows at least."""
        tokens = list(request.tokens)
        start = min(num_common(self._held[request.slot], tokens), len(tokens) - request.num_rows)
        return Span(request.slot, tokens, start, len(tokens), request.num_rows)

    def _trim(self, span: Span) -> Span:
        """Drop what the cache holds beyond the span's start: everything where llama.cpp cannot drop a part."""
        held = self._held[span.slot]
        if span.start == len(held):
            return span
        if self._lib.llama_memory_seq_rm(self._memory, span.slot, span.start, -1):
            del held[span.start :]
            return span
        self._empty(span.slot)  # a recurrent state has no past to go back to
        return replace(span, start=0)

    def _empty(self, slot: int) -> None:
        self._held[slot] = []
        self._lib.llama_memory_seq_rm(self._memory, slot, -1, -1)

    def _rows(self, spans: list[Span]) -> list[Rows]:
        """Evaluate; rows of the last decode are views, of earlier ones copies."""
        self._batch.take()  # what an exception left behind
        return collected(spans, self._max_rows, self._evaluate)

    def _evaluate(self, spans: list[Span]) -> list[Rows]:
        """The spans' rows, from one decode; the tokens that do not fit into it are evaluated before."""
        room = self._batch.size - sum(span.num_rows for span in spans)
        tails: list[Span] = []
        for span in spans:
            lead = min(span.stop - span.num_rows - span.start, room)
            room -= lead
            tails.append(replace(span, start=span.stop - span.num_rows - lead))
            self._prefill(replace(span, stop=tails[-1].start, num_rows=0))
        self._flush()
        for tail in tails:
            self._batch.add(tail)
        self._flush()
        return self._views(tails)

    def _prefill(self, span: Span) -> None:
        """Put a span without rows into batches, and decode each batch that is full."""
        while span.start < span.stop:
            part = replace(span, stop=min(span.stop, span.start + self._batch.room))
            self._batch.add(part)
            if self._batch.room == 0:
                self._flush()
            span = replace(span, start=part.stop)

    def _flush(self) -> None:
        """Decode what the batch holds, if anything, and remember what the cache then holds."""
        spans, num_tokens = self._batch.take()
        if num_tokens:
            self._decode(spans, num_tokens)
            for span in spans:
                self._held[span.slot] += span.tokens[span.start : span.stop]

    def _decode(self, spans: list[Span], num_tokens: int) -> None:
        asked = num_tokens > LONG_BATCH and self._cancelled is not never
        if asked and self._cancelled():
            raise Interrupted
        self._lib.llama_set_abort_callback(self._context, self._ask if asked else self._no_question, None)
        self._log.clear()
        code = self._lib.llama_decode(self._context, self._batch.native)
        if code == ABORTED and asked:
            self._forget(spans)
            raise Interrupted
        if code != 0:
            raise decode_error(code, num_tokens, self._log.reason())

    def _forget(self, spans: list[Span]) -> None:
        """After a decode that was broken off: cut the caches back to what was held before it."""
        for span in spans:
            if not self._lib.llama_memory_seq_rm(self._memory, span.slot, len(self._held[span.slot]), -1):
                self._empty(span.slot)

    def _views(self, spans: list[Span]) -> list[Rows]:
        """llama.cpp keeps the wanted rows one after the other, in the order of the batch."""
        logits = self._lib.llama_get_logits(self._context)
        if not logits:
            raise BackendError("llama.cpp gave no logits; this model cannot be a verifier, choose another GGUF")
        shape = (sum(span.num_rows for span in spans), self.num_vocab)
        return split(np.ctypeslib.as_array(logits, shape=shape), spans)


def _gpu(options: LlamaOptions) -> str | None:
    """The device whose host memory the batches lie in."""
    devices = gpu_names() if options.devices is None else list(options.devices)
    return devices[0] if devices and options.num_gpu_layers else None


def check_file(path: Path) -> None:
    """Raise ModelNotFoundError, FileAccessError or ModelFormatError unless it is a GGUF that can be read."""
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for its other end
            raise FileAccessError(f"{path} is not a regular file; give the path of a GGUF file")
        with path.open("rb") as file:
            magic = file.read(4)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFoundError(f"no model file at {path}; give the path of a GGUF file") from None
    except OSError as error:
        raise FileAccessError(f"cannot read {path}: {error.strerror}; give a GGUF file you may read") from None
    if magic != b"GGUF":
        raise ModelFormatError(
            f"{path}: not a GGUF file, it begins with {magic!r}; download it again or choose another"
        )


def _describe(lib: Any, model: Any, path: Path) -> str:
    text = ctypes.create_string_buffer(256)
    named = lib.llama_model_meta_val_str(model, b"general.name", text, len(text)) > 0
    name = text.value.decode("utf-8", "replace") if named else path.stem
    lib.llama_model_desc(model, text, len(text))
    kind = text.value.decode("utf-8", "replace")
    return f"{name} ({kind}, {lib.llama_model_size(model) / 1e6:.0f} MB)"
