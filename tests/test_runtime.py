"""Runtime over fakes: streams, threads, cancelling, closing, bad input."""

from __future__ import annotations

import collections.abc as abc
import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.core.policy import Fixed
from edgespec.core.sequence import SamplingParams
from edgespec.errors import BackendError, ClosedError, ContextLengthError, ParameterError, PromptError
from edgespec.runtime import Runtime
from edgespec.text.chat import Message
from edgespec.verifiers.base import Cancelled, Rows, ScoreRequest, never
from tests.fakes import END, LETTERS, FakeDrafter, FakeTokenizer, FakeVerifier, random_logits

GREEDY = SamplingParams(max_tokens=30, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=30, temperature=1.0, seed=4)


class Owned(FakeVerifier):
    """Notes which threads touch it, and can be made to wait or to fail."""

    def __init__(self, **options: Any) -> None:
        super().__init__(logits=endless, **options)
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None

    def score(self, requests: abc.Sequence[ScoreRequest], cancelled: Cancelled = never) -> list[Rows]:
        self.threads.add(threading.get_ident())
        self.gate.wait(10)
        if self.failure:
            raise self.failure
        return super().score(requests, cancelled)

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        super().close()


def spell(alphabet: str) -> abc.Callable[[abc.Sequence[int]], np.ndarray]:
    """A model that spells ``alphabet`` over and over; "#" is the end token."""
    ids = [END if letter == "#" else LETTERS.index(letter) for letter in alphabet]
    follow = dict(zip(ids, [*ids[1:], ids[0]], strict=True))

    def logits(tokens: abc.Sequence[int]) -> np.ndarray:
        row = np.zeros(32, np.float32)
        row[follow.get(tokens[-1], ids[0])] = 9.0
        return row

    return logits


def endless(tokens: abc.Sequence[int]) -> np.ndarray:
    """A random model that never ends by itself."""
    row = random_logits(32)(tokens)
    row[END] = -np.inf
    return row


def runtime(verifier: FakeVerifier | None = None, logits: Any = endless, **options: Any) -> Runtime:
    verifier = verifier or FakeVerifier(num_ctx=64, logits=logits)
    return Runtime(verifier, FakeDrafter(logits=logits), FakeTokenizer(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_plain_and_sequential_agree_and_chunks_make_the_result(params: SamplingParams) -> None:
    with runtime() as one:
        plain = one.generate("hello", params, mode="plain")
        chunks = list(one.stream("hello", params, policy=Fixed(3)))
    assert "".join(chunk.text for chunk in chunks) == plain.text
    assert tuple(token for chunk in chunks for token in chunk.tokens) == plain.tokens
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == plain.finish_reason == "length"
    assert chunks[-1].stats.completion_tokens == len(plain.tokens) == 30
    assert (plain.stats.mode, plain.stats.rounds, plain.stats.drafted) == ("plain", 30, 0)
    assert chunks[-1].stats.rounds == len(chunks) - 1


def test_stats_add_up() -> None:
    with runtime() as one:
        stats = one.generate("hello", GREEDY, policy=Fixed(4)).stats
    assert (stats.rounds, stats.drafted, stats.accepted, stats.completion_tokens) == (6, 24, 24, 30)
    assert stats.acceptance_rate == 1.0
    assert stats.tokens_per_round == 5.0
    assert stats.tokens_per_s > 0
    assert stats.ttft_s > 0


def test_a_drawn_seed_is_reported_and_gives_the_same_again() -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0)
    with runtime() as one:
        first = one.generate("hello", params)
        assert first.stats.seed is not None
        again = one.generate("hello", SamplingParams(max_tokens=30, temperature=1.0, seed=first.stats.seed))
        others = {one.generate("hello", params).tokens for _ in range(5)}
    assert again.tokens == first.tokens
    assert len(others) > 1


def test_the_end_token_ends_the_text_and_is_not_in_it() -> None:
    with runtime(logits=spell("abcdefgh#")) as one:
        result = one.generate("a", GREEDY, policy=Fixed(5))
    assert (result.text, result.finish_reason) == ("bcdefgh", "stop")
    assert result.tokens[-1] == END
    assert result.stats.completion_tokens == len(result.tokens) == 8


@pytest.mark.parametrize("length", [0, 1, 2, 5, 7])
def test_a_stop_string_across_tokens_inside_an_accepted_run(length: int) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, stop=("fg", "nothing"))
    with runtime(logits=spell("abcdefghij")) as one:
        result = one.generate("a", params, policy=Fixed(length))
        chunks = list(one.stream("a", params, policy=Fixed(length)))
    assert (result.text, result.finish_reason) == ("bcde", "stop")
    assert [LETTERS[token] for token in result.tokens] == list("bcdefg")
    assert result.stats.completion_tokens == 6
    assert "".join(chunk.text for chunk in chunks) == "bcde"


def test_only_one_thread_touches_the_backends_and_callers_may_be_many() -> None:
    verifier = Owned(num_ctx=64)
    with runtime(verifier) as one, ThreadPoolExecutor(8) as pool:
        expected = one.generate("hello", SAMPLED).tokens
        futures = [pool.submit(one.generate, "hello", SAMPLED) for _ in range(24)]
        assert {future.result().tokens for future in futures} == {expected}
    assert len(verifier.threads) == 1
    assert threading.get_ident() not in verifier.threads


def test_closing_a_stream_stops_the_work_and_leaves_the_runtime_usable() -> None:
    verifier = Owned(num_ctx=10_000)
    with runtime(verifier) as one:
        stream = one.stream("hello", SamplingParams(max_tokens=9000, temperature=0.0), mode="plain")
        next(stream)
        stream.cancel()
        *_, last = stream
        assert last.finish_reason == "cancelled"
        one.generate("hello", GREEDY)
        assert len(verifier.requests) < 9000


def test_an_unread_stream_starts_no_work() -> None:
    verifier = FakeVerifier(num_ctx=64)
    with runtime(verifier) as one:
        one.stream("hello", GREEDY)
    assert verifier.requests == []


def test_close_cancels_what_runs_and_what_waits() -> None:
    verifier = Owned(num_ctx=10_000)
    one = runtime(verifier)
    verifier.gate.clear()
    with ThreadPoolExecutor(3) as pool:
        params = SamplingParams(max_tokens=9000, temperature=0.0)
        futures = [pool.submit(one.generate, "hello", params, mode="plain") for _ in range(3)]
        while len(verifier.threads) == 0:
            pass
        closing = threading.Thread(target=one.close)
        closing.start()
        verifier.gate.set()
        results: list[Any] = [future.exception() or future.result() for future in futures]
        closing.join(10)
    assert not closing.is_alive()
    assert all(isinstance(r, ClosedError) or r.finish_reason == "cancelled" for r in results)


def test_a_closed_runtime_says_so() -> None:
    one = runtime()
    waiting = one.stream("hello", GREEDY)
    one.close()
    one.close()
    for call in (
        lambda: next(waiting),
        lambda: one.stream("hello"),
        lambda: one.generate("hello"),
        lambda: one.encode("a"),
    ):
        with pytest.raises(ClosedError):
            call()


def test_a_backend_error_reaches_the_caller_and_the_next_request_works() -> None:
    verifier = Owned(num_ctx=64)
    with runtime(verifier) as one:
        verifier.failure = BackendError("decode failed")
        with pytest.raises(BackendError, match="decode failed"):
            one.generate("hello", GREEDY)
        verifier.failure = None
        assert one.generate("hello", GREEDY).finish_reason == "length"


def test_prompts_as_text_and_as_messages() -> None:
    with runtime() as one:
        as_text = one.generate("hello", GREEDY)
        assert one.generate([{"role": "user", "content": "hello"}], GREEDY).tokens == as_text.tokens
        assert one.generate([Message("user", "hello")], GREEDY).tokens == as_text.tokens
        assert one.encode("hello", raw=True) == [LETTERS.index(letter) for letter in "hello"]
        assert one.decode([0, 1, END]) == "ab<end>"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda one: one.stream(""), PromptError),
        (lambda one: one.stream("  "), PromptError),
        (lambda one: one.stream("", raw=True), PromptError),
        (lambda one: one.stream([]), PromptError),
        (lambda one: one.stream([{"role": "user"}]), PromptError),
        (lambda one: one.stream([{"role": "user", "content": "a"}], raw=True), ParameterError),
        (lambda one: one.stream("a" * 64), ContextLengthError),
        (lambda one: one.stream("a", mode="fast"), ParameterError),
        (lambda one: one.stream("a", policy=Fixed(-1)), ParameterError),
        (lambda one: one.stream("a", SamplingParams(logit_bias=((32, 1.0),))), ParameterError),
        (lambda one: one.generate("a", SamplingParams(rule="rejection"), check_lossless=True), ParameterError),
    ],
)
def test_bad_input_is_refused_before_any_work(call: Any, error: type[Exception]) -> None:
    verifier = FakeVerifier(num_ctx=64)
    with runtime(verifier) as one, pytest.raises(error) as caught:
        call(one)
    assert "\n" not in str(caught.value)
    assert verifier.requests == []


def test_the_longest_prompt_gets_one_token() -> None:
    with runtime(FakeVerifier(num_ctx=8)) as one:
        result = one.generate("a" * 7, GREEDY)
    assert (len(result.tokens), result.finish_reason) == (1, "length")


def test_without_a_drafter_the_mode_is_plain() -> None:
    with Runtime(FakeVerifier(num_ctx=64), None, FakeTokenizer()) as one:  # type: ignore[arg-type]
        assert one.generate("hello", GREEDY).stats.mode == "plain"
        with pytest.raises(ParameterError, match="without a draft"):
            one.stream("hello", GREEDY, mode="sequential")


def test_the_lossless_check_finds_nothing_over_exact_backends() -> None:
    with runtime() as one:
        assert one.generate("hello", SAMPLED, check_lossless=True).divergences == ()
        assert one.generate("hello", SAMPLED).divergences is None


def test_the_last_chunk_of_a_cancelled_stream_still_comes_with_its_facts() -> None:
    verifier = Owned(num_ctx=10_000)
    with runtime(verifier) as one:
        stream = one.stream("hello", SamplingParams(max_tokens=9000, temperature=1.0, seed=5))
        next(stream)
        stream.cancel()
        *_, last = stream
        assert (last.finish_reason, last.stats.prompt_tokens, last.stats.seed) == ("cancelled", 5, 5)
        with pytest.raises(StopIteration):
            next(stream)


def test_a_dropped_stream_is_cancelled_and_a_dropped_runtime_is_freed() -> None:
    verifier = Owned(num_ctx=100_000)
    one = runtime(verifier)
    stream = one.stream("hello", SamplingParams(max_tokens=90_000, temperature=0.0), mode="plain")
    next(stream)
    del stream
    assert one.generate("hello", GREEDY).finish_reason == "length"
    del one
    gc.collect()
    with pytest.raises(ClosedError):
        verifier.score([ScoreRequest(0, [1], 1)])


def test_generating_inside_a_stream_of_the_same_runtime_does_not_wait_for_ever() -> None:
    with runtime() as one:
        inner = [one.generate("hello", GREEDY).text for _ in one.stream("hello", GREEDY)]
    assert len(set(inner)) == 1


def test_closing_while_another_thread_starts_its_first_request() -> None:
    for _ in range(30):
        one = runtime()
        with ThreadPoolExecutor(2) as pool:
            future = pool.submit(one.generate, "hello", GREEDY)
            one.close()
            failure = future.exception()
        assert failure is None or isinstance(failure, ClosedError)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads is what is tested
def test_a_forked_child_is_told_to_load_its_own() -> None:
    with runtime() as one:
        child = os.fork()
        if child == 0:
            try:
                one.close()
                one.generate("hello", GREEDY)
            except ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert one.generate("hello", GREEDY).finish_reason == "length"


def test_a_program_that_ends_does_not_wait_for_an_answer_nobody_reads() -> None:
    script = (
        "from tests.test_runtime import *\n"
        "one = runtime(Owned(num_ctx=10**9))\n"
        "stream = one.stream('hello', SamplingParams(max_tokens=10**8, temperature=0.0))\n"
        "next(stream)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[1], timeout=60, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
