"""Lists, ranges and receipts in the wrong order, off by one, or of other threads."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

from cpkit import CallMismatch, CallRecord, ThreadInfo, ToolCall, VersionConflict
from cpkit.driver import from_micros
from tests.broken.store import Broken, breaks


@breaks("threads.ordered-by-code-point")
class ListsByCase(Broken):
    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        listed = await super().list_threads(**options)
        return sorted(listed, key=lambda info: info.thread_id.casefold())


@breaks("threads.ordered-by-code-point")
class PagesByUtf16(Broken):
    """Sorts a page by code point, but finds its start in the order of UTF-16."""

    async def list_threads(
        self, *, after: str | None = None, limit: int = 100, **options: Any
    ) -> list[ThreadInfo]:
        await super().list_threads(after=after, limit=limit, **options)
        every = await super().list_threads(limit=10**9, **options)
        start = (after or "").encode("utf-16-be")
        return [one for one in every if one.thread_id.encode("utf-16-be") > start][
            :limit
        ]


@breaks("threads.pages")
class IgnoresLimits(Broken):
    async def list_threads(
        self,
        *,
        prefix: str = "",
        after: str | None = None,
        limit: int = 100,
        **options: Any,
    ) -> list[ThreadInfo]:
        return await super().list_threads(prefix=prefix, after=after, **options)


@breaks("threads.pages", raises="OverflowError")
class PassesLimitsOn(Broken):
    """Gives a limit to an engine whose integers have 64 bits."""

    async def list_threads(
        self, *, limit: Any = 100, **options: Any
    ) -> list[ThreadInfo]:
        if type(limit) is int:
            limit.to_bytes(8, signed=True)

        return await super().list_threads(limit=limit, **options)


@breaks("threads.limit-is-100")
class ListsFifty(Broken):
    async def list_threads(
        self, *, limit: int = 50, **options: Any
    ) -> list[ThreadInfo]:
        return await super().list_threads(limit=limit, **options)


@breaks("threads.after-is-exclusive")
class StartsAtAfter(Broken):
    async def list_threads(
        self,
        *,
        prefix: str = "",
        after: str | None = None,
        limit: int = 100,
        **options: Any,
    ) -> list[ThreadInfo]:
        listed = await super().list_threads(prefix=prefix, limit=limit, **options)
        return [one for one in listed if after is None or one.thread_id >= after]


@breaks("threads.after-is-exclusive")
class RepeatsTheThreadNamedLikeThePrefix(Broken):
    async def list_threads(
        self, *, prefix: str = "", after: str | None = None, **options: Any
    ) -> list[ThreadInfo]:
        behind = after if after is not None and after > prefix else None
        return await super().list_threads(prefix=prefix, after=behind, **options)


@breaks("threads.prefix-is-literal")
class TreatsPrefixAsPattern(Broken):
    async def list_threads(
        self,
        *,
        prefix: str = "",
        after: str | None = None,
        limit: int = 100,
        **options: Any,
    ) -> list[ThreadInfo]:
        listed = await super().list_threads(after=after, limit=10**6, **options)
        return [one for one in listed if fnmatchcase(one.thread_id, f"{prefix}*")][
            :limit
        ]


@breaks("threads.prefix-is-literal", raises="UnicodeEncodeError")
class CountsThePrefixUp(Broken):
    """Lists up to the prefix with its last character counted up by one."""

    async def list_threads(self, *, prefix: str = "", **options: Any) -> list[Any]:
        listed = await super().list_threads(prefix=prefix, **options)

        if prefix and ord(prefix[-1]) < 0x10FFFF:
            (prefix[:-1] + chr(ord(prefix[-1]) + 1)).encode()

        return listed


class _Infos(Broken):
    """Changes the listed data of a thread."""

    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        return [self.changed(info) for info in await super().list_threads(**options)]

    def changed(self, info: ThreadInfo) -> ThreadInfo:
        return info


@breaks("threads.tells-version-and-times")
class ListsTheCurrentTime(_Infos):
    def changed(self, info: ThreadInfo) -> ThreadInfo:
        return replace(info, created_at=datetime.now(UTC))


@breaks("threads.tells-version-and-times")
class CreatesWithTheFirstMessage(Broken):
    """Sets created_at again where a thread that had only extra gets a message."""

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        version = await super().append(thread_id, messages, **options)

        if messages and version == len(messages):
            thread = self._store.threads[thread_id]
            thread.created_at = thread.updated_at

        return version


@breaks("threads.updated-by-every-change")
class IgnoresResultsInUpdatedAt(Broken):
    async def record_result(
        self, thread_id: str, *args: Any, **options: Any
    ) -> CallRecord:
        before = self._store.threads[thread_id].updated_at
        record = await super().record_result(thread_id, *args, **options)
        self._store.threads[thread_id].updated_at = before
        return record


@breaks("threads.updated-by-every-change")
class IgnoresFailuresInUpdatedAt(Broken):
    async def record_result(
        self, thread_id: str, *args: Any, **options: Any
    ) -> CallRecord:
        threads = self._store.threads
        before = {one: thread.updated_at for one, thread in threads.items()}
        record = await super().record_result(thread_id, *args, **options)

        if record.status == "failed" and thread_id in before:
            threads[thread_id].updated_at = before[thread_id]

        return record


@breaks("threads.updated-never-goes-back")
class ListsItsClock(Broken):
    async def save_extra(self, thread_id: str, extra: Any) -> None:
        await super().save_extra(thread_id, extra)
        self._store.threads[thread_id].updated_at = self._store.now()


@breaks("threads.updated-by-changes-only")
class UpdatesOnList(_Infos):
    def changed(self, info: ThreadInfo) -> ThreadInfo:
        return replace(info, updated_at=datetime.now(UTC))


@breaks("threads.updated-by-changes-only")
class UpdatesBeforeItChecks(Broken):
    """Sets updated_at of an existing thread, and then compares the version."""

    async def append(self, thread_id: str, *args: Any, **options: Any) -> int:
        try:
            return await super().append(thread_id, *args, **options)
        except VersionConflict:
            if thread_id in self._store.threads:
                self._store.touch(thread_id)

            raise


@breaks("threads.updated-by-changes-only")
class UpdatesForAMismatch(Broken):
    """Sets updated_at of an existing thread, and then compares the call."""

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        try:
            return await super().record_issued(thread_id, call)
        except CallMismatch:
            if thread_id in self._store.threads:
                self._store.touch(thread_id)

            raise


@breaks("threads.knows-those-without-messages")
class ListsOnlyMessages(Broken):
    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        return [one for one in await super().list_threads(**options) if one.version]


@breaks("threads.lists-no-others")
class ListsRefusedClaims(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self._store.touch(thread_id)
        return await super().record_issued(thread_id, call)


@breaks("threads.erased-are-listed")
class IgnoresErased(Broken):
    async def list_threads(
        self, *, erased: bool = False, **options: Any
    ) -> list[ThreadInfo]:
        return await super().list_threads(**options)


@breaks("threads.erased-have-times")
class ListsErasedWithoutTimes(Broken):
    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        epoch = datetime(1970, 1, 1, tzinfo=UTC)
        return [
            info
            if info.thread_id in self._store.threads
            else replace(info, created_at=epoch, updated_at=epoch)
            for info in await super().list_threads(**options)
        ]


@breaks("threads.erased-have-times")
class PrefersResultsToClaims(Broken):
    """Takes the last result for the last change, if there is a result."""

    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        return [
            info
            if info.thread_id in self._store.threads
            else replace(info, updated_at=from_micros(self._last(info.thread_id)))
            for info in await super().list_threads(**options)
        ]

    def _last(self, thread_id: str) -> int:
        calls = self._store.of_thread(thread_id)
        results = [call.resolved_at for call in calls if call.resolved_at]
        return max(results or [call.issued_at for call in calls])


@breaks("threads.erased-have-times")
class ListsTheTimeOfTheDeletion(Broken):
    """Keeps the time of the last change before a deletion, without late results."""

    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        await super().delete_thread(thread_id, **options)

        if listed := await super().list_threads(prefix=thread_id, erased=True):
            self.__dict__.setdefault("_last", {})[thread_id] = listed[0].updated_at

    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        last = self.__dict__.get("_last", {})
        return [
            info
            if info.thread_id in self._store.threads
            else replace(info, updated_at=last.get(info.thread_id, info.updated_at))
            for info in await super().list_threads(**options)
        ]


@breaks("threads.erased-by-pages")
class FillsPagesWithThreadsFirst(Broken):
    """Adds erased ids only where the threads leave room on the page."""

    async def list_threads(
        self, *, limit: int = 100, erased: bool = False, **options: Any
    ) -> list[ThreadInfo]:
        alive = await super().list_threads(limit=limit, **options)

        if not erased:
            return alive

        every = await super().list_threads(limit=10**9, erased=True, **options)
        page = [*alive, *(info for info in every if info not in alive)][:limit]
        return sorted(page, key=lambda info: info.thread_id)


@breaks("threads.erased-by-pages")
class DropsErasedFromFullPages(Broken):
    """Leaves out erased ids after the page was cut, so a page can be empty too soon."""

    async def list_threads(
        self, *, erased: bool = False, **options: Any
    ) -> list[ThreadInfo]:
        page = await super().list_threads(erased=True, **options)
        return [one for one in page if erased or one.thread_id in self._store.threads]


@breaks("threads.erased-until-forgotten")
class ListsForgottenIds(Broken):
    async def delete_thread(
        self, thread_id: str, *, forget_keys: bool = False, **options: Any
    ) -> None:
        await super().delete_thread(thread_id, forget_keys=forget_keys, **options)

        if forget_keys:
            self.__dict__.setdefault("_forgotten", []).append(thread_id)

    async def list_threads(
        self, *, prefix: str = "", erased: bool = False, **options: Any
    ) -> list[ThreadInfo]:
        listed = await super().list_threads(prefix=prefix, erased=erased, **options)
        now = datetime.now(UTC)
        forgotten = self.__dict__.get("_forgotten", []) if erased else []
        listed += [
            ThreadInfo(one, 0, now, now) for one in forgotten if one.startswith(prefix)
        ]
        return sorted(listed, key=lambda info: info.thread_id)


@breaks("threads.arguments")
class AcceptsAnyLimit(Broken):
    async def list_threads(
        self, *, limit: Any = 100, **options: Any
    ) -> list[ThreadInfo]:
        return await super().list_threads(limit=max(1, int(limit or 1)), **options)


@breaks("read.is-a-slice")
class ReadsNoNegatives(Broken):
    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[Any]:
        return await super().read(thread_id, max(start, 0), stop)


@breaks("read.defaults-to-all")
class ReadsAPage(Broken):
    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = 3
    ) -> list[Any]:
        return await super().read(thread_id, start, stop)


@breaks("read.missing-is-empty", raises="KeyError")
class RaisesOnMissingRead(Broken):
    async def read(self, thread_id: str, *args: Any, **options: Any) -> list[Any]:
        self._store.threads[thread_id]
        return await super().read(thread_id, *args, **options)


@breaks("read.is-the-callers")
class ReturnsCachedMessages(Broken):
    async def read(self, thread_id: str, *args: Any, **options: Any) -> list[Any]:
        cache = self.__dict__.setdefault("_cache", {})
        found = await super().read(thread_id, *args, **options)
        return cache.setdefault(thread_id, found)  # type: ignore[no-any-return]  # an untyped cache


@breaks("read.arguments")
class AcceptsAnyBound(Broken):
    async def read(self, thread_id: str, start: Any = 0, stop: Any = None) -> list[Any]:
        last = None if stop is None else int(stop)
        return await super().read(thread_id, int(start or 0), last)


class _Receipts(Broken):
    """Changes the listed calls of a thread."""

    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        return self.changed(await super().list_calls(thread_id))

    def changed(self, calls: list[CallRecord]) -> list[CallRecord]:
        return calls


@breaks("receipts.every-attempt-in-order")
class ListsLastAttempts(_Receipts):
    def changed(self, calls: list[CallRecord]) -> list[CallRecord]:
        return list({one.call.idempotency_key: one for one in calls}.values())


@breaks("receipts.order-is-of-claims")
class ListsResolvedFirst(_Receipts):
    def changed(self, calls: list[CallRecord]) -> list[CallRecord]:
        return sorted(calls, key=lambda one: one.status)


@breaks("receipts.own-thread-only")
class ListsByKey(Broken):
    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        return [self._codec.record(call) for call in self._store.calls.values()]


@breaks("receipts.same-record-everywhere")
class ReturnsOtherTimes(_Receipts):
    def changed(self, calls: list[CallRecord]) -> list[CallRecord]:
        return [replace(one, issued_at=datetime.now(UTC)) for one in calls]


@breaks("receipts.find-call-is-the-holder")
class FindsTheFirstAttempt(Broken):
    async def find_call(self, idempotency_key: str) -> CallRecord | None:
        places = self._store.attempts.get(idempotency_key)
        return self._codec.record(self._store.calls[places[0]]) if places else None


@breaks("receipts.are-the-callers")
class ReturnsCachedRecords(_Receipts):
    def changed(self, calls: list[CallRecord]) -> list[CallRecord]:
        cache = self.__dict__.setdefault("_cache", calls)
        return list(cache)


@breaks("receipts.looking-records-nothing")
class CreatesThreadOnList(Broken):
    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        self._store.touch(thread_id)
        return await super().list_calls(thread_id)
