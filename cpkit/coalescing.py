"""Concurrent writers share a commit: what queues while one is under way joins the next.

A group is begun, and is done when its outcomes are told; between the two no task is
needed. That is what keeps a lone write as cheap as the store's own round trip, where
the store works in a thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from cpkit.lifetime import Lifetime

__all__ = ["Begin", "Coalescer", "Done", "in_task"]

OpT = TypeVar("OpT")

Done = Callable[[Sequence[object]], None]
"""Takes an outcome for each operation: its result, or the exception to raise."""

Begin = Callable[[list[OpT], Done], None]
"""Starts a group's commit. ``Done`` is called in the loop, once, whatever happens."""


class Coalescer(Generic[OpT]):
    """Groups operations so that concurrent callers share one commit.

    A lone operation starts at once. What queues while a group is under way forms the
    next group, in order of arrival; after a group of several the next begins a turn of
    the loop later, with all whom that group's end let go on.

    A caller that is cancelled before its group starts is taken out of the queue; one
    that is cancelled later merely stops waiting. ``size`` tells an operation's bytes.
    """

    # Bounds the latency of the last in a group, and the size of one statement.
    GROUP = 256
    GROUP_BYTES = 4 * 1024 * 1024

    def __init__(
        self, lifetime: Lifetime, begin: Begin[OpT], size: Callable[[OpT], int]
    ) -> None:
        self._begin = begin
        self._size = size
        self._queue: deque[tuple[OpT, asyncio.Future[Any]]] = deque()
        self._running = False
        self._in_company = True
        self._ended: asyncio.Future[None] | None = None
        lifetime.waits_for(self._all_done)

    async def run(self, op: OpT) -> Any:
        """Return the operation's outcome, or raise it where it is an exception."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self._queue.append((op, answer))

        if not self._running:
            self._running = True

            if self._in_company:
                loop.call_soon(self._begin_next)
            else:
                self._begin_next()

        return await answer

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        return not self._running

    async def _all_done(self) -> None:
        while self._running:
            self._ended = asyncio.get_running_loop().create_future()
            await self._ended

    def _begin_next(self) -> None:
        group = self._next_group()

        if group:
            self._in_company = len(group) > 1
            self._begin([op for op, _ in group], partial(self._settle, group))
            return

        self._running = False

        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _settle(
        self, group: list[tuple[OpT, asyncio.Future[Any]]], outcomes: Sequence[object]
    ) -> None:
        for (_, answer), outcome in zip(group, outcomes, strict=True):
            if answer.done():
                continue

            if isinstance(outcome, asyncio.CancelledError):
                answer.cancel()
            elif isinstance(outcome, BaseException):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

        self._begin_next()

    def _next_group(self) -> list[tuple[OpT, asyncio.Future[Any]]]:
        group: list[tuple[OpT, asyncio.Future[Any]]] = []
        size = 0

        while self._queue and len(group) < self.GROUP and size < self.GROUP_BYTES:
            op, answer = self._queue.popleft()

            if not answer.done():
                group.append((op, answer))
                size += self._size(op)

        return group


def in_task(
    lifetime: Lifetime, commit: Callable[[list[OpT]], Awaitable[Sequence[object]]]
) -> Begin[OpT]:
    """Make each group's commit a task, which goes on where its callers have left.

    What the commit raises goes to every caller of its group.
    """

    async def run(ops: list[OpT], done: Done, told: list[bool]) -> None:
        try:
            outcomes = await commit(ops)
        except Exception as exc:
            outcomes = [exc] * len(ops)

        told.append(True)
        done(outcomes)

    def begin(ops: list[OpT], done: Done) -> None:
        told: list[bool] = []

        def at_end(_: asyncio.Task[None]) -> None:
            # Only a loop that is shutting down cancels the task, maybe before it began.
            if not told:
                done([asyncio.CancelledError()] * len(ops))

        lifetime.spawn(run(ops, done, told)).add_done_callback(at_end)

    return begin
