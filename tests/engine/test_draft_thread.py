"""A drafter that fails or hangs is given up, once, and the text goes on without it."""

from __future__ import annotations

import collections.abc as abc
import logging
import threading

import pytest

from edgespec.core.policy import Fixed
from edgespec.core.sequence import Draft, SamplingParams, never
from edgespec.degraded import Degraded
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.engine.draft_thread import DraftThread
from edgespec.engine.loops import overlapped, sequential
from edgespec.engine.rounds import Guide
from edgespec.errors import BackendError, ParameterError
from tests.engine.test_loops import PROMPT, SETTINGS, run_plain, sequence
from tests.fakes import FakeDrafter, FakeVerifier

LOOPS = {"sequential": sequential, "overlapped": overlapped}
REQUEST = DraftRequest(0, PROMPT, len(PROMPT), 3, SamplingParams(temperature=0.0))


class Failing(FakeDrafter):
    """Drafts a few times, then does what the test says."""

    def __init__(self, after: int, fault: abc.Callable[[], None]) -> None:
        super().__init__()
        self._after, self._fault = after, fault

    def propose(
        self, requests: abc.Sequence[DraftRequest], cancelled: abc.Callable[[], bool] = lambda: False
    ) -> list[Draft]:
        if len(self.requests) >= self._after:
            self._fault()
        return super().propose(requests, cancelled)


def broken() -> None:
    raise BackendError("out of memory")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("after", range(6))
def test_a_drafter_that_fails_costs_no_token(loop: str, after: int, caplog: pytest.LogCaptureFixture) -> None:
    degraded, one = Degraded(), sequence(SETTINGS["sampled"])
    thread = DraftThread(Failing(after, broken), degraded)
    with caplog.at_level(logging.WARNING, "edgespec"):
        rounds = list(LOOPS[loop](one, thread, FakeVerifier(), Guide(Fixed(3))))
    thread.close()
    assert one.tokens == run_plain(SETTINGS["sampled"]).tokens
    assert rounds[-1].drafted == 0
    assert degraded.as_list() == [{"from": "the fake drafter", "to": "plain", "reason": "out of memory"}]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("after", range(4))
def test_a_drafter_that_hangs_costs_no_token(loop: str, after: int) -> None:
    let_go, degraded, one = threading.Event(), Degraded(), sequence(SETTINGS["sampled"])
    thread = DraftThread(Failing(after, lambda: void(let_go.wait(30))), degraded, patience_s=0.05)
    rounds = list(LOOPS[loop](one, thread, FakeVerifier(), Guide(Fixed(3))))
    assert one.tokens == run_plain(SETTINGS["sampled"]).tokens
    assert [step["to"] for step in degraded.as_list()] == ["plain"]
    assert all(round_.draft_s >= 0.0 for round_ in rounds)
    let_go.set()
    thread.close()


def void(_: object) -> None: ...


def test_closing_does_not_wait_for_a_drafter_that_hangs() -> None:
    let_go = threading.Event()
    thread = DraftThread(Failing(0, lambda: void(let_go.wait(30))), patience_s=0.05)
    assert thread.propose([REQUEST], never) == [Draft(len(PROMPT))]
    thread.close()
    assert not let_go.is_set()
    let_go.set()


def test_closing_does_not_wait_for_a_drafter_whose_hanging_nobody_noticed() -> None:
    let_go = threading.Event()
    thread = DraftThread(Failing(0, lambda: void(let_go.wait(30))), patience_s=0.05)
    thread.start(lambda drafter, asked: drafter.propose([REQUEST], asked), never, [])
    thread.close()
    assert thread.is_lost
    assert not let_go.is_set()
    let_go.set()


class Slow(FakeDrafter):
    """Takes twice the patience of the tests below, with signs of life."""

    def propose(
        self, requests: abc.Sequence[DraftRequest], cancelled: abc.Callable[[], bool] = lambda: False
    ) -> list[Draft]:
        for _ in range(10):
            threading.Event().wait(0.02)
            cancelled()
        return super().propose(requests, cancelled)


@pytest.mark.parametrize("num_before", [0, 2])
def test_a_slow_drafter_that_shows_signs_of_life_is_waited_for(num_before: int) -> None:
    thread = DraftThread(Slow(), patience_s=0.1)
    for _ in range(num_before):
        thread.start(lambda drafter, asked: drafter.propose([REQUEST], asked), never, [])
    (draft,) = thread.propose([REQUEST], never)
    assert len(draft.tokens) == 3
    assert not thread.is_lost
    thread.close()


def test_a_time_out_inside_the_drafter_is_its_own_error() -> None:
    def late() -> None:
        raise TimeoutError("a lock")

    thread = DraftThread(Failing(0, late))
    with pytest.raises(TimeoutError, match="a lock"):
        thread.propose([REQUEST], never)
    thread.close()


def test_a_fault_of_the_program_is_not_hidden() -> None:
    def wrong() -> None:
        raise ParameterError("slot: got 7")

    thread = DraftThread(Failing(0, wrong))
    with pytest.raises(ParameterError, match="slot: got 7"):
        thread.propose([REQUEST], never)
    assert not thread.is_lost
    thread.close()


def test_one_thread_touches_the_drafter() -> None:
    seen: set[int] = set()

    class Watched(FakeDrafter):
        def propose(
            self, requests: abc.Sequence[DraftRequest], cancelled: abc.Callable[[], bool] = lambda: False
        ) -> list[Draft]:
            seen.add(threading.get_ident())
            return super().propose(requests, cancelled)

        def close(self) -> None:
            seen.add(threading.get_ident())
            super().close()

    drafter: Drafter = Watched()
    thread = DraftThread(drafter)
    list(overlapped(sequence(SETTINGS["sampled"]), thread, FakeVerifier(), Guide(Fixed(3))))
    thread.close()
    assert len(seen) == 1
    assert threading.get_ident() not in seen


def test_any_number_of_threads_may_wait_for_one_result() -> None:
    let_go, thread, found = threading.Event(), DraftThread(FakeDrafter()), []
    pending = thread.start(lambda *_: let_go.wait(30), never, False)
    waiting = [threading.Thread(target=lambda: found.append(pending.result())) for _ in range(3)]
    for one in waiting:
        one.start()
    assert not pending.is_over()
    let_go.set()
    for one in waiting:
        one.join(30)
    assert found == [True] * 3
    assert pending.is_over()
    assert pending.result()
    thread.close()
