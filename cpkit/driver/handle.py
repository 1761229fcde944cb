"""The handle: what users hold, over any store.

A `Handle` does what is the same for all backends, so that a store cannot get it wrong.
A write goes down through three objects and comes back once: the handle checks and
encodes (`Codec`), `GroupCommit` orders and batches, `StoreCalls` limits time and
repeats. A read goes from the handle to `StoreCalls`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, Generic, NoReturn, Self, TypeVar

from cpkit.driver.codec import Codec, check_same_call
from cpkit.driver.group_commit import GroupCommit
from cpkit.driver.ids import check_id, span
from cpkit.driver.lifecycle import Lifecycle
from cpkit.driver.markers import can_scan, read_markers
from cpkit.driver.metrics import Metrics, provided_meter
from cpkit.driver.store import DriverOptions, Limits, Store, limits_of
from cpkit.driver.store_calls import StoreCalls
from cpkit.driver.watching import Watching
from cpkit.driver.writes import Append, StoredCall
from cpkit.errors import BackendUnavailable, UnknownCall, VersionConflict
from cpkit.records import CallRecord, CheckpointData, Durability, JsonValue, ToolCall

__all__ = ["Handle"]

MessageT = TypeVar("MessageT")
T = TypeVar("T")

# How often an append to a sealed store is tried; each time another writer came first.
_TRIES = 1_000

_ENTER = "write 'async with open_checkpointer(...) as cp:', and use cp inside"


class Handle(Generic[MessageT]):
    """A checkpointer over a store: the six methods, the reads of ranges, ``watch``.

    `cpkit.driver.handle_over` adds the optional methods that the store supports. The
    handle is an async context manager, entered once. ``message_type`` is as for
    ``open_checkpointer``.
    """

    def __init__(
        self,
        store: Store,
        *,
        message_type: type[MessageT] | Any = dict,
        options: DriverOptions | None = None,
    ) -> None:
        options = options or DriverOptions()
        # For so many seconds an operation is repeated while the server is away.
        retry = getattr(options, "connect_timeout", 10.0)
        self.store = store
        """The store behind the handle, for tools that report about it."""
        self._codec: Codec[MessageT] = Codec(
            message_type,
            max_payload=options.max_payload,
            max_append=options.max_append,
            strict_roundtrip=options.strict_roundtrip,
        )
        self._lifecycle = Lifecycle(store.name)
        self._check = self._lifecycle.check
        self._calls = StoreCalls(self._lifecycle, store, retry)
        self._commits = GroupCommit(self._lifecycle, store, self._calls)
        read = partial(self._calls.read, read_markers, store)
        observers = self._commits.observers
        self._watching = Watching(self._lifecycle, store, read, observers, options)

    async def __aenter__(self) -> Self:
        self._lifecycle.begin()

        try:
            # Also if the caller is cancelled, the opening ends before the store closes.
            await self._lifecycle.run_shielded(self._open())
        except BaseException:
            await self.aclose()
            raise

        self._codec.lower_limits(limits_of(self.store))

        if (meter := provided_meter()) is not None:
            metrics = Metrics(meter, self.store.name.partition(":")[0])
            metrics.time_operations(self)
            self._commits.observers.append(metrics.committed)
            self._watching.on_wake.append(metrics.woken)

        return self

    async def _open(self) -> None:
        await self._calls.read(self.store.open)

        if (check := getattr(self.store, "check_keyring", None)) is not None:
            await self._calls.read(check)

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __enter__(self) -> NoReturn:
        raise TypeError(_ENTER)

    # A with statement looks for __exit__ before it calls __enter__.
    __exit__ = __await__ = __enter__

    async def aclose(self) -> None:
        """Let what is in flight finish and close the store; idempotent.

        It waits for a commit that has begun, and for the store to close, ``timeout``
        and a second each, and for notifications in the background 10 seconds.
        """
        await self._lifecycle.close(self._calls.close)

    @property
    def durability(self) -> Durability:
        """Which failures (crash, power loss) an acknowledged write survives."""
        return self.store.durability()

    @property
    def limits(self) -> Limits:
        """The largest value and the largest append that this handle takes, in bytes."""
        return Limits(self._codec.max_payload, self._codec.max_append)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.store.name}>"

    # The six methods

    async def load(self, thread_id: str) -> CheckpointData[MessageT] | None:
        return await self._load(thread_id, 0, None)

    async def append(
        self,
        thread_id: str,
        messages: Sequence[MessageT],
        *,
        expected_version: int | None = None,
        extra: Mapping[str, JsonValue] | None = None,
    ) -> int:
        self._check()
        write = self._codec.append(thread_id, messages, expected_version, extra)

        try:
            version: int = await self._commits.run(write)
        except VersionConflict:
            if expected_version is not None:
                raise

            return await self._append_again(write)

        return version

    async def _append_again(self, write: Append) -> int:
        """Append to a sealed store, which was wrong about the version of the thread."""
        for _ in range(_TRIES):
            with suppress(VersionConflict):
                version: int = await self._commits.run(write)
                return version

        reason = f"other writers appended to the thread first, {_TRIES} times"
        raise BackendUnavailable(self.store.name, reason)

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        self._check()
        write = self._codec.merge(thread_id, extra)

        if write.items:
            await self._commits.run(write)
        else:
            await asyncio.sleep(0)  # as every operation, it yields

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self._check()
        write = self._codec.claim(thread_id, call)
        stored: StoredCall | None = await self._commits.run(write)

        if stored is None:
            return None

        record = self._codec.record(stored)

        if (stored.thread_id, stored.call_id) == (write.thread_id, write.call_id):
            check_same_call(record, write)

        return record

    async def record_result(
        self, thread_id: str, call_id: str, result: Any, *, success: bool = True
    ) -> CallRecord:
        self._check()
        write = self._codec.resolve(thread_id, call_id, result, success)
        stored: StoredCall | None = await self._commits.run(write)

        if stored is None:
            raise UnknownCall(write.thread_id, write.call_id)

        return self._codec.record(stored)

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        return await self._find(idempotency_key, "completed")

    # What every store supports

    async def load_range(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> CheckpointData[MessageT] | None:
        return await self._load(thread_id, start, stop)

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[MessageT]:
        found = await self._load(thread_id, start, stop)
        return [] if found is None else found.messages

    def watch(
        self, *thread_ids: str
    ) -> AbstractAsyncContextManager[AsyncIterator[str]]:
        self._check()
        checked = frozenset(check_id("thread_id", one) for one in thread_ids)

        if not checked and not can_scan(self.store):
            raise TypeError(f"{self.store.name} has no list of threads: name some")

        return self._watching.watch(checked)

    # The way to the store

    async def _load(
        self, thread_id: str, start: int, stop: int | None
    ) -> CheckpointData[MessageT] | None:
        self._check()
        thread_id = check_id("thread_id", thread_id)

        if type(start) is not int or start or stop is not None:
            span(start, stop, 0)  # checks them

        codec = self._codec
        found = await self._read(
            thread_id,
            self.store.snapshot,
            thread_id,
            start,
            stop,
            lambda bodies, first: codec.messages(bodies, thread_id, first),
        )

        if found is None:
            return None

        extra = codec.extra(found.items, thread_id) if found.items else {}
        calls = codec.records(found.pending) if found.pending else []
        return CheckpointData(found.messages, extra, calls, found.version, found.first)

    async def _find(self, idempotency_key: str, *statuses: str) -> CallRecord | None:
        """Return the key's newest attempt, if it has one of the statuses."""
        self._check()
        key = check_id("idempotency_key", idempotency_key)

        if self._commits.abandoned:
            await self._commits.wait_for_abandoned(None, keys=True)

        newest = await self._calls.read(self.store.holder, key)

        if newest is None or newest.status not in statuses:
            return None

        return self._codec.record(newest)

    async def _read(
        self, thread_id: str | None, query: Callable[..., Awaitable[T]], *args: Any
    ) -> T:
        """Ask the store about a thread, or about all, after abandoned writes."""
        if self._commits.abandoned:
            await self._commits.wait_for_abandoned(thread_id, keys=False)

        return await self._calls.read(query, *args)
