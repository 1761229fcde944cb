"""Agent state in a schema of a Postgres database, for any number of machines.

``docs/drivers.md`` is the manual.

URL forms
    ``postgresql://user:password@host:port/database`` or ``postgres://…``, as libpq
    takes them: several hosts, Unix sockets (``?host=/run/postgresql``), ``sslmode`` and
    related parameters, ``passfile``, ``service``, ``application_name`` and some
    settings of the server are left to asyncpg. Options: ``schema`` (``cpkit`` by
    default, any name), ``pooler`` (``transaction`` behind PgBouncer in that mode),
    ``pool_size`` (connections at most), and those of every server. In place of a URL:
    the caller's own `asyncpg.Pool`, which stays open. Give that pool ``reset=`` a
    coroutine that does nothing, or each operation costs one round trip more.

Durability
    A commit survives what the server's ``synchronous_commit``, ``fsync`` and
    ``full_page_writes`` say; `durability` reads them at open.

What is atomic
    A write is one statement, and a statement is a transaction. Appends and merges that
    queue while others are under way share a statement, one for each thread at least.
    Other writes of one batch are statements of one transaction, and so are a restore
    and a deletion that forgets keys, because they lock the table of calls first. A load
    is one statement, so it sees one moment. `cpkit_postgres.queries` explains why no
    gap and no lost append can appear.

Errors
    A write that waits for a lock of another transaction is ended by the server:
    ``statement_timeout`` is set to ``timeout``, unless the URL has one. After
    ``timeout`` the fate of a write is unknown, and its connection is closed.

Caveats
    Postgres 12 or newer. The database must be UTF8, which is checked at open. Times are
    those of the writer's clock.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, ClassVar, TypeAlias, TypeVar
from urllib.parse import quote

from pydantic_core import from_json, to_json

from cpkit.driver import (
    Append,
    Claim,
    Conflict,
    Decode,
    Erase,
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
    StoreFailure,
    StoreInfo,
    Write,
    decode_rows,
    from_micros,
    key_is_held,
    prefix_end,
    span,
)
from cpkit.errors import CorruptThread
from cpkit.records import Durability, ThreadInfo
from cpkit.registry import redacted
from cpkit_postgres import listen, queries, schema
from cpkit_postgres.connections import Connections, Fetch, Pool
from cpkit_postgres.options import CLIENT_PARAMETERS, PostgresOptions, check_url

__all__ = ["PostgresCheckpointer", "PostgresStore"]

MessageT = TypeVar("MessageT")

# A write with its place in the batch.
Placed: TypeAlias = tuple[int, Write]

# Postgres holds a value, and a whole array, of up to 1 GiB.
_MAX_BYTES = 2**29

_INT8_MAX = 2**63 - 1
_ABOVE_ALL_IDS = "\U0010ffff" * 129


class PostgresStore:
    """A schema of a Postgres database."""

    Options: ClassVar[type[PostgresOptions]] = PostgresOptions
    client_options: ClassVar[frozenset[str]] = CLIENT_PARAMETERS
    limits = Limits(_MAX_BYTES, _MAX_BYTES)
    max_writes = 256
    locks_threads = False
    erases = True

    def __init__(self, where: str | Pool, options: PostgresOptions) -> None:
        if isinstance(where, str):
            check_url(where)
            place = redacted(where.partition("?")[0])
        else:
            place = "postgresql:pool"

        self.name = f"{place}?schema={quote(options.schema)}"
        self.timeout = options.timeout
        self._connections = Connections(where, self.name, options)
        self._settings: schema.Settings | None = None

    @classmethod
    def from_url(cls, url: str, options: PostgresOptions) -> PostgresStore:
        return cls(url, options)

    @classmethod
    async def inspect(cls, url: str, options: PostgresOptions) -> StoreInfo | None:
        """Tell whether the store exists, ``None`` where the server does not answer."""
        connections = cls(url, options)._connections

        try:
            await connections.open()
            return await schema.inspect(connections)
        except StoreFailure:
            return None
        finally:
            await connections.close()

    async def open(self) -> None:
        await self._connections.open()
        self._settings = await schema.open_schema(self._connections)

    async def close(self) -> None:
        await self._connections.close()

    def durability(self) -> Durability:
        assert self._settings is not None, "the store is open"
        return self._settings.durability

    # Writes

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        if len(batch) == 1 and not _reuses_keys(batch[0]):
            return [await _apply(self._connections.fetch, batch[0])]

        outcomes: list[Outcome] = [None] * len(batch)
        entries, left = _gathered([*enumerate(batch)])

        if not left:
            await _append_many(self._connections.fetch, entries, outcomes)
            return outcomes

        async with self._connections.transaction() as fetch:
            if any(map(_reuses_keys, batch)):
                await fetch(queries.LOCK_CALLS)

            while entries or left:
                await _append_many(fetch, entries, outcomes)

                while left and not isinstance(left[0][1], Append | Merge):
                    place, write = left.pop(0)
                    outcomes[place] = await _apply(fetch, write)

                entries, left = _gathered(left)

        return outcomes

    # Reads

    async def snapshot(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> Snapshot | None:
        version, first, found = await self._read(thread_id, start, stop, False)

        if version is None:
            return None

        messages = await decode_rows(decode, found.bodies, first)
        return Snapshot(messages, found.items, found.calls, version, first)

    async def dump(self, thread_id: str) -> StoredDump | None:
        version, _, found = await self._read(thread_id, 0, None, True)
        return None if version is None and not found.calls else found

    async def _read(
        self, thread_id: str, start: int, stop: int | None, every_call: bool
    ) -> tuple[int | None, int, StoredDump]:
        """Return the version (``None``: no thread), the first position, the rest."""
        last = _INT8_MAX if stop is None else _clamped(stop)
        rows = await self._connections.fetch(
            queries.READ, thread_id, _clamped(start), last, every_call
        )
        rows.sort(key=itemgetter(0))
        version, created_at, updated_at, items, calls = from_json(rows[0][1])
        bodies = [row[1] for row in rows[1:]]
        first, end = span(start, stop, version or 0)

        if len(bodies) != end - first:
            where = f"messages {first} to {end - 1}"
            raise CorruptThread(thread_id, where, f"there are {len(bodies)}")

        stored = [*map(StoredCall._make, calls or ())]
        return (
            version,
            first,
            StoredDump(bodies, items or (), stored, created_at, updated_at),
        )

    async def holder(self, key: str) -> StoredCall | None:
        rows = await self._connections.fetch(queries.HOLDER, key)
        return StoredCall._make(rows[0]) if rows else None

    # Optional abilities

    async def threads(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[ThreadInfo]:
        rows = await self._connections.fetch(
            queries.THREADS,
            max(prefix, after or ""),
            after,
            prefix_end(prefix) or _ABOVE_ALL_IDS,
            limit,
            erased,
        )
        return [
            ThreadInfo(thread_id, version, from_micros(created), from_micros(updated))
            for thread_id, version, created, updated in rows
        ]

    async def calls(self, thread_id: str) -> list[StoredCall]:
        rows = await self._connections.fetch(queries.CALLS, thread_id)
        return [*map(StoredCall._make, rows)]

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        rows = await self._connections.fetch(queries.MARKERS, thread_ids)
        return {thread_id: tuple(marker) for thread_id, *marker in rows}

    async def announce(self, thread_ids: Sequence[str]) -> bool:
        return await listen.announce(self._connections, thread_ids)

    async def listen(self, heard: Heard) -> None:
        await listen.listen(self._connections, heard)


class PostgresCheckpointer(FullHandle[MessageT]):
    """A handle of a store in a schema of a Postgres database.

    ``where`` is a URL, or an initialized `asyncpg.Pool` that stays the caller's.
    Options as in the URL; those about connections have no effect on a caller's pool.
    """

    def __init__(
        self,
        where: str | Pool,
        *,
        message_type: type[MessageT] | Any = dict,
        **options: Any,
    ) -> None:
        known = PostgresOptions(**options)
        store = PostgresStore(where, known)
        super().__init__(store, message_type=message_type, options=known)


class _Entry:
    """What a thread gets in one statement.

    Either one write that expects a version, or any number of writes that do not.
    """

    __slots__ = ("bodies", "expected", "items", "writes")

    def __init__(self, expected: int | None) -> None:
        self.expected = expected
        self.bodies: list[str] = []
        self.items: dict[bytes, bytes] = {}
        self.writes: list[tuple[int, Append | Merge]] = []

    def add(self, place: int, write: Append | Merge) -> None:
        self.writes.append((place, write))
        self.items.update(write.items)

        if isinstance(write, Append):
            self.bodies += [body.decode() for body in write.bodies]

    def decide(self, version: int | None, seen: int, outcomes: list[Outcome]) -> bool:
        """Note the outcomes of the writes; return false if they have to run again.

        ``version`` is the new one, ``seen`` the one before if nothing was written.
        """
        if version is None:
            if self.expected not in (None, seen):
                outcomes[self.writes[0][0]] = Conflict(seen)
                return True

            if self.bodies or self.items:
                return False  # another writer was faster

            version = seen

        version -= len(self.bodies)

        for place, write in self.writes:
            if isinstance(write, Append):
                outcomes[place] = version = version + len(write.bodies)

        return True


def _gathered(writes: Iterable[Placed]) -> tuple[dict[str, _Entry], list[Placed]]:
    """Return the writes that can share the next statement, by thread, and the rest.

    A write is taken only with all earlier ones of its thread. Appends and merges do not
    look at keys, so they may run before the calls of other threads.
    """
    entries: dict[str, _Entry] = {}
    left: list[Placed] = []
    closed: set[str] = set()

    for place, write in writes:
        thread_id = write.thread_id
        expected = write.expected_version if isinstance(write, Append) else None

        if (
            not isinstance(write, Append | Merge)
            or thread_id in closed
            or (expected is not None and thread_id in entries)
        ):
            left.append((place, write))
            closed.add(thread_id)
            continue

        if thread_id not in entries:
            entries[thread_id] = _Entry(expected)

        entries[thread_id].add(place, write)

        if expected is not None:
            closed.add(thread_id)

    return entries, left


def _reuses_keys(write: Write) -> bool:
    """Tell whether a write can give a number of an attempt that was given before."""
    return type(write) is Restore or (type(write) is Erase and write.forget_keys)


async def _append_many(
    fetch: Fetch, entries: dict[str, _Entry], outcomes: list[Outcome]
) -> None:
    """Append to threads, and merge, in one statement; again where it was too late."""
    while entries:
        ids = sorted(entries)
        expected: list[str | None] = []
        added: list[str | None] = []
        messages: list[tuple[str, str, str]] = []
        items: list[tuple[str, str, str]] = []

        for thread_id in ids:
            entry = entries[thread_id]
            count = len(entry.bodies)
            expected.append(None if entry.expected is None else str(entry.expected))
            added.append(str(count) if count or entry.items else None)

            for nth, body in enumerate(entry.bodies):
                messages.append((thread_id, str(count - nth), body))

            for key, value in entry.items.items():
                items.append((thread_id, key.decode(), value.decode()))

        for thread_id, version, seen in await fetch(
            queries.APPEND_MANY,
            ids,
            expected,
            _now(),
            added,
            *([row[i] for row in messages] for i in range(3)),
            *([row[i] for row in items] for i in range(3)),
        ):
            if entries[thread_id].decide(version, seen or 0, outcomes):
                del entries[thread_id]


async def _apply(fetch: Fetch, write: Write) -> Outcome:
    """Apply one write."""
    match write:
        case Append() | Merge():
            return await _append(fetch, write)
        case Claim():
            return await _claim(fetch, write)
        case Resolve():
            return await _resolve(fetch, write)
        case Erase():
            return await _erase(fetch, write)
        case Restore():
            return await _restore(fetch, write)


async def _append(fetch: Fetch, write: Append | Merge) -> Outcome:
    bodies = write.bodies if isinstance(write, Append) else []
    items = write.items

    if len(bodies) <= 1 and len(items) <= 1 and (bodies or items):
        rows = await fetch(
            queries.APPEND,
            write.thread_id,
            write.expected_version if isinstance(write, Append) else None,
            _now(),
            bodies[0].decode() if bodies else None,
            items[0][0].decode() if items else None,
            items[0][1].decode() if items else None,
        )

        if rows:
            return rows[0][0] if isinstance(write, Append) else None

    outcomes: list[Outcome] = [None]
    entries, _ = _gathered([(0, write)])
    await _append_many(fetch, entries, outcomes)
    return outcomes[0]


async def _claim(fetch: Fetch, write: Claim) -> StoredCall | None:
    while True:
        ((claimed, *taken),) = await fetch(
            queries.CLAIM,
            write.thread_id,
            write.call_id,
            write.tool_name,
            write.args.decode(),
            write.idempotency_key,
            _now(),
        )

        if claimed:
            return None

        if taken[0] is not None:
            return StoredCall._make(taken)


async def _resolve(fetch: Fetch, write: Resolve) -> StoredCall | None:
    while True:
        rows = await fetch(
            queries.RESOLVE,
            write.thread_id,
            write.call_id,
            write.status,
            write.result.decode(),
            _now(),
        )

        if not rows:
            return None

        call = StoredCall._make(rows[0])

        if call.status != "issued":
            return call


async def _erase(fetch: Fetch, write: Erase) -> Conflict | None:
    expected = write.expected_version

    while True:
        ((seen, gone),) = await fetch(
            queries.ERASE, write.thread_id, expected, write.forget_keys
        )

        if expected not in (None, seen or 0):
            return Conflict(seen or 0)

        if gone or seen is None:
            return None


async def _restore(fetch: Fetch, write: Restore) -> Conflict | KeyHeld | None:
    """Restore a thread, while no call can be claimed."""
    thread_id, calls = write.thread_id, write.calls
    rows = await fetch(queries.VERSION, thread_id)

    if rows or await fetch(queries.CALLS, thread_id):
        return Conflict(rows[0][0] if rows else 0)

    keys = [call.idempotency_key for call in calls]
    attempts = [*map(StoredCall._make, await fetch(queries.ATTEMPTS, keys))]

    for call in calls:
        key = call.idempotency_key
        others = [other for other in attempts if other.idempotency_key == key]

        if key_is_held(call, others):
            return KeyHeld(key, others[-1].thread_id)

    if write.created_at is not None and not await fetch(
        queries.RESTORE_THREAD,
        thread_id,
        write.created_at,
        write.updated_at,
        [body.decode() for body in write.bodies],
        [key.decode() for key, _ in write.items],
        [value.decode() for _, value in write.items],
    ):
        # Another writer has begun the thread since it was found missing.
        return await _restore(fetch, write)

    if calls:
        records = [to_json(call._asdict()).decode() for call in calls]
        await fetch(queries.RESTORE_CALLS, records)

    return None


def _clamped(number: int) -> int:
    """Return the number, or the nearest that Postgres takes; versions are smaller."""
    return max(-_INT8_MAX, min(number, _INT8_MAX))


def _now() -> int:
    return time.time_ns() // 1000
