"""The threads that do what would block the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from cpkit_file.schema import failure

T = TypeVar("T")

_Job: TypeAlias = tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]


class Workers:
    """Threads of one event loop, up to ``limit``, which start when they are needed.

    They are daemons, so that a handle that was not closed does not keep the program
    alive, and they end when such a handle is forgotten. The way there and back costs a
    third of that of a ``ThreadPoolExecutor``, and jobs that begin in one turn of the
    loop share it.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, limit: int) -> None:
        self._limit = self._free = limit
        self._started = 0
        self._waiting: list[_Job] = []
        self._trips: SimpleQueue[tuple[Workers, list[_Job]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def run(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Do the work in a thread; it continues if the caller is cancelled."""
        if self._started <= self._limit - self._free < self._limit:
            name = f"cpkit-file-{self._started}"
            thread = threading.Thread(
                target=_serve, args=(self._trips,), name=name, daemon=True
            )
            thread.start()
            self._threads.append(thread)
            self._started += 1

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


def _serve(trips: SimpleQueue[tuple[Workers, list[_Job]] | None]) -> None:
    """Do jobs until a trip is ``None``; in between nothing refers to the workers."""
    while (trip := trips.get()) is not None:
        workers, jobs = trip
        done: list[Callable[[], None]] = []

        for answer, work, args in jobs:
            try:
                done.append(partial(answer.set_result, work(*args)))
            except OSError as exc:
                done.append(partial(answer.set_exception, failure(exc)))
            except BaseException as exc:
                done.append(partial(answer.set_exception, exc))

        with suppress(RuntimeError):  # the loop was closed, so nothing waits
            workers.loop.call_soon_threadsafe(workers._land, done)

        del trip, workers, jobs, answer, args, done
