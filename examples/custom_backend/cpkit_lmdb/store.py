"""Agent state in LMDB: a memory-mapped b-tree, embedded, for many processes.

URL form
    ``lmdb:///absolute/folder`` or ``lmdb:folder``. Option: ``map_size``, the most bytes
    that the store may grow to.

Durability, and what is atomic
    LMDB syncs each commit: an acknowledged write survives a power loss. Each batch and
    each read is one transaction. LMDB has one writer at a time, in all processes
    together, and readers see the last commit.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from itertools import islice, takewhile
from typing import Any, ClassVar, TypeVar

import lmdb
from pydantic import PositiveInt
from pydantic_core import from_json, to_json

from cpkit import CorruptThread, Durability, InvalidURL, Survives
from cpkit.driver import (
    Append,
    Claim,
    Conflict,
    Decode,
    DriverOptions,
    EraseCalls,
    Limits,
    Merge,
    Outcome,
    Resolve,
    Snapshot,
    StoredCall,
    StoreFailure,
    StoreInfo,
    Trim,
    Write,
    create_folder,
    erased_call,
    is_erased_by,
    issued_call,
    resolved_call,
    span,
    sync_folder,
)
from cpkit.registry import url_path

__all__ = ["LMDBStore"]

T = TypeVar("T")

# LMDB's keys have at most 511 bytes and ids up to 512, so ids are hashed: 32 bytes,
# different for different ids. A key starts with one of these letters.
#   t  thread -> version, position of the first message
#   m  thread, position -> body
#   x  thread, hash of the extra key -> [key, value]
#   c  thread, sequence -> StoredCall, in the order of claims
#   i  thread, hash of the call id -> the key under c
#   k  hash of the idempotency key -> the key under c of its newest attempt

# LMDB must not be opened twice in one process (lmdb.h, mdb_env_open). So all handles of
# a folder share one store: by path and process.
_stores: dict[tuple[str, int], LMDBStore] = {}


class LMDBOptions(DriverOptions):
    """``map_size``: address space, not disk space; the file grows as it fills."""

    map_size: PositiveInt = 2**34


class LMDBStore:
    """A folder with an LMDB environment, and the one thread that uses it."""

    Options: ClassVar[type[DriverOptions]] = LMDBOptions
    client_options: ClassVar[frozenset[str]] = frozenset()
    limits = Limits(max_value=2**32 - 1)
    max_writes = 256
    timeout = 10.0  # LMDB itself waits for ever for a writer that is stopped
    locks_threads = False
    erases, trims, erases_calls = False, True, True

    def __init__(self, folder: str, map_size: int) -> None:
        self.name = f"lmdb:{folder}"
        self._folder = folder
        self._map_size = map_size
        self._lock = threading.Lock()
        self._users = 0
        self._lmdb: Any = None

    @classmethod
    def from_url(cls, url: str, options: LMDBOptions) -> LMDBStore:
        if not (folder := url_path(url)).strip("/"):
            raise InvalidURL("write lmdb:folder or lmdb:///absolute/folder")

        place = os.path.abspath(folder), os.getpid()
        return _stores.setdefault(place, cls(place[0], options.map_size))

    @staticmethod
    async def inspect(url: str, options: LMDBOptions) -> StoreInfo:
        folder = url_path(url)
        exists = await asyncio.to_thread(os.path.exists, f"{folder}/data.mdb")
        return StoreInfo(exists, path=folder)

    async def open(self) -> None:
        await asyncio.to_thread(self._count, 1)

    async def close(self) -> None:
        await asyncio.to_thread(self._count, -1)

    def _count(self, handles: int) -> None:
        """Count a handle; the first one opens LMDB, and the last one closes it."""
        with self._lock:
            self._users += handles

            if self._lmdb is None and self._users:
                self._thread = ThreadPoolExecutor(1, "cpkit-lmdb")
                self._lmdb = self._thread.submit(self._opened).result()
            elif not self._users:
                self._thread.shutdown()  # waits for reads that were cancelled

                if self._lmdb is not None:
                    self._lmdb.close()
                    self._lmdb = None

    def _opened(self) -> lmdb.Environment:
        try:
            create_folder(self._folder, parents=True)
            _create(self._folder)
            environment = lmdb.open(self._folder, map_size=self._map_size, mode=0o600)
            # Killed processes keep their places in the table of readers.
            environment.reader_check()
            return environment
        except (lmdb.Error, OSError) as exc:
            raise StoreFailure("rejected", str(exc)) from exc

    def durability(self) -> Durability:
        return Durability(Survives.MACHINE, {"sync": "before each commit returns"})

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        return await self._run(lambda tx: [_apply(tx, one) for one in batch], True)

    async def snapshot(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> Snapshot | None:
        def query(tx: lmdb.Transaction) -> Snapshot | None:
            if (stored := tx.get(_key(b"t", thread_id))) is None:
                return None

            version, trimmed = _positions(stored)
            first, last = span(start, stop, version, trimmed)
            bodies = _rows(tx, _key(b"m", thread_id), _number(first))
            return Snapshot(
                decode(islice(bodies, last - first), first),
                [from_json(item) for item in _rows(tx, _key(b"x", thread_id))],
                [call for call in _calls(tx, thread_id) if call.status == "issued"],
                version,
                first,
            )

        return await self._run(query)

    async def holder(self, key: str) -> StoredCall | None:
        return await self._run(lambda tx: _call(tx, _key(b"k", key)))

    async def calls(self, thread_id: str) -> list[StoredCall]:
        return await self._run(lambda tx: _calls(tx, thread_id))

    async def _run(
        self, work: Callable[[lmdb.Transaction], T], write: bool = False
    ) -> T:
        future = self._thread.submit(self._transact, work, write)
        return await asyncio.wrap_future(future)

    def _transact(self, work: Callable[[lmdb.Transaction], T], write: bool) -> T:
        try:
            # An exception aborts the transaction; leaving the block commits it.
            with self._lmdb.begin(write=write) as tx:
                return work(tx)
        except (lmdb.PanicError, lmdb.MapResizedError):
            # An earlier commit could not be written, or another process with a larger
            # map grew the file beyond this one; this transaction did not begin.
            self._lmdb.close()
            self._lmdb = self._opened()
            return self._transact(work, write)
        except lmdb.MapFullError as exc:
            raise StoreFailure("rejected", f"{exc}; raise map_size") from exc
        except lmdb.Error as exc:
            # A commit that did not return can still have reached the file.
            raise StoreFailure("unknown" if write else "rejected", str(exc)) from exc


def _create(folder: str) -> None:
    """Create LMDB's file as a whole, and sync its name."""
    # LMDB syncs neither its first write nor the name, and cannot open a torn file.
    if not os.path.exists(f"{folder}/data.mdb"):
        with tempfile.TemporaryDirectory(dir=folder) as new:
            with lmdb.open(new, mode=0o600) as environment:
                environment.sync(True)

            with suppress(FileExistsError):
                os.link(f"{new}/data.mdb", f"{folder}/data.mdb")

    sync_folder(folder)


def _apply(tx: lmdb.Transaction, write: Write) -> Outcome:
    """Apply one write; a refused write has changed nothing."""
    thread_id, now = write.thread_id, time.time_ns() // 1000
    version, first = _positions(tx.get(_key(b"t", thread_id), b""))

    match write:
        case Append():
            if write.expected_version not in (None, version):
                return Conflict(version)

            if not write.bodies and not write.items:
                return version

            for body in write.bodies:
                tx.put(_key(b"m", thread_id, _number(version)), body)
                version += 1
        case Claim():
            known = _call(tx, _key(b"i", thread_id, _hash(write.call_id)))
            newest = _call(tx, _key(b"k", write.idempotency_key))

            if known or (newest and newest.status != "failed"):
                return known or newest

            place = _next_place(tx, thread_id)
            tx.put(place, to_json(issued_call(write, newest, now)))
            tx.put(_key(b"i", thread_id, _hash(write.call_id)), place)
            tx.put(_key(b"k", write.idempotency_key), place)
        case Resolve():
            pointer = _key(b"i", thread_id, _hash(write.call_id))
            found = _call(tx, pointer)

            if found is not None and found.status == "issued":
                found = resolved_call(found, write, now)
                tx.put(bytes(tx.get(pointer) or b""), to_json(found))

            return found
        case Trim():
            if write.expected_version not in (None, version):
                return Conflict(version)

            if (before := min(write.before, version)) <= first:
                return 0

            for position in range(first, before):
                tx.delete(_key(b"m", thread_id, _number(position)))

            tx.put(_key(b"t", thread_id), _number(version) + _number(before))
            return before - first

        case EraseCalls():
            if write.expected_version not in (None, version):
                return Conflict(version)

            old = [one for one in _calls(tx, thread_id) if is_erased_by(one, write)]

            for call in old:
                pointer = _key(b"i", thread_id, _hash(call.call_id))
                tx.put(bytes(tx.get(pointer) or b""), to_json(erased_call(call)))

            return len(old)

    # Creates a missing thread.
    tx.put(_key(b"t", thread_id), _number(version) + _number(first))

    for key, value in write.items if isinstance(write, Append | Merge) else ():
        item = to_json([key.decode(), value.decode()])
        tx.put(_key(b"x", thread_id, sha256(key).digest()), item)

    return version if isinstance(write, Append) else None


def _positions(stored: bytes | memoryview) -> tuple[int, int]:
    """Return the version and the position of the first message; 0 and 0 for none."""
    return int.from_bytes(stored[:8]), int.from_bytes(stored[8:])


def _next_place(tx: lmdb.Transaction, thread_id: str) -> bytes:
    """Return a key under c behind those of the thread's calls."""
    prefix, cursor = _key(b"c", thread_id), tx.cursor()
    _ = cursor.prev() if cursor.set_range(prefix + b"\xff" * 8) else cursor.last()
    last = bytes(cursor.key())
    number = int.from_bytes(last[-8:]) + 1 if last.startswith(prefix) else 0
    return prefix + _number(number)


def _call(tx: lmdb.Transaction, pointer: bytes) -> StoredCall | None:
    """Return the call to which a key under i or k points."""
    if (place := tx.get(pointer)) is None:
        return None

    if (stored := tx.get(bytes(place))) is None:
        raise CorruptThread("", bytes(place).hex(), "the call's row is missing")

    return StoredCall(*from_json(bytes(stored)))


def _calls(tx: lmdb.Transaction, thread_id: str) -> list[StoredCall]:
    return [StoredCall(*from_json(row)) for row in _rows(tx, _key(b"c", thread_id))]


def _rows(tx: lmdb.Transaction, prefix: bytes, first: bytes = b"") -> Iterator[bytes]:
    """Return the values of all keys with this prefix, in the order of the keys."""
    cursor = tx.cursor()
    rows = cursor.iternext() if cursor.set_range(prefix + first) else ()
    found = takewhile(lambda row: bytes(row[0]).startswith(prefix), rows)
    return (bytes(value) for _, value in found)


def _key(letter: bytes, name: str, rest: bytes = b"") -> bytes:
    return letter + _hash(name) + rest


def _hash(text: str) -> bytes:
    return sha256(text.encode()).digest()


def _number(value: int) -> bytes:
    """Eight bytes that sort as the number does."""
    return value.to_bytes(8)
