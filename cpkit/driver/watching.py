"""Watching: the watchers of one handle share one listener and one poll.

A thread changed if its *marker* changed: a value that the store computes, and that
differs after each change. A notification is only a hint to read a marker now. So a
lost, delayed or repeated notification costs time, and never a change. Without a hint
the markers of all watched threads are read once in each poll interval.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from copy import copy
from typing import Any

from cpkit.driver.announcing import Announcing
from cpkit.driver.backoff import Backoff
from cpkit.driver.group_commit import Committed
from cpkit.driver.ids import check_id
from cpkit.driver.lifecycle import Lifecycle
from cpkit.driver.markers import Markers
from cpkit.driver.store import AnnouncesChanges, ListensForChanges, Store
from cpkit.driver.writes import StoreFailure, Write, may_have_changed
from cpkit.errors import BackendUnavailable, InvalidId

__all__ = ["Watching"]

logger = logging.getLogger(__name__)

_NOT_READ = object()

# Seconds for which the listener and the poll continue after the last watcher left:
# the next watch often follows soon, and a new connection costs more than an idle one.
_LINGER = 5.0

# The longest rest after a scan, in seconds: of all threads, and of named threads. For
# many named threads it is _REST_PER_THREAD for each of them. A scan of few threads is
# slow only on a busy machine, and a long rest would delay their watchers.
_LONGEST_REST = 60.0
_LONGEST_NAMED_REST, _REST_PER_THREAD = 0.02, 0.0002


class _Scan:
    """Decides when to read markers again: those of the named threads, or all."""

    def __init__(self, interval: float) -> None:
        self.is_wanted = False
        """Whether notifications may be lost: then do not wait for the interval."""
        self._interval = interval
        self._began = 0.0
        self._rests_until = 0.0
        self._last_durations = 0.0, 0.0

    @property
    def due(self) -> float:
        if self.is_wanted:
            return self._rests_until

        return max(self._rests_until, self._began + self._interval)

    def begin(self, now: float) -> None:
        self.is_wanted = False
        self._began = now

    def end(self, now: float, longest_rest: float) -> None:
        """Rest for nine times as long as the scan took, but not for too long.

        The faster of the last two scans counts, so that one stall of the server does
        not slow the poll. A scan without an answer does not count at all.
        """
        self._last_durations = self._last_durations[1], now - self._began
        self._rests_until = now + min(9 * min(self._last_durations), longest_rest)


class Watcher:
    """The iterator of one ``watch``, over the ids of threads that changed.

    If a thread changes several times between two steps, its id is yielded once.
    """

    def __init__(self, thread_ids: frozenset[str], lifecycle: Lifecycle) -> None:
        self.thread_ids = thread_ids
        self.has_ended = False
        self._lifecycle = lifecycle
        self._changed: dict[str, None] = {}
        self._error: Exception | None = None
        self._woken = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        while True:
            if self.has_ended:
                raise StopAsyncIteration

            self._lifecycle.check()

            if self._error is not None:
                error, self._error = self._error, None
                raise error

            if self._changed:
                # No await follows, so a cancelled caller cannot lose the id.
                thread_id = next(iter(self._changed))
                del self._changed[thread_id]
                return thread_id

            self._woken.clear()
            await self._woken.wait()

    def add(self, thread_id: str) -> None:
        """Note that the thread changed, and wake the iterator."""
        self._changed[thread_id] = None
        self._woken.set()

    def fail(self, error: Exception) -> None:
        """Raise the error at the iterator's next step, once."""
        self._error = error
        self._woken.set()

    def wake(self) -> None:
        """Wake the iterator after it or the handle was closed."""
        self._woken.set()


class Watching:
    """All watchers of a handle.

    ``read`` returns the markers of these threads, or of all for ``None``. The handle
    calls `changed_by` after each commit.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        store: Store,
        read: Callable[[Collection[str] | None], Awaitable[Markers]],
        *,
        poll: float,
        notify: bool,
    ) -> None:
        self._lifecycle = lifecycle
        self._read = read
        self._scan_of_named, self._scan_of_all = _Scan(poll), _Scan(poll)
        self._store: Any = store
        self._listens = notify and isinstance(store, ListensForChanges)
        self._announcing: Announcing | None = None

        if notify and isinstance(store, AnnouncesChanges):
            self._announcing = Announcing(lifecycle, store)

        self._by_id: dict[str, set[Watcher]] = {}
        self._of_all: set[Watcher] = set()
        self._markers: dict[str, Hashable] = {}
        # If true, a thread without an entry in ``_markers`` does not exist.
        self._knows_all = False
        self._hints: set[str] = set()
        self._hinted = asyncio.Event()
        self.on_wake: list[Callable[[float], None]] = []
        """Each is called with the seconds from a hint to the wake-up that it led to."""
        self._hinted_at: float | None = None
        self._tasks: list[asyncio.Task[None]] = []
        # A scan of all threads that is under way.
        self._scanning: asyncio.Task[None] | None = None
        self._stop_timer: asyncio.TimerHandle | None = None
        lifecycle.on_close(self._close)

    @asynccontextmanager
    async def watch(
        self, thread_ids: frozenset[str]
    ) -> AsyncIterator[AsyncIterator[str]]:
        """Register a watcher, and read the markers before the block begins."""
        self._lifecycle.check()
        watcher = Watcher(thread_ids, self._lifecycle)
        self._register(watcher)

        try:
            asked = thread_ids or None
            self._compare(asked, await self._read(asked))
            yield watcher
        finally:
            watcher.has_ended = True
            watcher.wake()
            self._unregister(watcher)

    def changed_by(self, batch: Sequence[Write], outcomes: Sequence[Committed]) -> None:
        """Tell watchers of this handle, and listeners elsewhere, of a commit."""
        if self._announcing is None and not self._is_watched:
            return

        for write, outcome in zip(batch, outcomes, strict=True):
            if may_have_changed(write, outcome):
                self._heard(write.thread_id)

                if self._announcing is not None:
                    self._announcing.add(write.thread_id)

    @property
    def _is_watched(self) -> bool:
        return bool(self._by_id or self._of_all)

    # Watchers

    def _register(self, watcher: Watcher) -> None:
        for thread_id in watcher.thread_ids:
            self._by_id.setdefault(thread_id, set()).add(watcher)

        if not watcher.thread_ids:
            self._of_all.add(watcher)

        if self._stop_timer is not None:
            self._stop_timer.cancel()
            self._stop_timer = None

        if not self._tasks:
            self._tasks.append(self._lifecycle.spawn_in_background(self._poll()))

            if self._listens:
                self._tasks.append(self._lifecycle.spawn_in_background(self._listen()))

    def _unregister(self, watcher: Watcher) -> None:
        for thread_id in watcher.thread_ids:
            self._by_id[thread_id].discard(watcher)

            if not self._by_id[thread_id]:
                del self._by_id[thread_id]

                if not self._knows_all:
                    self._markers.pop(thread_id, None)

        self._of_all.discard(watcher)

        if self._knows_all and not self._of_all:
            self._knows_all = False
            self._markers = {one: self._markers.get(one) for one in self._by_id}

        if not self._is_watched and self._tasks:
            loop = asyncio.get_running_loop()
            self._stop_timer = loop.call_later(_LINGER, self._stop)

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()

        if self._scanning is not None:
            self._scanning.cancel()
            self._scanning = None

        self._tasks.clear()
        self._stop_timer = None

    def _close(self) -> None:
        """Stop, because the handle closes; the iterators raise ``Closed``."""
        if self._stop_timer is not None:
            self._stop_timer.cancel()

        self._stop()

        for watcher in {
            *self._of_all,
            *(w for some in self._by_id.values() for w in some),
        }:
            watcher.wake()

    # Hints, and the poll

    def _heard(self, thread_id: str | None) -> None:
        """Note a hint for one thread, or for all of them (``None``)."""
        if thread_id is None:
            self._scan_of_named.is_wanted = self._scan_of_all.is_wanted = True
        elif thread_id in self._by_id or self._of_all:
            self._hints.add(thread_id)
        else:
            return

        if self.on_wake and self._hinted_at is None:
            self._hinted_at = time.monotonic()

        self._hinted.set()

    async def _listen(self) -> None:
        clock = asyncio.get_running_loop().time
        backoff = Backoff(first=0.05, longest=5.0)
        pauses = backoff.pauses()

        while True:
            began = clock()

            try:
                await self._store.listen(self._heard_from_store)
                return
            except StoreFailure as exc:
                logger.info("%s: listening again: %s", self._lifecycle.name, exc)
            except Exception:
                logger.warning(
                    "%s: listening again", self._lifecycle.name, exc_info=True
                )

            if clock() - began > backoff.longest:
                pauses = backoff.pauses()  # it listened for a while: begin again

            await asyncio.sleep(next(pauses))

    def _heard_from_store(self, thread_id: str | None) -> None:
        if thread_id is None:
            self._heard(None)
            return

        with suppress(InvalidId):  # another program sent it
            self._heard(check_id("thread_id", thread_id))

    async def _poll(self) -> None:
        clock = asyncio.get_running_loop().time
        self._scan_of_named.begin(clock())
        self._scan_of_all.begin(clock())

        while True:
            scan = self._next_scan()
            began = clock()

            if not self._hints and began < scan.due:
                self._hinted.clear()

                with suppress(TimeoutError):
                    async with asyncio.timeout_at(scan.due):
                        await self._hinted.wait()

                continue

            is_scan = began >= scan.due

            if is_scan and scan is self._scan_of_all:
                # In a task of its own, so that the named threads do not wait for it.
                scan.begin(began)
                work = self._scan_all(None if self._hints else self._take_hinted_at())
                self._scanning = self._lifecycle.spawn_in_background(work)
                continue

            hints, self._hints = self._hints, set()
            asked = {one for one in hints if self._watches(one)}

            if is_scan:
                scan.begin(began)
                asked = {*hints, *self._by_id}

            # A hint for all threads, during a scan of them, is for the next such scan.
            is_for_all = self._scanning is not None and not asked
            hinted_at = None if is_for_all else self._take_hinted_at()
            has_answered = await self._look(asked, hinted_at)

            if is_scan and has_answered:
                named_rest = len(self._by_id) * _REST_PER_THREAD
                scan.end(clock(), max(_LONGEST_NAMED_REST, named_rest))

    async def _scan_all(self, hinted_at: float | None) -> None:
        try:
            if await self._look(None, hinted_at):
                self._scan_of_all.end(asyncio.get_running_loop().time(), _LONGEST_REST)
        finally:
            if self._scanning is asyncio.current_task():
                self._scanning = None
                self._hinted.set()  # `_poll` waits for the next such scan, too

    def _next_scan(self) -> _Scan:
        can_scan_all = self._of_all and self._scanning is None

        if can_scan_all and self._scan_of_all.due <= self._scan_of_named.due:
            return self._scan_of_all

        return self._scan_of_named

    def _take_hinted_at(self) -> float | None:
        hinted_at, self._hinted_at = self._hinted_at, None
        return hinted_at

    async def _look(self, asked: set[str] | None, hinted_at: float | None) -> bool:
        """Read and compare markers; return whether the store answered.

        After an error that a retry would not fix, wake the watchers of the threads:
        their own read raises the error. A watcher of all threads has no id to read, so
        its iterator raises it. ``hinted_at`` is when the hint came that led here.
        """
        if asked is not None and not asked:
            return True

        try:
            has_changed = self._compare(asked, await self._read(asked))
        except Exception as exc:
            if isinstance(exc, BackendUnavailable) and not exc.rejected:
                return False  # the next scan finds what changed

            logger.warning("%s: watching failed: %s", self._lifecycle.name, exc)

            for thread_id in self._by_id if asked is None else asked:
                self._notify(thread_id)

            for watcher in self._of_all:
                watcher.fail(copy(exc))  # a raised error gathers tracebacks

            return True

        if has_changed and hinted_at is not None:
            for tell in self.on_wake:
                tell(time.monotonic() - hinted_at)

        return True

    def _watches(self, thread_id: str) -> bool:
        return bool(self._of_all) or thread_id in self._by_id

    def _compare(self, asked: Collection[str] | None, found: Markers) -> bool:
        """Keep the new markers, and wake the watchers of the threads that changed."""
        has_changed = False

        if asked is None:
            asked = {*self._markers, *found}
            knows_all, self._knows_all = self._knows_all, bool(self._of_all)
        else:
            knows_all = self._knows_all

        for thread_id in asked:
            marker = found.get(thread_id)
            known = self._markers.get(thread_id, None if knows_all else _NOT_READ)

            if marker is None and thread_id not in self._by_id:
                self._markers.pop(thread_id, None)
            elif self._watches(thread_id):
                self._markers[thread_id] = marker

            if known is not _NOT_READ and known != marker:
                has_changed = True
                self._notify(thread_id)

        return has_changed

    def _notify(self, thread_id: str) -> None:
        for watcher in (*self._by_id.get(thread_id, ()), *self._of_all):
            watcher.add(thread_id)
