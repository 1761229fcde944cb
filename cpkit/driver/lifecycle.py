"""A handle's life on one event loop: opened once, used inside, closed at the end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from cpkit.errors import Closed, WrongEventLoop

__all__ = ["Lifecycle"]

T = TypeVar("T")

# Seconds that `close` waits for background tasks after it told them to end.
_BACKGROUND_TIMEOUT = 10.0


class Lifecycle:
    """Knows whether a handle may be used, and how many operations are in flight.

    ``name`` is how errors call the handle; it must not hold a password. Each operation
    adds one to ``in_flight`` when it begins, and calls `ended` when it ends.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_open = False
        self.in_flight = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0
        self._background: set[asyncio.Task[Any]] = set()
        self._idle: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self.on_close: list[Callable[[], object]] = []
        """Called when `close` begins, to end background tasks."""

    def begin(self) -> None:
        """Bind to the running loop and open; a handle is opened once."""
        if self._loop is not None:
            raise Closed(self.name)

        self._loop = _running_loop(self.name)
        self._process = os.getpid()
        self.is_open = True

    def check(self, *, closing: bool = False) -> None:
        """Raise ``Closed`` or ``WrongEventLoop`` unless the handle may be used here."""
        if not self.is_open and not closing:
            raise Closed(self.name)

        # On the copy of its loop in a forked child, a handle would have no threads, and
        # share its connections with the parent.
        if _running_loop(self.name) is not self._loop or os.getpid() != self._process:
            raise WrongEventLoop(self.name)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task; it begins in the loop's next turn.

        With an eager task factory, ``create_task`` would run the work before its caller
        has noted the task.
        """
        return asyncio.Task(work, loop=self._loop)

    async def run_shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """Await an operation that goes on if the caller is cancelled."""
        self.in_flight += 1
        task = self.spawn(work)
        task.add_done_callback(lambda _: self.ended())
        return await asyncio.shield(task)

    def spawn_in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that goes on until `close`, which waits for it for 10 s."""
        task = self.spawn(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def ended(self) -> None:
        """Note the end of an operation; `close` waits for the last one."""
        self.in_flight -= 1

        if self._idle is not None and not self.in_flight and not self._idle.done():
            self._idle.set_result(None)

    async def close(self, release: Callable[[], Awaitable[None]]) -> None:
        """Refuse new work, wait for what is in flight, and release, once.

        Idempotent, and completed even if the caller is cancelled.
        """
        if self._loop is None:
            return

        self.check(closing=True)
        self.is_open = False

        if self._closing is None:
            for stop in self.on_close:
                stop()

            self._closing = self.spawn(self._release(release))

        await asyncio.shield(self._closing)

    async def _release(self, release: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._wait_until_idle()

            if self._background:
                await asyncio.wait(self._background, timeout=_BACKGROUND_TIMEOUT)
                await self._wait_until_idle()  # operations of background tasks
        finally:
            # Also if this task is cancelled: asyncio.run cancels what is left.
            await release()

    async def _wait_until_idle(self) -> None:
        while self.in_flight:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle


def _running_loop(name: str) -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:  # under trio, for instance
        raise WrongEventLoop(name, is_running=False) from None
