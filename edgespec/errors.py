"""Every error edgespec raises on purpose.

::

    EdgespecError                exit  1, HTTP 500
    ├── ParameterError           exit  2, HTTP 400   a value outside its allowed range, an unknown option
    ├── ModelNotFoundError       exit  3, HTTP 500   a model file that is not there
    ├── ModelFormatError         exit  4, HTTP 500   truncated, corrupt, or of an unsupported kind
    ├── FileAccessError          exit  5, HTTP 500   a file that cannot be read or written
    ├── UnknownPairError         exit  6, HTTP 404   a pair no manifest describes
    ├── VocabularyMismatchError  exit  7, HTTP 500   a draft model that speaks other tokens than the verifier
    ├── PromptError              exit  8, HTTP 400   an empty prompt, text the tokenizer refuses
    │   └── ContextLengthError   exit  9, HTTP 400   a prompt longer than the context
    ├── BackendError             exit 10, HTTP 503   llama.cpp or ONNX Runtime failed while running
    ├── MissingDependencyError   exit 11, HTTP 500   an optional package that is not installed
    ├── ClosedError              exit 12, HTTP 503   use of a runtime that was closed
    ├── LosslessError            exit 13, HTTP 500   an output that differs from plain decoding without explanation
    ├── ProfileError             exit 14, HTTP 400   a device profile that is not there or not right
    ├── MemoryBudgetError        exit 15, HTTP 503   models, caches and buffers that do not fit the device's memory
    └── DownloadError            exit 16, HTTP 502   a file that could not be fetched, or is not the one expected

A message is one line and says what is wrong, what was got, what is allowed, and what to do next. The library raises,
the command line prints the line and exits with ``exit_code``, a server answers with ``http_status``.
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "ClosedError",
    "ContextLengthError",
    "DownloadError",
    "EdgespecError",
    "FileAccessError",
    "LosslessError",
    "MemoryBudgetError",
    "MissingDependencyError",
    "ModelFormatError",
    "ModelNotFoundError",
    "ParameterError",
    "ProfileError",
    "PromptError",
    "UnknownPairError",
    "VocabularyMismatchError",
]


class EdgespecError(Exception):
    """Base class: catch this to catch everything edgespec raises on purpose."""

    exit_code = 1
    http_status = 500


class ParameterError(EdgespecError):
    exit_code = 2
    http_status = 400


class ModelNotFoundError(EdgespecError):
    exit_code = 3


class ModelFormatError(EdgespecError):
    exit_code = 4


class FileAccessError(EdgespecError):
    exit_code = 5


class UnknownPairError(EdgespecError):
    exit_code = 6
    http_status = 404


class VocabularyMismatchError(EdgespecError):
    exit_code = 7


class PromptError(EdgespecError):
    exit_code = 8
    http_status = 400


class ContextLengthError(PromptError):
    exit_code = 9


class BackendError(EdgespecError):
    exit_code = 10
    http_status = 503


class MissingDependencyError(EdgespecError):
    exit_code = 11


class ClosedError(EdgespecError):
    exit_code = 12
    http_status = 503


class LosslessError(EdgespecError):
    exit_code = 13


class ProfileError(EdgespecError):
    exit_code = 14
    http_status = 400


class MemoryBudgetError(EdgespecError):
    """The message's first line is the summary; ``plan`` has the lines of the memory plan, for people."""

    exit_code = 15
    http_status = 503

    def __init__(self, message: str, plan: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.plan = plan


class DownloadError(EdgespecError):
    exit_code = 16
    http_status = 502
