"""Claims that succeed twice, never, or for the wrong call."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

from cpkit import (
    CallMismatch,
    CallRecord,
    CheckpointData,
    ToolCall,
)
from cpkit.canonical import canonical_json
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


class _Pending(Broken):
    """Changes the pending records of a load."""

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)

        if loaded is not None:
            loaded.pending[:] = [self.changed(record) for record in loaded.pending]

        return loaded

    def changed(self, record: CallRecord) -> CallRecord:
        return record


@breaks("claim.fresh-is-none")
class ReturnsTheClaim(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        await super().record_issued(thread_id, call)
        return await super().record_issued(thread_id, call)


@breaks("claim.is-pending")
class ForgetsArgs(_Pending):
    def changed(self, record: CallRecord) -> CallRecord:
        return replace(record, call=replace(record.call, args={}))


@breaks("claim.time-is-utc")
class ReturnsNaiveTimes(_Pending):
    def changed(self, record: CallRecord) -> CallRecord:
        return replace(record, issued_at=record.issued_at.replace(tzinfo=None))


@breaks(
    "claim.time-is-utc",
    "erase.late-result",
    "move.dumps-everything",
    "threads.erased-have-times",
    "threads.tells-version-and-times",
)
class TakesLocalTimeForUtc(Broken):
    """Every time is an hour late."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._store.ahead = 3_600_000_000


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
class CountsNoAttempts(_Pending):
    def changed(self, record: CallRecord) -> CallRecord:
        return replace(record, attempt=1)

    async def record_result(self, *args: Any, **options: Any) -> CallRecord:
        return self.changed(await super().record_result(*args, **options))


@breaks("claim.attempts-count-per-key")
class CountsAttemptsOfAllKeys(_Pending):
    def changed(self, record: CallRecord) -> CallRecord:
        return replace(record, attempt=len(self._store.attempts))


@breaks("claim.own-call-again")
class GrantsTheSameCallAgain(_Answer):
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
class RaisesWithoutFields(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        try:
            return await super().record_issued(thread_id, call)
        except CallMismatch as exc:
            raise CallMismatch("", "", exc.differs) from None


@breaks("claim.same-args-by-canonical-json", raises="CallMismatch")
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
class KeepsTheCallersArgs(_Pending, _Answer):
    _args: Any = None

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self._args = self._args or call.args
        return await super().record_issued(thread_id, call)

    def changed(self, record: CallRecord) -> CallRecord:
        return replace(record, call=replace(record.call, args=self._args))

    def answer(
        self, thread_id: str, call: ToolCall, record: CallRecord
    ) -> CallRecord | None:
        return self.changed(record)


@breaks("claim.leaves-the-rest")
class WritesClaimsToExtra(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        await self.save_extra(thread_id, {"last_call": call.call_id})
        return await super().record_issued(thread_id, call)


@breaks("claim.takes-a-call-only")
class AcceptsDicts(Broken):
    async def record_issued(self, thread_id: str, call: Any) -> CallRecord | None:
        given = call if isinstance(call, ToolCall) else ToolCall(**call)
        return await super().record_issued(thread_id, given)


class ComparesSomeArgs(Broken):
    """Takes other args for the same where a shorter text of both is the same."""

    def shortened(self, args: str) -> str:
        return args

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        try:
            return await super().record_issued(thread_id, call)
        except CallMismatch:
            stored = self._codec.record(self._store.calls[thread_id, call.call_id])
            texts = [canonical_json(one.args) for one in (stored.call, call)]
            same = replace(call, args=stored.call.args)

            if self.shortened(texts[0]) != self.shortened(texts[1]):
                raise

            return await super().record_issued(thread_id, same)


@breaks("claim.mismatch-of-args")
class ComparesArgsInAnyCase(ComparesSomeArgs):
    def shortened(self, args: str) -> str:
        return args.casefold()


@breaks("claim.mismatch-of-args")
class ComparesTheStartOfArgs(ComparesSomeArgs):
    def shortened(self, args: str) -> str:
        return args[: 2**16]


@breaks("claim.mismatch-of-args")
class ComparesArgsWithoutSpaces(ComparesSomeArgs):
    def shortened(self, args: str) -> str:
        return args.replace(" ", "")


@breaks("claim.mismatch-of-args")
class ComparesFifteenDigits(ComparesSomeArgs):
    """Rounds floats, as a column of decimal digits does."""

    def shortened(self, args: str) -> str:
        return repr(json.loads(args, parse_float=lambda text: f"{float(text):.15g}"))


@breaks("claim.mismatch-of-args")
class ComparesNumbersByValue(ComparesSomeArgs):
    """Takes 1e300 for the integer of that value, which is written in full."""

    def shortened(self, args: str) -> str:
        return repr(json.loads(args, parse_int=_decimal, parse_float=_decimal))


def _decimal(text: str) -> Decimal:
    return Decimal(text).normalize()
