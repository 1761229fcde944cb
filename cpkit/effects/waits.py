"""Waiting for an attempt that holds a key.

All callers of a process that wait for one attempt share one reader, so that a thousand
of them cost as much as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from copy import copy
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

from cpkit.driver.backoff import backoff_pauses
from cpkit.records import CallRecord
from cpkit.runs.waiting import StaleDetector, Wakeups, retry_unclear

__all__ = ["Answer", "Look", "SharedWaits"]

_RECHECK = 2.0
"""Look again after so many seconds, even if the watch reports nothing."""

_RECHECK_ALL = 0.25
"""Seconds for each attempt that callers of a handle wait for: the more there are, the
rarer is the look at each."""

Answer = CallRecord | StaleDetector | None
"""The key's record, once the attempt is over; ``None`` if the key may be free. A
detector if the holder is silent."""

Look = Callable[[], Awaitable[CallRecord | None]]
"""Reads the record of the key."""

ReadHeartbeat = Callable[[CallRecord], Awaitable[object]]

_Place = tuple[str, str, float | None]
"""The thread and the id of an attempt, and the ``stale_after`` of those that wait."""


class SharedWaits:
    """The attempts that callers of a handle wait for, and those that it runs."""

    _of: WeakKeyDictionary[Any, SharedWaits] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._readers: dict[_Place, _Reader] = {}
        self.running: dict[str, Any] = {}
        """The calls that this process runs, by id, with what shows that they live."""

    @classmethod
    def of(cls, cp: Any) -> SharedWaits:
        """Return the shared waits of a store's handle."""
        try:
            return cls._of.setdefault(cp, cls())
        except TypeError:  # no weak reference, or not hashable
            return cls()

    async def wait(
        self,
        cp: Any,
        holder: CallRecord,
        look: Look,
        stale_after: float | None = None,
        read_heartbeat: ReadHeartbeat | None = None,
    ) -> Answer:
        """Wait until an attempt is over, or silent for ``stale_after`` seconds.

        Of all callers one gets the detector of a silent holder, and may end the
        attempt; the next one gets its own after another such time. Raises what a look
        raised.
        """
        place = holder.thread_id, holder.call.call_id, stale_after
        reader = self._readers.get(place)

        if reader is None:
            reader = _Reader(self._readers, place, cp, holder, look, read_heartbeat)
            self._readers[place] = reader

        return await reader.wait()

    def post(self, record: CallRecord) -> None:
        """Give a record that this process wrote to the callers that wait for it."""
        for reader in list(self._readers.values()):
            if reader.holder.call.idempotency_key == record.call.idempotency_key:
                reader.seen(record)


class _Reader:
    """Looks at one attempt while callers wait for it, or until it is over."""

    def __init__(
        self,
        readers: dict[_Place, _Reader],
        place: _Place,
        cp: Any,
        holder: CallRecord,
        look: Look,
        read_heartbeat: ReadHeartbeat | None,
    ) -> None:
        self.holder = holder
        self._readers = readers
        self._place = place
        self._cp = cp
        self._look = look
        self._read_heartbeat = read_heartbeat
        self._callers: dict[asyncio.Future[Answer], None] = {}
        self._task: asyncio.Task[None] | None = None

    async def wait(self) -> Answer:
        """Return the answer for one caller; the last one that leaves ends the looks."""
        caller: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._callers[caller] = None

        if self._task is None:
            self._task = asyncio.create_task(self._read())
            # It may be cancelled, even before it began.
            self._task.add_done_callback(lambda _: self._end(None))

        try:
            return await caller
        finally:
            del self._callers[caller]

            if not self._callers:
                self._end(None)
                self._task.cancel()

    def seen(self, record: CallRecord | None) -> bool:
        """Answer the callers if the attempt is over; return whether it is."""
        is_over = (
            record is None
            or record.status != "issued"
            or record.erased
            or record.call.call_id != self.holder.call.call_id
        )

        if is_over:
            self._end(record)

        return is_over

    async def _read(self) -> None:
        stale_after = self._place[2]
        stale = None if stale_after is None else StaleDetector(stale_after)
        # A longer pause would not count as silence.
        longest = inf if stale is None else stale.longest_pause
        pauses = backoff_pauses(longest=min(1.0, longest))

        try:
            async with Wakeups(self._cp, self.holder.thread_id) as wakeups:
                while not self.seen(
                    await retry_unclear(self._look, retry_rejected=True)
                ):
                    if stale is not None and await stale.is_stale(self._heartbeat):
                        self._tell_one(stale)
                        stale = StaleDetector(stale.stale_after)

                    count = len(self._readers)
                    recheck = max(_RECHECK, _RECHECK_ALL * count)
                    await wakeups.wait(next(pauses), min(longest, recheck), count)
        except asyncio.CancelledError:
            raise
        except BaseException as exc:
            self._end(exc)

    async def _heartbeat(self) -> object:
        assert self._read_heartbeat is not None
        return await self._read_heartbeat(self.holder)

    def _tell_one(self, stale: StaleDetector) -> None:
        """Let one caller go on with a detector, the one that has waited longest."""
        for caller in self._callers:
            if not caller.done():
                caller.set_result(stale)
                return

    def _end(self, answer: CallRecord | BaseException | None) -> None:
        """Answer all callers; those that come from now on get another reader."""
        if self._readers.get(self._place) is self:
            del self._readers[self._place]

        for caller in self._callers:
            if caller.done():
                continue

            if isinstance(answer, BaseException):
                caller.set_exception(_copy_of(answer))
            else:
                caller.set_result(answer)


def _copy_of(error: BaseException) -> BaseException:
    """Return the error for one caller; itself if its class cannot be copied."""
    try:
        own = copy(error)
    except Exception:
        return error

    own.__cause__ = error.__cause__
    return own
