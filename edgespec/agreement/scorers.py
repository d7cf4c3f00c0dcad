"""Models as rows: whatever lies at a path, opened so that it scores a text."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import functools
import tempfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edgespec.core.head import Head
from edgespec.core.prefix import num_common
from edgespec.drafters.files import unreadable
from edgespec.drafters.onnx_manifest import MANIFEST
from edgespec.errors import ModelNotFoundError
from edgespec.paths import cache_dir
from edgespec.text.tokenizer import Tokenizer
from edgespec.verifiers.base import Rows, ScoreRequest
from edgespec.verifiers.canary import use_extra_bufts
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier

NUM_CTX = 1024  # texts are read in pieces of at most so many tokens, which bounds the caches
TOKENIZER = "tokenizer.json"

Progress = abc.Callable[[str, float], None]
Encode = abc.Callable[[str], list[int]]


class Scorer(Protocol):
    """One model; one thread may call it.

    num_bytes  of its files
    num_vocab  ids it can read: 0 to num_vocab - 1
    num_logits, head  width of its rows, and what the columns stand for (None: the id that is the index)
    num_ctx    most tokens of a piece
    tokens     raw token texts by id
    encode     text to ids; None where the model's files hold no tokenizer
    timed      whether its speed is the model's own
    """

    @property
    def num_bytes(self) -> int: ...
    @property
    def num_vocab(self) -> int: ...
    @property
    def num_logits(self) -> int: ...
    @property
    def head(self) -> Head | None: ...
    @property
    def num_ctx(self) -> int: ...
    @property
    def tokens(self) -> abc.Sequence[str]: ...
    @property
    def encode(self) -> Encode | None: ...
    @property
    def timed(self) -> bool: ...

    def score(self, tokens: abc.Sequence[int], num_rows: int) -> Rows:
        """(num_rows, num_logits) float32: what follows each of the last tokens. A view, valid until the next call."""
        ...


class LlamaScorer:
    """A GGUF in llama.cpp."""

    head = None
    timed = True

    def __init__(self, verifier: LlamaVerifier, path: Path) -> None:
        tokenizer = Tokenizer(verifier.model)
        self._verifier = verifier
        self.num_bytes = _gguf_bytes(path)
        self.num_vocab = self.num_logits = verifier.num_vocab
        self.num_ctx = verifier.num_ctx
        self.tokens = tokenizer.tokens
        self.encode: Encode = lambda text: tokenizer.encode(text, add_special=True, parse_special=False)

    def score(self, tokens: abc.Sequence[int], num_rows: int) -> Rows:
        (rows,) = self._verifier.score([ScoreRequest(0, tokens, num_rows)])
        return rows


class OnnxScorer:
    """A decoder on ONNX Runtime, token by token, as a draft model runs."""

    def __init__(self, opened: Any, num_bytes: int, encode: Encode | None, *, timed: bool = True) -> None:
        """``opened`` is an OpenedModel of drafters/onnx_open.py."""
        from edgespec.drafters.onnx_open import read_tokens

        self._model, self.head = opened.model, opened.head
        self.num_bytes, self.encode, self.timed = num_bytes, encode, timed
        self.num_vocab, self.num_logits = opened.model.num_vocab, opened.model.num_logits
        self.num_ctx = opened.model.num_ctx - 1  # a cache of fixed length keeps its last place free
        self.tokens = read_tokens(opened.tokens_path)
        self._cached: list[int] = []

    def score(self, tokens: abc.Sequence[int], num_rows: int) -> Rows:
        rows = np.empty((num_rows, self.num_logits), dtype=np.float32)
        first = len(tokens) - num_rows
        start = min(num_common(self._cached, list(tokens)), first)
        del self._cached[start:]
        for i in range(start, len(tokens)):
            row = self._model.extend(0, [tokens[i]], i)
            self._cached.append(tokens[i])
            if i >= first:
                rows[i - first] = row
        return rows


@contextlib.contextmanager
def opened(path: Path, num_threads: int, progress: Progress) -> abc.Iterator[Scorer]:
    """The model at ``path``, for as long as the block runs.

    A .onnx file; a folder with draft.toml; a checkpoint's folder (config.json and safetensors), which is built at 32
    bits into a temporary folder, and tells ``progress``; a folder with a published .onnx; any other file is a GGUF.

    Raises ModelNotFoundError, ModelFormatError, FileAccessError, BackendError, VocabularyMismatchError,
    MissingDependencyError.
    """
    _check_there(path)
    if is_checkpoint(path):
        opener = _checkpoint(path, num_threads, progress)
    elif path.is_dir() or path.suffix == ".onnx":
        opener = _onnx(path, num_threads)
    else:
        opener = _gguf(path, num_threads)
    with opener as scorer:
        yield scorer


def _check_there(path: Path) -> None:
    try:
        there = path.exists()
    except OSError as error:
        raise unreadable(path, error) from error
    if not there:
        raise ModelNotFoundError(f"no model at {path}; give a GGUF, a draft folder, an .onnx file or a checkpoint")


def is_checkpoint(path: Path) -> bool:
    """Raises FileAccessError where nobody may look."""
    try:
        return (path / "config.json").is_file() and any(path.glob("*.safetensors")) and not (path / MANIFEST).exists()
    except OSError as error:
        raise unreadable(path, error) from error


@contextlib.contextmanager
def _gguf(path: Path, num_threads: int) -> abc.Iterator[Scorer]:
    extra = use_extra_bufts(cache_dir())
    verifier = LlamaVerifier(LlamaOptions(path, num_threads, max_ctx=NUM_CTX, use_extra_bufts=extra))
    with contextlib.closing(verifier):
        yield LlamaScorer(verifier, path)


@contextlib.contextmanager
def _onnx(path: Path, num_threads: int) -> abc.Iterator[Scorer]:
    from edgespec.drafters.onnx_open import open_model

    opened = open_model(path, num_ctx=NUM_CTX, num_threads=num_threads)
    with contextlib.closing(opened.model):
        folders = (opened.path.parent, opened.path.parent.parent)
        tokenizers = [folder for folder in folders if (folder / TOKENIZER).is_file()]
        yield OnnxScorer(opened, _onnx_bytes(opened.path), _encoder(tokenizers[0]) if tokenizers else None)


@contextlib.contextmanager
def _checkpoint(path: Path, num_threads: int, progress: Progress) -> abc.Iterator[Scorer]:
    from edgespec.drafters.onnx_open import open_model
    from quantize import build_draft

    with tempfile.TemporaryDirectory(prefix="edgespec-") as folder:
        built = build_draft(path, Path(folder) / "draft", bits=32, progress=progress)
        opened = open_model(built, num_ctx=NUM_CTX, num_threads=num_threads)
        with contextlib.closing(opened.model):
            num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            yield OnnxScorer(opened, num_bytes, _encoder(path), timed=False)


def _encoder(folder: Path) -> Encode:
    """By the folder's tokenizer.json, which is opened on first use: often the other model has a tokenizer at hand."""

    @functools.cache
    def tokenizer() -> Any:
        from quantize.safetensors_source import open_tokenizer

        return open_tokenizer(folder)

    return lambda text: list(tokenizer().encode(text).ids)


def _onnx_bytes(graph: Path) -> int:
    """Of a draft folder all of it; of a published export the graph and the weights that are named after it."""
    whole = (graph.parent / MANIFEST).is_file()
    files = [file for file in graph.parent.iterdir() if whole or file.name.startswith(graph.name)]
    return sum(file.stat().st_size for file in files if file.is_file())


def _gguf_bytes(path: Path) -> int:
    """Of a split model, which is named by its first file, all parts together."""
    from edgespec.devices.gguf_sizes import parts

    return sum(part.stat().st_size for part in parts(path) if part.is_file())
