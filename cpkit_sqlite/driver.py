"""Agent state in one SQLite file, for any number of processes on one machine.

URL forms
    ``sqlite:///relative.db``, ``sqlite:////absolute.db`` and ``sqlite:///:memory:`` (a
    store of its own for each handle). Options: ``durability`` (``full`` or
    ``normal``), ``busy_timeout`` in seconds, and those of every driver.

Durability
    ``full``, the default: WAL with ``synchronous=FULL``, so an acknowledged write
    survives a power loss. ``normal``: it survives a kill of the process; a power loss
    can take the last commits, never tear one
    (sqlite.org/pragma.html#pragma_synchronous).

What is atomic
    Each operation is one trip to aiosqlite's worker thread and one transaction. Writes
    that queue while a commit is under way share the next one. A load reads messages,
    extra and calls in one transaction, on a connection of its own, so it neither waits
    for writers nor holds them up. Between processes the file's write lock decides;
    waiting for it longer than ``busy_timeout`` raises ``BackendUnavailable``.

Caveats
    The file must be on a local file system: WAL does not work over a network. Every
    table's name starts with ``cpkit_``, so the file may hold others as well.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Any,
    ClassVar,
    Generic,
    Literal,
    Self,
    TypeVar,
)

import aiosqlite
from pydantic import Field

from cpkit.driver.coalescing import Coalescer
from cpkit.driver.codec import Codec, check_same_call
from cpkit.driver.ids import check_id, check_page, span
from cpkit.driver.lifetime import Lifetime
from cpkit.driver.writes import Append, Erase, Merge, StoredCall, Write
from cpkit.errors import InvalidURL
from cpkit.records import (
    CallRecord,
    CheckpointData,
    Durability,
    JsonValue,
    Survives,
    ThreadInfo,
    ToolCall,
)
from cpkit.registry import DriverOptions, url_path
from cpkit_sqlite import transactions
from cpkit_sqlite.faults import translated
from cpkit_sqlite.schema import create_file, prepare

__all__ = ["SQLiteCheckpointer"]

MessageT = TypeVar("MessageT")
T = TypeVar("T")


class SQLiteOptions(DriverOptions):
    """``busy_timeout``: seconds to wait for another process's transaction."""

    durability: Literal["full", "normal"] = "full"
    busy_timeout: float = Field(30.0, gt=0, le=86_400)  # SQLite counts in a C int


class SQLiteCheckpointer(Generic[MessageT]):
    """A store in a SQLite file.

    ``path`` is the file's, or ``":memory:"``; a missing file is created for its owner
    alone, and so is a missing folder. Options as in the URL.
    """

    Options: ClassVar[type[DriverOptions]] = SQLiteOptions
    client_options: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        message_type: type[MessageT] | Any = dict,
        **options: Any,
    ) -> None:
        self._options = SQLiteOptions(**options)
        self._path = os.fspath(path)
        self._codec: Codec[MessageT] = Codec(
            message_type,
            max_payload=self._options.max_payload,
            strict_roundtrip=self._options.strict_roundtrip,
        )
        self._lifetime = Lifetime(f"sqlite:///{self._path}")
        self._in_memory = self._path == ":memory:"
        self._connections: list[aiosqlite.Connection] = []
        self._writer: aiosqlite.Connection
        self._reader: aiosqlite.Connection
        self._writes: Coalescer[Write] = Coalescer(self._lifetime, self._commit, _size)

    @classmethod
    def from_url(
        cls, url: str, *, message_type: Any, options: SQLiteOptions
    ) -> SQLiteCheckpointer[Any]:
        path = url_path(url)

        if not url.partition(":")[2].startswith("///") or path == "/":
            raise InvalidURL(
                "write sqlite:///relative.db, sqlite:////absolute.db "
                "or sqlite:///:memory:"
            )

        return cls(path[1:], message_type=message_type, **options.model_dump())

    async def __aenter__(self) -> Self:
        self._lifetime.begin()

        try:
            await self._lifetime.finish(self._open())
        except BaseException:
            await self.aclose()
            raise

        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let what is in flight finish and close the file; idempotent."""
        await self._lifetime.end(self._release)

    async def _open(self) -> None:
        try:
            if self._in_memory:
                self._writer = self._reader = await self._connect(self._path)
            else:
                # One file for both, even if the process changes its folder meanwhile.
                file = await asyncio.to_thread(create_file, self._path)
                self._writer = await self._connect(file)
                self._reader = await self._connect(file)
        except (sqlite3.Error, OSError) as exc:
            raise translated(exc, self._lifetime.name) from exc

    async def _connect(self, file: str) -> aiosqlite.Connection:
        """Open and prepare one connection; it is ours to close whatever happens."""
        connection = await aiosqlite.connect(
            file, isolation_level=None, timeout=self._options.busy_timeout
        )
        self._connections.append(connection)
        await _hop(
            connection,
            prepare,
            self._lifetime.name,
            self._options.durability,
            self._options.busy_timeout,
        )
        return connection

    async def _release(self) -> None:
        while self._connections:
            await self._connections.pop().close()

    @property
    def durability(self) -> Durability:
        if self._in_memory:
            return Durability(
                Survives.NONE, {}, ("state ends with this handle: name a file",)
            )

        if self._options.durability == "normal":
            return Durability(
                Survives.PROCESS,
                {"journal_mode": "WAL", "synchronous": "NORMAL"},
                ("a power loss can take the last commits: remove durability=normal",),
            )

        return Durability(
            Survives.MACHINE, {"journal_mode": "WAL", "synchronous": "FULL"}
        )

    def __repr__(self) -> str:
        return f"<SQLiteCheckpointer {self._lifetime.name}>"

    # The six methods

    async def load(self, thread_id: str) -> CheckpointData[MessageT] | None:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        return await self._read(
            thread_id,
            transactions.in_snapshot,
            transactions.load,
            self._codec,
            thread_id,
        )

    async def append(
        self,
        thread_id: str,
        messages: Sequence[MessageT],
        *,
        expected_version: int | None = None,
    ) -> int:
        self._lifetime.check()
        write = self._codec.append(thread_id, messages, expected_version)
        version: int = await self._writes.run(write)
        return version

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        self._lifetime.check()
        write = self._codec.merge(thread_id, extra)

        if write.items:
            await self._writes.run(write)

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self._lifetime.check()
        write = self._codec.claim(thread_id, call)
        stored: StoredCall | None = await self._writes.run(write)

        if stored is None:
            return None

        record = self._codec.record(stored)

        if stored[:2] == (write.thread_id, write.call.call_id):
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
        return self._codec.record(await self._writes.run(write))

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        record = await self.find_call(idempotency_key)
        return record if record is not None and record.status == "completed" else None

    # The optional protocols

    async def list_threads(
        self, *, prefix: str = "", after: str | None = None, limit: int = 100
    ) -> list[ThreadInfo]:
        self._lifetime.check()
        prefix, after, limit = check_page(prefix, after, limit)
        return await self._read(None, transactions.list_threads, prefix, after, limit)

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[MessageT]:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        span(start, stop, 0)  # a wrong argument raises even where there is no thread
        return await self._read(
            thread_id,
            transactions.in_snapshot,
            transactions.read_range,
            self._codec,
            thread_id,
            start,
            stop,
        )

    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        calls = await self._read(thread_id, transactions.calls_of, thread_id)
        return [self._codec.record(call) for call in calls]

    async def find_call(self, idempotency_key: str) -> CallRecord | None:
        self._lifetime.check()
        key = check_id("idempotency_key", idempotency_key)
        last = await self._read(None, transactions.last_attempt, key)

        if last is None or last.status == "failed":
            return None

        return self._codec.record(last)

    async def delete_thread(self, thread_id: str, *, forget_keys: bool = False) -> None:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        await self._writes.run(Erase(thread_id, forget_keys))

    # The trips to the worker threads

    async def _commit(self, writes: list[Write]) -> Sequence[object]:
        try:
            return await _hop(self._writer, transactions.apply, writes)
        except sqlite3.Error as exc:
            # One each: an error gathers the traceback of the caller that it goes to.
            return [
                translated(exc, self._lifetime.name, write.thread_id, writing=True)
                for write in writes
            ]

    async def _read(
        self, thread_id: str | None, query: Callable[..., T], *args: Any
    ) -> T:
        """Run a query; one of several statements takes `transactions.in_snapshot`."""
        try:
            return await _hop(self._reader, query, *args)
        except sqlite3.Error as exc:
            raise translated(exc, self._lifetime.name, thread_id) from exc


async def _hop(
    connection: aiosqlite.Connection, function: Callable[..., T], *args: Any
) -> T:
    """Run a whole transaction in one trip to the connection's thread.

    aiosqlite's public methods are one statement, and so one trip, each.
    """
    result: T = await connection._execute(  # type: ignore[no-untyped-call]  # aiosqlite
        function, connection._conn, *args
    )
    return result


def _size(write: Write) -> int:
    """Bytes that the write adds to its transaction, roughly."""
    if isinstance(write, Append):
        return sum(map(len, write.bodies))

    if isinstance(write, Merge):
        return sum(len(value) for _, value in write.items)

    return 0
