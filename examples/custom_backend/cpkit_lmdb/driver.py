"""Agent state in LMDB: a memory-mapped b-tree, embedded, for many processes.

URL form
    ``lmdb:///absolute/folder`` or ``lmdb:folder``. Option: ``map_size``, the most bytes
    that the store may grow to.

Durability
    LMDB syncs each commit: an acknowledged write survives a power loss.

What is atomic
    Each operation is one transaction. LMDB has one writer at a time, in all processes
    together, and readers see the last commit: there is nothing else to do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, ClassVar, Generic, Self, TypeVar

import lmdb
from pydantic import PositiveInt
from pydantic_core import from_json, to_json

from cpkit import (
    BackendUnavailable,
    CallRecord,
    CheckpointData,
    CorruptThread,
    Durability,
    InvalidURL,
    JsonValue,
    Survives,
    ToolCall,
    UnknownCall,
    VersionConflict,
)
from cpkit.driver.codec import Codec, check_same_call
from cpkit.driver.ids import check_id, span
from cpkit.driver.lifetime import Lifetime
from cpkit.driver.writes import Append, Claim, Merge, Resolve, StoredCall
from cpkit.registry import DriverOptions, url_path
from cpkit_lmdb import environments

__all__ = ["LMDBCheckpointer"]

MessageT = TypeVar("MessageT")
T = TypeVar("T")

# LMDB's keys have at most 511 bytes and ids up to 512, so a key starts with the hash of
# the thread's id: 32 bytes, of which no two ids share one.
#
#   threads   thread -> version
#   messages  thread, position -> body
#   extra     thread, hash of the key -> [key, value]
#   calls     thread, hash of the call id -> StoredCall
#   issued    thread, sequence -> key in calls: what is pending, in the order of claims
#   attempts  hash of the idempotency key -> key in calls of its newest attempt
_TABLES = ("threads", "messages", "extra", "calls", "issued", "attempts")


class LMDBOptions(DriverOptions):
    """``map_size``: address space, not disk space; the file grows as it fills."""

    map_size: PositiveInt = 2**34


class LMDBCheckpointer(Generic[MessageT]):
    """A store in a folder with an LMDB environment."""

    Options: ClassVar[type[DriverOptions]] = LMDBOptions
    client_options: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, folder: str, *, message_type: type[MessageT] | Any = dict, **options: Any
    ) -> None:
        self._folder = folder
        self._options = LMDBOptions(**options)
        self._codec: Codec[MessageT] = Codec(
            message_type,
            max_payload=self._options.max_payload,
            strict_roundtrip=self._options.strict_roundtrip,
        )
        self._lifetime = Lifetime(f"lmdb:{folder}")
        self._environment: lmdb.Environment | None = None
        self._tables: dict[str, Any] = {}

    @classmethod
    def from_url(
        cls, url: str, *, message_type: Any, options: LMDBOptions
    ) -> LMDBCheckpointer[Any]:
        folder = url_path(url)

        if not folder.strip("/"):
            raise InvalidURL("write lmdb:folder or lmdb:///absolute/folder")

        return cls(folder, message_type=message_type, **options.model_dump())

    async def __aenter__(self) -> Self:
        self._lifetime.begin()

        try:
            await self._lifetime.finish(asyncio.to_thread(self._open))
        except BaseException:
            await self.aclose()
            raise

        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let what is in flight finish and close the store; idempotent."""
        await self._lifetime.end(self._release)

    def _open(self) -> None:
        try:
            self._environment, self._tables, _ = environments.acquire(
                self._folder, self._options.map_size, _TABLES
            )
        except (lmdb.Error, OSError) as exc:
            raise BackendUnavailable(self._lifetime.name, str(exc)) from exc

    async def _release(self) -> None:
        if self._environment is not None:
            await asyncio.to_thread(environments.release, self._folder)

    @property
    def durability(self) -> Durability:
        return Durability(Survives.MACHINE, {"sync": "before each commit returns"})

    def __repr__(self) -> str:
        return f"<LMDBCheckpointer {self._lifetime.name}>"

    # The six methods

    async def load(self, thread_id: str) -> CheckpointData[MessageT] | None:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        return await self._run(self._load, thread_id)

    async def append(
        self,
        thread_id: str,
        messages: Sequence[MessageT],
        *,
        expected_version: int | None = None,
    ) -> int:
        self._lifetime.check()
        write = self._codec.append(thread_id, messages, expected_version)
        return await self._run(self._append, write, write=True)

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        self._lifetime.check()
        write = self._codec.merge(thread_id, extra)

        if write.items:
            await self._run(self._merge, write, write=True)

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self._lifetime.check()
        write = self._codec.claim(thread_id, call)
        record = await self._run(self._claim, write, write=True)

        if record is not None and record.call.call_id == write.call.call_id:
            if record.thread_id == write.thread_id:
                check_same_call(record, write.call)

        return record

    async def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool = True,
    ) -> CallRecord:
        self._lifetime.check()
        write = self._codec.resolve(thread_id, call_id, result, success)
        return await self._run(self._resolve, write, write=True)

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        self._lifetime.check()
        key = check_id("idempotency_key", idempotency_key)
        return await self._run(self._find_completed, key)

    # One optional protocol: ReadsRanges

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[MessageT]:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        span(start, stop, 0)  # a wrong argument raises even where there is no thread
        return await self._run(self._read, thread_id, start, stop)

    # Transactions, in a worker thread

    async def _run(
        self, operation: Callable[..., T], *args: Any, write: bool = False
    ) -> T:
        """Run an operation in one transaction, to its end even if we are cancelled."""
        return await self._lifetime.finish(
            asyncio.to_thread(self._in_transaction, operation, args, write)
        )

    def _in_transaction(
        self, operation: Callable[..., T], args: tuple[Any, ...], write: bool
    ) -> T:
        try:
            # An exception aborts the transaction; leaving the block commits it.
            with self._begun(write) as transaction:
                return operation(transaction, *args)
        except lmdb.Error as exc:
            # A commit that did not return can still have reached the file.
            raise BackendUnavailable(
                self._lifetime.name,
                str(exc),
                maybe_applied=write and not isinstance(exc, lmdb.MapFullError),
            ) from exc

    def _begun(self, write: bool) -> lmdb.Transaction:
        """Begin a transaction that sees the last commit.

        A writer that is killed when it has committed, and has not told the readers yet,
        leaves them the state before, until the next writer looks after it.
        """
        assert self._environment is not None
        committed = self._environment.info()["last_txnid"]
        transaction = self._environment.begin(write=write)

        if transaction.id() >= committed:
            return transaction

        transaction.abort()
        self._environment.begin(write=True).abort()
        return self._environment.begin()

    def _load(
        self, tx: lmdb.Transaction, thread_id: str
    ) -> CheckpointData[MessageT] | None:
        version = self._version(tx, thread_id)

        if version is None:
            return None

        return CheckpointData(
            self._messages(tx, thread_id, 0, version),
            self._codec.extra(
                (from_json(item) for _, item in self._rows(tx, "extra", thread_id)),
                thread_id,
            ),
            [
                self._codec.record(self._call(tx, place))
                for _, place in self._rows(tx, "issued", thread_id)
            ],
        )

    def _append(self, tx: lmdb.Transaction, write: Append) -> int:
        version = self._version(tx, write.thread_id) or 0

        if write.expected_version not in (None, version):
            raise VersionConflict(write.thread_id, write.expected_version, version)

        for position, body in enumerate(write.bodies, version):
            key = _key(write.thread_id) + _number(position)
            tx.put(key, body, db=self._tables["messages"])

        if write.bodies:
            self._set_version(tx, write.thread_id, version + len(write.bodies))

        return version + len(write.bodies)

    def _merge(self, tx: lmdb.Transaction, write: Merge) -> None:
        for key, value in write.items:
            place = _key(write.thread_id) + sha256(key).digest()
            item = to_json([key.decode(), value.decode()])
            tx.put(place, item, db=self._tables["extra"])

        self._touch(tx, write.thread_id)

    def _claim(self, tx: lmdb.Transaction, write: Claim) -> CallRecord | None:
        call = write.call
        place = _key(write.thread_id) + _key(call.call_id)

        if tx.get(place, db=self._tables["calls"]) is not None:
            return self._codec.record(self._call(tx, place))

        last = self._last_attempt(tx, call.idempotency_key)

        if last is not None and last.status != "failed":
            return self._codec.record(last)

        stored = StoredCall(
            write.thread_id,
            call.call_id,
            call.tool_name,
            write.args.decode(),
            call.idempotency_key,
            "issued",
            1 if last is None else last.attempt + 1,
            _now(),
            None,
            None,
            False,
        )
        # One writer at a time, so the number of calls is a sequence of claims.
        sequence = _number(tx.stat(self._tables["calls"])["entries"])
        tx.put(place, to_json(stored), db=self._tables["calls"])
        tx.put(_key(write.thread_id) + sequence, place, db=self._tables["issued"])
        tx.put(_key(call.idempotency_key), place, db=self._tables["attempts"])
        self._touch(tx, write.thread_id)
        return None

    def _resolve(self, tx: lmdb.Transaction, write: Resolve) -> CallRecord:
        place = _key(write.thread_id) + _key(write.call_id)

        if tx.get(place, db=self._tables["calls"]) is None:
            raise UnknownCall(write.thread_id, write.call_id)

        stored = self._call(tx, place)

        if stored.status == "issued":
            stored = stored._replace(
                status=write.status, result=write.result.decode(), resolved_at=_now()
            )
            tx.put(place, to_json(stored), db=self._tables["calls"])

            for key, pending in list(self._rows(tx, "issued", write.thread_id)):
                if pending == place:
                    tx.delete(key, db=self._tables["issued"])

        return self._codec.record(stored)

    def _find_completed(self, tx: lmdb.Transaction, key: str) -> CallRecord | None:
        last = self._last_attempt(tx, key)

        if last is None or last.status != "completed":
            return None

        return self._codec.record(last)

    def _read(
        self, tx: lmdb.Transaction, thread_id: str, start: int, stop: int | None
    ) -> list[MessageT]:
        version = self._version(tx, thread_id) or 0
        return self._messages(tx, thread_id, *span(start, stop, version))

    def _messages(
        self, tx: lmdb.Transaction, thread_id: str, first: int, last: int
    ) -> list[MessageT]:
        cursor = tx.cursor(db=self._tables["messages"])
        found = cursor.set_range(_key(thread_id) + _number(first))
        bodies = cursor.iternext(keys=False, values=True) if found else iter(())
        return self._codec.messages(
            (bytes(body) for body, _ in zip(bodies, range(first, last), strict=False)),
            thread_id,
            first,
        )

    def _version(self, tx: lmdb.Transaction, thread_id: str) -> int | None:
        stored = tx.get(_key(thread_id), db=self._tables["threads"])
        return None if stored is None else int.from_bytes(stored)

    def _set_version(self, tx: lmdb.Transaction, thread_id: str, version: int) -> None:
        tx.put(_key(thread_id), _number(version), db=self._tables["threads"])

    def _touch(self, tx: lmdb.Transaction, thread_id: str) -> None:
        """Let the thread be known, at the version that it has."""
        self._set_version(tx, thread_id, self._version(tx, thread_id) or 0)

    def _call(self, tx: lmdb.Transaction, place: bytes) -> StoredCall:
        stored = tx.get(place, db=self._tables["calls"])

        if stored is None:
            raise CorruptThread(
                "?", f"calls {place.hex()}", "it is named and not there"
            )

        return StoredCall(*from_json(bytes(stored)))

    def _last_attempt(self, tx: lmdb.Transaction, key: str) -> StoredCall | None:
        place = tx.get(_key(key), db=self._tables["attempts"])
        return None if place is None else self._call(tx, bytes(place))

    def _rows(
        self, tx: lmdb.Transaction, table: str, thread_id: str
    ) -> list[tuple[bytes, bytes]]:
        """Return the rows of a thread, in the order of their keys."""
        prefix = _key(thread_id)
        cursor = tx.cursor(db=self._tables[table])
        rows = []

        if cursor.set_range(prefix):
            for row in cursor.iternext():
                key, value = map(bytes, row)

                if not key.startswith(prefix):
                    break

                rows.append((key, value))

        return rows


def _key(text: str) -> bytes:
    return sha256(text.encode()).digest()


def _number(value: int) -> bytes:
    """Eight bytes that sort as the number does."""
    return value.to_bytes(8)


def _now() -> int:
    """Microseconds since the epoch."""
    return time.time_ns() // 1000
