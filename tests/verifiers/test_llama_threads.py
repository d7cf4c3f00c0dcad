"""Changing a verifier's threads while it is loaded."""

from __future__ import annotations

import collections.abc as abc
from pathlib import Path

import llama_cpp.llama_cpp as lib
import numpy as np
import pytest

from edgespec.errors import ClosedError, ParameterError
from edgespec.verifiers.base import ScoreRequest
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier


@pytest.fixture
def verifier(tiny_gguf: Path) -> abc.Iterator[LlamaVerifier]:
    verifier = LlamaVerifier(LlamaOptions(tiny_gguf, num_threads=1))
    yield verifier
    verifier.close()


def threads(verifier: LlamaVerifier) -> tuple[int, int]:
    return lib.llama_n_threads(verifier._context), lib.llama_n_threads_batch(verifier._context)


def test_threads_change_and_rows_do_not(verifier: LlamaVerifier) -> None:
    tokens = list(range(40))
    (before,) = (rows.copy() for rows in verifier.score([ScoreRequest(0, tokens, 4)]))
    assert threads(verifier) == (1, 1)
    verifier.set_threads(2)
    assert threads(verifier) == (2, 2)
    verifier.set_threads(2, 1)
    assert threads(verifier) == (2, 1)
    (after,) = verifier.score([ScoreRequest(0, tokens, 4)])
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong", [(0,), (-1,), (2, 0), (10**6,), (1.5,), (True,)])
def test_wrong_counts_are_refused_and_change_nothing(verifier: LlamaVerifier, wrong: tuple[int, ...]) -> None:
    with pytest.raises(ParameterError, match="num_threads"):
        verifier.set_threads(*wrong)
    assert threads(verifier) == (1, 1)


def test_a_closed_verifier_says_so(verifier: LlamaVerifier) -> None:
    verifier.close()
    with pytest.raises(ClosedError):
        verifier.set_threads(1)
