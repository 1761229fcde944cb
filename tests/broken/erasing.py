"""Deletions that delete too little, too much, or another thread."""

from __future__ import annotations

from typing import Any

from cpkit import (
    CallMismatch,
    CallRecord,
    JsonValue,
    ThreadInfo,
    ToolCall,
    UnknownCall,
)
from tests.broken.store import Broken, breaks


@breaks("erase.thread-is-gone")
class DeletesOnlyMessages(Broken):
    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        if thread_id in self._store.threads:
            self._store.threads[thread_id].bodies.clear()


@breaks("erase.starts-again-at-0")
class KeepsExtra(Broken):
    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        loaded = await self.load(thread_id)
        await super().delete_thread(thread_id, **options)
        self.__dict__.setdefault("_extra", {})[thread_id] = loaded and loaded.extra

    async def append(self, thread_id: str, *args: Any, **options: Any) -> int:
        version = await super().append(thread_id, *args, **options)
        await self.save_extra(
            thread_id, self.__dict__.get("_extra", {}).get(thread_id) or {}
        )
        return version


@breaks("erase.missing-is-no-error", raises="KeyError")
class RaisesOnMissingDelete(Broken):
    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        self._store.threads[thread_id]
        await super().delete_thread(thread_id, **options)


@breaks("erase.leaves-the-neighbours")
class DeletesByPrefix(Broken):
    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        for thread in list(self._store.threads):
            if thread.startswith(thread_id):
                await super().delete_thread(thread, **options)


@breaks("erase.completed-stays-paid", "erase.receipts-stay")
class AlwaysForgetsKeys(Broken):
    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        await super().delete_thread(thread_id, **{**options, "forget_keys": True})


@breaks("erase.issued-stays-issued")
class FailsPendingCalls(Broken):
    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        for record in await self.list_calls(thread_id):
            await self.record_result(thread_id, record.call.call_id, 0, success=False)

        await super().delete_thread(thread_id, **options)


@breaks("erase.failed-stays-free")
class ForgetsFailedCalls(Broken):
    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        calls = await self.list_calls(thread_id)

        if all(one.status == "failed" for one in calls):
            options["forget_keys"] = True

        await super().delete_thread(thread_id, **options)


@breaks("erase.own-call-again", raises="CallMismatch")
class ComparesErasedArgs(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        record = await super().record_issued(thread_id, call)

        if record and record.erased and record.call.args != call.args:
            raise CallMismatch(thread_id, call.call_id, ["args"])

        return record


@breaks("erase.late-result", raises="UnknownCall")
class RefusesLateResults(Broken):
    async def record_result(
        self, thread_id: str, call_id: str, result: JsonValue, **options: Any
    ) -> CallRecord:
        stored = self._store.calls.get((thread_id, call_id))

        if stored and stored.erased:
            raise UnknownCall(thread_id, call_id)

        return await super().record_result(thread_id, call_id, result, **options)


@breaks("erase.late-result")
class WritesErasedRecordsAnew(Broken):
    """Puts a new record in the place of an erased one that gets a late result."""

    async def record_result(
        self, thread_id: str, call_id: str, *args: Any, **options: Any
    ) -> CallRecord:
        record = await super().record_result(thread_id, call_id, *args, **options)

        if record.erased:
            stored = self._store.calls[thread_id, call_id]
            stored = stored._replace(issued_at=stored.resolved_at or 0)
            self._store.calls[thread_id, call_id] = stored
            record = self._codec.record(stored)

        return record


@breaks("erase.late-failure-frees")
class HoldsErasedKeys(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        last = self._store.last_attempt(call.idempotency_key)

        if last and last.erased:
            return self._codec.record(last)

        return await super().record_issued(thread_id, call)


@breaks("erase.forget-frees-keys", "erase.forget-leaves-no-receipt")
class NeverForgetsKeys(Broken):
    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        await super().delete_thread(thread_id, **{**options, "forget_keys": False})


@breaks("erase.forget-after-delete")
class ForgetsOnlyOnce(Broken):
    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        if thread_id in self._store.threads:
            await super().delete_thread(thread_id, **options)


@breaks("erase.forget-is-of-one-thread")
class ForgetsWholeKeys(Broken):
    async def delete_thread(
        self, thread_id: str, *, forget_keys: bool = False, **options: Any
    ) -> None:
        keys = {one.call.idempotency_key for one in await self.list_calls(thread_id)}
        await super().delete_thread(thread_id, forget_keys=forget_keys, **options)

        for key in keys if forget_keys else ():
            self._store.attempts.pop(key, None)


@breaks("erase.not-listed")
class ListsErasedThreads(Broken):
    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        for thread in list(self._store.calls_of):
            self._store.touch(thread)

        return await super().list_threads(**options)


@breaks("erase.reads-nothing")
class ReadsFromACache(Broken):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        cache = self.__dict__.setdefault("_cache", {})
        cache.setdefault(thread_id, []).extend(messages)
        return await super().append(thread_id, messages, **options)

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[Any]:
        found: list[Any] = self.__dict__["_cache"][thread_id]
        return found[start:stop]
