"""A limit of time for each of many operations, kept by one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

__all__ = ["TimeLimit"]

T = TypeVar("T")


class TimeLimit:
    """Ends what takes longer than ``seconds``, as ``asyncio.timeout`` does.

    One timer is set, for the operation that began first. One for each, cancelled a
    millisecond later, costs as much as a twentieth of an append to a server.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._begun: dict[asyncio.Timeout, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def within(self, work: Awaitable[T]) -> T:
        """Await the work; raise ``TimeoutError`` where it is cancelled by the limit."""
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(None)
        self._begun[limit] = loop.time()

        if self._timer is None:
            self._timer = loop.call_later(self.seconds, self._look, loop)

        try:
            async with limit:
                return await work
        finally:
            del self._begun[limit]

    def stop(self) -> None:
        """Let go of the timer, when nothing is under way any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None

        for limit, begun in self._begun.items():  # the oldest first
            if begun + self.seconds > loop.time():
                self._timer = loop.call_at(begun + self.seconds, self._look, loop)
                break

            limit.reschedule(loop.time())
