"""The contract in plain Python: the reference that every other store is held to.

URL forms
    ``memory://`` is a store of its own for each handle. ``memory://name`` is one store
    for all handles of that name in this process, in any of its event loops and
    threads, and lives as long as the process.

Durability
    None: the state ends with the process.

What is atomic
    Everything: each batch and each read runs under one lock, without an ``await``.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar
from urllib.parse import unquote

from cpkit.driver import (
    Append,
    Claim,
    Conflict,
    Decode,
    DriverOptions,
    Erase,
    EraseCalls,
    FullHandle,
    Heard,
    KeyHeld,
    Limits,
    Merge,
    Outcome,
    Resolve,
    Restore,
    Snapshot,
    StoredCall,
    StoredDump,
    Trim,
    Write,
    erased_call,
    from_micros,
    is_erased_by,
    issued_call,
    key_is_held,
    may_have_changed,
    resolved_call,
    span,
)
from cpkit.errors import InvalidURL
from cpkit.records import Durability, Survives, ThreadInfo

__all__ = ["MemoryCheckpointer", "MemoryStore"]

MessageT = TypeVar("MessageT")


@dataclass
class _Thread:
    """A thread; without times it has been deleted, and only its calls are left.

    The first of the bodies has the position ``first``.
    """

    created_at: int | None = None
    updated_at: int | None = None
    bodies: list[bytes] = field(default_factory=list)
    extra: dict[bytes, bytes] = field(default_factory=dict)
    calls: dict[str, StoredCall] = field(default_factory=dict)
    first: int = 0
    revision: int = 0

    @property
    def version(self) -> int:
        return self.first + len(self.bodies)

    def info(self, thread_id: str) -> ThreadInfo:
        issued = [call.issued_at for call in self.calls.values()]
        resolved = [call.resolved_at or 0 for call in self.calls.values()]
        created_at = self.created_at or min(issued)
        updated_at = self.updated_at or max(issued + resolved)
        times = from_micros(created_at), from_micros(updated_at)
        return ThreadInfo(thread_id, self.version, *times)


@dataclass
class _Data:
    lock: threading.Lock = field(default_factory=threading.Lock)
    threads: dict[str, _Thread] = field(default_factory=dict)
    # By idempotency key, then attempt number: thread id and call id.
    keys: dict[str, dict[int, tuple[str, str]]] = field(default_factory=dict)
    # Counts changes; a thread's revision is the count after its last one.
    changes: int = 0
    listeners: set[tuple[asyncio.AbstractEventLoop, Heard]] = field(default_factory=set)

    def thread(self, thread_id: str) -> _Thread:
        """Return the thread, or a new one that is not stored."""
        return self.threads.get(thread_id) or _Thread()

    def change(self, thread_id: str, thread: _Thread) -> int:
        """Store a thread that changes now; return the time in microseconds."""
        # Later than before, even if the clock is not: workers compare it.
        now = max(time.time_ns() // 1000, (thread.updated_at or 0) + 1)
        thread.created_at, thread.updated_at = thread.created_at or now, now
        self.threads[thread_id] = thread
        return now

    def tell(self, thread_id: str) -> None:
        """Count a change, and tell the listeners."""
        self.changes += 1

        if thread := self.threads.get(thread_id):
            thread.revision = self.changes

        for loop, heard in self.listeners:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(heard, thread_id)

    def attempts(self, key: str) -> list[StoredCall]:
        """Return the key's attempts, the newest last."""
        places = sorted(self.keys.get(key, {}).items())
        return [self.threads[thread].calls[call] for _, (thread, call) in places]

    def newest(self, key: str) -> StoredCall | None:
        if not (attempts := self.keys.get(key)):
            return None

        thread_id, call_id = attempts[max(attempts)]
        return self.threads[thread_id].calls[call_id]

    def put(self, call: StoredCall) -> None:
        self.threads[call.thread_id].calls[call.call_id] = call
        attempts = self.keys.setdefault(call.idempotency_key, {})
        attempts[call.attempt] = (call.thread_id, call.call_id)


_named: dict[str, _Data] = {}
_named_lock = threading.Lock()


class MemoryStore:
    """A store in this process's memory."""

    Options: ClassVar[type[DriverOptions]] = DriverOptions
    client_options: ClassVar[frozenset[str]] = frozenset()
    limits = Limits()
    max_writes = 1
    timeout: float | None = None
    locks_threads = False
    erases = trims = erases_calls = takes_bytes = True
    one_process = True

    def __init__(self, name: str | None = None) -> None:
        self.name = f"memory://{name or ''}"

        with _named_lock:
            self._data = _Data() if name is None else _named.setdefault(name, _Data())

    @classmethod
    def from_url(cls, url: str, options: DriverOptions) -> MemoryStore:
        _, slashes, name = url.partition("://")

        if not slashes:
            raise InvalidURL("write memory:// or memory://name")

        return cls(unquote(name) or None)

    async def open(self) -> None:
        """There is nothing to open."""

    async def close(self) -> None:
        """There is nothing to close: a named store belongs to the process."""

    def durability(self) -> Durability:
        advice = "the state ends with this process: use sqlite:///agent.db to keep it"
        return Durability(Survives.NONE, {}, (advice,))

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        with self._data.lock:
            outcomes = [self._apply(write, self._data) for write in batch]

            for write, outcome in zip(batch, outcomes, strict=True):
                if may_have_changed(write, outcome):
                    self._data.tell(write.thread_id)

            return outcomes

    def _apply(self, write: Write, data: _Data) -> Outcome:
        thread = data.thread(write.thread_id)
        version = thread.version

        match write:
            case Append() | Erase() | Trim() | EraseCalls() if (
                write.expected_version not in (None, version)
            ):
                return Conflict(version)
            case Append():
                if write.bodies or write.items:
                    data.change(write.thread_id, thread)
                    thread.bodies += write.bodies
                    thread.extra.update(write.items)

                return thread.version
            case Merge():
                data.change(write.thread_id, thread)
                thread.extra.update(write.items)
            case Claim():
                known = thread.calls.get(write.call_id)
                newest = data.newest(write.idempotency_key)

                if known or (newest and newest.status != "failed"):
                    return known or newest

                now = data.change(write.thread_id, thread)
                data.put(issued_call(write, newest, now))
            case Resolve():
                found = thread.calls.get(write.call_id)

                if found is None or found.status != "issued":
                    return found

                if found.erased:
                    now = time.time_ns() // 1000
                else:
                    now = data.change(write.thread_id, thread)

                data.put(resolved := resolved_call(found, write, now))
                return resolved
            case Erase():
                calls = [erased_call(call) for call in thread.calls.values()]
                data.threads.pop(write.thread_id, None)

                if calls and not write.forget_keys:
                    data.threads[write.thread_id] = _Thread()

                for one in calls:
                    if write.forget_keys:
                        del data.keys[one.idempotency_key][one.attempt]
                    else:
                        data.put(one)
            case Trim():
                removed = max(0, min(write.before, version) - thread.first)
                del thread.bodies[:removed]
                thread.first += removed
                return removed
            case EraseCalls():
                calls = [
                    one for one in thread.calls.values() if is_erased_by(one, write)
                ]

                for one in calls:
                    data.put(erased_call(one))

                return len(calls)
            case Restore():
                if write.thread_id in data.threads:
                    return Conflict(version)

                for one in write.calls:
                    if key_is_held(one, others := data.attempts(one.idempotency_key)):
                        return KeyHeld(one.idempotency_key, others[-1].thread_id)

                times = write.created_at, write.updated_at
                thread = _Thread(*times, list(write.bodies), dict(write.items))
                thread.first = write.first
                data.threads[write.thread_id] = thread

                for one in write.calls:
                    data.put(one)

        return None

    # A read yields to the event loop, as every other store's does.

    async def snapshot(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> Snapshot | None:
        await asyncio.sleep(0)

        with self._data.lock:
            thread = self._data.thread(thread_id)

            if thread.created_at is None:
                return None

            version, items = thread.version, list(thread.extra.items())
            first, last = span(start, stop, version, thread.first)
            bodies = thread.bodies[first - thread.first : last - thread.first]
            calls = thread.calls.values()
            pending = [c for c in calls if c.status == "issued" and not c.erased]

        return Snapshot(decode(bodies, first), items, pending, version, first)

    async def holder(self, key: str) -> StoredCall | None:
        await asyncio.sleep(0)

        with self._data.lock:
            return self._data.newest(key)

    async def calls(self, thread_id: str) -> list[StoredCall]:
        await asyncio.sleep(0)

        with self._data.lock:
            return list(self._data.thread(thread_id).calls.values())

    async def threads(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[ThreadInfo]:
        await asyncio.sleep(0)

        with self._data.lock:
            page = sorted(
                (thread_id, thread)
                for thread_id, thread in self._data.threads.items()
                if thread_id.startswith(prefix)
                and thread_id > (after or "")
                and (erased or thread.created_at is not None)
            )
            return [thread.info(thread_id) for thread_id, thread in page[:limit]]

    async def dump(self, thread_id: str) -> StoredDump | None:
        await asyncio.sleep(0)

        with self._data.lock:
            thread = self._data.threads.get(thread_id)

            if thread is None:
                return None

            return StoredDump(
                list(thread.bodies),
                list(thread.extra.items()),
                list(thread.calls.values()),
                thread.created_at,
                thread.updated_at,
                thread.first,
            )

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        await asyncio.sleep(0)

        with self._data.lock:
            found = self._data.threads
            ids = found if thread_ids is None else found.keys() & set(thread_ids)
            return {one: found[one].revision for one in ids}

    async def listen(self, heard: Heard) -> None:
        loop = asyncio.get_running_loop()

        with self._data.lock:
            self._data.listeners.add((loop, heard))

        try:
            heard(None)
            await loop.create_future()
        finally:
            with self._data.lock:
                self._data.listeners.discard((loop, heard))


class MemoryCheckpointer(FullHandle[MessageT]):
    """A handle of a store in this process's memory; options as in the URL."""

    def __init__(
        self,
        name: str | None = None,
        *,
        message_type: type[MessageT] | Any = dict,
        **options: Any,
    ) -> None:
        known = DriverOptions(**options)
        super().__init__(MemoryStore(name), message_type=message_type, options=known)
