"""LlamaVerifier beyond the contract: caches, batches, failures, files. Tiny model first, then the starter verifier."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import (
    BackendError,
    ClosedError,
    ParameterError,
)
from edgespec.verifiers import llama
from edgespec.verifiers.base import Interrupted, Rows, ScoreRequest
from edgespec.verifiers.canary import MODEL
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from edgespec.verifiers.llama_library import library, native_log
from tests.verifiers.contract import row_at

OPTIONS = LlamaOptions(MODEL, num_threads=1, num_ctx=256, num_slots=3, num_batch=16)


@contextlib.contextmanager
def opened(options: LlamaOptions) -> abc.Iterator[LlamaVerifier]:
    with contextlib.closing(LlamaVerifier(options)) as verifier:
        yield verifier


@pytest.fixture
def verifier() -> abc.Iterator[LlamaVerifier]:
    with opened(OPTIONS) as verifier:
        yield verifier


class Watched:
    """llama.cpp, with its decodes counted and one of them replaced by a failure."""

    def __init__(self, verifier: LlamaVerifier, fail_at: int = -1, code: int = 0) -> None:
        self._lib, self._fail_at, self._code = verifier._lib, fail_at, code
        self.widths: list[int] = []
        verifier._lib = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def llama_decode(self, context: Any, batch: Any) -> int:
        self.widths.append(batch.n_tokens)
        if len(self.widths) - 1 == self._fail_at:
            return self._code
        code: int = self._lib.llama_decode(context, batch)
        return code


def tokens_of(num: int, seed: int = 0, num_vocab: int = 64) -> list[int]:
    return np.random.default_rng(seed).integers(0, num_vocab, num).tolist()


def close_to(one: Rows, other: Rows, tolerance: float = 0.05) -> bool:
    return one.shape == other.shape and float(np.abs(one - other).max()) < tolerance


# What is evaluated


def test_only_what_the_cache_lacks_is_evaluated(verifier: LlamaVerifier) -> None:
    tokens = tokens_of(14)
    row_at(verifier, tokens[:8])
    watched = Watched(verifier)
    row_at(verifier, tokens[:12], 3)
    row_at(verifier, [*tokens[:10], 1, 2], 1)
    assert watched.widths == [4, 2]


def test_scoring_the_held_tokens_again_is_a_row_at_width_one(verifier: LlamaVerifier) -> None:
    tokens = tokens_of(12)
    wide = row_at(verifier, tokens, 6)
    watched = Watched(verifier)
    assert close_to(row_at(verifier, tokens), wide[-1:])
    assert watched.widths == [1]


def test_a_prompt_longer_than_the_batch_is_evaluated_in_parts(verifier: LlamaVerifier) -> None:
    tokens = tokens_of(50)
    watched = Watched(verifier)
    rows = row_at(verifier, tokens, 4)
    assert watched.widths == [16, 16, 2, 16]
    with opened(LlamaOptions(MODEL, num_threads=1, num_ctx=256)) as whole:
        assert close_to(rows, row_at(whole, tokens, 4))


def test_requests_of_unequal_length_share_their_last_decode(verifier: LlamaVerifier) -> None:
    lists, num_rows = [tokens_of(n, n) for n in (20, 3, 9)], [2, 1, 5]
    alone = [row_at(verifier, tokens, n, slot) for slot, (tokens, n) in enumerate(zip(lists, num_rows, strict=True))]
    for slot in range(3):
        row_at(verifier, [63], 1, slot)
    watched = Watched(verifier)
    together = verifier.score([ScoreRequest(s, lists[s], num_rows[s]) for s in (2, 0, 1)])
    for slot, rows in zip((2, 0, 1), together, strict=True):
        assert close_to(rows, alone[slot])
    assert watched.widths == [16, 16]


def test_rows_of_one_decode_are_views_of_one_buffer(verifier: LlamaVerifier) -> None:
    one, other = verifier.score([ScoreRequest(0, tokens_of(5), 2), ScoreRequest(1, tokens_of(6), 3)])
    assert not one.flags.owndata
    assert other.ctypes.data - one.ctypes.data == one.nbytes


def test_rows_that_do_not_fit_one_decode_are_all_valid(verifier: LlamaVerifier) -> None:
    tokens = tokens_of(40)
    rows = row_at(verifier, tokens, 38)
    expected = np.concatenate([row_at(verifier, tokens[:n]) for n in range(3, 41)])
    assert close_to(rows, expected)
    both = verifier.score([ScoreRequest(1, tokens, 20), ScoreRequest(2, tokens[:30], 10)])
    assert close_to(both[0], expected[-20:])
    assert close_to(both[1], expected[18:28])


# Broken off


def test_a_cancelled_prompt_keeps_what_was_evaluated(wide_batch: LlamaVerifier) -> None:
    verifier, tokens = wide_batch, tokens_of(250)
    answers = iter([False, True])
    watched = Watched(verifier)
    verifier._ask = verifier._no_question  # only the question between two batches
    with pytest.raises(Interrupted):
        verifier.score([ScoreRequest(0, tokens, 1)], lambda: next(answers))
    assert watched.widths == [100, 50]
    row_at(verifier, tokens)
    assert watched.widths == [100, 50, 100]


def test_llama_cpp_asks_within_a_long_batch(wide_batch: LlamaVerifier) -> None:
    verifier, tokens = wide_batch, tokens_of(100)
    expected = row_at(verifier, tokens, 3, slot=1)
    asked = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > 5

    with pytest.raises(Interrupted):
        verifier.score([ScoreRequest(0, tokens, 1)], cancelled)
    assert len(asked) >= 6
    assert close_to(row_at(verifier, tokens, 3), expected)


@pytest.fixture
def wide_batch() -> abc.Iterator[LlamaVerifier]:
    with opened(LlamaOptions(MODEL, num_threads=1, num_ctx=256, num_slots=2, num_batch=100)) as verifier:
        yield verifier


@pytest.mark.parametrize("code", [1, 2, -1, -3])
def test_a_failed_decode_empties_the_slots_concerned_and_no_other(verifier: LlamaVerifier, code: int) -> None:
    tokens = tokens_of(40)
    expected = row_at(verifier, tokens, 2)
    row_at(verifier, tokens[:9], slot=1)
    failing = Watched(verifier, fail_at=1, code=code)
    with pytest.raises(BackendError, match=r"KV cache has no place|failed with code"):
        row_at(verifier, [63, *tokens], 2)
    assert close_to(row_at(verifier, tokens, 2), expected)
    failing.widths.clear()
    row_at(verifier, tokens[:9], slot=1)
    assert failing.widths == [1]


def test_a_cache_that_cannot_go_back_is_filled_again(verifier: LlamaVerifier) -> None:
    """As with recurrent models: removing a part fails, removing all works."""
    tokens = tokens_of(12)
    expected = row_at(verifier, [*tokens[:6], 1, 2], 2)
    row_at(verifier, tokens)
    watched = Watched(verifier)

    def seq_rm(memory: Any, slot: int, start: int, stop: int) -> bool:
        return start < 0 and bool(watched._lib.llama_memory_seq_rm(memory, slot, start, stop))

    watched.llama_memory_seq_rm = seq_rm  # type: ignore[attr-defined]
    assert close_to(row_at(verifier, [*tokens[:6], 1, 2], 2), expected)
    assert watched.widths == [8]


# Opening and closing


def test_importing_the_module_loads_no_llama_cpp() -> None:
    code = "import sys, edgespec.verifiers.base, edgespec.verifiers.llama; sys.exit('llama_cpp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_says_what_it_holds(verifier: LlamaVerifier) -> None:
    assert (verifier.num_vocab, verifier.num_ctx, verifier.num_slots, verifier.num_ctx_train) == (64, 256, 3, 64)
    assert verifier.description.startswith("canary (llama ")
    assert verifier.model


def test_the_context_defaults_to_the_training_context() -> None:
    with opened(LlamaOptions(MODEL, num_threads=1)) as verifier:
        assert verifier.num_ctx == 64


def test_a_context_beyond_training_is_allowed_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "edgespec"), opened(OPTIONS):
        assert "256 tokens is more than the 64" in caplog.text


def test_closing_takes_the_model_away_and_gives_the_log_back() -> None:
    first, second = LlamaVerifier(OPTIONS), LlamaVerifier(OPTIONS)
    first.close()
    assert native_log()._num_users == 1
    second.close()
    second.close()
    assert native_log()._num_users == 0
    with pytest.raises(ClosedError):
        first.model  # noqa: B018


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_threads", 0),
        ("num_threads", True),
        ("num_ctx", 0),
        ("num_ctx", 2**25),
        ("num_slots", 300),
        ("num_batch", 0),
    ],
)
def test_options_outside_their_range_are_refused(name: str, value: int) -> None:
    arguments: dict[str, Any] = {"path": MODEL, "num_threads": 1, name: value}
    with pytest.raises(ParameterError, match=rf"{name}\)?: got {value}; allowed"):
        LlamaOptions(**arguments)


def test_a_context_that_cannot_be_made_frees_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfMemory:
        freed = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def llama_init_from_model(self, model: Any, params: Any) -> None:
            return None

        def llama_model_free(self, model: Any) -> None:
            self.freed += 1
            real.llama_model_free(model)

    real, short = library(), OutOfMemory()
    monkeypatch.setattr(llama, "library", lambda: short)
    with pytest.raises(BackendError, match=r"3 x 256 tokens: .*choose a smaller context"):
        LlamaVerifier(OPTIONS)
    assert short.freed == 1
    assert native_log()._num_users == 0


# The starter verifier


@pytest.fixture(scope="module")
def starter(starter_gguf: Path) -> abc.Iterator[LlamaVerifier]:
    with opened(LlamaOptions(starter_gguf, num_threads=1, num_slots=2, num_ctx=320, num_batch=128)) as verifier:
        yield verifier


@pytest.mark.model
def test_widths_one_and_five_agree(starter: LlamaVerifier) -> None:
    tokens = tokens_of(40, num_vocab=starter.num_vocab)
    narrow = np.concatenate([row_at(starter, tokens[: 20 + i]) for i in range(1, 21)])
    wide = np.concatenate([row_at(starter, tokens[: 20 + i], 5) for i in (5, 10, 15, 20)])
    assert close_to(wide, narrow, 1.0)
    assert (wide.argmax(axis=1) == narrow.argmax(axis=1)).mean() >= 0.9


@pytest.mark.model
def test_after_a_divergence_the_rows_are_those_from_scratch(starter: LlamaVerifier) -> None:
    tokens = tokens_of(60, num_vocab=starter.num_vocab)
    other = [*tokens[:50], *tokens_of(10, 1, starter.num_vocab)]
    row_at(starter, tokens, 8)
    synced = row_at(starter, other, 4)
    assert close_to(synced, row_at(starter, other, 4, slot=1), 1.0)


@pytest.mark.model
def test_the_starter_fills_its_context_and_refuses_one_more(starter: LlamaVerifier) -> None:
    tokens = tokens_of(321, num_vocab=starter.num_vocab)
    assert np.isfinite(row_at(starter, tokens[:320], 2)).all()
    with pytest.raises(ParameterError, match="number of tokens: got 321; allowed: a whole number from 1 to 320"):
        row_at(starter, tokens)
