"""Waiting for a change in the store: by `watch` where the store has it, else by time.

`Wakeups` waits for one caller. `SharedWaits` lets all callers of a key in a process
share one reader, so that a thousand waiting callers cost as much as one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from copy import copy
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

from cpkit.driver.backoff import Backoff
from cpkit.protocol import WatchesThreads
from cpkit.records import CallRecord
from cpkit.waiting import StaleDetector, retry_unclear

__all__ = ["Seat", "SharedWaits", "Wakeups"]

log = logging.getLogger("cpkit.waiting")

_UNWATCHED = 2.0
"""Seconds between two looks at a store that watches: in case a watch fails silently."""

_FIRST_GAP, _LONGEST_GAP = 0.005, 0.25
_QUIET = 1.0
"""Seconds between two looks at a thread that changes often: at most ten a second.

The first wake-up after a quiet second is served at once; then the gap doubles.
"""


class Wakeups:
    """Waits for changes of threads while its block runs.

    A wake-up is a hint: the caller looks at the store, and waits again if nothing that
    matters has changed. A change between two waits wakes the next wait.
    """

    def __init__(self, cp: Any, *thread_ids: str) -> None:
        self._watch = cp.watch if isinstance(cp, WatchesThreads) else None
        self._thread_ids = thread_ids
        self._changed = asyncio.Event()
        self._ids: set[str] = set()
        self._gap = 0.0
        self._woke_at = 0.0
        self._pump: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._watch is not None:
            self._context = self._watch(*self._thread_ids)
            changes = await self._context.__aenter__()
            self._pump = asyncio.create_task(self._collect(changes))

        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pump is None:
            return

        self._pump.cancel()

        try:
            await asyncio.wait([self._pump])
        finally:
            await self._context.__aexit__(kind, exc, traceback)

    async def wait(self, pause: float, longest: float = _UNWATCHED) -> set[str]:
        """Wait for a change, and return the ids of the changed threads.

        Without a working watch this waits for ``pause`` seconds, else for at most
        ``longest``. The set is empty if the time has passed.
        """
        if self._pump is None or self._pump.done():
            await asyncio.sleep(pause)
            return set()

        try:
            async with asyncio.timeout(longest):
                await self._changed.wait()
        except TimeoutError:
            return set()

        clock = asyncio.get_running_loop().time
        quiet = clock() - self._woke_at > _QUIET
        self._gap = 0.0 if quiet else min(2 * self._gap or _FIRST_GAP, _LONGEST_GAP)
        await asyncio.sleep(self._gap)
        self._woke_at = clock()
        self._changed.clear()
        found, self._ids = self._ids, set()
        return found

    async def _collect(self, changes: AsyncIterator[str]) -> None:
        try:
            async for thread_id in changes:
                self._ids.add(thread_id)
                self._changed.set()
        except Exception:
            log.warning("watching failed; polling instead", exc_info=True)
        finally:
            self._changed.set()


Look = Callable[[], Awaitable[CallRecord | None]]
"""Reads a key's record."""

ReadHeartbeat = Callable[[CallRecord], Awaitable[object]]


class SharedWaits:
    """The keys that callers of this process wait for, one reader for each key."""

    _of: WeakKeyDictionary[Any, SharedWaits] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._readers: dict[tuple[str, float | None], _Reader] = {}

    @classmethod
    def of(cls, cp: Any) -> SharedWaits:
        """Return the shared waits of a store's handle."""
        try:
            return cls._of.setdefault(cp, cls())
        except TypeError:  # no weak reference, or not hashable
            return cls()

    def join(
        self,
        key: str,
        holder: CallRecord,
        cp: Any,
        look: Look,
        backoff: Backoff,
        patience: float,
        *,
        blind: bool = False,
        stale_after: float | None = None,
        read_heartbeat: ReadHeartbeat | None = None,
    ) -> Seat:
        """Return a seat at the reader of a key that ``holder`` holds.

        The reader ends once the key's record is another one, or has an outcome.
        ``look`` reads the record. If it is ``blind``, it does not find issued records:
        then each look lets one caller try. ``patience`` bounds the retries of a look
        that the store refuses.
        """
        place = key, stale_after
        reader = self._readers.get(place)

        if reader is None:
            reader = _Reader(
                cp, holder, look, backoff, patience, blind, stale_after, read_heartbeat
            )
            self._readers[place] = reader
            reader.ended = lambda: self._forget(place, reader)

        return Seat(reader)

    def post(self, key: str, record: CallRecord) -> None:
        """Give a record that this process wrote to the callers that wait for it."""
        for (waited, _), reader in list(self._readers.items()):
            if waited == key:
                reader.seen(record)

    def _forget(self, place: tuple[str, float | None], reader: _Reader) -> None:
        if self._readers.get(place) is reader:
            del self._readers[place]


class Seat:
    """One caller's place at a reader; enter it, and call `wait`."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    async def __aenter__(self) -> Self:
        self._reader.enter()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._reader.leave()

    @property
    def is_over(self) -> bool:
        """Whether the holder's call is over, so that a new seat is needed."""
        return self._reader.is_over

    async def wait(self, timeout: float | None) -> CallRecord | StaleDetector | None:
        """Return the key's record once it has changed; ``None`` if it may be free.

        Returns a `StaleDetector` if the holder is stale: one of the callers gets it,
        and may end the holder's attempt. Raises ``TimeoutError``.
        """
        return await self._reader.wait(timeout)


class _Reader:
    """Looks at one key for all callers that wait for it."""

    ended: Callable[[], None]

    def __init__(
        self,
        cp: Any,
        holder: CallRecord,
        look: Look,
        backoff: Backoff,
        patience: float,
        blind: bool,
        stale_after: float | None,
        read_heartbeat: ReadHeartbeat | None,
    ) -> None:
        self._cp = cp
        self._holder = holder
        self._look = look
        self._backoff = backoff
        self._patience = patience
        self._blind = blind
        self._stale_after = stale_after
        self._read_heartbeat = read_heartbeat
        self._seats = 0
        self._waiting: deque[asyncio.Future[CallRecord | StaleDetector | None]] = (
            deque()
        )
        self._last: CallRecord | BaseException | None = None
        self.is_over = False
        self._task: asyncio.Task[None] | None = None

    def enter(self) -> None:
        self._seats += 1

        if self._task is None:
            self._task = asyncio.create_task(self._read())

    def leave(self) -> None:
        self._seats -= 1

        if self._seats == 0:
            self._end(None)
            assert self._task is not None
            self._task.cancel()

    async def wait(self, timeout: float | None) -> CallRecord | StaleDetector | None:
        if not self.is_over:
            future: asyncio.Future[CallRecord | StaleDetector | None]
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)

            async with asyncio.timeout(timeout):
                return await future

        if isinstance(self._last, BaseException):
            raise copy(self._last) from self._last.__cause__

        return self._last

    def seen(self, record: CallRecord | None) -> None:
        """Wake the callers if the holder's call is over."""
        if record is None:
            self._end(None)
        elif (
            record.status != "issued"
            or record.erased
            or record.call.call_id != self._holder.call.call_id
        ):
            self._end(record)

    def _wake_one(self, answer: StaleDetector | None) -> bool:
        while self._waiting:
            future = self._waiting.popleft()

            if not future.done():
                future.set_result(answer)
                return True

        return False

    def _end(self, last: CallRecord | BaseException | None) -> None:
        if self.is_over:
            return

        self.is_over, self._last = True, last
        self.ended()

        for future in self._waiting:
            if future.done():
                continue

            if isinstance(last, BaseException):
                future.set_exception(copy(last))
            else:
                future.set_result(last)

        self._waiting.clear()

    async def _read(self) -> None:
        try:
            async with Wakeups(self._cp, self._holder.thread_id) as wakeups:
                stale = self._detector()
                longest = None if stale is None else stale.longest_pause
                pauses = self._backoff.pauses(longest)

                while True:
                    record = await retry_unclear(
                        self._look, self._backoff, self._patience, retry_rejected=True
                    )

                    if record is not None or not self._blind:
                        self.seen(record)

                    if self.is_over:
                        return

                    if stale is not None and await self._is_stale(stale):
                        if self._wake_one(stale):
                            # The caller goes on with this detector. The next caller
                            # gets its turn after another full wait.
                            stale = self._detector()
                    elif self._blind and record is None:
                        self._wake_one(None)

                    await wakeups.wait(
                        next(pauses), min(_UNWATCHED, longest or _UNWATCHED)
                    )
        except asyncio.CancelledError:
            self._end(None)
            raise
        except BaseException as exc:
            self._end(exc)

    def _detector(self) -> StaleDetector | None:
        return None if self._stale_after is None else StaleDetector(self._stale_after)

    async def _is_stale(self, stale: StaleDetector) -> bool:
        read = self._read_heartbeat
        assert read is not None
        return await stale.is_stale(lambda: read(self._holder))
