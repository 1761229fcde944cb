"""Trims that remove too little or too much, or lose count of positions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, BinaryIO

from cpkit import CheckpointData, ThreadDump, VersionConflict
from tests.broken.crashes import Disk, DiskHarness
from tests.broken.powerloss import Synced
from tests.broken.reference import Reference, Thread
from tests.broken.store import AtOnce, Broken, breaks, pause


@breaks("trim.removes-below")
class KeepsTheOneBelow(Broken):
    """Takes the position for the last one to remove."""

    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        return await super().trim(thread_id, before + 1, **options)


@breaks("trim.removes-below")
class CutsBetweenAppends(Broken):
    """Keeps the messages of one append in one row, and removes whole rows only."""

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        version = await super().append(thread_id, messages, **options)
        self.__dict__.setdefault("_ends", {}).setdefault(thread_id, []).append(version)
        return version

    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        ends = self.__dict__.get("_ends", {}).get(thread_id, ())
        whole = max((end for end in ends if end <= before), default=0)
        return await super().trim(thread_id, whole, **options)


@breaks("trim.again-and-again")
class CountsFromWhatIsLeft(Broken):
    """Removes as many messages as the position says, from what is left."""

    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        loaded = await self.load(thread_id)
        first = 0 if loaded is None else loaded.first
        return await super().trim(thread_id, first + before, **options)


@breaks("trim.again-and-again")
class TellsThePosition(Broken):
    """Returns where the thread begins, in place of how many messages went."""

    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        await super().trim(thread_id, before, **options)
        loaded = await self.load(thread_id)
        return 0 if loaded is None else loaded.first


@breaks("trim.appends-go-on")
class CountsRows(Broken):
    """Takes the number of messages that are left for the version, in an append."""

    async def append(
        self,
        thread_id: str,
        messages: Any,
        *,
        expected_version: int | None = None,
        **options: Any,
    ) -> int:
        thread = self._store.threads.get(thread_id) or Thread(0, 0)

        if expected_version == len(thread.bodies):
            expected_version = thread.version

        return await super().append(
            thread_id, messages, expected_version=expected_version, **options
        )


@breaks("trim.beyond-the-version")
class GoesBeyondTheVersion(Broken):
    """Lets a thread begin beyond its version."""

    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        removed = await super().trim(thread_id, before, **options)

        if thread := self._store.threads.get(thread_id):
            thread.first = max(thread.first, before)

        return removed


@breaks("trim.beyond-the-version")
class WrapsAPosition(Broken):
    """Stores a position in 32 bits."""

    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        return await super().trim(thread_id, before % 2**32, **options)


@breaks("trim.is-gone-for-others")
class HidesInItsHandle(Broken):
    """Leaves the messages in the store, and does not show them in this handle."""

    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        await super().trim(thread_id, 0, **options)
        hidden = self.__dict__.setdefault("_hidden", {})
        removed: int = max(0, before - hidden.get(thread_id, 0))
        hidden[thread_id] = max(before, hidden.get(thread_id, 0))
        return removed

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)
        first = self.__dict__.get("_hidden", {}).get(thread_id, 0)

        if loaded is None or not first:
            return loaded

        return replace(loaded, messages=loaded.messages[first:], first=first)


@breaks("trim.is-gone-for-others")
class LoadsFromACache(Broken):
    """Answers a load from what this handle loaded before, while the version stays."""

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)
        cache = self.__dict__.setdefault("_cache", {})
        known = cache.get(thread_id)

        if known is None or loaded is None or known.version != loaded.version:
            cache[thread_id] = known = loaded

        return None if known is None else replace(known, messages=[*known.messages])


@breaks("trim.keeps-the-rest")
class ForgetsExtra(Broken):
    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        removed = await super().trim(thread_id, before, **options)

        if removed:
            self._store.threads[thread_id].extra.clear()

        return removed


@breaks("trim.keeps-the-rest")
class TakesATrimForAWrite(Broken):
    """Moves updated_at, so that a policy sees its own trim as a write."""

    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        removed = await super().trim(thread_id, before, **options)

        if removed:
            self._store.threads[thread_id].updated_at += 1

        return removed


@breaks("trim.nothing-to-remove")
class CreatesWhatItTrims(Broken):
    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        self._store.touch(thread_id)
        return await super().trim(thread_id, before, **options)


@breaks("trim.leaves-the-neighbours")
class TrimsByPrefix(Broken):
    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        for thread in list(self._store.threads):
            if thread.startswith(thread_id) and thread != thread_id:
                await super().trim(thread, before, **options)

        return await super().trim(thread_id, before, **options)


@breaks("trim.ranges")
class SlicesWhatIsLeft(Broken):
    """Applies a range to the messages that are left, and not to positions."""

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[Any]:
        loaded = await self.load(thread_id)
        return [] if loaded is None else loaded.messages[start:stop]


@breaks("trim.ranges")
class BeginsWhereAsked(Broken):
    """Says that a range begins where it was asked for."""

    async def load_range(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> CheckpointData[Any] | None:
        loaded = await super().load_range(thread_id, start, stop)

        if loaded is None:
            return None

        asked, *_ = slice(start, stop).indices(loaded.version)
        return replace(loaded, first=asked)


@breaks("trim.expected-version")
class IgnoresTheFenceOfATrim(Broken):
    async def trim(
        self, thread_id: str, before: int, *, expected_version: int | None = None
    ) -> int:
        await super().trim(thread_id, 0, expected_version=None)
        return await super().trim(thread_id, before)


@breaks("trim.expected-version")
class ComparesOnlyIfItRemoves(Broken):
    async def trim(
        self, thread_id: str, before: int, *, expected_version: int | None = None
    ) -> int:
        loaded = await self.load(thread_id)

        if loaded is None or before <= loaded.first:
            return 0

        return await super().trim(thread_id, before, expected_version=expected_version)


@breaks("trim.arguments")
class TrimsFromTheEnd(Broken):
    """Takes a negative position as a slice does."""

    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        loaded = await self.load(thread_id)

        if before < 0 and loaded is not None:
            before += loaded.version

        return await super().trim(thread_id, max(0, before), **options)


@breaks("trim.deleted-begins-at-0")
class RemembersWhereItBegan(Broken):
    """Keeps the first position of a deleted thread for its next one."""

    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        removed = await super().trim(thread_id, before, **options)

        if thread := self._store.threads.get(thread_id):
            self.__dict__.setdefault("_first", {})[thread_id] = thread.first

        return removed

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        is_new = thread_id not in self._store.threads
        version = await super().append(thread_id, messages, **options)

        if is_new:
            first = self.__dict__.get("_first", {}).get(thread_id, 0)
            self._store.threads[thread_id].first = first

        return version


@breaks("trim.moves")
class DumpsWithoutAPosition(Broken):
    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        dump = await super().dump_thread(thread_id)
        return None if dump is None else replace(dump, first=0)


@breaks("trim.moves")
class RestoresAtZero(Broken):
    async def restore_thread(self, dump: ThreadDump) -> None:
        if dump.messages:
            dump = replace(dump, first=0)

        await super().restore_thread(dump)


@breaks("trim.invalid-dumps")
class TakesAnyPosition(Broken):
    async def restore_thread(self, dump: ThreadDump) -> None:
        first: Any = dump.first
        await super().restore_thread(replace(dump, first=abs(int(first or 0)) % 99))


@breaks("concurrent.trims-count-once")
class CountsThenTrims(Broken):
    """Counts what it will remove, and removes it in a second step."""

    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        thread = self._store.threads.get(thread_id) or Thread(0, 0)
        count = max(0, min(before, thread.version) - thread.first)
        await pause()
        await super().trim(thread_id, before, **options)
        return count


@breaks("concurrent.trims-count-once")
class MovesThePositionLater(Broken):
    """Removes the messages, and moves the position of the first one afterwards."""

    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        removed = await super().trim(thread_id, before, **options)

        if removed:
            self._store.threads[thread_id].first -= removed
            await pause()
            self._store.threads[thread_id].first += removed

        return removed


@breaks("linearizable.trimmed-threads")
class ChecksThenTrims(AtOnce):
    """Compares the version in a step of its own."""

    async def trim(
        self, thread_id: str, before: int, *, expected_version: int | None = None
    ) -> int:
        thread = self._store.threads.get(thread_id) or Thread(0, 0)

        if expected_version not in (None, thread.version):
            raise VersionConflict(thread_id, expected_version or 0, thread.version)

        for _ in range(3):
            await pause()

        return await super().trim(thread_id, before)


@breaks("linearizable.trimmed-in-processes", harness=DiskHarness)
class TrimsForItself(Disk):
    """Does not tell other processes of a trim."""

    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        async with self._turn():
            return await Reference.trim(self, thread_id, before, **options)


@breaks("kill.trims-survive", harness=DiskHarness)
class WritesTrimsLater(Disk):
    """Acknowledges each trim, and writes four of them together."""

    _later: bytes = b""

    def _write(self, log: BinaryIO, values: list[Any]) -> None:
        if values[0] == "trim":
            self._later += json.dumps([self._store.now(), *values]).encode() + b"\n"

            if self._later.count(b"\n") < 4:
                return

            log.write(self._later)
            log.flush()
            self._read += len(self._later)
            self._later = b""
        else:
            super()._write(log, values)


@breaks("powerloss.acknowledged-survives", harness=DiskHarness)
class SyncsNoTrim(Synced):
    """Acknowledges a trim that is not on the disk yet."""

    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        sync, self._sync = self._sync, lambda log: log.flush()  # type: ignore[method-assign]  # for one line

        try:
            return await super().trim(thread_id, before, **options)
        finally:
            self._sync = sync  # type: ignore[method-assign]  # as it was
