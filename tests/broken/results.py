"""Results that are overwritten, lost, or found for the wrong key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cpkit import (
    CallRecord,
    CheckpointData,
    JsonValue,
    SerializationError,
    ToolCall,
)
from tests.broken.store import AtOnce, Broken, breaks


class _Result(AtOnce):
    """Sets a call back to issued if `reopens` returns true."""

    async def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool = True,
    ) -> CallRecord:
        stored = self._store.calls.get((thread_id, call_id))

        if stored and self.reopens(stored.status, success):
            self._store.calls[thread_id, call_id] = stored._replace(status="issued")

        return await super().record_result(thread_id, call_id, result, success=success)

    def reopens(self, status: str, success: bool) -> bool:
        return True


@breaks("result.first-stays", "concurrent.one-result-stays")
class KeepsTheLastResult(_Result):
    """Overwrites every earlier result."""


@breaks("result.late-failure-undoes-nothing")
class LetsFailureUndo(_Result):
    def reopens(self, status: str, success: bool) -> bool:
        return not success


@breaks("result.late-success-revives-nothing", "result.superseded-learns-it")
class LetsSuccessRevive(_Result):
    def reopens(self, status: str, success: bool) -> bool:
        return status == "failed" and success


@breaks("result.completes")
class KeepsResolvedPending(Broken):
    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)

        if loaded is not None:
            loaded.pending[:] = await self.list_calls(thread_id)

        return loaded


@breaks("result.failure-keeps-receipt")
class DropsReceipts(Broken):
    async def record_result(self, *args: Any, **options: Any) -> CallRecord:
        record = await super().record_result(*args, **options)
        return replace(record, result=None) if record.status == "failed" else record


@breaks("result.falsy-is-a-result")
class TreatsFalsyAsMissing(Broken):
    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        record = await super().find_completed(idempotency_key)
        return record if record and record.result else None


@breaks("result.unknown-call")
class IssuesOnResult(Broken):
    async def record_result(
        self, thread_id: str, call_id: str, *args: Any, **options: Any
    ) -> CallRecord:
        if (thread_id, call_id) not in self._store.calls:
            await self.record_issued(thread_id, ToolCall(call_id, "?", {}, call_id))

        return await super().record_result(thread_id, call_id, *args, **options)


@breaks("result.unknown-in-another-thread")
class FindsCallsAnywhere(Broken):
    async def record_result(
        self, thread_id: str, call_id: str, *args: Any, **options: Any
    ) -> CallRecord:
        for thread, known in self._store.calls:
            if known == call_id:
                thread_id = thread

        return await super().record_result(thread_id, call_id, *args, **options)


@breaks("result.refused-leaves-issued")
class FailsCallOnRefusedResult(Broken):
    async def record_result(
        self, thread_id: str, call_id: str, *args: Any, **options: Any
    ) -> CallRecord:
        try:
            return await super().record_result(thread_id, call_id, *args, **options)
        except SerializationError:
            await super().record_result(thread_id, call_id, None, success=False)
            raise


@breaks("result.success-is-a-bool")
class AcceptsAnySuccess(Broken):
    async def record_result(self, *args: Any, success: Any = True) -> CallRecord:
        return await super().record_result(*args, success=bool(success))


@breaks("result.copies-its-input", "result.record-is-the-callers")
class KeepsTheCallersResult(Broken):
    _kept: JsonValue = None

    async def record_result(
        self, thread_id: str, call_id: str, result: JsonValue, **options: Any
    ) -> CallRecord:
        self._kept = result
        record = await super().record_result(thread_id, call_id, result, **options)
        return replace(record, result=result)

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        record = await super().find_completed(idempotency_key)
        return record and replace(record, result=self._kept)


@breaks("find.unknown-is-none", raises="KeyError")
class RaisesWhenNotFound(Broken):
    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        self._store.attempts[idempotency_key]
        return await super().find_completed(idempotency_key)


@breaks("find.issued-is-none")
class FindsIssued(Broken):
    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        return await self.find_call(idempotency_key)


@breaks("find.failed-is-none")
class FindsFailed(Broken):
    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        last = self._store.last_attempt(idempotency_key)
        found = last is not None and last.status != "issued"
        return self._codec.record(last) if last and found else None


@breaks("find.completed-from-any-thread")
class FindsOnlyTheLastResult(Broken):
    _last: str | None = None

    async def record_result(self, *args: Any, **options: Any) -> CallRecord:
        record = await super().record_result(*args, **options)
        self._last = record.call.idempotency_key
        return record

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        if idempotency_key != self._last:
            return None

        return await super().find_completed(idempotency_key)


@breaks("find.completed-after-failures")
class FindsFirstAttempts(Broken):
    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        record = await super().find_completed(idempotency_key)
        return record if record and record.attempt == 1 else None
