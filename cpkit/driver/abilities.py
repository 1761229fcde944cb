"""The optional protocols, given to a handle whose store supports them."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from inspect import iscoroutinefunction
from typing import Any, TypeVar

from cpkit.driver.codec import check_fence, check_version, to_micros
from cpkit.driver.dumps import decode_dump, encode_dump
from cpkit.driver.handle import Handle
from cpkit.driver.ids import check_id, check_page
from cpkit.driver.jsontext import like_patterns
from cpkit.driver.store import (
    DriverOptions,
    SearchesMessages,
    Store,
    StoresDumps,
    StoresReceipts,
    StoresThreadLists,
    limits_of,
)
from cpkit.driver.writes import Erase, EraseCalls, Trim
from cpkit.errors import PayloadTooLarge
from cpkit.records import CallRecord, ThreadDump, ThreadInfo

__all__ = ["FullHandle", "SearchingHandle", "handle_over"]

MessageT = TypeVar("MessageT")


class _Lists(Handle[MessageT]):
    async def list_threads(
        self,
        *,
        prefix: str = "",
        after: str | None = None,
        limit: int = 100,
        erased: bool = False,
    ) -> list[ThreadInfo]:
        self._check()
        prefix, after, limit = check_page(prefix, after, limit)
        store: Any = self.store
        return await self._read(None, store.threads, prefix, after, limit, bool(erased))


class _Receipts(Handle[MessageT]):
    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        self._check()
        thread_id = check_id("thread_id", thread_id)
        store: Any = self.store
        calls = await self._read(thread_id, store.calls, thread_id)
        return self._codec.records(calls)

    async def find_call(self, idempotency_key: str) -> CallRecord | None:
        return await self._find(idempotency_key, "issued", "completed")


class _Erases(Handle[MessageT]):
    async def delete_thread(
        self,
        thread_id: str,
        *,
        expected_version: int | None = None,
        forget_keys: bool = False,
    ) -> None:
        self._check()
        thread_id = check_id("thread_id", thread_id)
        fence = check_fence(expected_version)
        await self._commits.run(Erase(thread_id, bool(forget_keys), fence))


class _Trims(Handle[MessageT]):
    async def trim(
        self, thread_id: str, before: int, *, expected_version: int | None = None
    ) -> int:
        self._check()
        thread_id = check_id("thread_id", thread_id)
        before = check_version(before, "before")
        write = Trim(thread_id, before, check_fence(expected_version))
        removed: int = await self._commits.run(write)
        return removed


class _ErasesCalls(Handle[MessageT]):
    async def erase_calls(
        self,
        thread_id: str,
        before: datetime,
        *,
        expected_version: int | None = None,
    ) -> int:
        self._check()
        thread_id = check_id("thread_id", thread_id)
        write = EraseCalls(thread_id, to_micros(before), check_fence(expected_version))
        erased: int = await self._commits.run(write)
        return erased


class _Moves(Handle[MessageT]):
    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        self._check()
        thread_id = check_id("thread_id", thread_id)
        store: Any = self.store
        dump = await self._read(thread_id, store.dump, thread_id)
        return None if dump is None else decode_dump(self._codec, thread_id, dump)

    async def restore_thread(self, dump: ThreadDump) -> None:
        self._check()
        write = encode_dump(self._codec, dump)
        limit = limits_of(self.store).max_append

        if write.first and not isinstance(self, _Trims):
            raise ValueError(f"{self.store.name} cannot hold a trimmed thread")

        if write.size > limit:
            raise PayloadTooLarge((), write.size, limit, "the engine's limit")

        await self._commits.run(write)


class _Searches(Handle[MessageT]):
    async def search_threads(
        self, text: str, *, prefix: str = "", limit: int = 100, timeout: float = 10.0
    ) -> list[tuple[str, int]]:
        self._check()
        prefix, _, limit = check_page(prefix, None, limit)
        store: Any = self.store
        args = like_patterns(text), prefix, limit, timeout
        return await self._read(None, store.search, *args)


class FullHandle(
    _Lists[MessageT],
    _Receipts[MessageT],
    _Erases[MessageT],
    _Trims[MessageT],
    _ErasesCalls[MessageT],
    _Moves[MessageT],
):
    """A handle with the optional protocols that all stores of cpkit have."""


class SearchingHandle(FullHandle[MessageT], _Searches[MessageT]):
    """A handle with every optional protocol."""


def handle_over(
    store: Store, *, message_type: Any = dict, options: DriverOptions | None = None
) -> Handle[Any]:
    """Return an unopened handle with the optional protocols of the store.

    Raises ``TypeError`` for an object that lacks a part of `cpkit.driver.Store`, or has
    an ``async`` method in place of ``durability``.
    """
    required = [name for name in vars(Store) if not name.startswith("_")]

    if missing := [name for name in required if not hasattr(store, name)]:
        raise TypeError(
            f"{type(store).__name__} is not a cpkit.driver.Store: "
            f"it lacks {', '.join(missing)}"
        )

    if iscoroutinefunction(store.durability):
        raise TypeError(f"{type(store).__name__}.durability must not be async")

    supported: dict[type[Handle[Any]], bool] = {
        _Lists: isinstance(store, StoresThreadLists),
        _Receipts: isinstance(store, StoresReceipts),
        _Erases: getattr(store, "erases", False),
        _Trims: getattr(store, "trims", False),
        _ErasesCalls: getattr(store, "erases_calls", False),
        _Moves: isinstance(store, StoresDumps),
        _Searches: isinstance(store, SearchesMessages),
    }
    mixins = tuple(one for one, is_supported in supported.items() if is_supported)
    return _class_of(mixins)(store, message_type=message_type, options=options)


@lru_cache
def _class_of(mixins: tuple[type[Handle[Any]], ...]) -> type[Handle[Any]]:
    # ``isinstance`` finds the optional protocols by the methods of the class.
    return type("Handle", mixins or (Handle,), {})
