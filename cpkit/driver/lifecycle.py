"""A handle's life on one event loop: opened once, used inside, closed after the last
operation."""

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
    """Knows whether a handle may be used, and which operations are in flight.

    ``name`` is how errors call the handle; it must not hold a password.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0
        self._open = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._callers = 0
        self._idle: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._on_close: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Bind to the running loop and open; a handle is opened once."""
        if self._loop is not None:
            raise Closed(self.name)

        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()
        self._open = True

    def on_close(self, stop: Callable[[], None]) -> None:
        """Call ``stop`` when `close` begins, to end background tasks."""
        self._on_close.append(stop)

    @property
    def is_open(self) -> bool:
        """Whether the handle was opened, and no `close` has begun."""
        return self._open

    def check(self) -> None:
        """Raise ``Closed`` or ``WrongEventLoop`` unless the handle may be used here."""
        if not self._open:
            raise Closed(self.name)

        self._check_loop()

    def _check_loop(self) -> None:
        """Raise ``WrongEventLoop`` on another loop, or on its copy in a forked child.

        Threads are not copied, and connections would be shared with the parent.
        """
        if asyncio.get_running_loop() is not self._loop or os.getpid() != self._process:
            raise WrongEventLoop(self.name)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that `close` waits for; it begins in the loop's next turn."""
        task = self._task(work)
        self._tasks.add(task)
        task.add_done_callback(self.abandon)
        return task

    def spawn_in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that goes on until `close`, which waits for it for 10 s."""
        task = self._task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        assert self._loop is not None
        # With an eager task factory, `create_task` would run the work before it returns
        # the task, and so before its caller has noted the task.
        return asyncio.Task(work, loop=self._loop)

    def abandon(self, task: asyncio.Task[Any]) -> None:
        """Do not let `close` wait for a task: it has ended, or it may never end."""
        self._tasks.discard(task)
        self._check_idle()

    async def run_shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that goes on even where the caller is cancelled."""
        task = self.spawn(work)
        task.add_done_callback(_mark_error_as_seen)
        return await asyncio.shield(task)

    async def run(self, work: Awaitable[T]) -> T:
        """Await work that is cancelled with its caller; `close` waits for it."""
        self._callers += 1

        try:
            return await work
        finally:
            self._callers -= 1
            self._check_idle()

    async def close(self, release: Callable[[], Awaitable[None]]) -> None:
        """Refuse new work, wait for what is in flight, and release, once.

        Idempotent, and completed even where the caller is cancelled.
        """
        if self._loop is None:
            return

        self._check_loop()
        self._open = False

        if self._closing is None:
            for stop in self._on_close:
                stop()

            self._closing = self._loop.create_task(self._release(release))

        await asyncio.shield(self._closing)

    async def _release(self, release: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._wait_until_idle()

            if self._background:
                await asyncio.wait(self._background, timeout=_BACKGROUND_TIMEOUT)
                await self._wait_until_idle()  # operations of background tasks
        finally:
            # Also where this task is cancelled: asyncio.run cancels what is left.
            await release()

    async def _wait_until_idle(self) -> None:
        while self._tasks or self._callers:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle

    def _check_idle(self) -> None:
        if self._idle is None or self._tasks or self._callers:
            return

        if not self._idle.done():
            self._idle.set_result(None)


def _mark_error_as_seen(task: asyncio.Task[Any]) -> None:
    """Keep asyncio from logging an error that a cancelled caller cannot get."""
    if not task.cancelled():
        task.exception()
