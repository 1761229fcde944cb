"""Erasures of calls that erase too little or too much, or forget what was paid."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from cpkit import CallRecord, ThreadDump, ToolCall, VersionConflict
from cpkit.driver.codec import to_micros
from tests.broken.store import Broken, breaks, pause


@breaks("content.keeps-the-rest")
class ErasesIssuedCalls(Broken):
    """Erases calls that are running as well."""

    async def erase_calls(self, thread_id: str, before: Any, **options: Any) -> int:
        erased = await super().erase_calls(thread_id, before, **options)

        for call in self._store.of_thread(thread_id):
            place = thread_id, call.call_id
            self._store.calls[place] = call._replace(args=b"{}", erased=True)

        return erased


@breaks("content.keeps-the-rest")
class KeepsArgs(Broken):
    """Erases results only."""

    async def erase_calls(self, thread_id: str, before: Any, **options: Any) -> int:
        args = {one.call_id: one.args for one in self._store.of_thread(thread_id)}
        erased = await super().erase_calls(thread_id, before, **options)

        for call in self._store.of_thread(thread_id):
            place = thread_id, call.call_id
            self._store.calls[place] = call._replace(args=args[call.call_id])

        return erased


@breaks("content.keeps-the-rest")
class TakesAnErasureForAWrite(Broken):
    """Moves updated_at, so that a thread never becomes old."""

    async def erase_calls(self, thread_id: str, before: Any, **options: Any) -> int:
        erased = await super().erase_calls(thread_id, before, **options)

        if erased:
            self._store.threads[thread_id].updated_at += 1

        return erased


@breaks("content.by-the-time-of-the-outcome")
class ComparesClaims(Broken):
    """Compares the time of the claim."""

    async def erase_calls(
        self, thread_id: str, before: datetime, **options: Any
    ) -> int:
        erased, calls = 0, self._store.of_thread(thread_id)
        limit = to_micros(before)

        for call in calls:
            if call.resolved_at and call.issued_at < limit and not call.erased:
                place = thread_id, call.call_id
                bare = call._replace(args=b"{}", result=None, erased=True)
                self._store.calls[place] = bare
                erased += 1

        return erased


@breaks("content.by-the-time-of-the-outcome")
class CountsEachTime(Broken):
    """Counts calls again that were erased before."""

    async def erase_calls(self, thread_id: str, before: Any, **options: Any) -> int:
        await super().erase_calls(thread_id, before, **options)
        return sum(call.erased for call in self._store.of_thread(thread_id))


@breaks("content.by-the-time-of-the-outcome")
class ForgetsTheZone(Broken):
    """Reads a time in the wrong zone as UTC, and rounds it to seconds."""

    async def erase_calls(
        self, thread_id: str, before: datetime, **options: Any
    ) -> int:
        rounded = before.replace(microsecond=0, tzinfo=UTC)
        return await super().erase_calls(thread_id, rounded, **options)


@breaks("content.keys-are-held")
class FreesErasedKeys(Broken):
    """Deletes the records, and so frees the keys of what was paid."""

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        held = await super().record_issued(thread_id, call)

        if held is None or not held.erased:
            return held

        key = call.idempotency_key
        self._store.attempts.pop(key, None)
        return await super().record_issued(thread_id, call)


@breaks("content.is-gone-for-others")
class FindsErasedContent(Broken):
    """Answers find_completed from what this handle found before."""

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        found = await super().find_completed(idempotency_key)
        cache = self.__dict__.setdefault("_found", {})
        return found and cache.setdefault(idempotency_key, found)


@breaks("content.nothing-to-erase")
class CreatesWhatItErases(Broken):
    async def erase_calls(self, thread_id: str, before: Any, **options: Any) -> int:
        self._store.touch(thread_id)
        return await super().erase_calls(thread_id, before, **options)


@breaks("content.leaves-the-neighbours")
class ErasesByPrefix(Broken):
    async def erase_calls(self, thread_id: str, before: Any, **options: Any) -> int:
        erased = await super().erase_calls(thread_id, before, **options)

        for thread in list(self._store.threads):
            if thread.startswith(thread_id.rstrip("%*")) and thread != thread_id:
                erased += await super().erase_calls(thread, before)

        return erased


@breaks("content.expected-version")
class IgnoresTheFenceOfAnErasure(Broken):
    async def erase_calls(
        self, thread_id: str, before: Any, *, expected_version: int | None = None
    ) -> int:
        return await super().erase_calls(thread_id, before)


@breaks("content.expected-version")
class ErasesThenCompares(Broken):
    """Raises, and has erased the calls."""

    async def erase_calls(
        self, thread_id: str, before: Any, *, expected_version: int | None = None
    ) -> int:
        erased = await super().erase_calls(thread_id, before)
        thread = self._store.threads.get(thread_id)
        version = thread.version if thread else 0

        if expected_version not in (None, version):
            raise VersionConflict(thread_id, expected_version or 0, version)

        return erased


@breaks("content.arguments")
class TakesALocalTime(Broken):
    """Takes a time without a zone for UTC."""

    async def erase_calls(self, thread_id: str, before: Any, **options: Any) -> int:
        if isinstance(before, datetime) and before.tzinfo is None:
            before = before.replace(tzinfo=UTC)

        return await super().erase_calls(thread_id, before, **options)


@breaks("content.moves")
class DumpsErasedAsEmpty(Broken):
    """Dumps an erased call as one that had no content."""

    async def restore_thread(self, dump: ThreadDump) -> None:
        await super().restore_thread(dump)

        for call in self._store.of_thread(dump.thread_id):
            if call.erased and call.resolved_at:
                place = dump.thread_id, call.call_id
                self._store.calls[place] = call._replace(result=b"null", erased=False)


@breaks("concurrent.erased-calls-count-once")
class CountsThenErases(Broken):
    """Counts what it will erase, and erases it in a second step."""

    async def erase_calls(self, thread_id: str, before: Any, **options: Any) -> int:
        calls = self._store.of_thread(thread_id)
        count = sum(one.resolved_at is not None and not one.erased for one in calls)
        await pause()
        await super().erase_calls(thread_id, before, **options)
        return count
