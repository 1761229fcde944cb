"""An event loop with virtual time that runs ready callbacks in an order of its choice.

Time stands still while anything is ready and then leaps to the next timer, so an hour
of waiting takes no time. Which of the ready callbacks runs next is drawn from a seeded
source: each seed is one interleaving of all tasks, the same one each time.
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
    """Nothing is ready and no timer is set: the main task waits for ever."""


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
        """Run the main coroutine to its end, and cancel what it left behind."""
        events._set_running_loop(self)
        self._running = True

        try:
            task: asyncio.Task[T] = self.create_task(main)
            return self._finish(task)
        finally:
            self._cancel_all()
            self._running = False
            events._set_running_loop(None)

    def jump(self, seconds: float) -> None:
        """Let the clock leap, as after a suspended machine."""
        self._now += seconds

    def _finish(self, task: asyncio.Task[T]) -> T:
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

    # What asyncio asks of a loop

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
        """Leave it in the heap: a cancelled handle is passed over when it is due."""

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
    """Return a loop; what no task asks for, such as sockets, it does not have."""
    made: SimulatedLoop = cast("Any", SimulatedLoop)(random)
    return made
