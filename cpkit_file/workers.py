"""The threads that do what would block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from cpkit.driver.coalescing import tell

__all__ = ["Workers"]

_Job = tuple[asyncio.AbstractEventLoop, Callable[[Any], None], Callable[[], Any]]


class Workers(Executor):
    """An executor of one event loop, whose threads start when they are needed.

    The hop there and back costs a third of what it does with a ``ThreadPoolExecutor``,
    whose bookkeeping on both sides keeps the thread that was woken waiting for Python.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._threads: list[Thread] = []
        self._under_way = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()

    def start(
        self, done: Callable[[Any], None], work: Callable[..., Any], *args: Any
    ) -> None:
        """Do the work, then call ``done`` in the loop with its result or exception."""
        if self._under_way >= len(self._threads) < self._limit:
            self._start_thread()

        self._under_way += 1
        loop = asyncio.get_running_loop()
        # Last, because the thread that it wakes needs Python for itself.
        self._jobs.put((loop, partial(self._end, done), partial(work, *args)))

    def submit(  # type: ignore[override]  # a future of the loop, which awaits any
        self, work: Callable[..., Any], /, *args: Any
    ) -> asyncio.Future[Any]:
        """Do the work; not where the future is cancelled before it begins."""
        answer = asyncio.get_running_loop().create_future()
        self.start(partial(tell, answer), _unless_cancelled, answer, work, *args)
        return answer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Return when all that was started is done, and the threads have ended."""
        for _ in self._threads:
            self._jobs.put(None)

        for thread in self._threads:
            thread.join()

    def __del__(self) -> None:
        # Of a handle that was not closed.
        for _ in self._threads:
            self._jobs.put(None)

    def _start_thread(self) -> None:
        # A daemon, so that a handle that was not closed does not keep the process.
        thread = Thread(target=_serve, args=(self._jobs,), name=self._name, daemon=True)

        try:
            thread.start()
        except RuntimeError:  # the system allows no more: those that run do it all
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def _end(self, done: Callable[[Any], None], outcome: Any) -> None:
        self._under_way -= 1
        done(outcome)


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        loop, done, work = job

        try:
            outcome = work()
        except BaseException as exc:
            outcome = exc

        try:
            loop.call_soon_threadsafe(done, outcome)
        except RuntimeError:
            pass  # the loop is closed, so nobody waits

        # Nothing is kept alive by a thread that waits.
        del job, loop, done, work, outcome


def _unless_cancelled(
    answer: asyncio.Future[Any], work: Callable[..., Any], *args: Any
) -> Any:
    return None if answer.cancelled() else work(*args)
