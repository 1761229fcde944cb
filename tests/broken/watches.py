"""Stores whose watchers miss changes, wait for ever, or leave something behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from fnmatch import fnmatchcase
from typing import ClassVar

from tests.broken.crashes import Disk, DiskHarness
from tests.broken.reference import Reference, Watcher
from tests.broken.store import Broken, breaks, pause


class _Misses(Broken):
    """A store that does not count some changes."""

    missed: tuple[str, ...] = ()

    def _changed(self, thread_id: str, change: str) -> None:
        if change not in self.missed:
            super()._changed(thread_id, change)


@breaks("watch.yields-each-change")
class MissesClaims(_Misses):
    missed = ("claim",)


class _SeesAll(Watcher):
    def take(self, thread_id: str) -> str:
        self.seen = dict(self.handle._store.revisions)
        return thread_id


@breaks("watch.yields-each-change")
class YieldsOneOfSeveral(Broken):
    """Takes all changes so far as seen with each yield."""

    def _watcher(self, thread_ids: frozenset[str]) -> Watcher:
        return _SeesAll(self, thread_ids)


@breaks("watch.clock-set-back")
class WatchesTheClock(Broken):
    """Counts a change whose time is later than that of the change before."""

    times: ClassVar[dict[str, int]] = {}

    def _changed(self, thread_id: str, change: str) -> None:
        now = time.time_ns()

        if now > self.times.get(thread_id, 0):
            self.times[thread_id] = now
            super()._changed(thread_id, change)


@breaks("watch.yields-deletions")
class MissesDeletions(_Misses):
    missed = ("deletion",)


@breaks("watch.yields-restores")
class MissesRestores(_Misses):
    missed = ("restore",)


class _Watches(Broken):
    """A store with watchers of its own kind."""

    kind: type[Watcher] = Watcher

    def _watcher(self, thread_ids: frozenset[str]) -> Watcher:
        return self.kind(self, thread_ids)


class _OwnChanges(Watcher):
    def changed(self) -> list[str]:
        own = self.handle.__dict__.get("_own", set())
        return [one for one in super().changed() if one in own]


@breaks("watch.yields-changes-of-others")
class SeesItsOwnChanges(_Watches):
    kind = _OwnChanges

    def _changed(self, thread_id: str, change: str) -> None:
        self.__dict__.setdefault("_own", set()).add(thread_id)
        super()._changed(thread_id, change)


class _KnownThreads(Watcher):
    def changed(self) -> list[str]:
        found = super().changed()
        return found if self.thread_ids else [one for one in found if one in self.seen]


@breaks("watch.any-thread")
class WatchesKnownThreads(_Watches):
    kind = _KnownThreads


class _ListedThreads(Watcher):
    def changed(self) -> list[str]:
        found, listed = super().changed(), self.handle._store.threads
        return found if self.thread_ids else [one for one in found if one in listed]


@breaks("watch.any-thread")
class WatchesTheList(_Watches):
    """Without ids looks at the listed threads only, and so sees no deletion."""

    kind = _ListedThreads


class _Forgets(Watcher):
    """Takes what changes within 20 ms of a yield as seen."""

    async def __anext__(self) -> str:
        taken = await super().__anext__()
        self.loop.call_later(0.02, self.take, taken)
        self.quiet = True
        return taken

    def changed(self) -> list[str]:
        return [] if getattr(self, "quiet", False) else super().changed()

    def take(self, thread_id: str) -> str:
        self.quiet = False
        return super().take(thread_id)


@breaks("watch.shows-the-last-change", raises="ExceptionGroup")
class ForgetsWhatCameMeanwhile(_Watches):
    kind = _Forgets


@breaks("watch.many-watchers")
class OneWatcherForEachHandle(_Watches):
    def _watcher(self, thread_ids: frozenset[str]) -> Watcher:
        for older in self._watchers():
            older.thread_ids = frozenset(("replaced",))

        return super()._watcher(thread_ids)


@breaks("watch.many-watchers")
class OneWatcherForEachThread(Broken):
    def _watcher(self, thread_ids: frozenset[str]) -> Watcher:
        for older in self._watchers():
            if older.thread_ids & thread_ids:
                older.thread_ids = frozenset(("replaced",))

        return super()._watcher(thread_ids)


@breaks("watch.ends-with-the-block")
class EndsEveryWatchOfAThread(Broken):
    """Forgets a thread when a watch of it ends, though another one goes on."""

    @asynccontextmanager
    async def _watch(
        self, thread_ids: frozenset[str]
    ) -> AsyncIterator[AsyncIterator[str]]:
        async with super()._watch(thread_ids) as changes:
            yield changes

        for other in self._watchers():
            if other.thread_ids & thread_ids:
                other.thread_ids = frozenset(("forgotten",))


class _OnlyWoken(Watcher):
    async def __anext__(self) -> str:
        await self.woken.wait()
        self.woken.clear()
        return self.take(self.changed()[0])


@breaks("watch.polls")
class TrustsNotifications(_Watches):
    kind = _OnlyWoken


class _PollsTheRest(Watcher):
    def changed(self) -> list[str]:
        told = self.handle._notified
        unpolled = set[str]() if told else DeletesWithoutAMark.unmarked
        return [one for one in super().changed() if one not in unpolled]


@breaks("watch.polls")
class DeletesWithoutAMark(_Watches):
    """Notifies of a deletion, which its poll cannot see."""

    kind = _PollsTheRest
    unmarked: ClassVar[set[str]] = set()

    def _changed(self, thread_id: str, change: str) -> None:
        if change == "deletion":
            self.unmarked.add(thread_id)
        else:
            self.unmarked.discard(thread_id)

        super()._changed(thread_id, change)


class _ComparesVersions(Watcher):
    """Takes a change for one only if the version, extra or a call is another."""

    def mark(self, thread_id: str) -> object:
        store = self.handle._store
        thread = store.threads.get(thread_id)
        calls = [(call.call_id, call.status) for call in store.of_thread(thread_id)]
        return thread and (len(thread.bodies), dict(thread.extra)), calls

    def changed(self) -> list[str]:
        marks = self.__dict__["marks"]
        return [one for one in super().changed() if marks.get(one) != self.mark(one)]

    def take(self, thread_id: str) -> str:
        self.__dict__["marks"][thread_id] = self.mark(thread_id)
        return super().take(thread_id)


@breaks("watch.polls")
class WatchesVersions(Broken):
    """Cannot tell a thread that was deleted and begun again from the old one."""

    def _watcher(self, thread_ids: frozenset[str]) -> Watcher:
        watcher = _ComparesVersions(self, thread_ids)
        watched = thread_ids or self._store.threads
        watcher.__dict__["marks"] = {one: watcher.mark(one) for one in watched}
        return watcher


@breaks("watch.other-processes", harness=DiskHarness)
class WatchesThisProcess(Disk):
    _watch = Reference._watch


class _TakesFirst(Watcher):
    async def __anext__(self) -> str:
        taken = await super().__anext__()

        for _ in range(5):
            await pause()

        return taken


@breaks("watch.cancelled")
class LosesWhatACancelledWaitTook(_Watches):
    kind = _TakesFirst


class _Endless(Watcher):
    async def __anext__(self) -> str:
        if not (changed := self.changed()):
            await self.loop.create_future()

        return self.take(changed[0])


@breaks("watch.ends-with-the-block", "watch.close-ends-it", raises="TimeoutError")
class WaitsForEver(_Watches):
    kind = _Endless


@breaks("watch.leaves-nothing")
class LeavesAListener(Broken):
    def watch(
        self, *thread_ids: str
    ) -> AbstractAsyncContextManager[AsyncIterator[str]]:
        self._listener = asyncio.create_task(asyncio.sleep(3600))
        return super().watch(*thread_ids)


class _ByPattern(Watcher):
    def changed(self) -> list[str]:
        revisions = self.handle._store.revisions
        return [
            one
            for one in revisions
            if any(fnmatchcase(one, pattern) for pattern in self.thread_ids)
            and revisions[one] != self.seen.get(one, 0)
        ]


@breaks("watch.ids-are-exact")
class WatchesByPattern(_Watches):
    kind = _ByPattern


@breaks("watch.invalid-ids")
class TakesAnyId(Broken):
    def watch(
        self, *thread_ids: str
    ) -> AbstractAsyncContextManager[AsyncIterator[str]]:
        return super().watch(
            *(one for one in thread_ids if isinstance(one, str) and one)
        )
