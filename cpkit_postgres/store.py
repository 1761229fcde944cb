"""Agent state in a schema of a Postgres database, for any number of machines.

``docs/drivers.md`` is the manual.

URL forms
    ``postgresql://user:password@host:port/database`` or ``postgres://…``, as libpq
    takes them: several hosts, Unix sockets (``?host=/run/postgresql``), ``sslmode`` and
    related parameters, ``passfile``, ``service``, ``application_name`` and some
    settings of the server are left to asyncpg. Options: ``schema`` (``cpkit`` by
    default, any name), ``pooler`` (``transaction`` behind PgBouncer in that mode),
    ``dialect`` (``portable`` for other engines, see `cpkit_postgres.portable`),
    ``partitions`` (1 to 64), ``pool_size`` (connections at most), and those of every
    server. In place of a URL: the caller's own `asyncpg.Pool`, which stays open. Give
    that pool ``reset=`` a coroutine that does nothing, or each operation costs one
    round trip more.

Durability
    A commit survives what the server's ``synchronous_commit``, ``fsync`` and
    ``full_page_writes`` say; `durability` reads them at open.

What is atomic
    An operation is one statement, and a statement is a transaction. Appends that queue
    while others are under way share a statement. Three rare writes are short
    transactions of several statements: deleting a thread, restoring one, and an append
    that has extra but no messages. A load is one statement, so it sees one moment.
    `cpkit_postgres.queries` explains why no gap and no lost append can appear.

Errors
    A write is repeated only where it is proven not to have run; otherwise
    ``BackendUnavailable`` says that it may have been applied. An operation that is
    cancelled or takes longer than ``timeout`` closes its connection; a write first asks
    the server to cancel its statement, and waits for up to a second until it has ended.
    If that is unknown, the next operation ends the server's process first.
    Opening raises ``SchemaMismatch`` for another number of partitions than the store
    was created with.

Caveats
    Postgres 12 or newer. The database must be UTF8 and transactions READ COMMITTED
    (SERIALIZABLE with ``dialect=portable``), which is checked at open.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from operator import itemgetter
from typing import Any, ClassVar, TypeVar, cast
from urllib.parse import quote

from pydantic_core import from_json, to_json

from cpkit.driver import (
    Append,
    Batching,
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
    Timeouts,
    Write,
    decode_rows,
    from_micros,
    key_is_held,
    prefix_end,
    span,
    to_micros,
)
from cpkit.errors import CorruptThread
from cpkit.records import Durability, ThreadInfo
from cpkit.registry import redacted
from cpkit_postgres import listen, portable, queries, schema
from cpkit_postgres.connections import Connections, Fetch, Pool, Record
from cpkit_postgres.errors import UNIQUE_VIOLATION, sqlstate
from cpkit_postgres.options import CLIENT_PARAMETERS, PostgresOptions, check_url

__all__ = ["PostgresCheckpointer", "PostgresStore"]

MessageT = TypeVar("MessageT")

# Postgres holds a value, and a whole array, of up to 1 GiB.
_MAX_BYTES = 2**29

_INT4_MAX = 2**31 - 1
_LOCKED = "another transaction holds the lock of the thread's row"
_NOT_A_TIME = 2**62
_ABOVE_ALL_IDS = "\U0010ffff" * 129


class PostgresStore:
    """A schema of a Postgres database."""

    Options: ClassVar[type[PostgresOptions]] = PostgresOptions
    client_options: ClassVar[frozenset[str]] = CLIENT_PARAMETERS
    limits = Limits(_MAX_BYTES, _MAX_BYTES)
    # Messages alone: other writes do not get cheaper together, and a slow one, such as
    # the deletion of a large thread, must not hold up a batch.
    batching = Batching(halves=True, kinds=(Append,), merges_appends=True)
    erases = True

    def __init__(self, where: str | Pool, options: PostgresOptions) -> None:
        if isinstance(where, str):
            check_url(where)
            place = redacted(where.partition("?")[0])
        else:
            place = "postgresql:pool"

        self.name = f"{place}?schema={quote(options.schema)}"
        self.timeouts = Timeouts(
            options.timeout, options.connect_timeout, cancels_reads=True
        )
        self._dialect = options.dialect
        self._options = options
        self._connections = Connections(where, self.name, options)
        self._settings: schema.Settings | None = None

    @classmethod
    def from_url(cls, url: str, options: PostgresOptions) -> PostgresStore:
        return cls(url, options)

    @classmethod
    async def inspect(cls, url: str, options: PostgresOptions) -> StoreInfo | None:
        """Tell whether the store exists, ``None`` where the server does not answer."""
        store = cls(url, options)

        try:
            return await schema.inspect(store._connections, options.schema)
        except StoreFailure:
            return None
        finally:
            await store.close()

    async def open(self) -> None:
        if self._dialect == "portable":
            portable.check_connections(self._connections)

        self._settings = await schema.open_schema(self._connections, self._options)

        if self._dialect == "portable":
            await portable.check_engine(self._connections)

    async def close(self) -> None:
        await self._connections.close()

    def durability(self) -> Durability:
        assert self._settings is not None, "the store is open"
        return self._settings.durability

    # Writes

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        write = batch[0]

        if isinstance(write, Append) and write.bodies:
            return await self._append(cast("Sequence[Append]", batch))

        return [await self._apply(write)]  # the handle groups no others

    async def _append(self, appends: Sequence[Append]) -> list[Outcome]:
        """Append to each thread in the order given; raise if nothing was written."""
        outcomes: dict[int, Outcome] = {}

        while len(outcomes) < len(appends):
            # A statement has one append to each thread, ordered by thread.
            first: dict[str, int] = {}

            for i, write in enumerate(appends):
                if i not in outcomes:
                    first.setdefault(write.thread_id, i)

            now = [first[thread_id] for thread_id in sorted(first)]

            try:
                found = await self._append_once([appends[i] for i in now])
            except (StoreFailure, CorruptThread) as exc:
                if not outcomes:
                    raise

                outcomes |= dict.fromkeys(now, exc)
                continue

            for i, (version, appended, is_locked) in zip(now, found, strict=True):
                if appended:
                    outcomes[i] = version + len(appends[i].bodies)
                elif is_locked:  # later appends to the thread must not overtake it
                    outcomes |= {
                        j: StoreFailure("not sent", _LOCKED)
                        for j in range(i, len(appends))
                        if appends[j].thread_id == appends[i].thread_id
                    }
                elif _clamped(appends[i].expected_version) not in (None, version):
                    outcomes[i] = Conflict(version)
                # Otherwise another writer was faster: append again.

        return [outcomes[i] for i in range(len(appends))]

    async def _append_once(self, appends: Sequence[Append]) -> list[Record]:
        """Return for each thread its version before, and the outcome of its append."""
        ids = [write.thread_id for write in appends]
        expected = [_clamped(write.expected_version) for write in appends]
        bodies = [[body.decode() for body in write.bodies] for write in appends]

        # Without arrays the statement takes 250 µs, not 300.
        if len(ids) == 1 and not appends[0].items:
            more = bodies[0][1:] or None
            return await self._connections.write(
                queries.APPEND, ids[0], expected[0], bodies[0][0], more
            )

        rest, items = [], []

        for i, write in enumerate(appends):
            place = str(i + 1)
            rest += [(place, str(n), body) for n, body in enumerate(bodies[i]) if n]
            items += [(place, *item) for item in _hashed(write.items)]

        return await self._connections.write(
            queries.APPEND_MANY if len(ids) > 1 else queries.APPEND_WITH_EXTRA,
            ids,
            [None if one is None else str(one) for one in expected],
            [first for first, *_ in bodies],
            *_columns(rest, 3),
            *_columns(items, 4),
        )

    async def _apply(self, write: Write) -> Outcome:
        """Apply a write that is not an append of messages."""
        match write:
            case Append() if write.items:
                return await self._merge_at_version(write)
            case Append():
                return await self._check_version(write)
            case Merge():
                await self._connections.write(
                    queries.MERGE, write.thread_id, *_columns(_hashed(write.items), 3)
                )
                return None
            case Claim():
                return await self._claim(write)
            case Resolve():
                return await self._resolve(write)
            case Erase():
                await self._erase(write)
                return None
            case Restore():
                return await self._restore(write)

    async def _check_version(self, write: Append) -> int | Conflict:
        rows = await self._connections.fetch(queries.VERSION, write.thread_id)
        version: int = rows[0][0] if rows else 0
        expected = write.expected_version
        return version if expected in (None, version) else Conflict(version)

    async def _merge_at_version(self, write: Append) -> int | Conflict:
        """Merge extra while no append can change the version."""
        expected = write.expected_version

        async with self._connections.transaction() as fetch:
            while not await fetch(queries.LOCK_THREAD, write.thread_id):
                if expected not in (None, 0):
                    return Conflict(0)

                # Not visible to others before the commit, so its version stays 0.
                if await fetch(queries.ADD_THREAD, write.thread_id):
                    break

            ((version,),) = await fetch(queries.VERSION, write.thread_id)

            if expected not in (None, version):
                return Conflict(version)

            columns = _columns(_hashed(write.items), 3)
            await fetch(queries.MERGE, write.thread_id, *columns)
            return int(version)

    async def _claim(self, write: Claim) -> StoredCall | None:
        call = write.call

        while True:
            ((claimed, *taken),) = await self._connections.write(
                queries.CLAIM,
                write.thread_id,
                call.call_id,
                call.tool_name,
                write.args.decode(),
                call.idempotency_key,
            )

            if claimed:
                return None

            if taken[0] is not None:
                return _stored(taken)

    async def _resolve(self, write: Resolve) -> StoredCall | None:
        while True:
            rows = await self._connections.write(
                queries.RESOLVE,
                write.thread_id,
                write.call_id,
                write.status,
                write.result.decode(),
            )

            if not rows:
                return None

            call = _stored(rows[0])

            if call.status != "issued":
                return call

    async def _erase(self, write: Erase) -> None:
        async with self._connections.transaction() as fetch:
            # Before the thread's row: a claim locks the table first, too.
            if write.forget_keys and self._dialect == "postgres":
                await fetch(queries.LOCK_CALLS)

            rows = await fetch(queries.DELETE_THREAD, write.thread_id)
            number = rows[0][0] if rows else None
            await fetch(
                queries.DELETE_CONTENT, write.thread_id, number, write.forget_keys
            )

    async def _restore(self, write: Restore) -> Conflict | KeyHeld | None:
        while True:
            try:
                async with self._connections.transaction() as fetch:
                    if write.calls and self._dialect == "postgres":
                        await fetch(queries.LOCK_CALLS)

                    return await _restore_in(fetch, write)
            except StoreFailure as exc:
                # Another writer began the thread since it was found missing. Not if the
                # thread's number is taken: that would be so again and again.
                constraint = getattr(exc.__cause__, "constraint_name", None)

                if (
                    sqlstate(exc.__cause__) != UNIQUE_VIOLATION
                    or constraint == "threads_pkey"
                ):
                    raise

    # Reads

    async def snapshot(self, thread_id: str, decode: Decode) -> Snapshot | None:
        version, bodies, found = await self._read(thread_id, 0, None, every_call=False)

        if version is None:
            return None

        messages = await decode_rows(decode, bodies, 0)
        return Snapshot(messages, found.items, found.calls)

    async def messages(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> list[Any]:
        version, bodies, _ = await self._read(thread_id, start, stop, every_call=None)
        return await decode_rows(decode, bodies, span(start, stop, version or 0)[0])

    async def _read(
        self, thread_id: str, start: int, stop: int | None, every_call: bool | None
    ) -> tuple[int | None, list[Any], StoredDump]:
        """Return the version (``None``: no thread), the messages, and all as a dump."""
        last = _INT4_MAX if stop is None else _clamped(stop)
        rows = await self._connections.fetch(
            queries.READ, thread_id, _clamped(start), last, every_call
        )
        rows.sort(key=itemgetter(0))
        _, _, version, extra, calls, *times = rows[0]
        first, end = span(start, stop, version or 0)
        positions = [row[0] for row in rows]

        if positions != [-1, *range(first, end)]:
            missing = min({*range(first, end)} - {*positions}, default=end)
            raise CorruptThread(thread_id, f"message {missing}", "it is missing")

        extra = extra or []
        half = len(extra) // 2
        items = [*zip(extra[:half], extra[half:], strict=True)]
        found = [_stored(from_json(text)) for text in calls or ()]
        bodies = [row[1] for row in rows[1:]]

        if version is None:
            return None, bodies, StoredDump(bodies, items, found, None, None)

        _check_times(thread_id, *times)
        created_at, updated_at = map(to_micros, times)
        return version, bodies, StoredDump(bodies, items, found, created_at, updated_at)

    async def holder(self, key: str) -> StoredCall | None:
        rows = await self._connections.fetch(queries.HOLDER, key)
        return _stored(rows[0]) if rows else None

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

        for thread_id, _, *times in rows:
            _check_times(thread_id, *times)

        return [ThreadInfo(*row) for row in rows]

    async def calls(self, thread_id: str) -> list[StoredCall]:
        rows = await self._connections.fetch(queries.CALLS, thread_id)
        return [_stored(row) for row in rows]

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        rows = await self._connections.fetch(queries.MARKERS, thread_ids)
        return {row[0]: tuple(row[1:]) for row in rows}

    async def announce(self, thread_ids: Sequence[str]) -> bool:
        if self._dialect == "portable":
            return False

        return await listen.announce(self._connections, thread_ids)

    async def listen(self, heard: Heard) -> None:
        if self._dialect == "postgres":
            await listen.listen(self._connections, heard)

    async def dump(self, thread_id: str) -> StoredDump | None:
        version, _, found = await self._read(thread_id, 0, None, every_call=True)
        return None if version is None and not found.calls else found


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


async def _restore_in(fetch: Fetch, write: Restore) -> Conflict | KeyHeld | None:
    """Restore a thread in a transaction that changes nothing if it is refused."""
    thread_id, calls = write.thread_id, write.calls
    rows = await fetch(queries.VERSION, thread_id)

    if rows or await fetch(queries.CALLS, thread_id):
        return Conflict(rows[0][0] if rows else 0)

    keys = [call.idempotency_key for call in calls]
    attempts = [_stored(row) for row in await fetch(queries.ATTEMPTS, keys)]

    for call in calls:
        key = call.idempotency_key
        others = [other for other in attempts if other.idempotency_key == key]

        if key_is_held(call, others):
            return KeyHeld(key, others[-1].thread_id)

    if write.created_at is not None and write.updated_at is not None:
        await fetch(
            queries.RESTORE_THREAD,
            thread_id,
            from_micros(write.created_at),
            from_micros(write.updated_at),
            [body.decode() for body in write.bodies],
            *_columns(_hashed(write.items), 3),
        )

    if calls:
        await fetch(queries.RESTORE_CALLS, [_restored(call) for call in calls])

    return None


def _stored(row: Iterable[Any]) -> StoredCall:
    call = StoredCall(*row)
    issued_at, resolved_at = _micros(call.issued_at), _micros(call.resolved_at)
    return call._replace(issued_at=issued_at, resolved_at=resolved_at)


def _micros(time: Any) -> Any:
    """Return the microseconds of a call's time, also of one as JSON text, or ``None``.

    Of a damaged time: microseconds that no datetime can hold. Then the handle raises
    ``CorruptThread``, with the other calls of the thread.
    """
    try:
        if isinstance(time, str):
            time = datetime.fromisoformat(time)
    except ValueError:
        return _NOT_A_TIME

    if time is not None and time >= queries.TOO_LATE:
        return _NOT_A_TIME

    return None if time is None else to_micros(time)


def _check_times(thread_id: str, *times: datetime) -> None:
    """Raise ``CorruptThread`` for damaged times of a thread."""
    if max(times) >= queries.TOO_LATE:
        raise CorruptThread(thread_id, "its times", "a time is out of range")


def _restored(call: StoredCall) -> str:
    """Return a call as a JSON object with Postgres's columns."""
    resolved_at = None if call.resolved_at is None else from_micros(call.resolved_at)
    times = {"issued_at": from_micros(call.issued_at), "resolved_at": resolved_at}
    return to_json(call._asdict() | times).decode()


def _hashed(items: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str, str]]:
    """Return extra's items as columns: the hash of the key, the key, the value."""
    return [
        (sha256(key).hexdigest(), key.decode(), value.decode()) for key, value in items
    ]


def _columns(rows: Sequence[Any], count: int) -> list[list[Any]]:
    """Turn rows into an array for each column."""
    return [[row[i] for row in rows] for i in range(count)]


def _clamped(number: int | None) -> int | None:
    """Return the number, or the nearest that Postgres takes; versions are smaller."""
    return None if number is None else max(-_INT4_MAX, min(number, _INT4_MAX))
