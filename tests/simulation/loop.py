"""An event loop with virtual time that runs ready callbacks in random order.

Time stands still while a callback is ready. Then it jumps to the next timer, so an hour
of waiting takes no time. A seeded generator draws which of the ready callbacks runs
next: each seed is one interleaving of all tasks, always the same.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections.abc import Callable, Coroutine
from contextvars import Context
from random import Random
from typing import Any, TypeVar, TypeVarTuple, cast

__all__ = ["SimulatedLoop", "Stuck", "simulated_loop"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Stuck(Exception):
    """No callback is ready and no timer is set: the main task waits for ever."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """The part of an event loop that tasks, futures, sleeps and timeouts need."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._now = 0.0
        self._ready: list[asyncio.Handle] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = 0
        self._running = False
        self.errors: list[dict[str, Any]] = []

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run the main coroutine until it returns, and cancel all other tasks."""
        events._set_running_loop(self)
        self._running = True

        try:
            task: asyncio.Task[T] = self.create_task(main)
            return self._run_until_done(task)
        finally:
            self._cancel_all()
            self._running = False
            events._set_running_loop(None)

    def jump(self, seconds: float) -> None:
        """Move the clock forward, as after a suspended machine."""
        self._now += seconds

    def _run_until_done(self, task: asyncio.Task[T]) -> T:
        while not task.done():
            self._step()

        return task.result()

    def _step(self) -> None:
        if not self._ready:
            while self._timers and self._timers[0][2].cancelled():
                heapq.heappop(self._timers)

            if not self._timers:
                raise Stuck

            self._now = max(self._now, self._timers[0][0])

        while self._timers and self._timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(self._timers)[2])

        chosen = int(self._random.random() * len(self._ready))
        self._ready[chosen], self._ready[-1] = self._ready[-1], self._ready[chosen]
        handle = self._ready.pop()

        if not handle.cancelled():
            handle._run()

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self):
            task.cancel()

        while self._ready:
            self._step()

    # The methods that asyncio calls

    def time(self) -> float:
        return self._now

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    # The loop has one thread.
    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave it in the heap: a cancelled handle is skipped when it is due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, **options)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)


def simulated_loop(random: Random) -> SimulatedLoop:
    """Return a loop; it has only what tasks need, for example no sockets."""
    made: SimulatedLoop = cast("Any", SimulatedLoop)(random)
    return made
