"""The threads that do what would block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeAlias, TypeVar

from cpkit.driver import StoreFailure

T = TypeVar("T")

_Job: TypeAlias = tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]
_Trips: TypeAlias = "SimpleQueue[tuple[Workers, list[_Job]] | None]"


class Workers:
    """Threads of one event loop, up to ``limit``, which start when they are needed.

    They are daemons, and end when the handle is forgotten. The way there and back costs
    a third of that of a ``ThreadPoolExecutor``, and jobs that begin in one turn of the
    loop share it.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, limit: int) -> None:
        self._limit = self._free = limit
        self._waiting: list[_Job] = []
        self._trips: _Trips = SimpleQueue()
        self._threads: list[Thread] = []

    def run(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Do the work in a thread; it continues if the caller is cancelled."""
        if not self._waiting:
            self.loop.call_soon(self._send)

        answer: asyncio.Future[T] = asyncio.Future(loop=self.loop)
        self._waiting.append((answer, work, args))
        return answer

    def end(self) -> None:
        """Return when all work is done and the threads have ended."""
        self.__del__()

        for thread in self._threads:
            thread.join()

    def __del__(self) -> None:
        for _ in self._threads:
            self._trips.put(None)

    def _send(self) -> None:
        while self._waiting and self._free:
            if len(self._threads) == self._limit - self._free:  # all are busy
                thread = Thread(None, _serve, "cpkit-file", (self._trips,), daemon=True)
                self._threads.append(thread)
                thread.start()

            share = -(-len(self._waiting) // self._free)
            self._free -= 1
            self._trips.put((self, self._waiting[:share]))
            del self._waiting[:share]

    def _land(self, done: list[Callable[[], None]]) -> None:
        self._free += 1

        for settle in done:
            try:
                settle()
            except asyncio.InvalidStateError:
                pass  # the caller was cancelled

        if self._waiting:  # after the callers, so that what they do next is there
            self.loop.call_soon(self._send)


def _serve(trips: _Trips) -> None:
    """Do jobs until a trip is ``None``; in between nothing refers to the workers."""
    while (trip := trips.get()) is not None:
        workers, jobs = trip
        done: list[Callable[[], None]] = []

        for answer, work, args in jobs:
            try:
                try:
                    done.append(partial(answer.set_result, work(*args)))
                except OSError as exc:
                    raise StoreFailure("rejected", str(exc)) from exc
            except BaseException as exc:
                done.append(partial(answer.set_exception, exc))

        with suppress(RuntimeError):  # the loop was closed, so nothing waits
            workers.loop.call_soon_threadsafe(workers._land, done)

        del trip, workers, jobs, answer, args, done
