"""Stores that fail beyond a thousand, ten thousand, or a few megabytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cpkit import CallRecord, JsonValue, ThreadDump, ThreadInfo
from tests.broken.reference import Watcher
from tests.broken.store import Broken, breaks


@breaks("sizes.long-thread")
class AppendsTenThousand(Broken):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        if isinstance(messages, (list, tuple)):
            messages = messages[:10_000]

        return await super().append(thread_id, messages, **options)


@breaks("sizes.long-thread")
class DumpsTenThousand(Broken):
    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        dump = await super().dump_thread(thread_id)
        return dump and replace(dump, messages=dump.messages[:10_000])


@breaks("sizes.long-thread")
class ListsAThousandCalls(Broken):
    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        return (await super().list_calls(thread_id))[:1000]


@breaks("sizes.long-thread")
class ErasesAThousandCalls(Broken):
    """Erases the first thousand calls of a thread, and leaves the content of others."""

    async def delete_thread(
        self, thread_id: str, *, forget_keys: bool = False, **options: Any
    ) -> None:
        known = isinstance(thread_id, str)
        later = self._store.of_thread(thread_id)[1000:] if known else []
        await super().delete_thread(thread_id, forget_keys=forget_keys, **options)

        for call in later if not forget_keys else ():
            self._store.calls[thread_id, call.call_id] = call


@breaks("sizes.many-threads")
class ListsAThousandThreads(Broken):
    async def list_threads(
        self, *, limit: Any = 100, **options: Any
    ) -> list[ThreadInfo]:
        return (await super().list_threads(limit=limit, **options))[:1000]


@breaks("watch.hundreds-of-ids")
class WatchesFiveHundred(Broken):
    def _watcher(self, thread_ids: frozenset[str]) -> Watcher:
        return super()._watcher(frozenset(sorted(thread_ids)[:500]))


@breaks("sizes.large-values")
class CutsAnswersAtTwoMegabytes(Broken):
    """Returns the holder of a key without args that do not fit into one packet."""

    async def record_issued(self, thread_id: str, call: Any) -> CallRecord | None:
        found = await super().record_issued(thread_id, call)

        if found is None or len(str(found.call.args)) < 2**21:
            return found

        return replace(found, call=replace(found.call, args={}))


@breaks("sizes.large-values")
class CutsResultsAtTwoMegabytes(Broken):
    async def record_result(
        self, thread_id: str, call_id: str, result: JsonValue, *, success: bool = True
    ) -> CallRecord:
        if isinstance(result, dict):
            result = {
                name: value[: 2**21] if isinstance(value, str) else value
                for name, value in result.items()
            }

        return await super().record_result(thread_id, call_id, result, success=success)
