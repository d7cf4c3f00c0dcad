"""Threads that own a backend: nobody else touches it."""

from __future__ import annotations

import collections.abc as abc
import queue
import threading
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")

NAME = "edgespec-owner"


class Owner:
    """Runs calls one at a time, in the order they were given, on a thread of its own. Any thread may give them.

    A daemon, unlike the threads of a ThreadPoolExecutor: a program that ends does not wait for an answer nobody reads.
    """

    def __init__(self, name: str = NAME) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], abc.Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: abc.Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        self._calls.put((future, call))
        return future

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
            future, call = item
            try:
                future.set_result(call())
            except BaseException as error:  # whoever waits for the future raises it
                future.set_exception(error)
            del item, future, call  # or what they hold would live until the next call
