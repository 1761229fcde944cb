"""A real store that records its calls, and can lose or delay its answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cpkit import (
    BackendUnavailable,
    CallRecord,
    CheckpointData,
    JsonValue,
    MemoryCheckpointer,
    ToolCall,
)

Fault = Literal["", "refused", "lost before", "lost after"]


class Spy:
    """The six methods of a store in memory.

    Each of the next appends takes one of ``faults``, and each of the next reads one of
    ``read_faults``. While ``gate`` is not set, appends wait. When an append ends,
    ``ended`` gets the number of its messages.
    """

    def __init__(self, inner: MemoryCheckpointer[Any]) -> None:
        self.inner = inner
        self.calls: list[tuple[Any, ...]] = []
        self.faults: deque[Fault] = deque()
        self.read_faults: deque[Fault] = deque()
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = asyncio.Event()
        self.ended: asyncio.Queue[int] = asyncio.Queue()

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        self.calls.append(("load",))
        self._fail(self.read_faults)
        return await self.inner.load(thread_id)

    async def append(
        self,
        thread_id: str,
        messages: Sequence[Any],
        *,
        expected_version: int | None = None,
        extra: Mapping[str, JsonValue] | None = None,
    ) -> int:
        self.calls.append(("append", len(messages), expected_version))
        self.waiting.set()
        await self.gate.wait()

        try:
            return await self._append(thread_id, messages, expected_version, extra)
        finally:
            self.ended.put_nowait(len(messages))

    async def _append(
        self,
        thread_id: str,
        messages: Sequence[Any],
        expected_version: int | None,
        extra: Mapping[str, JsonValue] | None,
    ) -> int:
        fault = self.faults.popleft() if self.faults else ""

        if fault in ("refused", "lost before"):
            raise BackendUnavailable("spy", fault, maybe_applied=fault != "refused")

        version = await self.inner.append(
            thread_id, messages, expected_version=expected_version, extra=extra
        )

        if fault == "lost after":
            raise BackendUnavailable("spy", fault, maybe_applied=True)

        return version

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        self.calls.append(("save_extra",))
        await self.inner.save_extra(thread_id, extra)

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self.calls.append(("record_issued",))
        return await self.inner.record_issued(thread_id, call)

    async def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool = True,
    ) -> CallRecord:
        self.calls.append(("record_result",))
        return await self.inner.record_result(
            thread_id, call_id, result, success=success
        )

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        self.calls.append(("find_completed",))
        return await self.inner.find_completed(idempotency_key)

    def _fail(self, faults: deque[Fault]) -> None:
        if faults and faults.popleft():
            raise BackendUnavailable("spy", "unreachable")


class RangeSpy(Spy):
    """A spy that can read ranges too."""

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[Any]:
        self.calls.append(("read", start, stop))
        self._fail(self.read_faults)
        return await self.inner.read(thread_id, start, stop)

    async def load_range(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> CheckpointData[Any] | None:
        self.calls.append(("load_range", start, stop))
        self._fail(self.read_faults)
        return await self.inner.load_range(thread_id, start, stop)
