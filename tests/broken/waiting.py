"""Cancellations that matter later, in one operation, or only after some time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from cpkit import CallRecord
from tests.broken.sizes import LeavesSocketsOpen
from tests.broken.store import Broken, breaks, pause


@breaks("cancel.write-is-decided")
class LandsAfterAThirdOfASecond(Broken):
    """Applies a cancelled restore 0.3 seconds later; nothing waits for it."""

    _tasks: ClassVar[set[asyncio.Task[Any]]] = set()

    async def restore_thread(self, dump: Any) -> None:
        try:
            await pause()
        except asyncio.CancelledError:
            task = asyncio.create_task(self._later(dump))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            raise

        await super().restore_thread(dump)

    async def _later(self, dump: Any) -> None:
        await asyncio.sleep(0.3)

        async with type(self)() as other:
            await super(LandsAfterAThirdOfASecond, other).restore_thread(dump)


@breaks("cancel.close-waits")
class ClosesBeforeADeletion(Broken):
    """A cancelled deletion takes effect 0.3 seconds later, after the handle's close."""

    _tasks: ClassVar[set[asyncio.Task[Any]]] = set()

    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        try:
            await pause()
        except asyncio.CancelledError:
            task = asyncio.create_task(self._later(thread_id, options))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            raise

        await super().delete_thread(thread_id, **options)

    async def _later(self, thread_id: str, options: Any) -> None:
        await asyncio.sleep(0.3)

        async with type(self)() as other:
            await super(ClosesBeforeADeletion, other).delete_thread(
                thread_id, **options
            )


@breaks("cancel.write-is-decided")
class StopsADeletionHalfway(Broken):
    """Erases the thread, and frees its keys some milliseconds later."""

    async def delete_thread(
        self, thread_id: str, *, forget_keys: bool = False, **options: Any
    ) -> None:
        await super().delete_thread(thread_id, **options)

        if forget_keys:
            await asyncio.sleep(0.004)
            await super().delete_thread(thread_id, forget_keys=True)


class _Pool(Broken):
    """Has four connections; one operation loses one in a hundred cancellations."""

    cancelled: ClassVar[int] = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._free = asyncio.Semaphore(4)

    @asynccontextmanager
    async def _connection(self, *, leaks: bool) -> AsyncIterator[None]:
        await self._free.acquire()

        try:
            await pause()
        except asyncio.CancelledError:
            _Pool.cancelled += leaks

            if not leaks or self.cancelled % 100:
                self._free.release()

            raise

        self._free.release()
        yield

    async def append(self, *args: Any, **options: Any) -> int:
        async with self._connection(leaks=False):
            return await super().append(*args, **options)


@breaks("cancel.hundreds-on-one-handle", hangs=True)
class LosesConnectionsOfAFind(_Pool):
    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        async with self._connection(leaks=True):
            return await super().find_completed(idempotency_key)


@breaks("cancel.hundreds-on-one-handle", hangs=True)
class LosesConnectionsOfADeletion(_Pool):
    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        async with self._connection(leaks=True):
            await super().delete_thread(thread_id, **options)


@breaks("cancel.leaves-nothing-open")
class LeavesTheSocketOfADump(LeavesSocketsOpen):
    """Leaves one connection open in a hundred cancelled dumps."""

    dumps: ClassVar[int] = 0

    async def append(self, *args: Any, **options: Any) -> int:
        return await Broken.append(self, *args, **options)

    async def dump_thread(self, thread_id: str) -> Any:
        connection = socket.socket()

        try:
            await pause()
        except asyncio.CancelledError:
            LeavesTheSocketOfADump.dumps += 1

            if self.dumps % 100 == 0:
                self.left.append(connection)
            else:
                connection.close()

            raise

        connection.close()
        return await super().dump_thread(thread_id)
