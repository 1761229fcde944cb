"""`with_cadence`, and the optional protocols of what it returns."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, TypeVar

from cpkit.cadence.buffered import BufferedCheckpointer
from cpkit.cadence.policy import Cadence
from cpkit.driver.codec import Codec
from cpkit.driver.ids import check_id, span
from cpkit.driver.options import MAX_APPEND, MAX_PAYLOAD
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
from cpkit.records import (
    CallRecord,
    CheckpointData,
    Durability,
    Survives,
    ThreadDump,
    ThreadInfo,
)

__all__ = ["with_cadence"]

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
        return await self._inner.list_threads(
            prefix=prefix, after=after, limit=limit, erased=erased
        )


class _Reads(BufferedCheckpointer[MessageT]):
    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[MessageT]:
        self._lifecycle.check()
        thread_id = check_id("thread_id", thread_id)

        async with self._decided(thread_id) as buffer:
            if buffer is None:
                return await self._inner.read(thread_id, start, stop)

            first, last = span(start, stop, buffer.version)

            if last <= buffer.base:
                return await self._inner.read(thread_id, first, last)

            # To the end, which shows whether another writer appended.
            known = min(first, buffer.base)
            stored = await self._inner.read(thread_id, known)
            buffer.check(known + len(stored))
            stored[buffer.base - known :] = self._messages(buffer)
            return stored[first - known : last - known]

    async def load_range(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> CheckpointData[MessageT] | None:
        self._lifecycle.check()
        span(start, stop, 0)  # checks them

        if thread_id not in self._unwritten():
            return await self._inner.load_range(thread_id, start, stop)

        if (data := await self.load(thread_id)) is None:
            return None

        first, last = span(start, stop, data.version)
        return replace(data, messages=data.messages[first:last], first=first)


class _Receipts(BufferedCheckpointer[MessageT]):
    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        self._lifecycle.check()
        return await self._inner.list_calls(thread_id)

    async def find_call(self, idempotency_key: str) -> CallRecord | None:
        self._lifecycle.check()
        return await self._inner.find_call(idempotency_key)


class _Erases(BufferedCheckpointer[MessageT]):
    async def delete_thread(
        self,
        thread_id: str,
        *,
        expected_version: int | None = None,
        forget_keys: bool = False,
    ) -> None:
        """Erase the thread and its buffer."""
        self._lifecycle.check()
        thread_id = check_id("thread_id", thread_id)
        await self._lifecycle.run_shielded(
            self._delete(thread_id, expected_version, forget_keys)
        )

    async def _delete(
        self, thread_id: str, expected_version: int | None, forget_keys: bool
    ) -> None:
        async with self._locked(thread_id) as buffer:
            if buffer is not None and expected_version is not None:
                await self._write(buffer)  # the store compares the version
                buffer = None

            await self._inner.delete_thread(
                thread_id, expected_version=expected_version, forget_keys=forget_keys
            )

            if buffer is not None:
                self._drop(buffer)


class _Watches(BufferedCheckpointer[MessageT]):
    def watch(
        self, *thread_ids: str
    ) -> AbstractAsyncContextManager[AsyncIterator[str]]:
        """Watch the store: a buffered message shows when it is written."""
        self._lifecycle.check()
        return self._inner.watch(*thread_ids)


class _States(BufferedCheckpointer[MessageT]):
    @property
    def durability(self) -> Durability:
        inner = self._inner.durability

        if self._max_messages == 1:
            return inner

        advice = (self._cadence.may_lose, *inner.advice)
        return Durability(Survives.NONE, inner.settings, advice)


class _Moves(BufferedCheckpointer[MessageT]):
    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        self._lifecycle.check()
        thread_id = check_id("thread_id", thread_id)
        await self._lifecycle.run_shielded(self._flush(thread_id))
        return await self._inner.dump_thread(thread_id)

    async def restore_thread(self, dump: ThreadDump) -> None:
        self._lifecycle.check()

        if isinstance(dump, ThreadDump):  # the store refuses anything else
            thread_id = check_id("thread_id", dump.thread_id)
            await self._lifecycle.run_shielded(self._flush(thread_id))

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


def with_cadence(
    cp: Checkpointer[MessageT],
    cadence: Cadence,
    *,
    message_type: type[MessageT] | Any = dict,
    max_payload: int = MAX_PAYLOAD,
    max_append: int = MAX_APPEND,
    strict_roundtrip: bool = False,
) -> BufferedCheckpointer[MessageT]:
    """Wrap an open checkpointer so that it writes at a cadence; enter the result.

    A message is checked when it is appended, long before the store sees it. So pass the
    ``message_type``, limits and ``strict_roundtrip`` with which the store was opened.
    """
    codec: Codec[MessageT] = Codec(
        message_type,
        max_payload=max_payload,
        max_append=max_append,
        strict_roundtrip=strict_roundtrip,
    )
    mixins = tuple(mixin for one, mixin in _MIXINS.items() if isinstance(cp, one))
    return _class_of(mixins)(cp, codec, cadence)


@functools.cache
def _class_of(
    mixins: tuple[type[BufferedCheckpointer[Any]], ...],
) -> type[BufferedCheckpointer[Any]]:
    # ``isinstance`` finds the optional protocols by the methods of the class.
    return type("BufferedCheckpointer", (*mixins, BufferedCheckpointer), {})
