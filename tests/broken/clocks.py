"""Stores that forget in time, take local times, or wait for a stopped writer."""

from __future__ import annotations

import asyncio
import fcntl
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, BinaryIO

from cpkit import CallRecord, CheckpointData, ThreadInfo, ToolCall
from tests.broken.crashes import Disk, DiskHarness
from tests.broken.store import Broken, breaks


@breaks("clock.nothing-expires")
class ExpiresClaims(Broken):
    """Gives a key to the next claim where its holder is silent for a minute."""

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        found = await super().record_issued(thread_id, call)
        claimed = self.__dict__.setdefault("_claimed", {})

        if found is None:
            claimed[call.idempotency_key] = time.monotonic()
        elif found.status == "issued" and found.call != call:
            since = time.monotonic() - claimed.get(
                call.idempotency_key, time.monotonic()
            )
            return None if since > 60 else found

        return found


@breaks("clock.nothing-expires")
class ForgetsResultsAfterAnHour(Broken):
    async def record_result(self, *args: Any, **options: Any) -> CallRecord:
        record = await super().record_result(*args, **options)
        done = self.__dict__.setdefault("_done", {})
        done.setdefault(record.call.idempotency_key, time.time())
        return record

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        found = await super().find_completed(idempotency_key)
        at = self.__dict__.get("_done", {}).get(idempotency_key, time.time())
        return found if time.time() - at < 3600 else None


@breaks("clock.nothing-expires")
class LoadsAnOldCacheAsEmpty(Broken):
    """Keeps what it loaded for a minute, and drops the pending calls then."""

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)
        seen = self.__dict__.setdefault("_seen", {})
        at = seen.setdefault(thread_id, time.monotonic())

        if loaded is not None and time.monotonic() - at > 60:
            return replace(loaded, pending=[])

        return loaded


@breaks("clock.any-time-zone")
class ListsLocalTimes(Broken):
    """Takes a naive local time for one in UTC."""

    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        return [
            replace(
                info,
                created_at=_local(info.created_at),
                updated_at=_local(info.updated_at),
            )
            for info in await super().list_threads(**options)
        ]


def _local(at: datetime) -> datetime:
    return datetime.fromtimestamp(at.timestamp()).replace(tzinfo=UTC)


@breaks("clock.any-time-zone")
class ClaimsAtLocalTimes(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        record = await super().record_issued(thread_id, call)

        if record is None:
            place = (thread_id, call.call_id)
            offset = time.localtime().tm_gmtoff * 1_000_000
            stored = self._store.calls[place]
            self._store.calls[place] = stored._replace(
                issued_at=stored.issued_at + offset
            )

        return record


@breaks("clock.stopped-writers", harness=DiskHarness, hangs=True)
class WaitsForAStoppedWriter(Disk):
    """Waits for the lock of another process without an end."""

    async def _lock(self, log: BinaryIO) -> None:
        await asyncio.to_thread(fcntl.flock, log, fcntl.LOCK_EX)


@breaks("clock.stopped-writers", harness=DiskHarness, raises="TimeoutError")
class RaisesTimeoutError(Disk):
    """Gives up in time, and lets its client's error out."""

    async def _lock(self, log: BinaryIO) -> None:
        for _ in range(100):
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                await asyncio.sleep(0.005)
            else:
                return

        raise TimeoutError


@breaks("clock.nothing-expires")
class DropsOldReceipts(Broken):
    """Lists no call that is older than an hour, by another one of Python's clocks."""

    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        hour = timedelta(hours=1)
        found = await super().list_calls(thread_id)
        return [one for one in found if datetime.now(UTC) - one.issued_at < hour]
