"""Stores that fail only beyond a size which small tests do not reach."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar

from cpkit import CallRecord, CheckpointData, JsonValue, ToolCall
from tests.broken.store import Broken, breaks, pause


@breaks("sizes.large-values")
class CutsResultsAt64KiB(Broken):
    async def record_result(
        self, thread_id: str, call_id: str, result: JsonValue, *, success: bool = True
    ) -> CallRecord:
        if isinstance(result, dict):
            result = {
                name: value[: 2**16] if isinstance(value, str) else value
                for name, value in result.items()
            }

        return await super().record_result(thread_id, call_id, result, success=success)


@breaks("sizes.many-calls")
class LoadsAHundredCalls(Broken):
    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)

        if loaded is None:
            return None

        return replace(loaded, pending=loaded.pending[:100])


@breaks("sizes.many-calls")
class ListsAHundredCalls(Broken):
    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        return (await super().list_calls(thread_id))[:100]


@breaks("sizes.long-thread")
class LoadsTenThousandMessages(Broken):
    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)

        if loaded is None:
            return None

        return replace(loaded, messages=loaded.messages[:10_000])


@breaks("sizes.long-thread")
class ReadsAThousandMessages(Broken):
    async def read(self, *args: Any, **options: Any) -> list[Any]:
        return (await super().read(*args, **options))[:1000]


@breaks("sizes.large-values")
class ReadsAMegabyte(Broken):
    """Reads one page of a query, as large as the engine makes it, and not the next."""

    async def read(self, *args: Any, **options: Any) -> list[Any]:
        found = await super().read(*args, **options)

        while len(str(found)) > 2**20:
            found.pop()

        return found


@breaks("sizes.many-appends")
class LosesEvery300thAppend(Broken):
    appends: ClassVar[int] = 0

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        LosesEvery300thAppend.appends += 1
        version = await super().append(thread_id, messages, **options)

        if self.appends % 300 == 0 and messages:
            self._store.threads[thread_id].bodies.pop()

        return version


@breaks("sizes.large-batch-is-one")
class AppendsInHundreds(Broken):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        if not isinstance(messages, list) or len(messages) <= 100:
            return await super().append(thread_id, messages, **options)

        version = await super().append(thread_id, messages[:100], **options)
        options.pop("expected_version", None)

        for start in range(100, len(messages), 100):
            await pause()
            some = messages[start : start + 100]
            version = await super().append(thread_id, some, **options)

        return version


class Pooled(Broken):
    """Takes one of thirty connections for each operation, and may lose it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._free = asyncio.Semaphore(30)

    async def append(self, *args: Any, **options: Any) -> int:
        async with self._connection():
            return await super().append(*args, **options)

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        async with self._connection():
            return await super().load(thread_id)

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        async with self._connection():
            return await super().record_issued(thread_id, call)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[None]:
        await self._free.acquire()
        await pause()  # a cancellation here loses the connection
        yield
        self._free.release()


@breaks("cancel.hundreds-on-one-handle", hangs=True)
class LosesCancelledConnections(Pooled):
    """Never gives a connection back whose operation was cancelled."""


@breaks("cancel.leaves-nothing-open")
class LeavesSocketsOpen(Broken):
    """Leaves every tenth connection open whose operation was cancelled."""

    cancelled: ClassVar[int] = 0
    left: ClassVar[list[socket.socket]] = []

    async def append(self, *args: Any, **options: Any) -> int:
        connection = socket.socket()

        try:
            await pause()
        except asyncio.CancelledError:
            LeavesSocketsOpen.cancelled += 1

            if self.cancelled % 10 == 0:
                self.left.append(connection)
            else:
                connection.close()

            raise

        connection.close()
        return await super().append(*args, **options)
