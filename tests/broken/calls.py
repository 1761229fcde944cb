"""Calls that are claimed twice, resolved twice, or forgotten."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from cpkit import (
    CallMismatch,
    CallRecord,
    CheckpointData,
    JsonValue,
    SerializationError,
    ToolCall,
)
from tests.broken.store import Broken, breaks


class _Answer(Broken):
    """Changes what a claim returns."""

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        record = await super().record_issued(thread_id, call)
        return None if record is None else self.answer(thread_id, call, record)

    def answer(
        self, thread_id: str, call: ToolCall, record: CallRecord
    ) -> CallRecord | None:
        return record


class _Shown(Broken):
    """Changes the records that a load shows."""

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)

        if loaded is not None:
            loaded.pending[:] = [self.shown(record) for record in loaded.pending]

        return loaded

    def shown(self, record: CallRecord) -> CallRecord:
        return record


@breaks("claim.fresh-is-none")
class ReturnsTheClaim(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        await super().record_issued(thread_id, call)
        return await super().record_issued(thread_id, call)


@breaks("claim.is-pending")
class ForgetsArgs(_Shown):
    def shown(self, record: CallRecord) -> CallRecord:
        return replace(record, call=replace(record.call, args={}))


@breaks("claim.time-is-utc")
class TellsLocalTime(_Shown):
    def shown(self, record: CallRecord) -> CallRecord:
        return replace(record, issued_at=record.issued_at.replace(tzinfo=None))


@breaks("claim.taken-returns-holder", "concurrent.one-claims-a-key")
class GrantsEveryClaim(_Answer):
    def answer(
        self, thread_id: str, call: ToolCall, record: CallRecord
    ) -> CallRecord | None:
        return record if record.call.call_id == call.call_id else None


@breaks("claim.key-is-held-across-threads")
class HoldsKeysByThread(_Answer):
    def answer(
        self, thread_id: str, call: ToolCall, record: CallRecord
    ) -> CallRecord | None:
        return record if record.thread_id == thread_id else None


@breaks("claim.key-is-held-by-key-alone")
class HoldsKeysByArgs(_Answer):
    def answer(
        self, thread_id: str, call: ToolCall, record: CallRecord
    ) -> CallRecord | None:
        return record if record.call.args == call.args else None


@breaks("claim.completed-holds")
class FreesCompletedKeys(_Answer):
    def answer(
        self, thread_id: str, call: ToolCall, record: CallRecord
    ) -> CallRecord | None:
        return record if record.status == "issued" else None


@breaks("claim.failed-frees-key")
class HoldsFailedKeys(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        last = self._store.last_attempt(call.idempotency_key)
        return (
            self._codec.record(last)
            if last and last.status == "failed"
            else await super().record_issued(thread_id, call)
        )


@breaks("claim.attempts-count-up", "concurrent.one-takes-over")
class CountsNoAttempts(_Shown):
    def shown(self, record: CallRecord) -> CallRecord:
        return replace(record, attempt=1)

    async def record_result(self, *args: Any, **options: Any) -> CallRecord:
        return self.shown(await super().record_result(*args, **options))


@breaks("claim.attempts-count-per-key")
class CountsAttemptsTogether(_Shown):
    def shown(self, record: CallRecord) -> CallRecord:
        return replace(record, attempt=len(self._store.attempts))


@breaks("claim.own-call-again")
class GrantsItsOwnAgain(_Answer):
    def answer(
        self, thread_id: str, call: ToolCall, record: CallRecord
    ) -> CallRecord | None:
        own = record.call.call_id == call.call_id
        return None if own and record.status == "issued" else record


@breaks("claim.call-id-is-used-once")
class RevivesFailedCalls(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        record = await super().record_issued(thread_id, call)

        if record is None or record.status != "failed":
            return record

        place = (thread_id, call.call_id)
        revived = self._store.calls[place]._replace(status="issued", resolved_at=None)
        self._store.calls[place] = revived
        return None


@breaks("claim.call-id-is-per-thread")
class SharesCallIds(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        for (_, call_id), stored in self._store.calls.items():
            if call_id == call.call_id:
                return self._codec.record(stored)

        return await super().record_issued(thread_id, call)


@breaks("claim.mismatch-of-key", "claim.mismatch-of-tool", "claim.mismatch-of-args")
class IgnoresMismatches(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        try:
            return await super().record_issued(thread_id, call)
        except CallMismatch:
            return self._codec.record(self._store.calls[thread_id, call.call_id])


@breaks("claim.mismatch-tells-the-facts")
class NamesNoCall(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        try:
            return await super().record_issued(thread_id, call)
        except CallMismatch as exc:
            raise CallMismatch("", "", exc.differs) from None


@breaks("claim.same-args-by-canonical-json")
class ComparesArgsAsText(_Answer):
    def answer(
        self, thread_id: str, call: ToolCall, record: CallRecord
    ) -> CallRecord | None:
        if json.dumps(record.call.args) != json.dumps(call.args):
            raise CallMismatch(thread_id, call.call_id, ["args"])

        return record


@breaks("claim.pending-in-order")
class SortsPending(Broken):
    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)

        if loaded is not None:
            loaded.pending.sort(key=lambda record: record.call.call_id)

        return loaded


@breaks("claim.copies-its-input", "claim.record-is-the-callers")
class KeepsTheCallersArgs(_Shown, _Answer):
    _args: Any = None

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self._args = self._args or call.args
        return await super().record_issued(thread_id, call)

    def shown(self, record: CallRecord) -> CallRecord:
        return replace(record, call=replace(record.call, args=self._args))

    def answer(
        self, thread_id: str, call: ToolCall, record: CallRecord
    ) -> CallRecord | None:
        return self.shown(record)


@breaks("claim.leaves-the-rest")
class NotesClaimsInExtra(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        await self.save_extra(thread_id, {"last_call": call.call_id})
        return await super().record_issued(thread_id, call)


@breaks("claim.takes-a-call-only")
class TakesAnyCall(Broken):
    async def record_issued(self, thread_id: str, call: Any) -> CallRecord | None:
        given = call if isinstance(call, ToolCall) else ToolCall(**call)
        return await super().record_issued(thread_id, given)


class _Result(Broken):
    """Puts a call back to issued where `reopens` says so."""

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
    """Overwrites whatever is there."""


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
class TakesFalsyForNothing(Broken):
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
class FailsRefusedResults(Broken):
    async def record_result(
        self, thread_id: str, call_id: str, *args: Any, **options: Any
    ) -> CallRecord:
        try:
            return await super().record_result(thread_id, call_id, *args, **options)
        except SerializationError:
            await super().record_result(thread_id, call_id, None, success=False)
            raise


@breaks("result.success-is-a-bool")
class TakesAnySuccess(Broken):
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


@breaks("find.unknown-is-none")
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
class RemembersOneResult(Broken):
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
