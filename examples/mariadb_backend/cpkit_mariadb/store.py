"""Agent state in a database of MariaDB, a Galera cluster, or MySQL.

URL forms
    ``mariadb://user:password@host:3306/database``, or ``mysql://``. Several hosts with
    commas are the nodes of a Galera cluster, or servers of which one takes writes; the
    first one that answers is used, and the next one after it was lost. Options:
    ``pool_size``, ``tls``, ``tls_ca``, and those of every server.

What is atomic
    A batch is one transaction of two round trips: the first one locks the rows of its
    threads and keys, and reads; the second one writes and commits. A load is one
    transaction with a consistent snapshot.

Durability
    What ``innodb_flush_log_at_trx_commit`` and the binary log's ``sync_binlog`` say. A
    Galera cluster keeps what it acknowledged when nodes are lost, as long as one that
    had it is left: a commit is on every node before it is acknowledged.

Caveats
    MariaDB 10.5, MySQL 8, or newer. The database exists, and the user may create tables
    in it; they begin with ``cpkit_``. Do not add triggers. A value can have half of
    ``max_allowed_packet``. Not for asynchronous replicas: they lag, and lose writes
    when they are promoted.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

from cpkit import CorruptThread, Durability, Survives, ThreadInfo
from cpkit.driver import (
    Decode,
    Limits,
    Outcome,
    Snapshot,
    StoredCall,
    StoredDump,
    StoreFailure,
    StoreInfo,
    Write,
    decode_rows,
    from_micros,
    prefix_end,
    span,
)
from cpkit.errors import SchemaMismatch
from cpkit_mariadb import queries
from cpkit_mariadb.batch import Batch, call_of
from cpkit_mariadb.connections import NO_TABLE, Connections, MariaDBOptions, code
from cpkit_mariadb.queries import SCHEMA_VERSION, as_list, quoted

__all__ = ["MariaDBOptions", "MariaDBStore"]

_INT8_MAX = 2**63 - 1  # no version is larger
_ABOVE_ALL_IDS = "\U0010ffff" * 129
_ROOM = 2**14  # for ids, keywords and numbers beside a value

_SETTINGS = "version innodb_flush_log_at_trx_commit innodb_doublewrite log_bin".split()
_SETTINGS += ["sync_binlog", "wsrep_on"]
_FLUSH = (
    "a crash can take the last second: SET GLOBAL innodb_flush_log_at_trx_commit = 1"
)
_DOUBLEWRITE = "a power loss can tear pages: start it with innodb_doublewrite = ON"
_BINLOG = "a power loss can take commits: SET GLOBAL sync_binlog = 1"


class MariaDBStore:
    """A database of a server, or of a cluster."""

    Options: ClassVar[type[MariaDBOptions]] = MariaDBOptions
    client_options: ClassVar[frozenset[str]] = frozenset()
    survives_by_default = Survives.MACHINE
    max_writes = 256
    locks_threads = False
    erases = trims = True

    def __init__(self, url: str, options: MariaDBOptions) -> None:
        self._connections = Connections(url, options)
        self.name = self._connections.name
        self.timeout = options.timeout
        self.limits = Limits()
        self._packet = 0

    @classmethod
    def from_url(cls, url: str, options: MariaDBOptions) -> MariaDBStore:
        return cls(url, options)

    @classmethod
    async def inspect(cls, url: str, options: MariaDBOptions) -> StoreInfo | None:
        """Tell whether the store exists; ``None`` where no server answers."""
        store = cls(url, options)

        try:
            await store._connections.open()

            if (version := await store._version()) is None:
                return StoreInfo(False)

            ((size,),) = await store._read(queries.SIZE)
            return StoreInfo(True, version, int(size))
        except StoreFailure:
            return None
        finally:
            await store.close()

    async def open(self) -> None:
        await self._connections.open()
        self._packet = int(self._connections.settings["max_allowed_packet"]) - _ROOM
        # A value is in one statement, where each byte may need a backslash.
        self.limits = Limits(self._packet // 2)

        if await self._version() is None:
            # Several processes may do this at once, and one may die between two tables.
            async with self._connections.lend() as link:
                await link.ask(queries.CREATE)

        if (version := await self._version()) != SCHEMA_VERSION:
            raise SchemaMismatch(self.name, version, SCHEMA_VERSION)

    async def close(self) -> None:
        await self._connections.close()

    def durability(self) -> Durability:
        """What a commit survives (mariadb.com/kb/en/innodb-system-variables)."""
        values = self._connections.settings
        settings = {name: values[name] for name in _SETTINGS if name in values}
        flush = values["innodb_flush_log_at_trx_commit"]

        # The first one that holds counts. With a binary log, the recovery after a crash
        # asks it what was committed.
        for is_weak, survives, advice in (
            (flush == "0", Survives.NONE, _FLUSH),
            (flush == "2", Survives.PROCESS, _FLUSH),
            (values["innodb_doublewrite"] == "OFF", Survives.PROCESS, _DOUBLEWRITE),
            (
                values["log_bin"] == "ON" and values["sync_binlog"] != "1",
                Survives.PROCESS,
                _BINLOG,
            ),
        ):
            if is_weak:
                return Durability(survives, settings, (advice,))

        return Durability(Survives.MACHINE, settings)

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        work = Batch(batch)

        async with self._connections.lend() as link:
            _, *answers = await link.write("BEGIN", *work.reads())
            work.fill(answers)
            outcomes = [work.apply(write) for write in batch]
            *parts, last = work.script(self._packet)

            for part in parts:
                await link.write(*part)

            await link.write(*last, commits=bool(parts or last[1:]))

        return outcomes

    async def snapshot(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> Snapshot | None:
        pending = "c.status = 'issued' AND c.erased = 0"
        thread, bodies, items, calls = await self._whole(
            thread_id, start, stop, pending
        )

        if not thread or thread[0][-1]:
            return None

        version, first = thread[0][:2]
        begin, end = span(start, stop, version, first)

        if (count := len(bodies)) != end - begin:
            where = f"messages {begin} to {end - 1}"
            raise CorruptThread(thread_id, where, f"there are {count}")

        messages = await decode_rows(decode, [body for (body,) in bodies], begin)
        return Snapshot(messages, items, [*map(call_of, calls)], version, begin)

    async def dump(self, thread_id: str) -> StoredDump | None:
        thread, rows, items, calls = await self._whole(thread_id, 0, None, "TRUE")

        if not thread:
            return None

        _, first, created_at, updated_at, erased = thread[0]
        times = (None, None) if erased else (created_at, updated_at)
        bodies = [body for (body,) in rows]
        return StoredDump._make([bodies, items, [*map(call_of, calls)], *times, first])

    async def holder(self, key: str) -> StoredCall | None:
        rows = await self._read(queries.HOLDER.format(key=quoted(key)))
        return call_of(rows[0]) if rows else None

    async def calls(self, thread_id: str) -> list[StoredCall]:
        place = {"id": quoted(thread_id), "condition": "TRUE"}
        rows = await self._read(queries.CALLS_OF_THREAD.format(**place))
        return [*map(call_of, rows)]

    async def threads(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[ThreadInfo]:
        page = {
            "start": quoted(prefix),
            "after": quoted(after or ""),
            "end": quoted(prefix_end(prefix) or _ABOVE_ALL_IDS),
            "erased": int(erased),
            "limit": limit,
        }
        return [
            ThreadInfo(thread_id.decode(), version, *map(from_micros, times))
            for thread_id, version, *times in await self._read(
                queries.THREADS.format(**page)
            )
        ]

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        query = queries.MARKERS

        if thread_ids is not None:
            if not thread_ids:
                return {}

            query += f" WHERE thread_id IN {as_list(thread_ids)}"

        return {one.decode(): revision for one, revision in await self._read(query)}

    async def _version(self) -> int | None:
        """Return the version of the schema; ``None`` if there is no store."""
        try:
            rows = await self._read(queries.VERSION)
        except StoreFailure as exc:
            if code(exc.__cause__) == NO_TABLE:
                return None

            raise

        return max(rows)[0] if rows else None

    async def _read(self, query: str) -> Sequence[Any]:
        """Run one query, which sees one moment by itself."""
        async with self._connections.lend() as link:
            (rows,) = await link.ask(query)
            return rows

    async def _whole(
        self, thread_id: str, start: int, stop: int | None, calls: str
    ) -> Sequence[Sequence[Any]]:
        """Return a thread's row, messages, extra and calls, of one moment."""
        place = {"id": quoted(thread_id)}
        bounds = {"start": _bound(start), "stop": _bound(stop)}
        script = [
            queries.ONE_MOMENT,
            queries.THREAD.format(**place),
            queries.MESSAGES.format(**place, **bounds),
            queries.EXTRA.format(**place),
            queries.CALLS_OF_THREAD.format(**place, condition=calls),
            "COMMIT",
        ]

        async with self._connections.lend() as link:
            _, _, *answers, _ = await link.ask(";".join(script))
            return answers


def _bound(position: int | None) -> str:
    """Return a slice's bound as SQL; a negative one counts from the version."""
    if position is None or position >= 0:
        return str(min(_INT8_MAX if position is None else position, _INT8_MAX))

    return f"t.version - {min(-position, _INT8_MAX)}"
