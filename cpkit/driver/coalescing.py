"""How concurrent writers share a commit: what queues during one joins the next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from cpkit.driver.lifetime import Lifetime

__all__ = ["Coalescer", "tell"]

OpT = TypeVar("OpT")


class Coalescer(Generic[OpT]):
    """Groups operations so that concurrent callers share one commit.

    ``commit`` takes a group and returns an outcome for each operation: its result, or
    the exception for that caller alone; what it raises goes to every caller of the
    group. ``size`` tells an operation's bytes.

    A lone operation is committed at once, by its caller: no task stands between them.
    What queues while a commit is under way forms the next group, in order of arrival;
    after a group of several the next begins a turn of the loop later, with all whom
    that group's end let go on.

    With ``by_halves`` a crowd is committed in two halves that take turns: while the
    store has the one, the callers of the other get ready. That pays where a server does
    the work, and not where a thread of this process does, with which they would contend
    for the interpreter.

    A caller that is cancelled before its group starts is taken out of the queue; one
    that is cancelled later merely stops waiting. A lone one cancels its commit, which
    ends wholly done or not done, or shields itself.
    """

    # Bounds the latency of the last in a group, and the size of one statement.
    GROUP = 256
    GROUP_BYTES = 4 * 1024 * 1024
    # Fewer take longer in two commits than in one after another; measured.
    CROWD = 48

    def __init__(
        self,
        lifetime: Lifetime,
        commit: Callable[[list[OpT]], Awaitable[Sequence[object]]],
        size: Callable[[OpT], int],
        *,
        by_halves: bool = False,
    ) -> None:
        self._lifetime = lifetime
        self._commit = commit
        self._size = size
        self._by_halves = by_halves
        self._queue: deque[tuple[OpT, asyncio.Future[Any]]] = deque()
        self._group: list[tuple[OpT, asyncio.Future[Any]]] = []
        self._running = False
        self._in_company = True
        self._ended: asyncio.Future[None] | None = None
        lifetime.waits_for(self._all_done)

    async def run(self, op: OpT) -> Any:
        """Return the operation's outcome, or raise it where it is an exception."""
        if self._running or self._in_company:
            answer = asyncio.get_running_loop().create_future()
            self._queue.append((op, answer))

            if not self._running:
                self._go_on()

            return await answer

        self._running = True

        try:
            (outcome,) = await self._commit([op])
        finally:
            self._go_on()

        if isinstance(outcome, BaseException):
            raise outcome

        return outcome

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        return not self._running

    def _go_on(self) -> None:
        """Commit what is queued, in a task, or come to rest."""
        self._running = bool(self._queue)

        if self._running:
            self._lifetime.spawn(self._drain()).add_done_callback(self._at_end)
        elif self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def _all_done(self) -> None:
        while self._running:
            self._ended = asyncio.get_running_loop().create_future()
            await self._ended

    async def _drain(self) -> None:
        waiting = len(self._queue)
        # Of the first group alone: what is left waits for it, and then they alternate.
        most = waiting // 2 if self._by_halves and waiting >= self.CROWD else self.GROUP

        while self._take_group(most):
            most = self.GROUP
            ops = [op for op, _ in self._group]

            try:
                outcomes = await self._commit(ops)
                assert len(outcomes) == len(ops), "an outcome for each operation"
            except Exception as exc:
                outcomes = [exc] * len(ops)

            self._settle(outcomes)

        self._go_on()

    def _at_end(self, drain: asyncio.Task[None]) -> None:
        # Only a loop that is shutting down cuts it short, maybe before it began. What
        # is queued then is of those who write on their way out.
        if drain.cancelled() or drain.exception() is not None:
            self._settle([asyncio.CancelledError()] * len(self._group))
            self._go_on()

    def _settle(self, outcomes: Sequence[object]) -> None:
        group, self._group = self._group, []

        for (_, answer), outcome in zip(group, outcomes, strict=True):
            tell(answer, outcome)

    def _take_group(self, most: int) -> bool:
        """Take so many out of the queue, the next group; tell whether there is one."""
        size = 0

        while self._queue and len(self._group) < most and size < self.GROUP_BYTES:
            op, answer = self._queue.popleft()

            if not answer.done():
                self._group.append((op, answer))
                size += self._size(op)

        if self._group:
            self._in_company = len(self._group) > 1

        return bool(self._group)


def tell(answer: asyncio.Future[Any], outcome: object) -> None:
    """Give a caller its operation's outcome or its exception, if it still waits."""
    if answer.done():
        return

    if isinstance(outcome, asyncio.CancelledError):
        answer.cancel()
    elif isinstance(outcome, BaseException):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
