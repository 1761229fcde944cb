"""The handle: what users hold, over any store.

A `Handle` does what is the same for all backends, so that a store cannot get it wrong.
A write goes down through three objects and comes back once: the handle checks and
encodes (`Codec`), `GroupCommit` orders and batches, `StoreCalls` limits time and
repeats. A read goes from the handle to `StoreCalls`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Generic, NoReturn, Self, TypeVar

from cpkit.driver.codec import Codec, check_same_call
from cpkit.driver.group_commit import GroupCommit
from cpkit.driver.ids import check_id, span
from cpkit.driver.lifecycle import Lifecycle
from cpkit.driver.markers import can_scan, read_markers
from cpkit.driver.metrics import Metrics, provided_meter
from cpkit.driver.options import DriverOptions, ServerOptions
from cpkit.driver.store import Limits, Store
from cpkit.driver.store_calls import StoreCalls
from cpkit.driver.watching import Watching
from cpkit.driver.writes import Conflict, KeyHeld, Outcome, StoredCall, Write
from cpkit.errors import KeyTaken, UnknownCall, VersionConflict
from cpkit.records import (
    CallRecord,
    CheckpointData,
    Durability,
    JsonValue,
    ToolCall,
)

__all__ = ["Handle"]

MessageT = TypeVar("MessageT")
T = TypeVar("T")

_ENTER = "write 'async with open_checkpointer(...) as cp:', and use cp inside"

# Seconds for which an operation is repeated while the server cannot be reached.
_RETRY = 10.0


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
        retry = (
            options.connect_timeout if isinstance(options, ServerOptions) else _RETRY
        )
        self._store = store
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
        self._watching = Watching(
            self._lifecycle,
            store,
            partial(self._calls.read, read_markers, store),
            self._commits.on_change,
            options,
        )

    async def __aenter__(self) -> Self:
        self._lifecycle.begin()

        try:
            # Also if the caller is cancelled, the opening ends before the store closes.
            await self._lifecycle.run_shielded(self._calls.read(self._store.open))
        except BaseException:
            await self.aclose()
            raise

        self._codec.lower_limits(self._store.limits)

        if (meter := provided_meter()) is not None:
            metrics = Metrics(meter, self._store.name.partition(":")[0])
            metrics.time_operations(self)
            self._commits.observers.append(metrics.committed)
            self._watching.on_wake.append(metrics.woken)

        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __enter__(self) -> NoReturn:
        raise TypeError(_ENTER)

    # Never called: a with statement looks for this method before it calls __enter__.
    __exit__ = __enter__

    def __await__(self) -> NoReturn:
        raise TypeError(_ENTER)

    async def aclose(self) -> None:
        """Let what is in flight finish and close the store; idempotent.

        It waits for a commit that has begun, and for the store to close, ``timeout``
        and a second each, and for notifications in the background 10 seconds.
        """
        await self._lifecycle.close(self._calls.close)

    @property
    def store(self) -> Store:
        """The store behind the handle, for tools that report about it."""
        return self._store

    @property
    def durability(self) -> Durability:
        """Which failures (crash, power loss) an acknowledged write survives."""
        return self._store.durability()

    @property
    def limits(self) -> Limits:
        """The largest value and the largest append that this handle takes, in bytes."""
        return Limits(self._codec.max_payload, self._codec.max_append)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._store.name}>"

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
        outcome = await self._commits.run(write)

        if type(outcome) is int:
            return outcome

        raise self._refusal(write, outcome)

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        self._check()
        write = self._codec.merge(thread_id, extra)

        if write.items:
            await self._write(write)
        else:
            await asyncio.sleep(0)  # as every operation, it yields

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self._check()
        write = self._codec.claim(thread_id, call)
        stored = await self._commits.run(write)

        if stored is None:
            return None

        if type(stored) is not StoredCall:
            raise self._refusal(write, stored)

        record = self._codec.record(stored)

        if stored[:2] == write[:2]:
            check_same_call(record, write)

        return record

    async def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool = True,
    ) -> CallRecord:
        self._check()
        write = self._codec.resolve(thread_id, call_id, result, success)
        stored = await self._commits.run(write)

        if stored is None:
            raise UnknownCall(write.thread_id, write.call_id)

        if type(stored) is not StoredCall:
            raise self._refusal(write, stored)

        return self._codec.record(stored)

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        stored = await self._holder(idempotency_key)

        if stored is None or stored.status != "completed":
            return None

        return self._codec.record(stored)

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

        if not checked and not can_scan(self._store):
            raise TypeError(
                f"{self._store.name} cannot list its threads: name those to watch"
            )

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
            self._store.snapshot,
            thread_id,
            start,
            stop,
            lambda bodies, first: codec.messages(bodies, thread_id, first),
        )

        if found is None:
            return None

        return CheckpointData(
            found.messages,
            codec.extra(found.items, thread_id) if found.items else {},
            codec.records(found.pending) if found.pending else [],
            found.version,
            found.first,
        )

    async def _holder(self, idempotency_key: str) -> StoredCall | None:
        """Return the key's newest attempt."""
        self._check()
        key = check_id("idempotency_key", idempotency_key)

        if self._commits.abandoned:
            await self._commits.wait_for_abandoned(None, keys=True)

        return await self._calls.read(self._store.holder, key)

    async def _read(
        self,
        thread_id: str | None,
        query: Callable[..., Awaitable[T]],
        *args: Any,
    ) -> T:
        """Ask the store about a thread, or about all, after abandoned writes."""
        if self._commits.abandoned:
            await self._commits.wait_for_abandoned(thread_id, keys=False)

        return await self._calls.read(query, *args)

    async def _write(self, write: Write) -> None:
        """Commit a write that returns nothing; raise if it was refused."""
        outcome = await self._commits.run(write)

        if outcome is not None:
            raise self._refusal(write, outcome)

    def _refusal(self, write: Write, outcome: Outcome | Exception) -> Exception:
        """Return the contract's error for the outcome of a write."""
        if isinstance(outcome, Conflict):
            expected = getattr(write, "expected_version", 0)  # a restore expects 0
            return VersionConflict(write.thread_id, expected, outcome.version)

        if isinstance(outcome, KeyHeld):
            return KeyTaken(*outcome)

        if not isinstance(outcome, Exception):
            outcome = TypeError(f"commit returned {outcome!r:.100} for a write")

        return self._calls.error(outcome, is_write=True)
