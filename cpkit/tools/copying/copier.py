"""Copying one store into another, thread by thread, each checked to the last hash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from typing import Any

from cpkit.errors import (
    CallMismatch,
    CorruptThread,
    InvalidId,
    PayloadTooLarge,
    SerializationError,
    VersionConflict,
)
from cpkit.protocol import ListsThreads
from cpkit.records import CallRecord, ThreadInfo
from cpkit.tools.copying.calls import GRAVES, CallCopier, Conflict, Destination, Source
from cpkit.tools.copying.report import CopyReport, Problem
from cpkit.tools.copying.shape import (
    Calls,
    Shape,
    calls_flaw,
    content_flaw,
    shape_of,
    unlike_call,
)
from cpkit.tools.paging import thread_pages

__all__ = ["copy_store", "every_thread"]

# Errors that are of one thread; all others are of a store, and end the copy.
_OF_A_THREAD = (
    CallMismatch,
    CorruptThread,
    InvalidId,
    PayloadTooLarge,
    SerializationError,
)

# Threads at a time, which hides a server's round trips; and the messages that they may
# have together, because a thread is loaded whole.
_AT_ONCE = 8
_MESSAGES_AT_ONCE = 2_000
# One append: messages, and characters of JSON.
_BATCH = 500
_BATCH_SIZE = 4_000_000


async def copy_store(
    source: Source,
    destination: Destination,
    *,
    deleted: Sequence[str] = (),
    overwrite_extra: bool = False,
    on_start: Callable[[int], None] | None = None,
    on_thread: Callable[[], None] | None = None,
) -> CopyReport:
    """Bring all threads of a store into another; never overwrite anything there.

    Both hold messages as plain JSON (``message_type=Any``). What is there already is
    compared and passed over, so a copy that was interrupted, at any point, is
    completed by making it again. Appends are fenced by ``expected_version``. A thread
    of which the destination holds something else is reported and left alone;
    ``overwrite_extra`` takes the source's values of extra keys. Extra cannot be fenced:
    what somebody else writes to the very same key of the destination, between the look
    and the write, is overwritten.

    Each thread is what one load shows, with its calls as they were right after; what
    changed in the source meanwhile is in the report. Of calls, the keys, attempt
    numbers, statuses, args and results are kept, by the methods of the contract; all
    times are those of the copy. Threads that were deleted but kept their keys are not
    listed by any store: name them in ``deleted``.

    One thread of each store is in memory as a whole, and some hundred bytes for each
    thread and each failed call. Raises what the stores raise about themselves.
    """
    copier = _Copier(source, destination, overwrite_extra)
    return await copier.run(deleted, on_start, on_thread)


async def every_thread(source: ListsThreads, prefix: str = "") -> list[ThreadInfo]:
    """List all threads, page by page."""
    return [info async for page in thread_pages(source, prefix=prefix) for info in page]


class _Copier:
    def __init__(
        self, source: Source, destination: Destination, overwrite_extra: bool
    ) -> None:
        self._from = source
        self._to = destination
        self._overwrite_extra = overwrite_extra
        self.report = CopyReport()
        self._calls = CallCopier(source, destination, self.report)

    async def run(
        self,
        deleted: Sequence[str],
        on_start: Callable[[int], None] | None,
        on_thread: Callable[[], None] | None,
    ) -> CopyReport:
        threads = await every_thread(self._from)
        listed = {one.thread_id: one.updated_at for one in threads}
        # Deleted threads, of which no list tells; here those of an earlier copy.
        unlisted = [one for one in {GRAVES, *deleted} if one not in listed]
        self.report.threads = len(threads)

        if on_start is not None:
            on_start(len(threads))

        async def one(thread_id: str) -> None:
            await self._guarded(thread_id, self._thread(thread_id))

            if on_thread is not None:
                on_thread()

        await self._calls.survey()

        for group in _groups(threads):
            await _all(one(thread.thread_id) for thread in group)

        for thread_id in sorted(unlisted):
            await self._guarded(thread_id, self._thread(thread_id))

        await self._late_calls()
        await self._calls.bury()
        self.report.moved = await self._moved(listed)
        return self.report

    async def _guarded(self, thread_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Let a thread's own trouble be the end of that thread alone."""
        try:
            await work
        except Conflict as exc:
            self.report.conflicts.append(Problem(thread_id, str(exc)))
        except _OF_A_THREAD as exc:
            self.report.failures.append(Problem(thread_id, str(exc)))

    async def _thread(self, thread_id: str) -> None:
        before = shape_of(await self._to.load(thread_id))
        data = await self._from.load(thread_id)
        calls = await self._from.list_calls(thread_id)

        if data is None and not calls:
            return  # it is gone, or an earlier copy found nothing to bury

        wanted = shape_of(data)
        there = await self._calls.there(thread_id)
        self._refuse(wanted, before)

        if thread_id != GRAVES:
            _refuse(calls_flaw(calls, there))
            await self._calls.check_keys(calls, there)

        # Calls first: whoever uses a thread that is not whole yet repeats no effect.
        has_news = await self._calls.put(calls, there)

        if data is not None:
            has_news |= before.version < wanted.version
            await self._append(thread_id, data.messages, wanted, before.version)
            news = {
                key: value
                for key, value in data.extra.items()
                if before.extra.get(key) != wanted.extra[key]
            }
            del data
            await self._to.save_extra(thread_id, news)
            self.report.extra += len(news)
            has_news |= bool(news)

        self.report.copied += has_news
        self.report.already += not has_news

        if has_news:
            before = shape_of(await self._to.load(thread_id))
            there = await self._calls.there(thread_id)

        self._check(wanted, calls, before, there)

    async def _append(
        self, thread_id: str, messages: list[Any], wanted: Shape, version: int
    ) -> None:
        while version < wanted.version:
            end = _batch_end(wanted.sizes, version)

            try:
                await self._to.append(
                    thread_id, messages[version:end], expected_version=version
                )
            except VersionConflict:
                # Another copy at work, or somebody else; it is the same or a conflict.
                found = shape_of(await self._to.load(thread_id))
                self._refuse(wanted, found)
                version = found.version
            else:
                self.report.messages += end - version
                version = end

    def _check(
        self, wanted: Shape, calls: list[CallRecord], found: Shape, there: Calls
    ) -> None:
        """Compare what is in the destination with what was to be there."""
        if (found.messages, found.extra) != (wanted.messages, wanted.extra):
            raise Conflict("somebody else wrote to it in the destination meanwhile")

        for record in calls:
            if not record.erased and not self._calls.is_waiting(record):
                _check_call(record, there)

        self.report.checked += 1

    async def _late_calls(self) -> None:
        """Carry the calls that waited for those of other threads."""
        waiting = sorted(self._calls.waiting)

        for (_, thread_id), group in groupby(
            waiting, key=attrgetter("attempt", "thread_id")
        ):
            ids = {one.call_id for one in group}
            calls = await self._from.list_calls(thread_id)
            late = [one for one in calls if one.call.call_id in ids]
            await self._guarded(thread_id, self._late(thread_id, late))

    async def _late(self, thread_id: str, calls: list[CallRecord]) -> None:
        for record in calls:
            await self._calls.put_late(record)

        there = await self._calls.there(thread_id)

        for record in calls:
            if not record.erased:
                _check_call(record, there)

    async def _moved(self, listed: dict[str, datetime]) -> list[str]:
        """Return the threads that are not as they were listed in the beginning."""
        now = {one.thread_id: one.updated_at for one in await every_thread(self._from)}
        return sorted(
            thread_id
            for thread_id in listed.keys() | now.keys()
            if listed.get(thread_id) != now.get(thread_id)
        )

    def _refuse(self, wanted: Shape, found: Shape) -> None:
        _refuse(content_flaw(wanted, found, may_replace=self._overwrite_extra))


def _refuse(flaw: str | None) -> None:
    if flaw is not None:
        raise Conflict(flaw)


def _check_call(record: CallRecord, there: Calls) -> None:
    call_id = record.call.call_id
    found = there.get(call_id)

    if found is None or found.status != record.status:
        raise Conflict(f"call {call_id!r} is not {record.status} after it was written")

    _refuse(unlike_call(record, found))


def _groups(threads: Iterable[ThreadInfo]) -> Iterator[list[ThreadInfo]]:
    """Divide threads into groups that may be in memory together."""
    group: list[ThreadInfo] = []
    size = 0

    for one in threads:
        if group and (len(group) == _AT_ONCE or size + one.version > _MESSAGES_AT_ONCE):
            yield group
            group, size = [], 0

        group.append(one)
        size += one.version

    if group:
        yield group


def _batch_end(sizes: list[int], start: int) -> int:
    """Return where a batch of messages ends; it has one at least."""
    end, size = start + 1, sizes[start]

    while end < min(len(sizes), start + _BATCH) and size + sizes[end] <= _BATCH_SIZE:
        size += sizes[end]
        end += 1

    return end


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do several things at a time, to the end of each, and raise the first error."""
    outcomes = await asyncio.gather(*work, return_exceptions=True)

    for outcome in outcomes:
        if outcome is not None:
            raise outcome
