"""The optional protocols of a buffered checkpointer."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from cpkit.cadence.buffered import BufferedCheckpointer
from cpkit.driver.ids import check_id, span
from cpkit.protocol import (
    Checkpointer,
    ErasesThreads,
    KeepsReceipts,
    ListsThreads,
    MovesThreads,
    ReadsRanges,
    StatesDurability,
    WatchesThreads,
)
from cpkit.records import CallRecord, Durability, Survives, ThreadDump, ThreadInfo

__all__ = ["buffered_class"]

MessageT = TypeVar("MessageT")


class _Lists(BufferedCheckpointer[MessageT]):
    async def list_threads(
        self,
        *,
        prefix: str = "",
        after: str | None = None,
        limit: int = 100,
        erased: bool = False,
    ) -> list[ThreadInfo]:
        """Write what is buffered, then list as the store does."""
        self._lifecycle.check()
        await self._lifecycle.run_shielded(self._flush_all())
        page: list[ThreadInfo] = await self._inner.list_threads(
            prefix=prefix, after=after, limit=limit, erased=erased
        )
        return page


class _Reads(BufferedCheckpointer[MessageT]):
    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[MessageT]:
        self._lifecycle.check()
        thread_id = check_id("thread_id", thread_id)

        async with self._decided(thread_id) as buffer:
            if buffer is None:
                part: list[MessageT] = await self._inner.read(thread_id, start, stop)
                return part

            first, last = span(start, stop, buffer.version)

            if last <= buffer.base:
                part = await self._inner.read(thread_id, first, last)
                return part

            # To the end, which shows whether another writer appended.
            known = min(first, buffer.base)
            stored: list[MessageT] = await self._inner.read(thread_id, known)
            buffer.check(known + len(stored))
            stored[buffer.base - known :] = self._messages(buffer)
            return stored[first - known : last - known]


class _Receipts(BufferedCheckpointer[MessageT]):
    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        self._lifecycle.check()
        calls: list[CallRecord] = await self._inner.list_calls(thread_id)
        return calls

    async def find_call(self, idempotency_key: str) -> CallRecord | None:
        self._lifecycle.check()
        record: CallRecord | None = await self._inner.find_call(idempotency_key)
        return record


class _Erases(BufferedCheckpointer[MessageT]):
    async def delete_thread(self, thread_id: str, *, forget_keys: bool = False) -> None:
        """Erase the thread and its buffer."""
        self._lifecycle.check()
        thread_id = check_id("thread_id", thread_id)
        await self._lifecycle.run_shielded(self._delete(thread_id, forget_keys))

    async def _delete(self, thread_id: str, forget_keys: bool) -> None:
        async with self._locked(thread_id) as buffer:
            await self._inner.delete_thread(thread_id, forget_keys=forget_keys)

            if buffer is not None:
                self._drop(buffer)


class _Watches(BufferedCheckpointer[MessageT]):
    def watch(
        self, *thread_ids: str
    ) -> AbstractAsyncContextManager[AsyncIterator[str]]:
        """Watch the store: a buffered message shows when it is written."""
        self._lifecycle.check()
        watch: AbstractAsyncContextManager[AsyncIterator[str]]
        watch = self._inner.watch(*thread_ids)
        return watch


class _States(BufferedCheckpointer[MessageT]):
    @property
    def durability(self) -> Durability:
        inner: Durability = self._inner.durability

        if self._max_messages == 1:
            return inner

        return Durability(
            Survives.NONE, inner.settings, (self._may_lose, *inner.advice)
        )


class _Moves(BufferedCheckpointer[MessageT]):
    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        self._lifecycle.check()
        thread_id = check_id("thread_id", thread_id)
        await self._lifecycle.run_shielded(self._flush(thread_id))
        dump: ThreadDump | None = await self._inner.dump_thread(thread_id)
        return dump

    async def restore_thread(self, dump: ThreadDump) -> None:
        self._lifecycle.check()

        if isinstance(dump, ThreadDump):  # the store refuses anything else
            await self._lifecycle.run_shielded(self._flush(dump.thread_id))

        await self._inner.restore_thread(dump)


_MIXINS: dict[type, type[BufferedCheckpointer[Any]]] = {
    ListsThreads: _Lists,
    ReadsRanges: _Reads,
    KeepsReceipts: _Receipts,
    ErasesThreads: _Erases,
    MovesThreads: _Moves,
    StatesDurability: _States,
    WatchesThreads: _Watches,
}


def buffered_class(cp: Checkpointer[Any]) -> type[BufferedCheckpointer[Any]]:
    """Return the class with the optional protocols that the checkpointer has."""
    return _class_of(tuple(m for one, m in _MIXINS.items() if isinstance(cp, one)))


@functools.cache
def _class_of(
    mixins: tuple[type[BufferedCheckpointer[Any]], ...],
) -> type[BufferedCheckpointer[Any]]:
    # ``isinstance`` finds the optional protocols by the methods of the class.
    return type("BufferedCheckpointer", (*mixins, BufferedCheckpointer), {})
