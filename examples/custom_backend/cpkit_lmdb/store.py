"""Agent state in LMDB: a memory-mapped b-tree, embedded, for many processes.

URL form
    ``lmdb:///absolute/folder`` or ``lmdb:folder``. Option: ``map_size``, the most bytes
    that the store may grow to.

Durability
    LMDB syncs each commit: an acknowledged write survives a power loss.

What is atomic
    Each batch and each read is one transaction. LMDB has one writer at a time, in all
    processes together, and readers see the last commit.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import islice
from typing import ClassVar, TypeVar

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
    Limits,
    Merge,
    Outcome,
    Resolve,
    Snapshot,
    StoredCall,
    StoreFailure,
    StoreInfo,
    Write,
    issued_call,
    resolved_call,
    span,
)
from cpkit.registry import url_path
from cpkit_lmdb import environments

__all__ = ["LMDBStore"]

T = TypeVar("T")

# LMDB's keys have at most 511 bytes and ids up to 512, so ids are hashed: 32 bytes,
# different for different ids. A key starts with one of these letters.
#
#   t  thread -> version
#   m  thread, position -> body
#   x  thread, hash of the extra key -> [key, value]
#   c  thread, sequence -> StoredCall, in the order of claims
#   i  thread, hash of the call id -> the key under c
#   k  hash of the idempotency key -> the key under c of its newest attempt


class LMDBOptions(DriverOptions):
    """``map_size``: address space, not disk space; the file grows as it fills."""

    map_size: PositiveInt = 2**34


class LMDBStore:
    """A folder with an LMDB environment."""

    Options: ClassVar[type[DriverOptions]] = LMDBOptions
    client_options: ClassVar[frozenset[str]] = frozenset()
    limits = Limits(max_value=2**32 - 1)
    max_writes = 256
    timeout = None
    locks_threads = False
    erases = False

    def __init__(self, folder: str, options: LMDBOptions) -> None:
        self.name = f"lmdb:{folder}"
        self._folder = folder
        self._map_size = options.map_size
        self._environment: environments.Environment | None = None

    @classmethod
    def from_url(cls, url: str, options: LMDBOptions) -> LMDBStore:
        return cls(_folder(url), options)

    @staticmethod
    async def inspect(url: str, options: LMDBOptions) -> StoreInfo:
        folder = _folder(url)
        exists = await asyncio.to_thread(os.path.exists, f"{folder}/data.mdb")
        return StoreInfo(exists, path=folder)

    async def open(self) -> None:
        try:
            self._environment = await asyncio.to_thread(
                environments.acquire, self._folder, self._map_size
            )
        except (lmdb.Error, OSError) as exc:
            raise StoreFailure("rejected", str(exc)) from exc

    async def close(self) -> None:
        if self._environment is not None:
            await asyncio.to_thread(environments.release, self._folder)

    def durability(self) -> Durability:
        return Durability(Survives.MACHINE, {"sync": "before each commit returns"})

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        return await self._run(
            lambda tx: [_apply(tx, write) for write in batch], write=True
        )

    async def snapshot(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> Snapshot | None:
        def query(tx: lmdb.Transaction) -> Snapshot | None:
            version = _version(tx, thread_id)

            if version is None:
                return None

            first, last = span(start, stop, version)
            return Snapshot(
                decode(_bodies(tx, thread_id, first, last), first),
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
        self, work: Callable[[lmdb.Transaction], T], *, write: bool = False
    ) -> T:
        return await asyncio.to_thread(self._in_transaction, work, write)

    def _in_transaction(self, work: Callable[[lmdb.Transaction], T], write: bool) -> T:
        assert self._environment is not None

        try:
            # An exception aborts the transaction; leaving the block commits it.
            with self._environment.used() as environment:
                with _begin(environment, write) as tx:
                    return work(tx)
        except (lmdb.PanicError, lmdb.MapResizedError) as exc:
            # An earlier commit could not be written, or another process with a larger
            # map grew the file beyond this one; this transaction did not begin.
            self._environment.reopen(environment)
            raise StoreFailure("not sent", str(exc)) from exc
        except lmdb.MapFullError as exc:
            raise StoreFailure("rejected", f"{exc}; raise map_size") from exc
        except lmdb.Error as exc:
            # A commit that did not return can still have reached the file.
            raise StoreFailure("unknown" if write else "rejected", str(exc)) from exc


def _folder(url: str) -> str:
    folder = url_path(url)

    if not folder.strip("/"):
        raise InvalidURL("write lmdb:folder or lmdb:///absolute/folder")

    return folder


def _begin(environment: lmdb.Environment, write: bool) -> lmdb.Transaction:
    """Begin a transaction that sees the last commit.

    A writer that is killed after its commit, and before it informs the readers, leaves
    them the state before, until the next writer repairs that.
    """
    committed = environment.info()["last_txnid"]
    transaction = environment.begin(write=write)

    if transaction.id() >= committed:
        return transaction

    transaction.abort()
    environment.begin(write=True).abort()
    return environment.begin()


def _apply(tx: lmdb.Transaction, write: Write) -> Outcome:
    """Apply one write; a refused write has changed nothing."""
    thread_id = write.thread_id
    version = _version(tx, thread_id) or 0

    match write:
        case Append():
            if write.expected_version not in (None, version):
                return Conflict(version)

            for body in write.bodies:
                tx.put(_key(b"m", thread_id, _number(version)), body)
                version += 1

            if write.bodies or write.items:
                _merge(tx, thread_id, write.items)
                tx.put(_key(b"t", thread_id), _number(version))

            return version
        case Merge():
            _merge(tx, thread_id, write.items)
            tx.put(_key(b"t", thread_id), _number(version))
        case Claim():
            known = _call(tx, _key(b"i", thread_id, _hash(write.call_id)))
            newest = _call(tx, _key(b"k", write.idempotency_key))

            if known or (newest and newest.status != "failed"):
                return known or newest

            # Nothing is ever deleted, so the number of entries is a sequence.
            place = _key(b"c", thread_id, _number(tx.stat()["entries"]))
            tx.put(place, to_json(issued_call(write, newest, time.time_ns() // 1000)))
            tx.put(_key(b"i", thread_id, _hash(write.call_id)), place)
            tx.put(_key(b"k", write.idempotency_key), place)
            tx.put(_key(b"t", thread_id), _number(version))
        case Resolve():
            pointer = _key(b"i", thread_id, _hash(write.call_id))
            found = _call(tx, pointer)

            if found is not None and found.status == "issued":
                found = resolved_call(found, write, time.time_ns() // 1000)
                tx.put(bytes(tx.get(pointer) or b""), to_json(found))

            return found
        case _:
            raise StoreFailure("rejected", f"unknown write {type(write).__name__}")

    return None


def _version(tx: lmdb.Transaction, thread_id: str) -> int | None:
    stored = tx.get(_key(b"t", thread_id))
    return None if stored is None else int.from_bytes(stored)


def _merge(
    tx: lmdb.Transaction, thread_id: str, items: Sequence[tuple[bytes, bytes]]
) -> None:
    for key, value in items:
        item = to_json([key.decode(), value.decode()])
        tx.put(_key(b"x", thread_id, sha256(key).digest()), item)


def _call(tx: lmdb.Transaction, pointer: bytes) -> StoredCall | None:
    """Return the call to which a key under i or k points."""
    place = tx.get(pointer)

    if place is None:
        return None

    if (stored := tx.get(bytes(place))) is None:
        raise CorruptThread("?", bytes(place).hex(), "the call's row is missing")

    return StoredCall(*from_json(bytes(stored)))


def _calls(tx: lmdb.Transaction, thread_id: str) -> list[StoredCall]:
    return [StoredCall(*from_json(row)) for row in _rows(tx, _key(b"c", thread_id))]


def _bodies(
    tx: lmdb.Transaction, thread_id: str, first: int, last: int
) -> Iterator[bytes]:
    prefix = _key(b"m", thread_id)
    return islice(_rows(tx, prefix, _number(first)), last - first)


def _rows(tx: lmdb.Transaction, prefix: bytes, first: bytes = b"") -> Iterator[bytes]:
    """Yield the values of all keys with this prefix, in the order of the keys."""
    cursor = tx.cursor()

    if cursor.set_range(prefix + first):
        for key, value in cursor.iternext():
            if bytes(key[: len(prefix)]) != prefix:
                break

            yield bytes(value)


def _key(letter: bytes, name: str, rest: bytes = b"") -> bytes:
    return letter + _hash(name) + rest


def _hash(text: str) -> bytes:
    return sha256(text.encode()).digest()


def _number(value: int) -> bytes:
    """Eight bytes that sort as the number does."""
    return value.to_bytes(8)
