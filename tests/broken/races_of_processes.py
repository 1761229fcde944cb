"""Operations in two steps, each under the lock; other processes write between them.

The window between the steps is one round trip to a server on the same machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from cpkit import (
    CallRecord,
    CheckpointData,
    JsonValue,
    ToolCall,
    VersionConflict,
)
from tests.broken.crashes import Disk, DiskHarness
from tests.broken.reference import Reference
from tests.broken.store import breaks

ROUND_TRIP = 0.0003
"""Seconds."""


@breaks("concurrent.loads-beside-processes-are-of-one-moment", harness=DiskHarness)
class LoadsInTwoTurns(Disk):
    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        first = await super().load(thread_id)
        await asyncio.sleep(ROUND_TRIP)
        second = await super().load(thread_id)

        if first is None or second is None:
            return second

        return replace(first, extra=second.extra)


@breaks("linearizable.threads-at-one-instant", harness=DiskHarness)
class ChecksTheVersionBefore(Disk):
    async def append(
        self,
        thread_id: str,
        messages: Any,
        *,
        expected_version: int | None = None,
        **options: Any,
    ) -> int:
        loaded = await self.load(thread_id)
        await asyncio.sleep(ROUND_TRIP)
        version = 0 if loaded is None else loaded.version

        if expected_version not in (None, version):
            raise VersionConflict(thread_id, expected_version or 0, version)

        return await super().append(thread_id, messages, **options)


@breaks("linearizable.threads-at-one-instant", harness=DiskHarness)
class MergesByReadAndWrite(Disk):
    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        loaded = await self.load(thread_id)
        await asyncio.sleep(ROUND_TRIP)
        before = {} if loaded is None else loaded.extra
        await super().save_extra(thread_id, {**before, **extra})


@breaks("linearizable.threads-at-one-instant", harness=DiskHarness)
class TearsABatch(Disk):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        version = 0

        for message in messages:
            version = await super().append(thread_id, [message], **options)
            options.pop("expected_version", None)
            await asyncio.sleep(ROUND_TRIP)

        return version


@breaks("linearizable.keys-at-one-instant", harness=DiskHarness)
class LooksThenClaims(Disk):
    """Looks up the key in one step, and writes the claim in another."""

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        holder = await self.find_call(call.idempotency_key)

        if holder is not None:
            return holder

        await asyncio.sleep(ROUND_TRIP)

        async with self._turn() as log:
            found = await Reference.record_issued(self, thread_id, call)

            if found is None:
                issued = self._store.calls[thread_id, call.call_id].issued_at
                self._write(log, ["record_issued", thread_id, asdict(call), issued])

            return None
