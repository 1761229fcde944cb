"""Dumps and restores that change, lose or overwrite something."""

from __future__ import annotations

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from cpkit import (
    CallRecord,
    CheckpointData,
    InvalidId,
    KeyTaken,
    ThreadDump,
    ToolCall,
    UnknownCall,
    VersionConflict,
)
from cpkit.driver import StoredCall
from cpkit.driver.dumps import encode_dump
from tests.broken.store import AtOnce, Broken, breaks, pause


class _Restores(Broken):
    """Restores another dump than the one that it is given."""

    def changed(self, dump: ThreadDump) -> ThreadDump:
        raise NotImplementedError

    async def restore_thread(self, dump: ThreadDump) -> None:
        await super().restore_thread(self.changed(dump))


@breaks("move.missing-is-none")
class DumpsAnEmptyThread(Broken):
    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        empty = ThreadDump(thread_id, [], {}, [], None, None)
        return await super().dump_thread(thread_id) or empty


@breaks("move.missing-is-none")
class DumpsByPattern(Broken):
    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        found = [one for one in self._store.threads if fnmatchcase(one, thread_id)]
        exact = await super().dump_thread(thread_id)
        return exact or (await super().dump_thread(found[0]) if found else None)


@breaks("move.refuses-invalid-dumps")
class DumpsInvalidIds(Broken):
    """Has nothing under an id that cannot exist, and says so."""

    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        try:
            return await super().dump_thread(thread_id)
        except InvalidId:
            return None


@breaks("move.dumps-everything")
class DumpsPendingCallsOnly(Broken):
    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        dump = await super().dump_thread(thread_id)

        if dump is None:
            return None

        calls = [record for record in dump.calls if record.status == "issued"]
        return replace(dump, calls=calls)


@breaks("move.round-trip")
class StaysDeleted(Broken):
    """Remembers a deleted id, and hides it until the next append."""

    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        self.__dict__.setdefault("_deleted", set()).add(thread_id)
        await super().delete_thread(thread_id, **options)

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        if thread_id in self.__dict__.get("_deleted", ()):
            return None

        return await super().load(thread_id)


class _Refuses(Broken):
    """Refuses a dump because of calls that do not stand in its way."""

    def in_the_way(self, dump: ThreadDump, call: StoredCall) -> bool:
        raise NotImplementedError

    async def restore_thread(self, dump: ThreadDump) -> None:
        for one in dump.calls:
            call = self._store.last_attempt(one.call.idempotency_key)

            if call is not None and self.in_the_way(dump, call):
                raise KeyTaken(call.idempotency_key, call.thread_id)

        await super().restore_thread(dump)


@breaks("move.judges-each-key", raises="KeyTaken")
class MixesKeys(_Refuses):
    """Takes the attempts of one key for those of every key in the dump."""

    def in_the_way(self, dump: ThreadDump, call: StoredCall) -> bool:
        return any(one.attempt == call.attempt for one in dump.calls)


@breaks("move.comes-back-below", raises="KeyTaken")
class WantsTheNewestAttempt(_Refuses):
    """Refuses an attempt that is older than the one on record."""

    def in_the_way(self, dump: ThreadDump, call: StoredCall) -> bool:
        return any(one.attempt < call.attempt for one in dump.calls)


@breaks("move.keeps-values")
class DumpsIntegersAsFloats(Broken):
    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        dump = await super().dump_thread(thread_id)

        if dump is None:
            return None

        messages = json.loads(json.dumps(dump.messages), parse_int=_as_double)
        return replace(dump, messages=messages)


def _as_double(digits: str) -> int:
    """Return what is left of an integer that JavaScript has read."""
    return int(float(digits)) if len(digits) < 300 else 0


@breaks("move.keeps-times")
class RestoresWithSeconds(_Restores):
    """Rounds times to whole seconds."""

    def changed(self, dump: ThreadDump) -> ThreadDump:
        assert dump.created_at is not None
        return replace(dump, created_at=dump.created_at.replace(microsecond=0))


@breaks("move.keeps-times", raises="ValueError")
class EndsIn2038(Broken):
    """Has columns for the seconds since 1970 with 32 bits."""

    async def restore_thread(self, dump: ThreadDump) -> None:
        self._check_usable()
        times = encode_dump(self._codec, dump)

        if times.updated_at and times.updated_at >= 2**31 * 1_000_000:
            raise ValueError("the time is out of range")

        await super().restore_thread(dump)


@breaks("move.keeps-times")
class KeepsSecondsAsFloats(Broken):
    """Keeps times as floats of seconds, which is exact today."""

    async def restore_thread(self, dump: ThreadDump) -> None:
        await super().restore_thread(dump)
        thread = self._store.threads.get(dump.thread_id)

        if thread is not None:
            thread.updated_at = int(thread.updated_at / 1e6 * 1e6)


@breaks("move.keeps-attempts", raises="ValueError")
class CountsWith16Bits(Broken):
    async def restore_thread(self, dump: ThreadDump) -> None:
        self._check_usable()

        if any(call.attempt >= 2**15 for call in encode_dump(self._codec, dump).calls):
            raise ValueError("the attempt is out of range")

        await super().restore_thread(dump)


@breaks("move.keeps-attempts")
class CountsAttemptsAgain(_Restores):
    """Numbers the attempts of each key from 1."""

    def changed(self, dump: ThreadDump) -> ThreadDump:
        counts: dict[str, int] = {}
        calls = []

        for record in dump.calls:
            key = record.call.idempotency_key
            counts[key] = counts.get(key, 0) + 1
            calls.append(replace(record, attempt=counts[key]))

        return replace(dump, calls=calls)


@breaks("move.keeps-order")
class OrdersCallsByTime(_Restores):
    def changed(self, dump: ThreadDump) -> ThreadDump:
        calls = sorted(dump.calls, key=lambda record: record.issued_at)
        return replace(dump, calls=calls)


@breaks("move.keeps-order")
class DumpsCallsByTime(Broken):
    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        dump = await super().dump_thread(thread_id)
        calls = sorted(dump.calls, key=lambda one: one.issued_at) if dump else []
        return dump and replace(dump, calls=calls)


@breaks("move.keeps-order")
class ListsCallsByTime(Broken):
    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        calls = await super().list_calls(thread_id)
        return sorted(calls, key=lambda one: one.issued_at)


@breaks("move.keeps-erasure")
class RevivesErasedCalls(Broken):
    async def restore_thread(self, dump: ThreadDump) -> None:
        await super().restore_thread(dump)

        for place in self._store.calls_of[dump.thread_id]:
            erased = self._store.calls[place]
            result = None if erased.status == "issued" else b"null"
            alive = erased._replace(erased=False, result=result)
            self._store.calls[place] = alive


@breaks("move.holds-its-keys")
class RestoresCallsWithoutKeys(Broken):
    """Does not enter restored calls into the index of keys."""

    async def restore_thread(self, dump: ThreadDump) -> None:
        await super().restore_thread(dump)

        for record in dump.calls:
            self._store.attempts[record.call.idempotency_key] = []


@breaks("move.failed-frees-its-key")
class RestoredFailuresHold(Broken):
    """Takes a restored failed attempt for the holder of its key."""

    async def restore_thread(self, dump: ThreadDump) -> None:
        await super().restore_thread(dump)
        failed = {
            record.call.idempotency_key: record
            for record in dump.calls
            if record.status == "failed"
        }
        self.__dict__.setdefault("_failed", {}).update(failed)

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        held: CallRecord | None = self.__dict__.get("_failed", {}).get(
            call.idempotency_key
        )
        return held or await super().record_issued(thread_id, call)


@breaks("move.issued-is-resolved", raises="UnknownCall")
class RestoresHistoryOnly(Broken):
    """Refuses results of calls that it did not issue itself."""

    async def restore_thread(self, dump: ThreadDump) -> None:
        await super().restore_thread(dump)
        self.__dict__.setdefault("_restored", set()).add(dump.thread_id)

    async def record_result(
        self, thread_id: str, call_id: str, *args: Any, **options: Any
    ) -> CallRecord:
        if thread_id in self.__dict__.get("_restored", ()):
            raise UnknownCall(thread_id, call_id)

        return await super().record_result(thread_id, call_id, *args, **options)


@breaks("move.attempts-in-any-order")
class LastRestoredIsNewest(Broken):
    """Takes the attempt that was restored last for the newest."""

    async def restore_thread(self, dump: ThreadDump) -> None:
        await super().restore_thread(dump)

        for record in dump.calls:
            place = (dump.thread_id, record.call.call_id)
            attempts = self._store.attempts[record.call.idempotency_key]
            attempts.remove(place)
            attempts.append(place)


@breaks("move.refuses-an-existing-thread")
class OverwritesThreads(Broken):
    async def restore_thread(self, dump: ThreadDump) -> None:
        try:
            await super().restore_thread(dump)
        except VersionConflict:
            await self.delete_thread(dump.thread_id, forget_keys=True)
            await super().restore_thread(dump)


@breaks("move.refuses-erased-calls")
class OverwritesErasedCalls(Broken):
    async def restore_thread(self, dump: ThreadDump) -> None:
        try:
            await super().restore_thread(dump)
        except VersionConflict:
            if dump.thread_id in self._store.threads:
                raise

            await self.delete_thread(dump.thread_id, forget_keys=True)
            await super().restore_thread(dump)


@breaks("move.refuses-a-taken-key")
class ChecksHoldersOnly(Broken):
    """Refuses a key only where another thread has an issued or completed call."""

    async def restore_thread(self, dump: ThreadDump) -> None:
        try:
            await super().restore_thread(dump)
        except KeyTaken as exc:
            if await self.find_call(exc.idempotency_key) is not None:
                raise


@breaks("move.refusal-changes-nothing")
class RestoresWhatItCan(Broken):
    """Restores the calls before the one that is refused."""

    async def restore_thread(self, dump: ThreadDump) -> None:
        try:
            await super().restore_thread(dump)
        except KeyTaken as exc:
            keys = [record.call.idempotency_key for record in dump.calls]
            calls = dump.calls[: keys.index(exc.idempotency_key)]
            await super().restore_thread(replace(dump, calls=calls))
            raise


@breaks("move.refuses-invalid-dumps")
class RestoresAnyAttempts(Broken):
    """Does not compare the attempts within a dump."""

    async def restore_thread(self, dump: ThreadDump) -> None:
        try:
            await super().restore_thread(dump)
        except ValueError as exc:
            if "attempt" not in str(exc):
                raise


@breaks("move.refuses-invalid-dumps")
class DropsResultsInSilence(Broken):
    """Leaves out the result of a call that cannot have one, and restores the rest."""

    async def restore_thread(self, dump: ThreadDump) -> None:
        try:
            await super().restore_thread(dump)
        except ValueError as exc:
            if "but has a result" not in str(exc):
                raise

            calls = [replace(record, result=None) for record in dump.calls]
            await super().restore_thread(replace(dump, calls=calls))


@breaks("move.refuses-invalid-dumps")
class TakesAnyIterable(Broken):
    """Lists the calls of a dump before it looks at them."""

    async def restore_thread(self, dump: ThreadDump) -> None:
        await super().restore_thread(replace(dump, calls=list(dump.calls)))


@breaks("limits.too-large-is-refused")
class RestoresWithoutLimits(Broken):
    """Trusts that what another store could keep is not too large for this one."""

    async def restore_thread(self, dump: ThreadDump) -> None:
        limit, self._codec.max_payload = self._codec.max_payload, 2**40

        try:
            await super().restore_thread(dump)
        finally:
            self._codec.max_payload = limit


@breaks("sizes.long-thread")
class DumpsAThousandMessages(Broken):
    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        dump = await super().dump_thread(thread_id)
        return dump and replace(dump, messages=dump.messages[:1000])


@breaks("move.copies")
class KeepsTheCallersDump(Broken):
    """Gives back the restored dump as long as the thread does not change."""

    async def restore_thread(self, dump: ThreadDump) -> None:
        await super().restore_thread(dump)
        thread = self._store.threads.get(dump.thread_id)
        kept = self.__dict__.setdefault("_kept", {})
        kept[dump.thread_id] = thread and thread.updated_at, dump

    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        thread = self._store.threads.get(thread_id)
        updated_at, kept = self.__dict__.get("_kept", {}).get(thread_id, (None, None))
        same = thread is not None and thread.updated_at == updated_at
        return kept if same else await super().dump_thread(thread_id)


@breaks("cancel.write-is-decided")
class LeavesHalfAThread(Broken):
    """Restores in two steps, the calls last, and stops when it is cancelled."""

    async def restore_thread(self, dump: ThreadDump) -> None:
        await super().restore_thread(dump)
        calls = self._store.calls_of.pop(dump.thread_id, [])
        await pause()
        self._store.calls_of[dump.thread_id] = calls


@breaks("concurrent.one-restores")
class ChecksThenRestores(AtOnce):
    async def restore_thread(self, dump: ThreadDump) -> None:
        if await self.dump_thread(dump.thread_id) is not None:
            raise VersionConflict(dump.thread_id, 0, len(dump.messages))

        await pause()
        await self.delete_thread(dump.thread_id, forget_keys=True)
        await super().restore_thread(dump)


@breaks("concurrent.dumps-are-snapshots")
class DumpsInTwoSteps(Broken):
    """Reads the messages, then extra."""

    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        first = await super().dump_thread(thread_id)
        await pause()
        later = await super().dump_thread(thread_id)
        return first and later and replace(later, messages=first.messages)
