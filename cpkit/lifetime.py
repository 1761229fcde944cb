"""What every handle owes its callers, whatever store is behind it.

`Lifetime` binds a handle to one event loop, refuses use outside its context, and sees
what was begun through to its end. `Coalescer` lets what queues while a commit is under
way share the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from cpkit.errors import Closed, WrongEventLoop

__all__ = ["Coalescer", "Lifetime"]

T = TypeVar("T")
OpT = TypeVar("OpT")


class Lifetime:
    """A handle's time from open to close, on one event loop.

    ``name`` is how errors call the handle; it must hold no password.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open = False
        self._tasks: set[asyncio.Task[Any]] = set()
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
        """Start work that the handle waits for before it closes."""
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that runs to its end even where the caller is cancelled.

        A client library's connection is thereby never left in the middle of an
        answer, and an operation is never half done.
        """
        task = self.spawn(work)
        task.add_done_callback(_look_at)
        return await asyncio.shield(task)

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

    async def _release(self, release: Callable[[], Awaitable[None]]) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

        await release()


def _look_at(task: asyncio.Task[Any]) -> None:
    """Mark an error as seen: asyncio reports it as lost where its caller has left."""
    if not task.cancelled():
        task.exception()


class Coalescer(Generic[OpT]):
    """Groups operations so that concurrent callers share one commit.

    A lone operation starts at once. What queues while a group is under way forms the
    next group, in order of arrival. ``commit`` takes a group and returns an outcome
    for each operation: its result, or the exception for that caller alone; what it
    raises goes to every caller of the group.

    A caller that is cancelled before its group starts is taken out of the queue; one
    that is cancelled later merely stops waiting.
    """

    # Bounds the latency of the last in a group, and the size of one statement.
    GROUP = 256
    GROUP_BYTES = 4 * 1024 * 1024

    def __init__(
        self,
        lifetime: Lifetime,
        commit: Callable[[list[OpT]], Awaitable[Sequence[object]]],
        size: Callable[[OpT], int],
    ) -> None:
        self._lifetime = lifetime
        self._commit = commit
        self._size = size
        self._queue: deque[tuple[OpT, asyncio.Future[Any]]] = deque()
        self._running = False

    async def run(self, op: OpT) -> Any:
        """Return the operation's outcome, or raise it where it is an exception."""
        answer = asyncio.get_running_loop().create_future()
        self._queue.append((op, answer))

        if not self._running:
            self._running = True
            self._lifetime.spawn(self._drain())

        return await answer

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        return not self._running

    async def _drain(self) -> None:
        try:
            while group := self._next_group():
                await self._settle(group)
        finally:
            self._running = False

    async def _settle(self, group: list[tuple[OpT, asyncio.Future[Any]]]) -> None:
        try:
            outcomes = await self._commit([op for op, _ in group])
        except asyncio.CancelledError:
            # Only a loop that is shutting down cancels this task; no caller is left
            # waiting on it.
            for _, answer in [*group, *self._queue]:
                answer.cancel()

            self._queue.clear()
            raise
        except Exception as exc:
            outcomes = [exc] * len(group)

        for (_, answer), outcome in zip(group, outcomes, strict=True):
            if answer.done():
                continue

            if isinstance(outcome, BaseException):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

    def _next_group(self) -> list[tuple[OpT, asyncio.Future[Any]]]:
        group: list[tuple[OpT, asyncio.Future[Any]]] = []
        size = 0

        while self._queue and len(group) < self.GROUP and size < self.GROUP_BYTES:
            op, answer = self._queue.popleft()

            if not answer.done():
                group.append((op, answer))
                size += self._size(op)

        return group
