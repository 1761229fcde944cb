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

# Threads, and how many of them write. Syncs of different files share the file system's
# commits. More threads were measured to wait for Python.
_THREADS, _WRITERS = 16, 4

_Job: TypeAlias = tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]


class Workers:
    """Threads of one event loop, which start when they are needed.

    They are daemons, so that a handle that was not closed does not keep the program
    alive. The way there and back costs a third of that of a ``ThreadPoolExecutor``.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self._trips: SimpleQueue[tuple[list[_Job], bool] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._busy = self._writing = 0
        self._writes: list[_Job] = []

    def run(
        self, work: Callable[..., T], *args: Any, writes: bool = False
    ) -> asyncio.Future[T]:
        """Do the work in a thread; it continues if the caller is cancelled.

        What ``writes``, and begins in one turn of the event loop, shares trips.
        """
        answer: asyncio.Future[T] = asyncio.Future(loop=self.loop)

        self._writes.append((answer, work, args))

        if not writes:
            self._send([self._writes.pop()], False)
        elif not self._writes[1:]:
            self.loop.call_soon(self._send_writes)

        return answer

    def end(self) -> None:
        """Return when all work is done and the threads have ended."""
        for _ in self._threads:
            self._trips.put(None)

        for thread in self._threads:
            thread.join()

    def _send_writes(self) -> None:
        while self._writes and self._writing < _WRITERS:
            share = -(-len(self._writes) // (_WRITERS - self._writing))
            self._writing += 1
            self._send(self._writes[:share], True)
            del self._writes[:share]

    def _send(self, jobs: list[_Job], writes: bool) -> None:
        self._busy += 1

        if self._busy > len(self._threads) < _THREADS:
            thread = threading.Thread(
                target=self._serve, name="cpkit-file", daemon=True
            )
            thread.start()
            self._threads.append(thread)

        self._trips.put((jobs, writes))

    def _serve(self) -> None:
        while (trip := self._trips.get()) is not None:
            done: list[Callable[[], None]] = []

            for answer, work, args in trip[0]:
                try:
                    done.append(partial(answer.set_result, work(*args)))
                except OSError as exc:
                    done.append(partial(answer.set_exception, failure(exc)))
                except BaseException as exc:
                    done.append(partial(answer.set_exception, exc))

            with suppress(RuntimeError):  # the loop was closed, so nothing waits
                self.loop.call_soon_threadsafe(self._land, done, trip[1])

            del trip, answer, args, done  # nothing stays alive while it waits

    def _land(self, done: list[Callable[[], None]], writes: bool) -> None:
        self._busy -= 1
        self._writing -= writes

        for settle in done:
            try:
                settle()
            except asyncio.InvalidStateError:
                pass  # the caller was cancelled

        if writes and self._writes:
            # After the callers, so that what they write next is there.
            self.loop.call_soon(self._send_writes)
