"""How concurrent writers share syncs, and trips to the worker threads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

from cpkit.driver.coalescing import tell
from cpkit.driver.lifetime import Lifetime
from cpkit.driver.writes import Append, Merge, Resolve

__all__ = ["ThreadWrite", "WriteQueue"]

ThreadWrite = Append | Merge | Resolve
"""A write that needs no more than the lock of its thread's log."""

Outcomes = list[list[object] | None]
Carry = Callable[
    [Callable[[Outcomes | BaseException], None], list[list[ThreadWrite]], bool], None
]
_Waiter = tuple[ThreadWrite, asyncio.Future[Any]]

# Syncs of different files share the file system's commits, so several at once cost
# hardly more than one; with more than this the threads wait for each other's turn in
# Python.
_TRIPS = 4
# Bounds how long the last of a group waits for an answer that the first could have.
_GROUP = 256
_GROUP_BYTES = 4 * 1024 * 1024


class WriteQueue:
    """Carries writes to the worker threads, as few trips and syncs as that takes.

    A trip sets out in the loop's next turn, with what is written in this one. Writes
    to one thread that wait while its log is being written are the next group, in order
    of arrival, for one sync. Threads that wait while all trips are under way are
    divided among the next ones, as several groups for one trip.

    ``carry`` starts a trip: it takes groups and calls back with, for each, an outcome
    or its exception for every write, or ``None`` where another process has the log.
    Such a group then takes a trip of its own, with ``wait``, and holds up nobody else.

    A caller that is cancelled before its trip starts is taken out of the queue; one
    that is cancelled later merely stops waiting.
    """

    def __init__(self, lifetime: Lifetime, carry: Carry) -> None:
        self._carry = carry
        self._waiting: dict[str, deque[_Waiter]] = {}
        # Threads with a group under way, and those that wait for nothing but a trip.
        self._busy: set[str] = set()
        self._ready: dict[str, None] = {}
        # Trips that could be made beside those under way.
        self._free = _TRIPS
        self._setting_out = False
        self._ended: asyncio.Future[None] | None = None
        lifetime.waits_for(self._all_done)

    async def run(self, write: ThreadWrite) -> Any:
        """Return the write's outcome, or raise it where it is an exception."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self._waiting.setdefault(write.thread_id, deque()).append((write, answer))

        if write.thread_id not in self._busy:
            self._ready[write.thread_id] = None

            if not self._setting_out:
                self._setting_out = True
                loop.call_soon(self._set_out)

        return await answer

    async def _all_done(self) -> None:
        while self._waiting or self._busy:
            self._ended = asyncio.get_running_loop().create_future()
            await self._ended

    def _set_out(self) -> None:
        """Divide what is ready among the trips that are free."""
        self._setting_out = False

        while self._ready and self._free:
            share = list(islice(self._ready, -(-len(self._ready) // self._free)))
            groups = list(filter(None, map(self._take, share)))

            if groups:
                self._free -= 1
                self._send(groups, wait=False)

        if self._ended is not None and not (self._busy or self._ended.done()):
            self._ended.set_result(None)

    def _send(self, groups: list[list[_Waiter]], *, wait: bool) -> None:
        writes = [[write for write, _ in group] for group in groups]
        self._carry(partial(self._come_back, groups, wait), writes, wait)

    def _come_back(
        self,
        groups: list[list[_Waiter]],
        wait: bool,
        outcomes: Outcomes | BaseException,
    ) -> None:
        self._free += not wait

        if isinstance(outcomes, BaseException):
            outcomes = [[outcomes] * len(group) for group in groups]

        for group, found in zip(groups, outcomes, strict=True):
            if found is None:
                self._send([group], wait=True)
            else:
                self._settle(group, found)

        # After those who were answered, so that they can be in it with what is next.
        asyncio.get_running_loop().call_soon(self._set_out)

    def _take(self, thread_id: str) -> list[_Waiter]:
        """Take the next group of a thread out of the queue."""
        del self._ready[thread_id]
        waiting = self._waiting[thread_id]
        group: list[_Waiter] = []
        size = 0

        while waiting and len(group) < _GROUP and size < _GROUP_BYTES:
            write, answer = waiting.popleft()

            if not answer.done():
                group.append((write, answer))
                size += _size(write)

        if not waiting:
            del self._waiting[thread_id]

        if group:
            self._busy.add(thread_id)

        return group

    def _settle(self, group: list[_Waiter], outcomes: list[object]) -> None:
        thread_id = group[0][0].thread_id
        self._busy.remove(thread_id)

        if thread_id in self._waiting:
            self._ready[thread_id] = None

        for (_, answer), outcome in zip(group, outcomes, strict=True):
            tell(answer, outcome)


def _size(write: ThreadWrite) -> int:
    """Bytes that the write adds to its group, roughly."""
    if isinstance(write, Append):
        return sum(map(len, write.bodies))

    if isinstance(write, Merge):
        return sum(len(value) for _, value in write.items)

    return len(write.result)
