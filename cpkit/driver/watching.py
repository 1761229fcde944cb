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
from functools import partial
from typing import Any

from cpkit.driver.backoff import backoff_pauses
from cpkit.driver.group_commit import Observer, Outcomes
from cpkit.driver.lifecycle import Lifecycle
from cpkit.driver.markers import Markers
from cpkit.driver.notices import Announcing
from cpkit.driver.store import AnnouncesChanges, DriverOptions, ListensForChanges, Store
from cpkit.driver.writes import StoreFailure, Write, may_have_changed
from cpkit.errors import BackendUnavailable

__all__ = ["Watching"]

logger = logging.getLogger(__name__)

_NOT_READ = object()

# Seconds for which the listener and the scans continue after the last watcher left:
# the next watch often follows soon, and a new connection costs more than an idle one.
_LINGER = 5.0

# A scan is followed by a rest of nine times as long, of at most so many seconds: after
# one of all threads, and of named threads. For many named threads it is _PER_THREAD for
# each of them. A scan of few is slow only on a busy machine, and its watchers wait.
_LONGEST_REST = 60.0
_LONGEST_NAMED_REST, _PER_THREAD = 0.02, 0.0002


class Watcher:
    """The iterator of one ``watch``, over the ids of threads that changed.

    If a thread changes several times between two steps, its id is yielded once.
    """

    def __init__(self, thread_ids: frozenset[str], lifecycle: Lifecycle) -> None:
        self.thread_ids = thread_ids
        self.changed: dict[str, None] = {}
        self.error: Exception | None = None
        """Raised at the next step, once."""
        self.has_ended = False
        self.woken = asyncio.Event()
        self._lifecycle = lifecycle

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        while not self.has_ended:
            self._lifecycle.check()

            if self.error is not None:
                error, self.error = self.error, None
                raise error

            if self.changed:
                # No await follows, so a cancelled caller cannot lose the id.
                thread_id = next(iter(self.changed))
                del self.changed[thread_id]
                return thread_id

            self.woken.clear()
            await self.woken.wait()

        raise StopAsyncIteration


class Watching:
    """All watchers of a handle.

    ``read`` returns the markers of these threads, or of all for ``None``. While a
    thread is watched, one of the ``observers`` of commits notes which threads they
    changed. One task looks at the threads of which a hint came. Two others scan: the
    threads that are watched by name, and all if one watch is without ids.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        store: Store,
        read: Callable[[Collection[str] | None], Awaitable[Markers]],
        observers: list[Observer],
        options: DriverOptions,
    ) -> None:
        self._lifecycle = lifecycle
        self._read = read
        self._observers = observers
        self._poll = options.poll
        self._by_id: dict[str, set[Watcher]] = {}
        self._of_all: set[Watcher] = set()
        self._markers: dict[str, Hashable] = {}
        # If true, a thread without an entry in ``_markers`` does not exist.
        self._knows_all = False
        self._hints: set[str] = set()
        self._hinted = asyncio.Event()
        self._scans_wanted = asyncio.Event(), asyncio.Event()
        self._jobs: list[Callable[[], Any]] = [
            self._follow_hints,
            partial(self._scan, self._scans_wanted[0], of_all=False),
            partial(self._scan, self._scans_wanted[1], of_all=True),
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._linger: asyncio.TimerHandle | None = None
        self.on_wake: list[Callable[[float], None]] = []
        """Each is called with the seconds from a hint to the wake-up that it led to."""
        self._hinted_at: float | None = None
        lifecycle.on_close.append(self._close)

        if options.notify and isinstance(store, ListensForChanges):
            self._jobs.append(partial(self._listen, store))

        if options.notify and isinstance(store, AnnouncesChanges):
            observers.append(Announcing(lifecycle, store).committed)

    @asynccontextmanager
    async def watch(self, thread_ids: frozenset[str]) -> AsyncIterator[Watcher]:
        """Register a watcher, and read the markers before the block begins."""
        self._lifecycle.check()
        watcher = Watcher(thread_ids, self._lifecycle)

        for thread_id in thread_ids:
            self._by_id.setdefault(thread_id, set()).add(watcher)

        if not thread_ids:
            self._of_all.add(watcher)

        if self._linger is not None:
            self._linger.cancel()

        if not self._tasks:
            spawn = self._lifecycle.spawn_in_background
            self._observers.append(self._committed)
            self._tasks = [spawn(job()) for job in self._jobs]

        try:
            asked = thread_ids or None
            self._compare(asked, await self._read(asked))
            yield watcher
        finally:
            watcher.has_ended = True
            watcher.woken.set()
            self._unregister(watcher)

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

        if not self._by_id and not self._of_all:
            loop = asyncio.get_running_loop()
            self._linger = loop.call_later(_LINGER, self._stop)

    def _stop(self) -> None:
        """End the tasks: no watcher came for a while, or the handle closes."""
        if self._tasks:
            self._observers.remove(self._committed)

            for task in self._tasks:
                task.cancel()

            self._tasks.clear()

    def _close(self) -> None:
        """Stop, because the handle closes; the iterators raise ``Closed``."""
        self._stop()

        for watcher in self._of_all.union(*self._by_id.values()):
            watcher.woken.set()

    # Hints

    def _committed(self, writes: Sequence[Write], outcomes: Outcomes) -> None:
        """Look at the threads that a commit of this handle changed."""
        for write, outcome in zip(writes, outcomes, strict=True):
            if may_have_changed(write, outcome):
                self._heard(write.thread_id)

    def _heard(self, thread_id: str | None) -> None:
        """Note a hint for one thread, or for all of them (``None``)."""
        if thread_id is None:
            for wanted in self._scans_wanted:
                wanted.set()
        elif self._watches(thread_id):
            self._hints.add(thread_id)
            self._hinted.set()
        else:
            return

        self._hinted_at = self._hinted_at or time.monotonic()

    async def _listen(self, store: ListensForChanges) -> None:
        name, clock = self._lifecycle.name, asyncio.get_running_loop().time
        pauses = backoff_pauses(0.05, 5.0)

        while True:
            began = clock()

            try:
                await store.listen(self._heard)
                return
            except StoreFailure as exc:
                logger.info("%s: listening again: %s", name, exc)
            except Exception:
                logger.warning("%s: listening again", name, exc_info=True)

            if clock() - began > 5.0:
                pauses = backoff_pauses(0.05, 5.0)  # it listened for a while

            await asyncio.sleep(next(pauses))

    async def _follow_hints(self) -> None:
        while True:
            await self._hinted.wait()
            self._hinted.clear()
            hints, self._hints = self._hints, set()
            await self._look({one for one in hints if self._watches(one)})

    # Scans

    async def _scan(self, wanted: asyncio.Event, *, of_all: bool) -> None:
        """Look at watched threads in each poll interval, or if hints may be lost."""
        clock = asyncio.get_running_loop().time
        durations = 0.0, 0.0
        asked: set[str] | None

        while True:
            began = clock()

            if of_all:
                asked, longest = None if self._of_all else set(), _LONGEST_REST
            else:
                asked = {*self._by_id}
                longest = max(_LONGEST_NAMED_REST, len(asked) * _PER_THREAD)

            if asked != set() and await self._look(asked):
                durations = durations[1], clock() - began

            # Of the last two scans the faster one counts: a server may have stalled.
            await asyncio.sleep(min(9 * min(durations), longest))

            with suppress(TimeoutError):
                async with asyncio.timeout_at(began + self._poll):
                    await wanted.wait()

            wanted.clear()

    async def _look(self, asked: set[str] | None) -> bool:
        """Read and compare markers; return whether the store answered.

        After an error that a retry would not fix, wake the watchers of the threads:
        their own read raises the error. A watcher of all threads has no id to read, so
        its iterator raises it.
        """
        hinted_at, self._hinted_at = self._hinted_at, None

        if asked == set():
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
                watcher.error = copy(exc)  # a raised error gathers tracebacks
                watcher.woken.set()

            return True

        if has_changed and hinted_at is not None:
            for tell in self.on_wake:
                tell(time.monotonic() - hinted_at)

        return True

    def _watches(self, thread_id: str) -> bool:
        return bool(self._of_all) or thread_id in self._by_id

    def _compare(self, asked: Collection[str] | None, found: Markers) -> bool:
        """Keep the new markers, and wake the watchers of the threads that changed."""
        has_changed, knows_all = False, self._knows_all

        if asked is None:
            asked = {*self._markers, *found}
            self._knows_all = bool(self._of_all)

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
            watcher.changed[thread_id] = None
            watcher.woken.set()
