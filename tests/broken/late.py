"""Stores whose cancelled writes take effect later than an operation that follows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self

from cpkit import CallRecord, CheckpointData, ThreadDump, ThreadInfo
from tests.broken.store import Broken, breaks, pause


class _Late(Broken):
    """Applies a cancelled write in a background task, some time after its caller."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._late: set[asyncio.Task[Any]] = set()

    async def _write(self, write: Callable[[Self], Awaitable[Any]]) -> Any:
        """Do the write; if the caller is cancelled first, do it later."""
        try:
            await pause()
        except asyncio.CancelledError:
            task = asyncio.create_task(self._write_later(write))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
            raise

        return await write(self)

    async def _write_later(self, write: Callable[[Self], Awaitable[Any]]) -> None:
        for _ in range(20):
            await pause()

        # A handle of its own, because this one may be closed by now.
        async with type(self)() as other:
            await write(other)

    async def _decided(self) -> None:
        """Wait until every late write is done."""
        if self._late:
            await asyncio.wait(self._late)


class _LateAppends(_Late):
    async def append(self, *args: Any, **options: Any) -> int:
        version: int = await self._write(
            lambda handle: Broken.append(handle, *args, **options)
        )
        return version


@breaks("cancel.write-is-decided")
class LandsLate(_LateAppends):
    """Does not wait for a cancelled append at all."""


@breaks("cancel.close-waits")
class ClosesBeforeItIsDecided(_LateAppends):
    """Reads wait for a cancelled append; the close does not."""

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        await self._decided()
        return await super().load(thread_id)


@breaks("cancel.write-is-decided")
class WaitsByThreadOnly(_Late):
    """Reads of a thread wait for a cancelled result; reads of a key do not."""

    async def record_result(self, *args: Any, **options: Any) -> CallRecord:
        record: CallRecord = await self._write(
            lambda handle: Broken.record_result(handle, *args, **options)
        )
        return record

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        await self._decided()
        return await super().load(thread_id)

    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        await self._decided()
        return await super().list_calls(thread_id)

    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        await self._decided()
        return await super().list_threads(**options)

    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        await self._decided()
        return await super().dump_thread(thread_id)
