"""The contract in plain Python, written without the driver kit's handle.

`Reference` implements the six methods and the optional protocols directly. The broken
backends inherit from it and break one promise each. It passes every clause itself, so
it also proves that the suite certifies a store that does not use `cpkit.driver`'s
handle.

Every operation yields to other tasks once, before it checks the handle. Then it takes
one lock, and never awaits while it holds the lock. So each operation is atomic, cannot
be cancelled in the middle, and is never in flight when the handle closes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self

from conformance import Harness
from cpkit import (
    CallRecord,
    CheckpointData,
    Closed,
    Durability,
    JsonValue,
    KeyTaken,
    Survives,
    ThreadDump,
    ThreadInfo,
    ToolCall,
    UnknownCall,
    VersionConflict,
    WrongEventLoop,
)
from cpkit.driver.codec import (
    Codec,
    check_same_call,
    check_version,
    from_micros,
    to_micros,
)
from cpkit.driver.dumps import decode_dump, encode_dump
from cpkit.driver.ids import check_id, check_page, span
from cpkit.driver.writes import StoredCall, StoredDump, key_is_held

__all__ = ["Reference", "ReferenceHarness", "Tables", "forget_named_stores"]

CallPlace = tuple[str, str]
"""A thread id and a call id."""


@dataclass
class Thread:
    """A stored thread: message bodies and extra as JSON text, times in microseconds."""

    created_at: int
    updated_at: int
    bodies: list[bytes] = field(default_factory=list)
    extra: dict[bytes, bytes] = field(default_factory=dict)
    first: int = 0
    """The position of the first message that is left."""

    @property
    def version(self) -> int:
        return self.first + len(self.bodies)


@dataclass
class Tables:
    """Everything that one store holds.

    ``calls`` is in the order of claims. ``calls_of`` (by thread id) and ``attempts``
    (by idempotency key) are indexes into it, in the same order.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    threads: dict[str, Thread] = field(default_factory=dict)
    calls: dict[CallPlace, StoredCall] = field(default_factory=dict)
    calls_of: dict[str, list[CallPlace]] = field(default_factory=dict)
    attempts: dict[str, list[CallPlace]] = field(default_factory=dict)
    watchers: set[Watcher] = field(default_factory=set)
    revisions: dict[str, int] = field(default_factory=dict)
    ahead: int = 0
    """By how many microseconds the store's clock is wrong."""
    replayed: int | None = None
    """The time of a write that a log replays."""

    def now(self) -> int:
        """Return the microseconds since 1970."""
        if self.replayed is not None:
            return self.replayed

        return time.time_ns() // 1000 + self.ahead

    def touch(self, thread_id: str) -> Thread:
        """Create the thread if it does not exist, and set ``updated_at`` to now."""
        now = self.now()
        thread = self.threads.setdefault(thread_id, Thread(now, now))
        thread.updated_at = max(now, thread.updated_at)
        return thread

    def last_attempt(self, key: str) -> StoredCall | None:
        """Return the newest call of an idempotency key."""
        places = self.attempts.get(key)
        return self.calls[places[-1]] if places else None

    def of_thread(self, thread_id: str) -> list[StoredCall]:
        """Return the calls of a thread in the order of claims."""
        return [self.calls[place] for place in self.calls_of.get(thread_id, ())]

    def clear(self) -> None:
        """Delete everything."""
        for table in (self.threads, self.calls, self.calls_of, self.attempts):
            table.clear()


class Watcher:
    """The iterator of one ``watch``: compares revisions, and is woken to do so."""

    def __init__(self, handle: Reference, thread_ids: frozenset[str]) -> None:
        self.handle = handle
        self.thread_ids = thread_ids
        self.seen: dict[str, int] = {}
        self.ended = False
        self.woken = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def wake(self) -> None:
        with suppress(RuntimeError):  # the loop was closed
            self.loop.call_soon_threadsafe(self.woken.set)

    def changed(self) -> list[str]:
        """Return the ids that have another revision than when they were seen."""
        revisions = dict(self.handle._store.revisions)
        return [
            one
            for one in self.thread_ids or revisions
            if revisions.get(one, 0) != self.seen.get(one, 0)
        ]

    def take(self, thread_id: str) -> str:
        self.seen[thread_id] = self.handle._store.revisions[thread_id]
        return thread_id

    def __aiter__(self) -> Watcher:
        return self

    async def __anext__(self) -> str:
        while True:
            if self.ended:
                raise StopAsyncIteration

            self.handle._check_usable()
            self.woken.clear()

            if changed := self.changed():
                return self.take(changed[0])

            with suppress(TimeoutError):
                async with asyncio.timeout(self.handle.poll):
                    await self.woken.wait()


_named: dict[str, Tables] = {}
_named_lock = threading.Lock()


def forget_named_stores() -> None:
    """Delete every named store of this process."""
    with _named_lock:
        _named.clear()


class Reference:
    """A store in this process's memory.

    All handles with the same name share one store. A handle without a name has its
    own. ``options`` are those of `Codec`.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        message_type: Any = dict,
        notify: bool = True,
        poll: float = 1.0,
        **options: Any,
    ) -> None:
        self._notified = notify
        self.poll = poll
        self._name = name or "unnamed reference"
        self._codec: Codec[Any] = Codec(message_type, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_open = False

        if name is None:
            self._store = Tables()
        else:
            with _named_lock:
                self._store = _named.setdefault(name, Tables())

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise Closed(self._name)

        self._loop = asyncio.get_running_loop()
        self._is_open = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the handle; idempotent."""
        if self._loop not in (None, asyncio.get_running_loop()):
            raise WrongEventLoop(self._name)

        self._is_open = False

        for watcher in self._watchers():
            watcher.wake()

    def _check_usable(self) -> None:
        """Raise ``Closed`` or ``WrongEventLoop`` if the caller may not use the handle.

        Every operation calls this before it looks at its arguments.
        """
        if not self._is_open:
            raise Closed(self._name)

        if asyncio.get_running_loop() is not self._loop:
            raise WrongEventLoop(self._name)

    @property
    def durability(self) -> Durability:
        return Durability(Survives.NONE, {"kept": "until this process ends"})

    async def _begin(self) -> None:
        """Yield to other tasks, and check the handle, before anything else."""
        await asyncio.sleep(0)
        self._check_usable()

    # The six methods

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        await self._begin()
        return self._snapshot(thread_id, 0, None)

    def _snapshot(
        self, thread_id: str, start: int, stop: int | None
    ) -> CheckpointData[Any] | None:
        thread_id = check_id("thread_id", thread_id)
        span(start, stop, 0)  # checks them

        with self._store.lock:
            thread = self._store.threads.get(thread_id)

            if thread is None:
                return None

            version = thread.version
            first, last = span(start, stop, version, thread.first)
            bodies = thread.bodies[first - thread.first : last - thread.first]
            extra = list(thread.extra.items())
            calls = self._store.of_thread(thread_id)

        return CheckpointData(
            self._codec.messages(bodies, thread_id, first),
            self._codec.extra(extra, thread_id),
            [
                self._codec.record(call)
                for call in calls
                if call.status == "issued" and not call.erased
            ],
            version,
            first,
        )

    async def append(
        self,
        thread_id: str,
        messages: Sequence[Any],
        *,
        expected_version: int | None = None,
        extra: Mapping[str, JsonValue] | None = None,
    ) -> int:
        await self._begin()
        write = self._codec.append(thread_id, messages, expected_version, extra)

        with self._store.lock:
            thread = self._store.threads.get(write.thread_id)
            version = thread.version if thread else 0

            if write.expected_version not in (None, version):
                raise VersionConflict(write.thread_id, write.expected_version, version)

            if not write.bodies and not write.items:
                return version

            thread = self._store.touch(write.thread_id)
            thread.bodies += write.bodies
            thread.extra.update(write.items)
            self._changed(write.thread_id, "append")
            return thread.version

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        await self._begin()
        write = self._codec.merge(thread_id, extra)

        if not write.items:
            return

        with self._store.lock:
            self._store.touch(write.thread_id).extra.update(write.items)
            self._changed(write.thread_id, "extra")

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        await self._begin()
        write = self._codec.claim(thread_id, call)
        place = (write.thread_id, write.call_id)

        with self._store.lock:
            known = self._store.calls.get(place)

            if known is not None:
                record = self._codec.record(known)
                check_same_call(record, write)
                return record

            last = self._store.last_attempt(write.idempotency_key)

            if last is not None and last.status != "failed":
                return self._codec.record(last)

            self._store.touch(write.thread_id)
            self._store.calls[place] = StoredCall(
                thread_id=write.thread_id,
                call_id=write.call_id,
                tool_name=write.tool_name,
                args=write.args,
                idempotency_key=write.idempotency_key,
                status="issued",
                attempt=1 if last is None else last.attempt + 1,
                issued_at=self._store.now(),
                result=None,
                resolved_at=None,
                erased=False,
            )
            self._store.calls_of.setdefault(write.thread_id, []).append(place)
            self._store.attempts.setdefault(write.idempotency_key, []).append(place)
            self._changed(write.thread_id, "claim")
            return None

    async def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool = True,
    ) -> CallRecord:
        await self._begin()
        write = self._codec.resolve(thread_id, call_id, result, success)
        place = (write.thread_id, write.call_id)

        with self._store.lock:
            stored = self._store.calls.get(place)

            if stored is None:
                raise UnknownCall(*place)

            if stored.status == "issued":
                stored = stored._replace(
                    status=write.status,
                    result=None if stored.erased else write.result,
                    resolved_at=self._store.now(),
                )
                self._store.calls[place] = stored

                if not stored.erased:
                    self._store.touch(write.thread_id)
                    self._changed(write.thread_id, "result")

            return self._codec.record(stored)

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        record = await self.find_call(idempotency_key)
        return record if record is not None and record.status == "completed" else None

    # The optional protocols

    async def list_threads(
        self,
        *,
        prefix: str = "",
        after: str | None = None,
        limit: int = 100,
        erased: bool = False,
    ) -> list[ThreadInfo]:
        await self._begin()
        prefix, after, limit = check_page(prefix, after, limit)

        with self._store.lock:
            ids = {*self._store.threads}

            if erased:
                ids |= {
                    one for one in self._store.calls_of if self._store.of_thread(one)
                }

            page = sorted(
                thread_id
                for thread_id in ids
                if thread_id.startswith(prefix) and (after is None or thread_id > after)
            )
            return [self._info(thread_id) for thread_id in page[:limit]]

    def _info(self, thread_id: str) -> ThreadInfo:
        thread = self._store.threads.get(thread_id)

        if thread is None:
            calls = self._store.of_thread(thread_id)
            changes = [call.resolved_at or call.issued_at for call in calls]
            thread = Thread(min(call.issued_at for call in calls), max(changes))

        return ThreadInfo(
            thread_id,
            thread.version,
            from_micros(thread.created_at),
            from_micros(thread.updated_at),
        )

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[Any]:
        await self._begin()
        found = self._snapshot(thread_id, start, stop)
        return [] if found is None else found.messages

    async def load_range(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> CheckpointData[Any] | None:
        await self._begin()
        return self._snapshot(thread_id, start, stop)

    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        await self._begin()
        thread_id = check_id("thread_id", thread_id)

        with self._store.lock:
            calls = self._store.of_thread(thread_id)

        return [self._codec.record(call) for call in calls]

    async def find_call(self, idempotency_key: str) -> CallRecord | None:
        await self._begin()
        key = check_id("idempotency_key", idempotency_key)

        with self._store.lock:
            last = self._store.last_attempt(key)

        if last is None or last.status == "failed":
            return None

        return self._codec.record(last)

    async def delete_thread(
        self,
        thread_id: str,
        *,
        expected_version: int | None = None,
        forget_keys: bool = False,
    ) -> None:
        await self._begin()
        thread_id = check_id("thread_id", thread_id)

        if expected_version is not None:
            expected_version = check_version(expected_version)

        with self._store.lock:
            thread = self._store.threads.get(thread_id)
            version = thread.version if thread else 0

            if expected_version not in (None, version):
                raise VersionConflict(thread_id, expected_version or 0, version)

            self._store.threads.pop(thread_id, None)
            self._changed(thread_id, "deletion")

            if not forget_keys:
                for call in self._store.of_thread(thread_id):
                    self._store.calls[thread_id, call.call_id] = call._replace(
                        args=b"{}", result=None, erased=True
                    )

                return

            for place in self._store.calls_of.pop(thread_id, ()):
                key = self._store.calls.pop(place).idempotency_key
                self._store.attempts[key].remove(place)

                if not self._store.attempts[key]:
                    del self._store.attempts[key]

    async def trim(
        self, thread_id: str, before: int, *, expected_version: int | None = None
    ) -> int:
        await self._begin()
        thread_id = check_id("thread_id", thread_id)
        before = check_version(before, "before")

        if expected_version is not None:
            expected_version = check_version(expected_version)

        with self._store.lock:
            thread = self._store.threads.get(thread_id) or Thread(0, 0)

            if expected_version not in (None, thread.version):
                raise VersionConflict(thread_id, expected_version or 0, thread.version)

            removed = max(0, min(before, thread.version) - thread.first)
            del thread.bodies[:removed]
            thread.first += removed
            self._changed(thread_id, "trim")
            return removed

    async def erase_calls(
        self,
        thread_id: str,
        before: datetime,
        *,
        expected_version: int | None = None,
    ) -> int:
        await self._begin()
        thread_id = check_id("thread_id", thread_id)
        limit = to_micros(before)

        if expected_version is not None:
            expected_version = check_version(expected_version)

        with self._store.lock:
            thread = self._store.threads.get(thread_id) or Thread(0, 0)

            if expected_version not in (None, thread.version):
                raise VersionConflict(thread_id, expected_version or 0, thread.version)

            old = [
                call
                for call in self._store.of_thread(thread_id)
                if not call.erased and (call.resolved_at or limit) < limit
            ]

            for call in old:
                self._store.calls[thread_id, call.call_id] = call._replace(
                    args=b"{}", result=None, erased=True
                )

            self._changed(thread_id, "erase_calls")
            return len(old)

    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        await self._begin()
        thread_id = check_id("thread_id", thread_id)

        with self._store.lock:
            thread = self._store.threads.get(thread_id)
            calls = self._store.of_thread(thread_id)

            if thread is None and not calls:
                return None

            alive = thread or Thread(0, 0)
            dump = StoredDump(
                list(alive.bodies),
                list(alive.extra.items()),
                calls,
                None if thread is None else thread.created_at,
                None if thread is None else thread.updated_at,
                alive.first,
            )

        return decode_dump(self._codec, thread_id, dump)

    async def restore_thread(self, dump: ThreadDump) -> None:
        await self._begin()
        write = encode_dump(self._codec, dump)

        with self._store.lock:
            thread = self._store.threads.get(write.thread_id)

            if thread is not None or self._store.of_thread(write.thread_id):
                actual = thread.version if thread else 0
                raise VersionConflict(write.thread_id, 0, actual)

            for call in write.calls:
                places = self._store.attempts.get(call.idempotency_key, [])
                others = [self._store.calls[place] for place in places]

                if key_is_held(call, others):
                    raise KeyTaken(call.idempotency_key, others[-1].thread_id)

            if write.created_at is not None and write.updated_at is not None:
                thread = Thread(write.created_at, write.updated_at, write.bodies)
                thread.extra.update(write.items)
                thread.first = write.first
                self._store.threads[write.thread_id] = thread

            for call in write.calls:
                place = (call.thread_id, call.call_id)
                self._store.calls[place] = call
                self._store.calls_of.setdefault(call.thread_id, []).append(place)
                attempts = self._store.attempts.setdefault(call.idempotency_key, [])
                attempts.append(place)
                attempts.sort(key=lambda one: self._store.calls[one].attempt)

            self._changed(write.thread_id, "restore")

    def watch(
        self, *thread_ids: str
    ) -> AbstractAsyncContextManager[AsyncIterator[str]]:
        self._check_usable()
        return self._watch(frozenset(check_id("thread_id", one) for one in thread_ids))

    @asynccontextmanager
    async def _watch(
        self, thread_ids: frozenset[str]
    ) -> AsyncIterator[AsyncIterator[str]]:
        self._check_usable()
        watcher = self._watcher(thread_ids)

        with self._store.lock:
            watcher.seen = dict(self._store.revisions)
            self._store.watchers.add(watcher)

        try:
            yield watcher
        finally:
            watcher.ended = True
            watcher.wake()

            with self._store.lock:
                self._store.watchers.discard(watcher)

    def _watcher(self, thread_ids: frozenset[str]) -> Watcher:
        return Watcher(self, thread_ids)

    def _watchers(self) -> list[Watcher]:
        """Return the watchers of this handle."""
        return [one for one in {*self._store.watchers} if one.handle is self]

    def _changed(self, thread_id: str, change: str) -> None:
        """Count a change and wake; called under the lock."""
        revisions = self._store.revisions
        revisions[thread_id] = revisions.get(thread_id, 0) + 1

        for watcher in self._store.watchers:
            if watcher.handle._notified:
                watcher.wake()


@dataclass
class ReferenceHarness(Harness):
    """Handles of one named store in this process."""

    store: str

    def open(self, **options: Any) -> Reference:
        return Reference(self.store, **options)

    def elsewhere(self) -> Harness | None:
        return None
