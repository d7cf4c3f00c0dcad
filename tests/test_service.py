"""A runtime that serves many at once: batches, checks that run alone, what it learns, a verifier that hangs."""

from __future__ import annotations

import collections.abc as abc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from edgespec.core.costs import Curves, Overlap
from edgespec.core.policy import Fixed
from edgespec.core.sequence import SamplingParams
from edgespec.errors import BackendError, ClosedError
from edgespec.runtime import MODES, Mode, Runtime
from edgespec.verifiers.base import Cancelled, Rows, ScoreRequest, never
from tests.engine.test_overlapped import TimedVerifier
from tests.fakes import FakeDrafter, FakeTokenizer, FakeVerifier
from tests.test_runtime import endless

CURVES = Curves((1, 8), (0,), ((0.01, 0.02),), (1, 8), (0.001, 0.002), Overlap())
PROMPTS = ["abc", "hello there", "what is it?", "go on.", "one more", "z", "yes!", "again"]


class Gated(FakeVerifier):
    """Waits at every call until the gate is open."""

    def __init__(self, **options: Any) -> None:
        super().__init__(logits=endless, **options)
        self.gate = threading.Event()
        self.gate.set()

    def score(self, requests: abc.Sequence[ScoreRequest], cancelled: Cancelled = never) -> list[Rows]:
        self.gate.wait(30)
        return super().score(requests, cancelled)


def serve(num_slots: int = 4, verifier: FakeVerifier | None = None, **options: Any) -> Runtime:
    verifier = verifier or Gated(num_ctx=64, num_slots=num_slots)
    drafter = FakeDrafter(num_slots=num_slots, logits=endless)
    return Runtime(verifier, drafter, FakeTokenizer(), policy=Fixed(3), **options)  # type: ignore[arg-type]


def params(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=20, temperature=0.9, seed=seed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_many_at_once_get_what_each_would_get_alone(mode: Mode, num_slots: int) -> None:
    with serve() as alone:
        expected = [alone.generate(prompt, params(i), mode="plain").tokens for i, prompt in enumerate(PROMPTS)]
    with serve(num_slots, curves=CURVES, mode=mode) as many, ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda item: many.generate(item[1], params(item[0])).tokens, enumerate(PROMPTS))
        assert list(found) == expected


def test_requests_that_wait_together_are_verified_together() -> None:
    verifier = Gated(num_ctx=64, num_slots=4)
    with serve(verifier=verifier) as runtime:
        verifier.gate.clear()
        streams = [runtime.stream(prompt, params(i)) for i, prompt in enumerate(PROMPTS[:4])]
        with ThreadPoolExecutor(4) as pool:
            results = [pool.submit(list, stream) for stream in streams]
            while runtime._service.num_waiting + runtime._service.num_running < 4:
                threading.Event().wait(0.001)
            verifier.gate.set()
            assert all(result.result()[-1].finish_reason == "length" for result in results)
        assert max(len(call) for call in verifier.requests) == 4


def test_a_check_runs_alone() -> None:
    """Its rounds are run again to compare rows, so nobody else may be in its batches."""
    verifier = Gated(num_ctx=64, num_slots=4)
    with serve(verifier=verifier) as runtime, ThreadPoolExecutor(8) as pool:
        plain = [pool.submit(runtime.generate, prompt, params(i)) for i, prompt in enumerate(PROMPTS[:3])]
        checked = [pool.submit(runtime.generate, prompt, params(9), check_lossless=True) for prompt in PROMPTS[:2]]
        assert [result.result().divergences for result in checked] == [(), ()]
        assert all(result.result().finish_reason == "length" for result in plain)


def test_speedup_is_reported_where_costs_are_measured_and_only_there() -> None:
    with serve() as runtime:
        assert runtime.generate("abc", params(1)).stats.speedup == 0.0
    with serve(curves=CURVES) as runtime:
        assert runtime.generate("abc", params(1)).stats.speedup > 0.0


def test_overlapped_hides_drafting() -> None:
    with serve(verifier=TimedVerifier(0.003, num_slots=4, logits=endless), mode="overlapped") as runtime:
        stats = runtime.generate("abc", params(1)).stats
    assert stats.mode == "overlapped"
    assert 0.0 < stats.hidden_s <= stats.draft_s


def test_a_verifier_that_hangs_ends_the_requests_and_not_the_program() -> None:
    verifier = Gated(num_ctx=64, num_slots=4)
    runtime = serve(verifier=verifier, patience_s=0.2)
    assert runtime.generate("abc", params(1)).finish_reason == "length"
    verifier.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        for result in [pool.submit(runtime.generate, "abc", params(i)) for i in range(2)]:
            with pytest.raises(BackendError, match="no sign of life"):
                result.result()
    with pytest.raises(ClosedError):
        runtime.generate("abc")
    runtime.close()
    verifier.gate.set()


def test_closing_does_not_wait_for_a_verifier_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    verifier = Gated(num_ctx=64, num_slots=4)
    runtime = serve(verifier=verifier, patience_s=0.2)
    verifier.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(runtime.generate, "abc", params(1))
        while not runtime._service.num_running:
            threading.Event().wait(0.001)
        runtime.close()
        assert isinstance(result.exception(), BackendError)
    assert [record.getMessage() for record in caplog.records] == [
        "the verifier gave no sign of life for 0.2 s and is left to the end of the process"
    ]
    verifier.gate.set()


def test_a_runtime_may_be_closed_on_the_thread_of_its_drafter() -> None:
    """Where the garbage collector happens to find it."""
    verifier, drafter = Gated(num_ctx=64), FakeDrafter(logits=endless)
    runtime = Runtime(verifier, drafter, FakeTokenizer())  # type: ignore[arg-type]
    thread = runtime._service._drafter
    assert thread is not None
    thread.start(lambda *_: runtime.close(), never, None).result()
    runtime._service._owner._thread.join(10)
    with pytest.raises(ClosedError):
        verifier.score([ScoreRequest(0, [1], 1)])
    with pytest.raises(ClosedError):
        drafter.propose([])


def test_closing_waits_for_whoever_encodes() -> None:
    """The tokenizer reads what closing frees."""
    reading, let_go, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(FakeTokenizer):
        def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            reading.set()
            let_go.wait(10)
            assert not closed.is_set()
            return super().encode(text, add_special=add_special, parse_special=parse_special)

    class Noted(Gated):
        def close(self) -> None:
            closed.set()
            super().close()

    runtime = Runtime(Noted(num_ctx=64), None, Slow())  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as pool:
        encoded = pool.submit(runtime.encode, "abc")
        reading.wait(10)
        closing = pool.submit(runtime.close)
        assert not closed.wait(0.1)
        let_go.set()
        assert len(encoded.result()) == 3
        closing.result()
    assert closed.is_set()


def test_a_drafter_that_fails_is_in_the_list_of_steps_down() -> None:
    class Failing(FakeDrafter):
        def propose(self, requests: Any, cancelled: Any = never) -> Any:
            raise BackendError("no memory left")

    with Runtime(FakeVerifier(logits=endless), Failing(), FakeTokenizer()) as runtime:  # type: ignore[arg-type]
        result = runtime.generate("abc", params(3))
        assert result.finish_reason == "length"
        assert runtime.degraded.as_list() == [{"from": "the fake drafter", "to": "plain", "reason": "no memory left"}]
