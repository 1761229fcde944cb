"""A limit of time for each of many operations, kept by one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

__all__ = ["TimeLimit"]

T = TypeVar("T")


class TimeLimit:
    """Ends what takes longer than ``seconds``, as ``asyncio.timeout`` does.

    One timer is set, for the operation that began first: one for each, and a context
    for each to cancel it, cost as much as a tenth of an append to a server.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        # When each began, the oldest first, and the cancellations it had seen by then.
        self._begun: dict[asyncio.Task[Any], tuple[float, int]] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def within(self, work: Awaitable[T]) -> T:
        """Await the work; raise ``TimeoutError`` where it is cancelled by the limit.

        A task has one work at a time under the limit.
        """
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        self._begun[task] = loop.time(), task.cancelling()

        if self._timer is None:
            self._timer = loop.call_later(self.seconds, self._look, loop)

        try:
            return await work
        except BaseException as exc:
            # One who is cancelled by somebody else as well hears of that.
            if task in self._late and task.uncancel() <= self._begun[task][1]:
                if isinstance(exc, asyncio.CancelledError):
                    raise TimeoutError from exc

            raise
        finally:
            del self._begun[task]
            self._late.discard(task)

    def stop(self) -> None:
        """Let go of the timer, when nothing is under way any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None

        for task, (begun, _) in self._begun.items():
            if begun + self.seconds > loop.time():
                self._timer = loop.call_at(begun + self.seconds, self._look, loop)
                break

            if task not in self._late:
                self._late.add(task)
                task.cancel()
