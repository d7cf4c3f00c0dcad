"""ONNX Runtime sessions as the drafters use them: one provider, quiet, errors on one line."""

from __future__ import annotations

import collections.abc as abc
import re
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgespec.drafters.files import unreadable
from edgespec.errors import BackendError, MissingDependencyError, ModelFormatError, ParameterError

Row = NDArray[np.float32]

_FATAL_ONLY = 4
# What has no kernel on the GPU runs on the CPU.
_PROVIDERS = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"]}


class DraftModel(Protocol):
    """A decoder with one KV cache per slot. The caller keeps count of what each slot holds and says so in every call.

    num_vocab   token ids it can read: 0 to num_vocab - 1
    num_logits  length of a row
    num_ctx     most tokens a slot can hold
    """

    @property
    def num_vocab(self) -> int: ...
    @property
    def num_logits(self) -> int: ...
    @property
    def num_ctx(self) -> int: ...

    def chunk(self, num_cached: int) -> int:
        """Most tokens one ``extend`` may take after ``num_cached`` ones."""
        ...

    def extend(self, slot: int, tokens: abc.Sequence[int], num_cached: int) -> Row:
        """Evaluate tokens after the first ``num_cached`` ones of a slot; what it held beyond those is lost.

        Returns the logits after the last token, valid until the next call. BackendError leaves the first ``num_cached``
        intact.
        """
        ...

    def step(self, tokens: abc.Mapping[int, int], num_cached: abc.Sequence[int]) -> dict[int, Row]:
        """``extend`` by one token for several slots, in few calls.

        tokens      slot: token
        num_cached  for every slot there is
        """
        ...

    def close(self) -> None: ...


def open_session(path: Path, num_threads: int, spin: bool, provider: str = "cpu") -> Any:
    """An InferenceSession. Raises ModelNotFoundError, FileAccessError, ModelFormatError or MissingDependencyError."""
    _check_provider(provider, ort.get_available_providers())
    try:
        path.open("rb").close()
    except OSError as error:
        raise unreadable(path, error) from error
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _FATAL_ONLY
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
    # Threads that spin on after a run would take the cores from the verifier.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    ort.set_default_logger_severity(_FATAL_ONLY)
    try:
        session = ort.InferenceSession(str(path), options, providers=_PROVIDERS[provider])
    except Exception as error:  # its classes share no base
        raise ModelFormatError(f"{path} is no usable ONNX model: {condensed(error)}; get it again") from error
    _check_provider(provider, session.get_providers())  # it falls back to the CPU where CUDA's libraries are missing
    return session


def _check_provider(provider: str, there: abc.Sequence[str]) -> None:
    if provider not in _PROVIDERS:
        raise ParameterError(f"provider: got {provider!r}; allowed: {', '.join(_PROVIDERS)}")
    if _PROVIDERS[provider][0] not in there:
        raise MissingDependencyError(
            f"ONNX Runtime cannot use the provider {provider!r} here, it has: {', '.join(there)}; install "
            "onnxruntime-gpu with CUDA's libraries and a GPU, or set [draft] provider to 'cpu' in the profile"
        )


def condensed(error: Exception) -> str:
    """ONNX Runtime's message without its codes and line breaks, at most 240 characters."""
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", " ".join(str(error).split()))
    return text if len(text) <= 240 else text[:240] + "…"


def run(session: Any, binding: Any) -> None:
    """Run with everything bound; other threads may run meanwhile. Raises BackendError."""
    try:
        session.run_with_iobinding(binding)
    except Exception as error:
        raise BackendError(f"ONNX Runtime failed: {condensed(error)}; try another draft model") from error


def signature(session: Any) -> str:
    """What goes in and comes out, on one line, caches of layers beyond the first left out."""
    return f"{_listed(session.get_inputs())} -> {_listed(session.get_outputs())}"


def _listed(values: abc.Iterable[Any]) -> str:
    return ", ".join(f"{value.name} {value.shape}" for value in values if not re.search(r"\.[1-9]\d*\.", value.name))
