"""Stores that keep a promise on the common path, and break it on another one."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from typing import Any, BinaryIO, Self

from cpkit import (
    BackendUnavailable,
    CallRecord,
    SerializationError,
    ToolCall,
    VersionConflict,
)
from tests.broken.crashes import Disk, DiskHarness
from tests.broken.remote import Remote, on_a_server
from tests.broken.store import Broken, breaks, pause


@breaks("cancel.is-not-swallowed")
class SwallowsTheCancellationOfAClaim(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        with suppress(asyncio.CancelledError):
            await pause()

        return await super().record_issued(thread_id, call)


@breaks("cancel.is-not-swallowed")
class SwallowsTheCancellationOfARestore(Broken):
    async def restore_thread(self, dump: Any) -> None:
        with suppress(asyncio.CancelledError):
            await pause()

        await super().restore_thread(dump)


@breaks("handle.close-lets-writes-finish")
class AcknowledgesDeletionsAtClose(Broken):
    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        self._check_usable()
        await pause()

        if self._is_open:
            await super().delete_thread(thread_id, **options)


@breaks("handle.close-lets-writes-finish")
class AcknowledgesFencedExtraAtClose(Broken):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        if not messages and options.get("extra") and "expected_version" in options:
            await pause()

            if not self._is_open:
                return int(options["expected_version"])

        return await super().append(thread_id, messages, **options)


@breaks("handle.works-after-mistakes")
class ForgetsTheClaimAfterItsOwnError(Broken):
    """Leaves a transaction open after a value it could not encode; the next is lost."""

    _failed = False

    async def append(self, *args: Any, **options: Any) -> int:
        try:
            return await super().append(*args, **options)
        except SerializationError:
            self._failed = True
            raise

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        if self._failed:
            self._failed = False
            self._check_usable()
            return None

        return await super().record_issued(thread_id, call)


@breaks("handle.works-after-refusals")
class LosesTheMergeAfterARefusedDeletion(Broken):
    """Rolls back at the next commit what a refused deletion had begun."""

    _refused = False

    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        try:
            await super().delete_thread(thread_id, **options)
        except VersionConflict:
            self._refused = True
            raise

    async def save_extra(self, thread_id: str, extra: Any) -> None:
        if not self._refused:
            await super().save_extra(thread_id, extra)

        self._refused = False


@breaks("threads.updated-by-every-change")
class IgnoresFencedExtraInUpdatedAt(Broken):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        known = isinstance(thread_id, str)
        before = self._store.threads.get(thread_id) if known else None
        updated_at = before.updated_at if before else 0
        version = await super().append(thread_id, messages, **options)

        if not messages and before and options.get("expected_version") is not None:
            before.updated_at = updated_at

        return version


@breaks("values.survive-opening")
class MigratesNumbers(Broken):
    """Writes every value again when a handle opens, by a parser without floats."""

    async def __aenter__(self) -> Self:
        for thread in self._store.threads.values():
            thread.bodies[:] = [_migrated(body) for body in thread.bodies]

        return await super().__aenter__()


def _migrated(body: bytes) -> bytes:
    def number(text: str) -> float | int:
        return int(float(text)) if float(text).is_integer() else float(text)

    try:
        return json.dumps(json.loads(body, parse_float=number)).encode()
    except (ValueError, OverflowError):
        return body


@breaks("wire.lost-answers-are-told", harness=on_a_server)
class TakesALostDeletionForARefusal(Remote):
    async def _lost(self, method: str, *args: Any, **options: Any) -> Any:
        maybe = method != "delete_thread"
        raise BackendUnavailable("broken", "no answer", maybe_applied=maybe)


@breaks("wire.lost-answers-are-told", harness=on_a_server)
class SendsRestoresAgain(Remote):
    async def _lost(self, method: str, *args: Any, **options: Any) -> Any:
        if method == "restore_thread":
            return await self._ask(method, *args, **options)

        return await super()._lost(method, *args, **options)


@breaks("wire.lost-answers-are-told", harness=on_a_server)
class SendsFencedAppendsAgain(Remote):
    async def _lost(self, method: str, *args: Any, **options: Any) -> Any:
        if options.get("expected_version") is not None:
            return await self._ask(method, *args, **options)

        return await super()._lost(method, *args, **options)


@breaks("kill.every-write-is-whole", harness=DiskHarness, hangs=True)
class LeavesTheLockOfAKey(Disk):
    """Locks a key with a folder that stays when the claiming process is killed."""

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        lock = self._folder / f"lock-{hash_of(call.idempotency_key)}"

        while True:
            with suppress(FileExistsError):
                os.mkdir(lock)
                break

            await asyncio.sleep(0.0005)

        try:
            await asyncio.sleep(0.005)
            return await super().record_issued(thread_id, call)
        finally:
            os.rmdir(lock)


def hash_of(text: str) -> str:
    return text.encode().hex()[:200]


@breaks("kill.every-write-is-whole", harness=DiskHarness)
class DeletesInTwoWrites(Disk):
    """Erases a thread, and then frees its keys."""

    async def delete_thread(
        self, thread_id: str, *, forget_keys: bool = False, **options: Any
    ) -> None:
        await super().delete_thread(thread_id, **options)

        if forget_keys:
            await asyncio.sleep(0.05)
            await super().delete_thread(thread_id, forget_keys=True)


@breaks("kill.claims-survive", harness=DiskHarness)
class TakesKeysFromTheDead(Disk):
    """Lets a claim take the key of an ended process; reads still see the holder."""

    def _write(self, log: BinaryIO, values: list[Any]) -> None:
        if values[0] == "record_issued":
            owner = self._folder / f"owner-{hash_of(values[2]['idempotency_key'])}"
            owner.write_text(f"{os.getpid()}")

        super()._write(log, values)

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        record = await super().record_issued(thread_id, call)
        owner = self._folder / f"owner-{hash_of(call.idempotency_key)}"

        if record is None or record.call.call_id == call.call_id:
            return record

        try:
            os.kill(int(owner.read_text()), 0)
        except ProcessLookupError:
            return None

        return record
