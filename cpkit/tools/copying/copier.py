"""Copy one store into another, thread by thread, and compare every thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Protocol

from cpkit.errors import (
    CorruptThread,
    InvalidId,
    KeyMissing,
    KeyTaken,
    PayloadTooLarge,
    SerializationError,
    VersionConflict,
)
from cpkit.keyring import HASHED
from cpkit.protocol import ErasesThreads, MovesThreads
from cpkit.records import ThreadDump, ThreadInfo
from cpkit.tools.copying.compare import find_conflict, is_same
from cpkit.tools.copying.exports import Source
from cpkit.tools.copying.report import CopyReport, Problem
from cpkit.tools.paging import gather_limited, thread_pages

__all__ = ["Destination", "copy_store"]

# Errors of one thread. The copy goes on after them; any other error ends it.
_OF_A_THREAD = (
    CorruptThread,
    InvalidId,
    KeyMissing,
    PayloadTooLarge,
    SerializationError,
)

# Threads that are copied at the same time have at most this many messages together,
# unless a single thread has more.
_MAX_MESSAGES = 2_000


class Destination(Source, MovesThreads, ErasesThreads, Protocol):
    """What can be copied into."""


async def copy_store(
    source: Source,
    destination: Destination,
    *,
    update: bool = False,
    on_thread: Callable[[], None] | None = None,
) -> CopyReport:
    """Copy every thread exactly, deleted threads that keep their keys included.

    Each thread is created in one atomic step and compared afterwards. So an interrupted
    copy is completed by another one, and two copies at once do no harm. A thread that
    exists in the destination is compared and not changed; the report names it if it
    differs.

    With ``update`` a thread is replaced if the destination has an earlier state of it:
    it is deleted there and created again. Values of extra are then those of the source.
    The destination must not be in use meanwhile: a write between the two steps is lost.

    About eight threads are in memory at a time. A problem of one thread is in the
    report; what the stores raise about themselves ends the copy.
    """
    return await _Copier(source, destination, update).run(on_thread)


class _Copier:
    def __init__(self, source: Source, destination: Destination, update: bool) -> None:
        self._from = source
        self._to = destination
        self._update = update
        self._blocked: list[str] = []
        self._report = CopyReport()

    async def run(self, on_thread: Callable[[], None] | None) -> CopyReport:
        report = self._report

        async def copy_one(info: ThreadInfo) -> None:
            report.threads += 1

            try:
                await self._copy_thread(info.thread_id)
            except KeyTaken:
                self._blocked.append(info.thread_id)

            if on_thread is not None:
                on_thread()

        async for page in thread_pages(self._from, erased=True):
            for group in _groups(page):
                await gather_limited(copy_one, group)

        # An update of another thread may have freed the key.
        for thread_id in sorted(self._blocked):
            try:
                await self._copy_thread(thread_id)
            except KeyTaken as exc:
                report.conflicts.append(Problem(thread_id, str(exc)))

        report.moved = await self._moved()
        return report

    async def _copy_thread(self, thread_id: str) -> None:
        try:
            wanted = await self._from.dump_thread(thread_id)

            if wanted is None:  # it was deleted since it was listed
                return

            # The source was opened without its keyring, and has erased calls alone:
            # the destination would take what stands for a key as the key.
            if any(one.call.idempotency_key.startswith(HASHED) for one in wanted.calls):
                reason = "its keys are hashed: open the source with its keyring"
                self._report.failures.append(Problem(thread_id, reason))
                return

            await self._write_and_compare(wanted)
        except _OF_A_THREAD as exc:
            self._report.failures.append(Problem(thread_id, str(exc)))

    async def _write_and_compare(self, wanted: ThreadDump) -> None:
        found = await self._to.dump_thread(wanted.thread_id)
        report = self._report

        if found is None:
            if is_written := await self._restore(wanted):
                report.copied += 1
                report.messages += len(wanted.messages)
                report.calls += len(wanted.calls)

            found = await self._to.dump_thread(wanted.thread_id)
        elif (
            is_written := self._update
            and not is_same(found, wanted)
            and find_conflict(found, wanted) is None
        ):
            await self._replace(found, wanted)
            report.updated += 1
            trimmed = wanted.first - found.first
            report.messages += trimmed + len(wanted.messages) - len(found.messages)
            report.calls += len(wanted.calls) - len(found.calls)
            found = await self._to.dump_thread(wanted.thread_id)

        if found is not None and is_same(found, wanted):
            report.checked += 1
            report.already += not is_written
            return

        reason = (
            "it was deleted in the destination while the copy ran"
            if found is None
            else find_conflict(found, wanted)
        )

        if reason is None:
            report.changed.append(wanted.thread_id)
        else:
            report.conflicts.append(Problem(wanted.thread_id, reason))

    async def _restore(self, dump: ThreadDump) -> bool:
        """Create the thread; return whether another writer had not created it."""
        try:
            await self._to.restore_thread(dump)
        except VersionConflict:
            return False
        except (TypeError, ValueError) as exc:  # an export that a person edited
            raise CorruptThread(dump.thread_id, "its dump", str(exc)) from exc

        return True

    async def _replace(self, found: ThreadDump, wanted: ThreadDump) -> None:
        """Replace an earlier state. A copy that is killed in between is run again."""
        await self._to.delete_thread(wanted.thread_id, forget_keys=True)

        try:
            await self._restore(wanted)
        except (KeyTaken, *_OF_A_THREAD):
            with suppress(KeyTaken):  # by another thread of this copy
                await self._restore(found)

            raise

    async def _moved(self) -> list[str]:
        """Return the threads of the source that changed after they were copied.

        Compares both lists: exact copies have the versions and times of the source.
        """
        report = self._report
        known = {one.thread_id for one in (*report.conflicts, *report.failures)}
        known.update(report.changed)
        moved = []
        copies = _every_thread(self._to)
        copied = await anext(copies, None)

        async for info in _every_thread(self._from):
            while copied is not None and copied.thread_id < info.thread_id:
                copied = await anext(copies, None)

            if copied != info and info.thread_id not in known:
                moved.append(info.thread_id)

        return moved


async def _every_thread(store: Source) -> AsyncIterator[ThreadInfo]:
    async for page in thread_pages(store, erased=True):
        for info in page:
            yield info


def _groups(threads: Iterable[ThreadInfo]) -> Iterator[list[ThreadInfo]]:
    """Divide threads into groups that may be in memory together."""
    group: list[ThreadInfo] = []
    size = 0

    for one in threads:
        if group and size + one.version > _MAX_MESSAGES:
            yield group
            group, size = [], 0

        group.append(one)
        size += one.version

    if group:
        yield group
