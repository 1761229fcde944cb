"""Reads that begin in one turn of the event loop, in one trip to the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["Together"]

ItemT = TypeVar("ItemT")
T = TypeVar("T")


class Together(Generic[ItemT, T]):
    """Reads of single items by a function that reads many.

    A list of conversations reads the extra of each thread, without messages. A store
    that uses this in its ``snapshot`` makes one trip for all of them.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[ItemT, asyncio.Future[Sequence[T]]]] = []

    async def read(
        self, item: ItemT, read_many: Callable[[list[ItemT]], Awaitable[Sequence[T]]]
    ) -> T:
        """Return what ``read_many`` has for the item.

        The first caller of a turn reads for all. If that fails or is cancelled, the
        others read alone: one item may be the reason, and a caller's limit of time is
        its own.
        """
        waiting = self._waiting
        answer: asyncio.Future[Sequence[T]] = asyncio.Future()
        waiting.append((item, answer))

        if len(waiting) == 1:
            await self._read_all(waiting, read_many)

        return (await answer or await read_many([item]))[0]

    async def _read_all(
        self,
        waiting: list[tuple[ItemT, asyncio.Future[Sequence[T]]]],
        read_many: Callable[[list[ItemT]], Awaitable[Sequence[T]]],
    ) -> None:
        found: Sequence[T] = []

        try:
            try:
                await asyncio.sleep(0)
            finally:
                self._waiting = []  # a later caller sees what was stored meanwhile

            found = await read_many([item for item, _ in waiting])
        except Exception:
            # Each reads alone then, and meets the error again if it is its own.
            if len(waiting) == 1:
                raise
        finally:
            for place, (_, answer) in enumerate(waiting):
                if not answer.done():  # not cancelled
                    answer.set_result(found[place : place + 1])
