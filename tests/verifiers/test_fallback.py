"""FallbackVerifier over fakes that fail on demand: no token is lost, each step is told once."""

from __future__ import annotations

import collections.abc as abc
import logging
from pathlib import Path

import numpy as np
import pytest

from edgespec.core.sequence import Cancelled, never
from edgespec.degraded import Degraded
from edgespec.errors import BackendError, ClosedError, ContextLengthError, ModelFormatError, ParameterError
from edgespec.text.tokenizer import Tokenizer
from edgespec.verifiers.base import Interrupted, Rows, ScoreRequest, Verifier
from edgespec.verifiers.fallback import FallbackVerifier, Place
from edgespec.verifiers.llama_library import native_log
from edgespec.verifiers.llama_vocabulary import Vocabulary
from tests.fakes import FakeVerifier
from tests.verifiers.contract import VerifierContract

PROMPT = [3, 1, 4]


class Failing(FakeVerifier):
    """Raises what ``failures`` has for each score in turn, None being a success; afterwards it works."""

    def __init__(self, *failures: Exception | None, num_ctx: int = 64, num_vocab: int = 32, num_slots: int = 1) -> None:
        super().__init__(num_vocab=num_vocab, num_ctx=num_ctx, num_slots=num_slots)
        self.failures = [*failures]
        self.threads: list[tuple[int, int | None]] = []

    def score(self, requests: abc.Sequence[ScoreRequest], cancelled: Cancelled = never) -> list[Rows]:
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None and not self._closed:
            raise failure
        return super().score(requests, cancelled)

    def set_threads(self, num_threads: int, num_threads_batch: int | None = None) -> None:
        self.threads.append((num_threads, num_threads_batch))


class Box:
    """Places by their kind; each opens its next verifier, or raises it."""

    def __init__(self, **verifiers: list[FakeVerifier | Exception]) -> None:
        self.verifiers = verifiers
        self.opened: list[str] = []
        self.degraded = Degraded()

    def places(self) -> list[Place]:
        return [Place(kind, lambda kind=kind: self._open(kind)) for kind in self.verifiers]  # type: ignore[misc]

    def _open(self, kind: str) -> Verifier:
        self.opened.append(kind)
        found = self.verifiers[kind].pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def load(self) -> FallbackVerifier:
        return FallbackVerifier(self.places(), self.degraded)


def greedy(verifier: Verifier, num: int, tokens: list[int] | None = None) -> list[int]:
    """Decoding of one token after the other, as an engine does it."""
    tokens = [*(tokens or PROMPT)]
    for _ in range(num):
        (rows,) = verifier.score([ScoreRequest(0, tokens, 1)])
        tokens.append(int(rows[0].argmax()))
    return tokens


PLAIN = greedy(FakeVerifier(), 12)


class TestFallbackVerifier(VerifierContract):
    @pytest.fixture
    def verifier(self) -> Verifier:
        return Box(gpu=[FakeVerifier(num_slots=2)]).load()


def lost() -> BackendError:
    return BackendError("the device is lost")


@pytest.mark.parametrize("num_good", [0, 1, 5, 11])
def test_a_failure_between_any_two_tokens_loses_none(num_good: int, caplog: pytest.LogCaptureFixture) -> None:
    gpu = Failing(*[None] * num_good, lost(), lost())
    box = Box(gpu=[gpu], cpu=[FakeVerifier()])
    with caplog.at_level(logging.WARNING, "edgespec"):
        assert greedy(box.load(), 12) == PLAIN
    assert box.degraded.as_list() == [{"from": "gpu", "to": "cpu", "reason": "the device is lost"}]
    assert gpu._closed
    assert [record.getMessage() for record in caplog.records] == [
        "the verifier failed and is tried once more: the device is lost",
        "cpu instead of gpu: the device is lost",
    ]


def test_a_failure_that_passes_changes_nothing() -> None:
    box = Box(gpu=[Failing(None, lost(), None, None, lost())], cpu=[FakeVerifier()])
    assert greedy(box.load(), 12) == PLAIN
    assert box.opened == ["gpu"]
    assert box.degraded.as_list() == []


def test_places_are_gone_down_one_after_the_other() -> None:
    box = Box(gpu=[Failing(None, lost(), lost())], both=[Failing(None, None, lost(), lost())], cpu=[FakeVerifier()])
    verifier = box.load()
    assert greedy(verifier, 12) == PLAIN
    assert [(step.wanted, step.got) for step in box.degraded.steps] == [("gpu", "both"), ("both", "cpu")]
    assert verifier.kind == "cpu"


def test_a_place_that_does_not_open_is_passed_over_with_both_reasons() -> None:
    box = Box(gpu=[Failing(lost(), lost())], both=[BackendError("out of memory")], cpu=[FakeVerifier()])
    assert greedy(box.load(), 12) == PLAIN
    assert box.degraded.as_list() == [{"from": "gpu", "to": "cpu", "reason": "the device is lost; out of memory"}]


def test_a_place_that_refuses_at_load_is_passed_over() -> None:
    box = Box(gpu=[BackendError("out of memory")], cpu=[FakeVerifier(num_ctx=50)])
    verifier = box.load()
    assert (verifier.num_vocab, verifier.num_ctx, verifier.num_slots, verifier.kind) == (32, 50, 1, "cpu")
    assert greedy(verifier, 12) == PLAIN
    assert box.degraded.as_list() == [{"from": "gpu", "to": "cpu", "reason": "out of memory"}]


def test_where_no_place_opens_every_reason_is_told() -> None:
    box = Box(gpu=[BackendError("out of memory")], cpu=[BackendError("no such CPU")])
    with pytest.raises(BackendError, match=r"^out of memory; no such CPU$"):
        box.load()
    assert box.degraded.as_list() == []


def test_a_broken_file_is_no_reason_to_go_elsewhere() -> None:
    box = Box(gpu=[ModelFormatError("not a GGUF file")], cpu=[FakeVerifier()])
    with pytest.raises(ModelFormatError):
        box.load()
    assert box.opened == ["gpu"]


def test_where_none_is_left_the_error_is_raised_and_the_next_score_tries_again() -> None:
    box = Box(gpu=[Failing(lost(), lost(), BackendError("gone"), BackendError("gone, again"))], cpu=[])
    verifier = FallbackVerifier(box.places()[:1], box.degraded)
    for match in ("the device is lost", "gone, again"):
        with pytest.raises(BackendError, match=match):
            verifier.score([ScoreRequest(0, PROMPT, 1)])
    assert greedy(verifier, 12) == PLAIN
    assert box.degraded.as_list() == []


def test_where_nothing_below_opens_the_next_score_opens_the_same_place_anew() -> None:
    box = Box(gpu=[Failing(lost(), lost()), FakeVerifier()], cpu=[BackendError("out of memory")])
    verifier = box.load()
    with pytest.raises(BackendError, match="the device is lost; out of memory"):
        verifier.score([ScoreRequest(0, PROMPT, 1)])
    assert verifier.verifier is None
    assert verifier.num_ctx == 64
    assert greedy(verifier, 12) == PLAIN
    assert (verifier.kind, box.degraded.as_list()) == ("gpu", [])


def test_a_failure_that_nobody_waits_for_opens_nothing() -> None:
    box = Box(gpu=[Failing(lost(), lost())], cpu=[FakeVerifier()])
    verifier = box.load()
    with pytest.raises(Interrupted):
        verifier.score([ScoreRequest(0, PROMPT, 1)], lambda: True)
    assert box.opened == ["gpu"]
    assert greedy(verifier, 12) == PLAIN


@pytest.mark.parametrize("error", [Interrupted(), ParameterError("slot"), ZeroDivisionError()])
def test_what_is_no_failure_of_the_backend_goes_through(error: Exception) -> None:
    box = Box(gpu=[Failing(error)], cpu=[FakeVerifier()])
    verifier = box.load()
    with pytest.raises(type(error)):
        verifier.score([ScoreRequest(0, PROMPT, 1)])
    assert box.opened == ["gpu"]
    assert greedy(verifier, 12) == PLAIN


def test_text_too_long_for_the_place_that_took_over_says_so() -> None:
    box = Box(gpu=[Failing(None, lost(), lost())], cpu=[FakeVerifier(num_ctx=6)])
    verifier = box.load()
    tokens = greedy(verifier, 3)
    assert (tokens, verifier.num_ctx) == (PLAIN[:6], 6)
    greedy(verifier, 1, tokens)
    with pytest.raises(ContextLengthError, match=r"has 7 tokens; the verifier that took over \(cpu\) holds 6: shorten"):
        verifier.score([ScoreRequest(0, [1] * 7, 1)])
    with pytest.raises(ParameterError, match="number of tokens: got 100"):
        verifier.score([ScoreRequest(0, [1] * 100, 1)])


@pytest.mark.parametrize("other", [FakeVerifier(num_vocab=33), FakeVerifier(num_slots=2)])
def test_another_model_cannot_take_over(other: FakeVerifier) -> None:
    box = Box(gpu=[Failing(lost(), lost())], cpu=[other])
    with pytest.raises(BackendError, match=r"the device is lost; another verifier \(vocabulary, slots\): got"):
        greedy(box.load(), 1)
    assert other._closed


def test_threads_go_with_it() -> None:
    gpu, cpu = Failing(None, lost(), lost()), Failing()
    box = Box(gpu=[gpu], cpu=[cpu])
    verifier = box.load()
    verifier.set_threads(3, 2)
    greedy(verifier, 4)
    assert (gpu.threads, cpu.threads) == ([(3, 2)], [(3, 2)])
    plain = Box(gpu=[FakeVerifier()]).load()
    plain.set_threads(3)  # a verifier without threads has none to set


def test_closing_closes_what_is_open() -> None:
    gpu = FakeVerifier()
    verifier = Box(gpu=[gpu]).load()
    verifier.close()
    verifier.close()
    assert gpu._closed
    with pytest.raises(ClosedError):
        verifier.model  # noqa: B018
    with pytest.raises(ClosedError):
        verifier.set_threads(1)


def test_rows_are_those_of_the_verifier() -> None:
    (rows,) = Box(gpu=[FakeVerifier()]).load().score([ScoreRequest(0, PROMPT, 3)])
    (expected,) = FakeVerifier().score([ScoreRequest(0, PROMPT, 3)])
    assert np.array_equal(rows, expected)


def test_its_model_outlives_a_step_down(tiny_gguf: Path) -> None:
    box = Box(gpu=[Failing(lost(), lost())], cpu=[FakeVerifier()])
    verifier = FallbackVerifier(box.places(), box.degraded, Vocabulary(tiny_gguf))
    tokenizer = Tokenizer(verifier.model)
    greedy(verifier, 1)
    assert tokenizer.encode("the", add_special=False, parse_special=False)
    verifier.close()
    assert native_log()._num_users == 0


def test_a_vocabulary_is_closed_when_no_place_opens(tiny_gguf: Path) -> None:
    vocabulary = Vocabulary(tiny_gguf)
    with pytest.raises(BackendError):
        FallbackVerifier(Box(gpu=[lost()]).places(), Degraded(), vocabulary)
    assert vocabulary.model is None
