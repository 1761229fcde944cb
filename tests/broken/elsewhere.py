"""Handles that see late, or otherwise, what another handle has written."""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar

from cpkit import CallRecord, CheckpointData, ThreadInfo, ToolCall
from tests.broken.crashes import Disk, DiskHarness
from tests.broken.reference import Reference
from tests.broken.store import Broken, breaks, pause


@breaks("handle.shares-every-write")
class RemembersErasedContent(Broken):
    """A completed call stays completed, so its record is remembered for good."""

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        found = await super().find_completed(idempotency_key)
        known: dict[str, CallRecord] = self.__dict__.setdefault("_known", {})

        if found is not None and idempotency_key in known:
            return deepcopy(known[idempotency_key])

        if found is not None:
            known[idempotency_key] = deepcopy(found)

        return found

    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        await super().delete_thread(thread_id, **options)
        self.__dict__["_known"] = {}


@breaks("handle.shares-every-write")
class ListsALittleLate(Broken):
    """Answers a later page again that is at most 30 milliseconds old."""

    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        fresh = await super().list_threads(**options)

        if not options.get("after"):
            return fresh

        lists: dict[str, tuple[float, list[ThreadInfo]]] = self.__dict__.setdefault(
            "_lists", {}
        )
        at, listed = lists.get(repr(options), (0.0, fresh))

        if time.monotonic() - at < 0.03:
            return list(listed)

        lists[repr(options)] = time.monotonic(), fresh
        return fresh

    def _changed(self, thread_id: str, change: str) -> None:
        self.__dict__["_lists"] = {}
        super()._changed(thread_id, change)


@breaks("handle.shares-every-write")
class RemembersExtraOfARange(Broken):
    """Loads a part of a thread again only where its version has changed."""

    async def load_range(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> CheckpointData[Any] | None:
        fresh = await super().load_range(thread_id, start, stop)
        known: dict[Any, Any] = self.__dict__.setdefault("_ranges", {})
        kept = known.get((thread_id, start, stop))

        if start or stop is not None:
            return fresh

        if fresh is not None and kept is not None and kept.version == fresh.version:
            return replace(fresh, extra=dict(kept.extra))

        known[thread_id, start, stop] = fresh
        return fresh

    def _changed(self, thread_id: str, change: str) -> None:
        self.__dict__["_ranges"] = {}
        super()._changed(thread_id, change)


@breaks("claim.order-of-two-handles")
class OrdersClaimsByHandle(Broken):
    """Numbers the claims of each handle in blocks, as sequences with a cache do."""

    blocks: ClassVar[dict[tuple[str, str], int]] = {}
    handles: ClassVar[int] = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        OrdersClaimsByHandle.handles += 1
        self._next = self.handles * 1000

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        record = await super().record_issued(thread_id, call)
        self._next += 1
        self.blocks.setdefault((thread_id, call.call_id), self._next)
        return record

    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        listed = await super().list_calls(thread_id)
        return sorted(
            listed, key=lambda one: self.blocks.get((thread_id, one.call.call_id), 0)
        )


@breaks("concurrent.negative-ranges-are-slices")
class CountsThenReads(Broken):
    """Counts the messages in one step, and reads from there in another."""

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[Any]:
        if start < 0 and stop is not None and stop < 0:
            version = await self.append(thread_id, [])
            await pause()
            start = max(0, version + start)

        return await super().read(thread_id, start, stop)


@breaks("handle.shares-with-processes", harness=DiskHarness)
class ListsItsOwnProcess(Disk):
    """Reads no news before it lists, so that another process's threads are missing."""

    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        return await Reference.list_threads(self, **options)


@breaks("handle.shares-with-processes", harness=DiskHarness)
class DumpsItsOwnProcess(Disk):
    async def dump_thread(self, thread_id: str) -> Any:
        return await Reference.dump_thread(self, thread_id)
