"""What every handle owes its callers, whatever store is behind it.

`Lifetime` binds a handle to one event loop, refuses use outside its context, and sees
what was begun through to its end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from cpkit.errors import Closed, WrongEventLoop

__all__ = ["Lifetime"]

T = TypeVar("T")

# A task that begins when it is made, and not in the loop's next turn.
_AT_ONCE: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}


class Lifetime:
    """A handle's time from open to close, on one event loop.

    ``name`` is how errors call the handle; it must hold no password.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._callers = 0
        self._callers_left: asyncio.Future[None] | None = None
        self._waits_for: list[Callable[[], Awaitable[None]]] = []
        self._closing: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Bind to the running loop and open; a handle is opened once."""
        if self._loop is not None:
            raise Closed(self.name)

        self._loop = asyncio.get_running_loop()
        self._open = True

    def check(self) -> None:
        """Raise ``Closed`` or ``WrongEventLoop`` unless the handle may be used here."""
        if not self._open:
            raise Closed(self.name)

        if asyncio.get_running_loop() is not self._loop:
            raise WrongEventLoop(self.name)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work in the loop's next turn; the handle waits for it at its end."""
        assert self._loop is not None
        return self._awaited(self._loop.create_task(work))

    def waits_for(self, ended: Callable[[], Awaitable[None]]) -> None:
        """Await this too, before the handle closes."""
        self._waits_for.append(ended)

    async def during(self, work: Awaitable[T]) -> T:
        """Await work that is cancelled with its caller; the handle ends after it.

        For work that a cancellation leaves wholly done or wholly not done. It takes no
        task, and so two turns of the loop less than `finish`.
        """
        self._callers += 1

        try:
            return await work
        finally:
            self._callers -= 1
            left = self._callers_left

            if left is not None and not self._callers and not left.done():
                left.set_result(None)

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that runs to its end even where the caller is cancelled.

        A client library's connection is thereby never left in the middle of an
        answer, and an operation is never half done.
        """
        assert self._loop is not None
        answer = self._loop.create_future()

        def at_end(_: asyncio.Task[None]) -> None:
            # A loop that is shutting down may cancel the task before it begins.
            work.close()
            answer.cancel()

        telling = asyncio.Task(_answered(work, answer), loop=self._loop, **_AT_ONCE)
        self._awaited(telling).add_done_callback(at_end)
        result: T = await answer
        return result

    async def end(self, release: Callable[[], Awaitable[None]]) -> None:
        """Refuse new work, let what is in flight finish, and release, once.

        Idempotent, and completed even where the caller is cancelled.
        """
        if self._loop is None:
            return

        if asyncio.get_running_loop() is not self._loop:
            raise WrongEventLoop(self.name)

        self._open = False

        if self._closing is None:
            self._closing = self._loop.create_task(self._release(release))

        await asyncio.shield(self._closing)

    def _awaited(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _release(self, release: Callable[[], Awaitable[None]]) -> None:
        for ended in self._waits_for:
            await ended()

        while self._tasks or self._callers:
            if self._tasks:
                await asyncio.wait(self._tasks)
            else:
                self._callers_left = asyncio.get_running_loop().create_future()
                await self._callers_left

        await release()


async def _answered(work: Coroutine[Any, Any, T], answer: asyncio.Future[T]) -> None:
    """Do the work, and tell its caller at once, if that is still waiting.

    The task's own callbacks would tell a turn of the loop later.
    """
    try:
        result = await work
    except Exception as exc:
        if not answer.done():
            answer.set_exception(exc)
    else:
        if not answer.done():
            answer.set_result(result)
