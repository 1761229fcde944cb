"""A store over an ordered key-value engine: the layout, the writes and the reads.

RocksDB, LMDB, LevelDB and their kin keep keys in order, and write several at once. For
such an engine an author writes three functions of a `KeyValueStore`: open, close, and
one transaction. A `View` gives each write its meaning.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from heapq import merge
from itertools import groupby, islice, takewhile
from typing import NamedTuple, TypeVar

from pydantic_core import from_json, to_json

from cpkit.driver.codec import from_micros
from cpkit.driver.ids import span
from cpkit.driver.store import Decode, Limits
from cpkit.driver.writes import (
    Append,
    Claim,
    Conflict,
    Erase,
    EraseCalls,
    KeyHeld,
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
    is_erased_by,
    issued_call,
    key_is_held,
    resolved_call,
)
from cpkit.errors import CorruptThread, SchemaMismatch
from cpkit.records import Durability, ThreadInfo

__all__ = ["KeyValueStore", "View"]

T = TypeVar("T")

# The version of this layout, under the key s.
_SCHEMA = b"1"

# A key starts with one of these letters, and has at most 434 bytes: ids are hashed.
#   t  beginning of the thread's id, hash of a long one -> _Thread
#   m  thread, position -> body
#   x  thread, hash of the extra key -> length of the key, key, value
#   c  thread, number -> StoredCall, in the order of claims
#   i  thread, hash of the call id -> the key under c
#   a  idempotency key, attempt -> the key under c
#   k  idempotency key -> the key under c of its newest attempt

# Threads are listed in the order of their ids, so as much of an id as every engine
# takes in a key is not hashed. Ids have at most 512 bytes.
_SORTED = 400


class _Thread(NamedTuple):
    """A thread's row; without times it was erased, and only its calls are left.

    ``calls`` is the number of the next call. The first message has position ``first``.
    """

    thread_id: str
    version: int = 0
    first: int = 0
    calls: int = 0
    created_at: int | None = None
    updated_at: int | None = None


class View:
    """The rows of an engine at one moment, with the changes of a batch over them.

    ``get(key)`` returns a value or ``None``. ``rows(first)`` yields the keys from
    ``first`` on with their values, in the order of the keys. Both read one moment: of
    a snapshot or a transaction. After a batch, ``changes`` has the new value of each
    key, ``None`` for a deleted one; the engine must write all of them or none.
    """

    def __init__(
        self,
        get: Callable[[bytes], bytes | None],
        rows: Callable[[bytes], Iterable[tuple[bytes, bytes]]],
    ) -> None:
        self._get = get
        self._rows = rows
        self.changes: dict[bytes, bytes | None] = {}

    def get(self, key: bytes) -> bytes | None:
        """Return a value as the batch has left it."""
        return self.changes[key] if key in self.changes else self._get(key)

    def put(self, key: bytes, value: bytes) -> None:
        self.changes[key] = value

    def delete(self, key: bytes) -> None:
        self.changes[key] = None

    def rows(self, prefix: bytes, first: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield all keys with this prefix and their values, in the order of the keys.

        It begins at ``prefix + first``. Do not change rows while it runs.
        """
        start = prefix + first
        stored = takewhile(lambda row: row[0].startswith(prefix), self._rows(start))

        if not self.changes:
            return stored

        changed = [
            (key, value)
            for key, value in self.changes.items()
            if value is not None and key.startswith(prefix) and key >= start
        ]
        kept = (row for row in stored if row[0] not in self.changes)
        return merge(kept, sorted(changed))

    def apply(self, write: Write) -> Outcome:
        """Apply one write; a refused write has changed nothing."""
        thread = self._thread(write.thread_id)
        version, name = thread.version, _hash(write.thread_id)

        match write:
            case Append() | Erase() | Trim() | EraseCalls() if (
                write.expected_version not in (None, version)
            ):
                return Conflict(version)
            case Append():
                if not write.bodies and not write.items:
                    return version

                for position, body in enumerate(write.bodies, version):
                    self.put(b"m" + name + _number(position), body)

                self._merge(name, write.items)
                version += len(write.bodies)
                self._change(thread._replace(version=version))
                return version
            case Merge():
                self._merge(name, write.items)
                self._change(thread)
            case Claim():
                known = self._call(b"i" + name + _hash(write.call_id))
                newest = self.holder(write.idempotency_key)

                if known or (newest and newest.status != "failed"):
                    return known or newest

                now = self._change(thread._replace(calls=thread.calls + 1))
                self._put_call(issued_call(write, newest, now), thread.calls)
            case Resolve():
                pointer = b"i" + name + _hash(write.call_id)
                found = self._call(pointer)

                if found is not None and found.status == "issued":
                    now = _now() if found.erased else self._change(thread)
                    found = resolved_call(found, write, now)
                    self.put(self.get(pointer) or b"", to_json(found))

                return found
            case Erase():
                self._erase(thread, write.forget_keys)
            case Trim():
                if (before := min(write.before, version)) <= thread.first:
                    return 0

                for position in range(thread.first, before):
                    self.delete(b"m" + name + _number(position))

                self._put_thread(thread._replace(first=before))
                return before - thread.first
            case EraseCalls():
                calls = self._calls(name).items()
                old = [one for one in calls if is_erased_by(one[1], write)]

                for place, call in old:
                    self.put(place, to_json(erased_call(call)))

                return len(old)
            case Restore():
                return self._restore(write)

        return None

    def snapshot(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> Snapshot | None:
        thread, name = self._thread(thread_id), _hash(thread_id)

        if thread.created_at is None:
            return None

        first, last = span(start, stop, thread.version, thread.first)
        rows = self.rows(b"m" + name, _number(first))
        messages = decode((body for _, body in islice(rows, last - first)), first)

        if len(messages) != last - first:
            raise CorruptThread(thread_id, f"messages {first} to {last}", "one is lost")

        return Snapshot(
            messages,
            self._items(name),
            [c for c in self.calls(thread_id) if c.status == "issued" and not c.erased],
            thread.version,
            first,
        )

    def holder(self, key: str) -> StoredCall | None:
        return self._call(b"k" + _hash(key))

    def calls(self, thread_id: str) -> list[StoredCall]:
        return list(self._calls(_hash(thread_id)).values())

    def threads(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[ThreadInfo]:
        first = max(prefix.encode()[:_SORTED], (after or "").encode()[:_SORTED])
        rows = self.rows(b"t", first)
        beginning = b"t" + prefix.encode()[:_SORTED]
        rows = takewhile(lambda row: row[0].startswith(beginning), rows)
        # Ids that differ only behind `_SORTED` bytes are in the order of their hashes.
        groups = groupby(rows, lambda row: row[0][: _SORTED + 1])
        found = (
            thread
            for _, group in groups
            for thread in sorted(_stored(_Thread, *row) for row in group)
            if thread.thread_id.startswith(prefix)
            and thread.thread_id > (after or "")
            and (erased or thread.created_at is not None)
        )
        return [self._info(thread) for thread in islice(found, limit)]

    def dump(self, thread_id: str) -> StoredDump | None:
        if self.get(_thread_key(thread_id)) is None:
            return None

        thread, name = self._thread(thread_id), _hash(thread_id)
        return StoredDump(
            [body for _, body in self.rows(b"m" + name)],
            self._items(name),
            self.calls(thread_id),
            thread.created_at,
            thread.updated_at,
            thread.first,
        )

    def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        """Return the threads' rows: each change makes `updated_at` later."""
        if thread_ids is None:
            return {_stored(_Thread, *row).thread_id: row[1] for row in self.rows(b"t")}

        rows = {one: self.get(_thread_key(one)) for one in thread_ids}
        return {one: row for one, row in rows.items() if row is not None}

    def _thread(self, thread_id: str) -> _Thread:
        """Return the thread; at version 0 and without times where it is missing."""
        key = _thread_key(thread_id)
        row = self.get(key)
        return _Thread(thread_id) if row is None else _stored(_Thread, key, row)

    def _put_thread(self, thread: _Thread) -> None:
        self.put(_thread_key(thread.thread_id), to_json(thread))

    def _change(self, thread: _Thread) -> int:
        """Store a thread that changes now; return the time in microseconds."""
        # Later than before, even if the clock is not: workers compare it.
        now = max(_now(), (thread.updated_at or 0) + 1)
        created_at = thread.created_at or now
        self._put_thread(thread._replace(created_at=created_at, updated_at=now))
        return now

    def _merge(self, name: bytes, items: Iterable[tuple[bytes, bytes]]) -> None:
        for key, value in items:
            row = len(key).to_bytes(2) + key + value
            self.put(b"x" + name + sha256(key).digest(), row)

    def _items(self, name: bytes) -> list[tuple[bytes, bytes]]:
        rows = (row for _, row in self.rows(b"x" + name))
        return [
            (row[2 : (end := 2 + int.from_bytes(row[:2]))], row[end:]) for row in rows
        ]

    def _calls(self, name: bytes) -> dict[bytes, StoredCall]:
        """Return the calls of a thread with their keys, in the order of claims."""
        rows = self.rows(b"c" + name)
        return {place: _stored(StoredCall, place, row) for place, row in rows}

    def _call(self, pointer: bytes) -> StoredCall | None:
        """Return the call to which a key under i, a or k points."""
        if (place := self.get(pointer)) is None:
            return None

        if (row := self.get(place)) is None:
            raise CorruptThread("", place.hex(), "the call's row is missing")

        return _stored(StoredCall, place, row)

    def _put_call(self, call: StoredCall, number: int) -> None:
        """Store a call of which nothing is stored yet."""
        name, key = _hash(call.thread_id), _hash(call.idempotency_key)
        place, newest = b"c" + name + _number(number), self._call(b"k" + key)
        self.put(place, to_json(call))
        self.put(b"i" + name + _hash(call.call_id), place)
        self.put(b"a" + key + _number(call.attempt), place)

        if newest is None or newest.attempt < call.attempt:
            self.put(b"k" + key, place)

    def _erase(self, thread: _Thread, forget_keys: bool) -> None:
        name = _hash(thread.thread_id)

        for position in range(thread.first, thread.version):
            self.delete(b"m" + name + _number(position))

        for key, _ in list(self.rows(b"x" + name)):
            self.delete(key)

        calls = self._calls(name)

        for place, call in calls.items():
            if forget_keys:
                self._forget(place, call)
            else:
                self.put(place, to_json(erased_call(call)))

        if calls and not forget_keys:
            self._put_thread(_Thread(thread.thread_id, calls=thread.calls))
        else:
            self.delete(_thread_key(thread.thread_id))

    def _forget(self, place: bytes, call: StoredCall) -> None:
        key = _hash(call.idempotency_key)
        self.delete(place)
        self.delete(b"i" + _hash(call.thread_id) + _hash(call.call_id))
        self.delete(b"a" + key + _number(call.attempt))

        # Where the newest is forgotten, the attempt before it counts again.
        if self.get(b"k" + key) == place:
            left = [pointer for _, pointer in self.rows(b"a" + key)]
            self.changes[b"k" + key] = left[-1] if left else None

    def _restore(self, write: Restore) -> Outcome:
        if self.get(_thread_key(write.thread_id)) is not None:
            return Conflict(self._thread(write.thread_id).version)

        for call in write.calls:
            places = [row for row, _ in self.rows(b"a" + _hash(call.idempotency_key))]
            others = [one for place in places if (one := self._call(place))]

            if key_is_held(call, others):
                return KeyHeld(call.idempotency_key, others[-1].thread_id)

        name, version = _hash(write.thread_id), write.first + len(write.bodies)

        for position, body in enumerate(write.bodies, write.first):
            self.put(b"m" + name + _number(position), body)

        for number, call in enumerate(write.calls):
            self._put_call(call, number)

        self._merge(name, write.items)
        times = write.created_at, write.updated_at
        numbers = version, write.first, len(write.calls)
        self._put_thread(_Thread(write.thread_id, *numbers, *times))
        return None

    def _info(self, thread: _Thread) -> ThreadInfo:
        created_at, updated_at = thread.created_at, thread.updated_at

        if created_at is None or updated_at is None:
            calls = self.calls(thread.thread_id)
            created_at = min(call.issued_at for call in calls)
            updated_at = max(call.resolved_at or call.issued_at for call in calls)

        times = from_micros(created_at), from_micros(updated_at)
        return ThreadInfo(thread.thread_id, thread.version, *times)


class KeyValueStore(ABC):
    """A `Store` with all abilities but a search, in one worker thread.

    A subclass defines ``name``, ``Options``, ``from_url`` and the four methods below.
    All handles of one name in a process share the engine: the first one opens it, and
    the last one closes it. Reads of this process wait for its writes.
    """

    client_options: frozenset[str] = frozenset()
    limits = Limits()
    max_writes = 256
    timeout: float | None = None
    locks_threads = False
    erases = trims = erases_calls = True

    name: str

    _engine: _Engine | None = None

    @abstractmethod
    def open_engine(self) -> None:
        """Open the engine, and create what is missing; runs in the worker thread.

        It may be called again after it failed.
        """

    @abstractmethod
    def close_engine(self) -> None:
        """Close what `open_engine` opened."""

    @abstractmethod
    def transact(self, work: Callable[[View], T], write: bool) -> T:
        """Return ``work(view)``, after the changes of the view are durable.

        With ``write``, no other writer, of this process or another, may change a row
        from the beginning of the view until its changes are written. Raises
        ``StoreFailure`` in place of the engine's errors.
        """

    @abstractmethod
    def durability(self) -> Durability:
        """Return what an acknowledged write survives."""

    async def open(self) -> None:
        await asyncio.to_thread(self._open)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _open(self) -> None:
        place = type(self), self.name, os.getpid()

        with _engines_lock:
            if (engine := _engines.get(place)) is None:
                engine = _Engine(self, ThreadPoolExecutor(1, "cpkit-key-value"))

                try:
                    engine.worker.submit(self.open_engine).result()
                    engine.worker.submit(self._check_schema).result()
                except BaseException:
                    engine.worker.shutdown()
                    raise

            engine.handles += 1
            _engines[place] = self._engine = engine

    def _close(self) -> None:
        place = type(self), self.name, os.getpid()

        with _engines_lock:
            # Without an engine the opening has failed.
            if (engine := self._engine) is not None:
                self._engine = None
                engine.handles -= 1

                if not engine.handles:
                    del _engines[place]
                    # After the reads that were cancelled.
                    engine.worker.submit(engine.store.close_engine).result()
                    engine.worker.shutdown()

    def _check_schema(self) -> None:
        found = self.transact(lambda view: view.get(b"s"), False)

        if found is None:
            self.transact(lambda view: view.put(b"s", _SCHEMA), True)
        elif found != _SCHEMA:
            number = int(found) if found.isdigit() else repr(found)
            raise SchemaMismatch(self.name, number, int(_SCHEMA))

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        return await self._run(lambda view: [view.apply(one) for one in batch], True)

    async def snapshot(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> Snapshot | None:
        return await self._run(
            lambda view: view.snapshot(thread_id, start, stop, decode)
        )

    async def holder(self, key: str) -> StoredCall | None:
        return await self._run(lambda view: view.holder(key))

    async def calls(self, thread_id: str) -> list[StoredCall]:
        return await self._run(lambda view: view.calls(thread_id))

    async def threads(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[ThreadInfo]:
        return await self._run(lambda view: view.threads(prefix, after, limit, erased))

    async def dump(self, thread_id: str) -> StoredDump | None:
        return await self._run(lambda view: view.dump(thread_id))

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        return await self._run(lambda view: view.markers(thread_ids))

    async def _run(self, work: Callable[[View], T], write: bool = False) -> T:
        engine = self._engine
        assert engine is not None, "the handle calls open first"
        # The first handle's object holds the engine.
        run = engine.worker.submit(
            engine.store.transact, partial(_released, work), write
        )
        return await asyncio.wrap_future(run)


def _released(work: Callable[[View], T], view: View) -> T:
    """Do the work; an exception does not keep iterators of the engine.

    Its traceback has them, a caller may keep it, and an engine such as RocksDB stays
    open as long as one exists.
    """
    try:
        return work(view)
    except Exception as exc:
        raised: BaseException | None = exc

        while raised is not None:
            traceback.clear_frames(raised.__traceback__)
            raised = raised.__context__

        raise


@dataclass
class _Engine:
    """An open engine of this process: its store, its one thread, and its handles."""

    store: KeyValueStore
    worker: ThreadPoolExecutor
    handles: int = 0


_engines: dict[tuple[type, str, int], _Engine] = {}
_engines_lock = threading.Lock()


def _stored(kind: Callable[..., T], place: bytes, row: bytes) -> T:
    try:
        return kind(*from_json(row))
    except (TypeError, ValueError) as exc:
        reason = f"not a {kind.__name__}: {exc}"
        raise CorruptThread("", place.hex(), reason) from exc


def _thread_key(thread_id: str) -> bytes:
    """Return a key in the order of the ids; an id has no NUL."""
    name = thread_id.encode()
    rest = sha256(name).digest() if len(name) > _SORTED else b""
    return b"t" + name[:_SORTED] + b"\0" + rest


def _hash(text: str) -> bytes:
    return sha256(text.encode()).digest()


def _number(value: int) -> bytes:
    """Eight bytes that sort as the number does."""
    return value.to_bytes(8)


def _now() -> int:
    return time.time_ns() // 1000
