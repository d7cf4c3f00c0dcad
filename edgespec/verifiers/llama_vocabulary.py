"""A GGUF's vocabulary alone: what text/tokenizer.py needs, without the weights."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import os
from pathlib import Path
from typing import Any

from edgespec.verifiers.llama_library import library, native_log
from edgespec.verifiers.native_log import load_error


class Vocabulary:
    """A vocabulary that stays open until ``close``. Any thread may read it.

    model  its ``llama_model*``, without weights; None after ``close``
    """

    def __init__(self, path: Path) -> None:
        """Raises as open_vocabulary does."""
        self._resources = contextlib.ExitStack()
        self.model: Any = self._resources.enter_context(open_vocabulary(path))

    def close(self) -> None:
        """Free it; a second call does nothing."""
        self.model = None
        self._resources.close()


@contextlib.contextmanager
def open_vocabulary(path: Path) -> abc.Iterator[Any]:
    """The ``llama_model*`` of a GGUF whose weights are not read, valid within the block. Takes milliseconds.

    Raises ModelFormatError when llama.cpp cannot load it, MissingDependencyError.
    """
    lib, log = library(), native_log()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    log.acquire()
    try:
        log.clear()
        model = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            raise load_error(path, log.reason())
        try:
            yield model
        finally:
            lib.llama_model_free(model)
    finally:
        log.release()
