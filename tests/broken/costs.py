"""Operations whose cost grows with the length of the thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from cpkit import CallRecord, CheckpointData, JsonValue, ThreadInfo, ToolCall
from tests.broken.store import Broken, breaks


@breaks("bounded.append-memory")
class LoadsToAppend(Broken):
    async def append(self, thread_id: str, *args: Any, **options: Any) -> int:
        await self.load(thread_id)
        return await super().append(thread_id, *args, **options)


@breaks("bounded.append-calls")
class VisitsEveryMessage(Broken):
    """Makes one function call for each stored message."""

    async def append(self, thread_id: str, *args: Any, **options: Any) -> int:
        version = await super().append(thread_id, *args, **options)

        for body in self._store.threads[thread_id].bodies:
            len(body)

        return version


@breaks("bounded.append-bytes")
class WritesWholeThread(Broken):
    """Writes the whole thread at each append."""

    async def append(self, thread_id: str, *args: Any, **options: Any) -> int:
        version = await super().append(thread_id, *args, **options)
        whole = b"".join(self._store.threads[thread_id].bodies)
        await asyncio.to_thread(_write, whole)
        return version


def _write(whole: bytes) -> None:
    with open(os.devnull, "wb") as file:
        file.write(whole)


@breaks("bounded.merge-memory")
class LoadsToMerge(Broken):
    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        await self.load(thread_id)
        await super().save_extra(thread_id, extra)


@breaks("bounded.claim-memory")
class LoadsToClaim(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        await self.load(thread_id)
        return await super().record_issued(thread_id, call)


@breaks("bounded.read-memory")
class LoadsToRead(Broken):
    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[Any]:
        return (await super().read(thread_id))[start:stop]


@breaks("bounded.list-memory")
class LoadsToList(Broken):
    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        listed = await super().list_threads(**options)

        for info in listed:
            await self.load(info.thread_id)

        return listed


@breaks("bounded.load-beside-huge")
class ScansEveryThread(Broken):
    """Looks at the messages of all threads to find those of one."""

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        for thread in self._store.threads.values():
            hash(b"".join(body.upper() for body in thread.bodies))

        return await super().load(thread_id)
