"""Waiting for a change in the store: by `watch` where the store has it, else by time.

`Wakeups` waits for one caller. `SharedWaits` lets all callers of a key in a process
share one reader, so that a thousand waiting callers cost as much as one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from copy import copy
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

from cpkit.driver.backoff import backoff_pauses
from cpkit.protocol import WatchesThreads
from cpkit.records import CallRecord
from cpkit.waiting import StaleDetector, retry_unclear

__all__ = ["Answer", "Reader", "SharedWaits", "Wakeups"]

log = logging.getLogger(__name__)

_RECHECK = 2.0
"""Look again after so many seconds, even if the watch reports nothing."""

_RECHECK_ALL = 0.25
"""Seconds for each key that callers of a handle wait for: a thousand keys are looked at
four times a second in all, beside the looks that a watch calls for."""

_REST = 9
"""The rest after a look, as a multiple of its time: looks take a tenth of the time.

However often a thread changes, a waiter sees what it waits for after one rest. The
looks of all waiters of a handle count together.
"""

_LONGEST_REST = 0.25
"""Seconds after which a changed thread is looked at, however many waiters there are."""


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
        self._shared = SharedWaits.of(cp)
        self._looks_since = 0.0
        self._context: AbstractAsyncContextManager[AsyncIterator[str]] | None = None
        self._pump: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._watch is not None:
            self._context = self._watch(*self._thread_ids)
            changes = await self._context.__aenter__()
            self._pump = asyncio.create_task(self._collect(changes))
            self._looks_since = asyncio.get_running_loop().time()

        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pump is None:
            return

        assert self._context is not None
        self._pump.cancel()

        try:
            await asyncio.wait([self._pump])
        finally:
            await self._context.__aexit__(kind, exc, traceback)

    async def wait(self, pause: float, longest: float = _RECHECK) -> set[str]:
        """Wait for a change, and return the ids of the changed threads.

        With a watch it waits for at most ``longest`` seconds and a rest of 0.25 s;
        without a working one, for ``pause`` seconds. The set is empty if no change was
        reported.
        """
        if self._pump is None or self._pump.done():
            await asyncio.sleep(pause)
            return set()

        clock = asyncio.get_running_loop().time
        looked_at = clock()
        self._shared.looked(looked_at, looked_at - self._looks_since)

        try:
            async with asyncio.timeout(longest):
                await self._changed.wait()

            # A waiter whose own last look was long ago looks at once, whatever rest the
            # looks of other waiters need.
            rest_ends = min(self._shared.rest_ends, looked_at + _LONGEST_REST)
            await asyncio.sleep(max(0.0, rest_ends - clock()))
        except TimeoutError:
            return set()
        finally:
            self._looks_since = clock()

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


Answer = CallRecord | StaleDetector | None

Look = Callable[[], Awaitable[CallRecord | None]]
"""Reads a key's record."""

ReadHeartbeat = Callable[[CallRecord], Awaitable[object]]


class SharedWaits:
    """The keys that callers of this process wait for, one reader for each key."""

    _of: WeakKeyDictionary[Any, SharedWaits] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._readers: dict[tuple[str, float | None], Reader] = {}
        self.rest_ends = 0.0
        """When the rest ends that the looks of all waiters took."""
        self.running: dict[str, Any] = {}
        """The calls that this process runs, by id, with what shows that they live."""

    @classmethod
    def of(cls, cp: Any) -> SharedWaits:
        """Return the shared waits of a store's handle."""
        try:
            return cls._of.setdefault(cp, cls())
        except TypeError:  # no weak reference, or not hashable
            return cls()

    @asynccontextmanager
    async def join(
        self,
        key: str,
        holder: CallRecord,
        cp: Any,
        look: Look,
        stale_after: float | None = None,
        read_heartbeat: ReadHeartbeat | None = None,
    ) -> AsyncIterator[Reader]:
        """Wait, in the block, with all callers for a key that ``holder`` holds.

        The reader ends once the key's record is another one, or has an outcome.
        ``look`` reads the record. With ``stale_after`` the holder's heartbeat is
        watched too.
        """
        place = key, stale_after
        reader = self._readers.get(place)

        if reader is None or reader.is_over:
            reader = Reader(self, cp, holder, look, stale_after, read_heartbeat)
            self._readers[place] = reader

        reader.enter()

        try:
            yield reader
        finally:
            if reader.leave() and self._readers.get(place) is reader:
                del self._readers[place]

    @property
    def recheck(self) -> float:
        """The seconds after which a key is looked at without a notification."""
        return max(_RECHECK, _RECHECK_ALL * len(self._readers))

    def looked(self, now: float, took: float) -> None:
        """Note a look that ended ``now``, so that the waiters rest."""
        rest_ends = max(now, self.rest_ends) + _REST * took
        self.rest_ends = min(rest_ends, now + _LONGEST_REST)

    def post(self, key: str, record: CallRecord) -> None:
        """Give a record that this process wrote to the callers that wait for it."""
        for (own, _), reader in list(self._readers.items()):
            if own == key:
                reader.seen(record)


class Reader:
    """Looks at one key for all callers that wait for it."""

    def __init__(
        self,
        shared: SharedWaits,
        cp: Any,
        holder: CallRecord,
        look: Look,
        stale_after: float | None,
        read_heartbeat: ReadHeartbeat | None,
    ) -> None:
        self._shared = shared
        self._cp = cp
        self._holder = holder
        self._look = look
        self._stale_after = stale_after
        self._read_heartbeat = read_heartbeat
        self._callers = 0
        self._waiting: dict[asyncio.Future[Answer], None] = {}
        self._outcome: asyncio.Future[CallRecord | None] = (
            asyncio.get_running_loop().create_future()
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the holder's call is over, so that callers join again."""
        return self._outcome.done()

    def enter(self) -> None:
        """Count a caller in; the first one starts the reader."""
        self._callers += 1

        if self._task is None:
            self._task = asyncio.create_task(self._read())

    def leave(self) -> bool:
        """Count a caller out; the last one ends the reader. Return whether it did."""
        self._callers -= 1

        if self._callers:
            return False

        assert self._task is not None
        self._end(None)
        self._task.cancel()
        return True

    async def wait(self, timeout: float | None) -> Answer:
        """Return the key's record once it has changed; ``None`` if it may be free.

        Returns a `StaleDetector` if the holder is stale: one of the callers gets it,
        and may end the holder's attempt. Raises ``TimeoutError``, and what a look
        raised.
        """
        if not self.is_over:
            future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            self._waiting[future] = None

            try:
                async with asyncio.timeout(timeout):
                    answer = await future
            finally:
                self._waiting.pop(future, None)

            if not self.is_over:
                return answer

        if (error := self._outcome.exception()) is not None:
            raise _copy_of(error)

        return self._outcome.result()

    def seen(self, record: CallRecord | None) -> None:
        """Wake the callers if the holder's call is over."""
        if (
            record is None
            or record.status != "issued"
            or record.erased
            or record.call.call_id != self._holder.call.call_id
        ):
            self._end(record)

    def _wake_one(self, answer: StaleDetector | None) -> bool:
        while self._waiting:
            future = next(iter(self._waiting))
            del self._waiting[future]

            if not future.done():
                future.set_result(answer)
                return True

        return False

    def _end(self, last: CallRecord | BaseException | None) -> None:
        if self.is_over:
            return

        if isinstance(last, BaseException):
            self._outcome.set_exception(last)
            self._outcome.exception()  # retrieved, so that asyncio does not log it
        else:
            self._outcome.set_result(last)

        while self._wake_one(None):
            pass

    async def _read(self) -> None:
        try:
            async with Wakeups(self._cp, self._holder.thread_id) as wakeups:
                stale = self._detector()
                longest = None if stale is None else stale.longest_pause
                pauses = backoff_pauses(longest=min(1.0, longest or 1.0))

                while True:
                    self.seen(await retry_unclear(self._look, retry_rejected=True))

                    if self.is_over:
                        return

                    if stale is not None and await self._is_stale(stale):
                        # A caller goes on with this detector. The next caller gets its
                        # turn after another full wait.
                        if self._wake_one(stale):
                            stale = self._detector()

                    recheck = self._shared.recheck
                    await wakeups.wait(next(pauses), min(longest or recheck, recheck))
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


def _copy_of(error: BaseException) -> BaseException:
    """Return the error for one caller; itself if its class cannot be copied."""
    try:
        own = copy(error)
    except Exception:
        return error

    own.__cause__ = error.__cause__
    return own
