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
from cpkit_mariadb.batch import Batch, reads
from cpkit_mariadb.connections import Connections, MariaDBOptions
from cpkit_mariadb.queries import SCHEMA_VERSION, as_list, quoted

__all__ = ["MariaDBOptions", "MariaDBStore"]

_INT8_MAX = 2**63 - 1  # no version is larger
_ROOM = 2**14  # for ids, keywords and numbers beside a value

_FLUSH = "a crash can take a second: SET GLOBAL innodb_flush_log_at_trx_commit = 1"
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

    @classmethod
    def from_url(cls, url: str, options: MariaDBOptions) -> MariaDBStore:
        return cls(url, options)

    @classmethod
    async def inspect(cls, url: str, options: MariaDBOptions) -> StoreInfo | None:
        """Tell whether the store exists; ``None`` where no server answers."""
        store = cls(url, options)

        try:
            await store._connections.open()
            version, size = await store._schema()
            return StoreInfo(version is not None, version, size)
        except StoreFailure:
            return None
        finally:
            await store.close()

    async def open(self) -> None:
        await self._connections.open()

        if (await self._schema())[0] is None:
            # Several processes may do this at once, and one may die between two tables.
            await self._ask(queries.CREATE)

        if (version := (await self._schema())[0]) != SCHEMA_VERSION:
            raise SchemaMismatch(self.name, version, SCHEMA_VERSION)

        packet = int(self._connections.settings["max_allowed_packet"]) - _ROOM
        # A value is in one statement, where each byte may need a backslash.
        self.limits = Limits(packet // 2)

    async def close(self) -> None:
        await self._connections.close()

    def durability(self) -> Durability:
        """What a commit survives (mariadb.com/kb/en/innodb-system-variables)."""
        values = self._connections.settings
        flush = values["innodb_flush_log_at_trx_commit"]
        # With a binary log, the recovery after a crash asks it what was committed.
        loses_log = values["log_bin"] == "ON" and values["sync_binlog"] != "1"
        faults = (
            (flush != "1", _FLUSH),
            (values["innodb_doublewrite"] == "OFF", _DOUBLEWRITE),
            (loses_log, _BINLOG),
        )
        advice = tuple(text for holds, text in faults if holds)
        weak = Survives.NONE if flush == "0" else Survives.PROCESS
        return Durability(weak if advice else Survives.MACHINE, values, advice)

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        async with self._connections.lend() as run:
            work = Batch(await run(*reads(batch)))
            outcomes = [work.apply(write) for write in batch]

            for part in work.scripts(2 * self.limits.max_value):
                await run(*part)

        return outcomes

    async def snapshot(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> Snapshot | None:
        pending = "c.status = 'issued' AND c.erased = 0"
        version, bodies, thread = await self._whole(thread_id, start, stop, pending)

        if thread is None or thread.created_at is None:
            return None

        begin, end = span(start, stop, version, thread.first)

        if (count := len(bodies)) != end - begin:
            where = f"messages {begin} to {end - 1}"
            raise CorruptThread(thread_id, where, f"there are {count}")

        messages = await decode_rows(decode, bodies, begin)
        return Snapshot(messages, thread.items, thread.calls, version, begin)

    async def dump(self, thread_id: str) -> StoredDump | None:
        *_, thread = await self._whole(thread_id, 0, None, "TRUE")
        return thread

    async def holder(self, key: str) -> StoredCall | None:
        newest = f"c.idempotency_key = {quoted(key)} ORDER BY c.attempt DESC LIMIT 1"
        (rows,) = await self._ask(queries.CALLS.format(condition=newest))
        return StoredCall._make(rows[0]) if rows else None

    async def calls(self, thread_id: str) -> list[StoredCall]:
        (rows,) = await self._ask(_calls(thread_id, "TRUE"))
        return [*map(StoredCall._make, rows)]

    async def threads(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[ThreadInfo]:
        end = prefix_end(prefix) or "\U0010ffff" * 129  # above all ids
        place = {
            "start": quoted(prefix),
            "after": quoted(after or ""),
            "end": quoted(end),
        }
        query = queries.PAGE.format(**place, erased=int(erased), limit=limit)
        (rows,) = await self._ask(query)
        return [ThreadInfo(*row[:2], *map(from_micros, row[2:])) for row in rows]

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        ids = as_list(["", *(thread_ids or ())])
        where = "TRUE" if thread_ids is None else f"thread_id IN {ids}"
        (rows,) = await self._ask(queries.MARKERS.format(where=where))
        return dict(rows)

    async def _schema(self) -> tuple[int | None, int]:
        """Return the version of the schema, ``None`` without one, and bytes."""
        (((version, size),),) = await self._ask(queries.SCHEMA)
        return int(version) if version else None, int(size or 0)

    async def _ask(self, script: str) -> Sequence[Any]:
        """Return the rows of each statement."""
        async with self._connections.lend() as run:
            return await run(script)

    async def _whole(
        self, thread_id: str, start: int, stop: int | None, condition: str
    ) -> tuple[int, list[Any], StoredDump | None]:
        """Return a thread's version, messages, and all of it, at one moment."""
        place = {"id": quoted(thread_id), "start": _bound(start), "stop": _bound(stop)}
        script = [
            queries.ONE_MOMENT,
            queries.THREADS.format(ids=as_list([thread_id])),
            queries.MESSAGES.format(**place),
            queries.EXTRA.format(**place),
            _calls(thread_id, condition),
            "COMMIT",
        ]

        _, _, threads, rows, items, calls, _ = await self._ask(";".join(script))
        bodies = [body for (body,) in rows]

        if not threads:
            return 0, bodies, None

        version, first, created_at, updated_at, _ = threads[0][1:]
        content = bodies, items, [*map(StoredCall._make, calls)]
        return version, bodies, StoredDump(*content, created_at, updated_at, first)


def _calls(thread_id: str, condition: str) -> str:
    """Return the query of a thread's calls, in the order of claims."""
    own = f"c.thread_id = {quoted(thread_id)} AND {condition} ORDER BY c.sequence"
    return queries.CALLS.format(condition=own)


def _bound(position: int | None) -> str:
    """Return a slice's bound as SQL; a negative one counts from the version."""
    number = max(
        -_INT8_MAX, _INT8_MAX if position is None else min(position, _INT8_MAX)
    )
    return f"{'t.version' if number < 0 else 0} + {number}"
