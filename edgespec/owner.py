"""Threads that own a backend: nobody else touches it."""

from __future__ import annotations

import collections.abc as abc
import queue
import threading
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")
_Result = TypeVar("_Result", contravariant=True)

NAME = "edgespec-owner"


class Receiver(Protocol[_Result]):
    """Who is told how a call went, once, on the owner's thread: a Future, or something lighter. Must not raise."""

    def set_result(self, result: _Result) -> None: ...
    def set_exception(self, error: BaseException) -> None: ...


class Owner:
    """Runs calls one at a time, in the order they were given, on a thread of its own. Any thread may give them.

    A daemon, unlike the threads of a ThreadPoolExecutor: a program that ends does not wait for an answer nobody reads.
    """

    def __init__(self, name: str = NAME) -> None:
        self._calls: queue.SimpleQueue[tuple[Receiver[Any], abc.Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: abc.Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        self.give(call, future)
        return future

    def give(self, call: abc.Callable[[], _T], receiver: Receiver[_T]) -> None:
        """As ``submit``, for who needs no Future: its condition costs as much as waking the thread."""
        self._calls.put((receiver, call))

    def stop(self, *, wait: bool = False) -> None:
        """End the thread once what was given before is done; ``wait`` for it, unless this is the thread itself."""
        self._calls.put(None)
        if wait:
            self._thread.join()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            receiver, call = item
            try:
                receiver.set_result(call())
            except BaseException as error:  # whoever waits for the result raises it
                receiver.set_exception(error)
            del item, receiver, call  # or what they hold would live until the next call
