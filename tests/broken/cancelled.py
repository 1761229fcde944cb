"""Cancellations that leave an operation half done, a lock held, or a wrong state."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Self

from cpkit import (
    BackendUnavailable,
    CallRecord,
    CheckpointData,
    JsonValue,
    ToolCall,
    VersionConflict,
)
from tests.broken.races import AppendsInView, MergesKeyByKey
from tests.broken.store import Broken, breaks, pause


@breaks("cancel.write-is-decided")
class LeavesHalfABatch(AppendsInView):
    """Appends message by message, and stops when it is cancelled."""


@breaks("cancel.write-is-decided")
class LeavesHalfAMerge(MergesKeyByKey):
    """Merges key by key, and stops when it is cancelled."""


@breaks("cancel.write-is-decided")
class ClaimsInTwoSteps(Broken):
    """Records the call, then its hold on the key."""

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        record = await super().record_issued(thread_id, call)

        if record is None:
            held = self._store.attempts[call.idempotency_key].pop()
            await pause()
            self._store.attempts[call.idempotency_key].append(held)

        return record


@breaks("cancel.write-is-decided")
class ResolvesInTwoSteps(Broken):
    """Records the status, then the result."""

    async def record_result(
        self, thread_id: str, call_id: str, result: JsonValue, **options: Any
    ) -> CallRecord:
        place = (thread_id, call_id)

        if self._store.calls[place].status != "issued":
            return await super().record_result(thread_id, call_id, result, **options)

        await super().record_result(thread_id, call_id, None, **options)
        await pause()
        whole = self._codec.resolve(thread_id, call_id, result, True)
        stored = self._store.calls[place]._replace(result=whole.result)
        self._store.calls[place] = stored
        return self._codec.record(stored)


@breaks("cancel.reads-do-no-harm", raises="BackendUnavailable")
class LeavesConnectionInUse(Broken):
    """Uses one connection for reads. A cancelled read leaves it in use forever."""

    _reading = False

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        if self._reading:
            raise BackendUnavailable("broken", "another operation is in progress")

        self._reading = True
        await pause()
        self._reading = False
        return await super().load(thread_id)


@breaks("cancel.retry-cannot-duplicate")
class ChecksACachedVersion(Broken):
    """Caches a thread's version after the write, and checks the cached version."""

    async def append(
        self,
        thread_id: str,
        messages: Any,
        *,
        expected_version: int | None = None,
        **options: Any,
    ) -> int:
        versions = self.__dict__.setdefault("_versions", {})

        if expected_version not in (None, versions.get(thread_id, 0)):
            raise VersionConflict(thread_id, expected_version or 0, versions[thread_id])

        version = await super().append(thread_id, messages, **options)
        await pause()
        versions[thread_id] = version
        return version


@breaks("cancel.blocks-nobody", hangs=True)
class LeaksALock(Broken):
    """Does not release its lock when it is cancelled."""

    async def append(self, *args: Any, **options: Any) -> int:
        lock = self.__dict__.setdefault("_lock", asyncio.Lock())
        await lock.acquire()
        await pause()
        version = await super().append(*args, **options)
        lock.release()
        return version


@breaks("cancel.some-of-many")
class DropsTheNextAppend(Broken):
    """On a cancellation removes the wrong operation from its queue."""

    _dropped = 0

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        try:
            for _ in range(4):
                await pause()
        except asyncio.CancelledError:
            self._dropped += 1
            raise

        if self._dropped:
            self._dropped -= 1
            thread = self._store.touch(thread_id)
            return len(thread.bodies) + len(messages)

        return await super().append(thread_id, messages, **options)


@breaks("cancel.is-not-swallowed")
class SwallowsCancellation(Broken):
    async def append(self, *args: Any, **options: Any) -> int:
        try:
            await pause()
        except asyncio.CancelledError:
            return await super().append(*args, **options)

        return await super().append(*args, **options)


@breaks("cancel.while-closing")
class ClosesInTwoSteps(Broken):
    """Cancels its background task only if the close is not cancelled."""

    async def __aenter__(self) -> Self:
        self._beat = asyncio.create_task(asyncio.sleep(3600))
        return await super().__aenter__()

    async def aclose(self) -> None:
        await pause()
        self._beat.cancel()
        await super().aclose()


@breaks("cancel.while-opening", raises="BackendUnavailable")
class StaysHalfOpen(Broken):
    """Marks the store as opening, and keeps the mark when it is cancelled."""

    opening: bool = False

    async def __aenter__(self) -> Self:
        if type(self).opening:
            raise BackendUnavailable("broken", "another handle is creating the store")

        type(self).opening = True
        await pause()
        type(self).opening = False
        return await super().__aenter__()

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        await super().save_extra(thread_id, extra)
