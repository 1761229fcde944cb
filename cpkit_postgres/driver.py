"""Agent state in a schema of a Postgres database, for any number of machines.

URL forms
    ``postgresql://user:password@host:port/database`` or ``postgres://…``, as libpq
    takes them: several hosts, Unix sockets (``?host=/run/postgresql``), ``sslmode`` and
    its kin, ``passfile``, ``service``, ``application_name`` and some settings of the
    server are left to asyncpg. Options: ``schema`` (``cpkit`` by default, any name),
    ``pooler`` (``transaction`` behind PgBouncer in that mode), ``pool_size``
    (connections at most), ``connect_timeout`` (seconds that an operation waits for a
    server that is away), ``command_timeout`` (seconds for one statement), and those of
    every driver. Or the caller's own `asyncpg.Pool`, which stays theirs to close; give
    it ``reset=`` a coroutine that does nothing, or each operation costs one round trip
    more.

Durability
    A commit is worth what the server's ``synchronous_commit``, ``fsync`` and
    ``full_page_writes`` say; `durability` reads them.

What is atomic
    Each operation is one statement, one round trip and one transaction. Appends that
    queue while others are under way share a transaction. A load is one statement, and
    so one snapshot. Per thread, commits come in the order of positions, because whoever
    changes a thread holds its advisory lock to the end of the transaction.

What happens when the server goes away
    The next operation connects again, to the primary where the URL names several hosts.
    A write is made again by itself only where it is proven not to have run; otherwise
    ``BackendUnavailable`` says that it may have been applied.

Caveats
    Postgres 12 or newer; the database must be UTF8 and the transactions READ COMMITTED,
    which is checked at open. The schema's name stands in its functions: do not rename
    it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any, ClassVar, Generic, Self, TypeVar
from urllib.parse import quote

from cpkit.driver.coalescing import Coalescer
from cpkit.driver.codec import Codec, check_same_call
from cpkit.driver.ids import check_id, check_page, prefix_end, span
from cpkit.driver.lifetime import Lifetime
from cpkit.driver.writes import Append, StoredCall
from cpkit.errors import (
    BackendUnavailable,
    CheckpointerError,
    Closed,
    CorruptThread,
    UnknownCall,
    VersionConflict,
)
from cpkit.records import (
    CallRecord,
    CheckpointData,
    Durability,
    JsonValue,
    ThreadInfo,
    ToolCall,
)
from cpkit.registry import DriverOptions, redacted
from cpkit_postgres.appends import AppendGroup, Entry
from cpkit_postgres.connections import Connections, Pool, Record
from cpkit_postgres.options import CLIENT_PARAMETERS, PostgresOptions, check_url
from cpkit_postgres.schema import Settings, create, is_missing
from cpkit_postgres.statements import statements

__all__ = ["PostgresCheckpointer"]

MessageT = TypeVar("MessageT")

# A load of more messages or characters is decoded in a thread, so that the event loop
# is not held up: up to here that takes about two milliseconds.
_MANY_MESSAGES = 512
_MANY_CHARACTERS = 512 * 1024

# How many ends of threads are remembered, as guesses for their next append. The lower
# bits of an end are the version; see append_1 in schema.sql.
_GUESSES = 10_000
_VERSION = 2**32 - 1

_INT4_MAX = 2**31 - 1
_ABOVE_ALL_IDS = "\U0010ffff" * 129
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class PostgresCheckpointer(Generic[MessageT]):
    """A store in a schema of a Postgres database.

    ``where`` is a URL, or an initialized `asyncpg.Pool` that stays the caller's, and on
    which the options about connections have no effect. Options as in the URL.
    """

    Options: ClassVar[type[DriverOptions]] = PostgresOptions
    client_options: ClassVar[frozenset[str]] = CLIENT_PARAMETERS

    def __init__(
        self,
        where: str | Pool,
        *,
        message_type: type[MessageT] | Any = dict,
        **options: Any,
    ) -> None:
        known = PostgresOptions(**options)

        if isinstance(where, str):
            check_url(where)
            place = redacted(where.partition("?")[0])
        else:
            place = "postgresql pool"

        name = f"{place}?schema={quote(known.schema)}"
        self._codec: Codec[MessageT] = Codec(
            message_type,
            max_payload=known.max_payload,
            strict_roundtrip=known.strict_roundtrip,
        )
        self._schema = known.schema
        self._sql = statements(known.schema)
        self._settings: Settings | None = None
        self._lifetime = Lifetime(name)
        self._connections = Connections(where, name, known)
        # A caller that is cancelled cancels its statement, by a request to the server.
        # Behind a transaction pooler that may come to somebody else's statement.
        self._through = (
            self._lifetime.finish
            if known.pooler == "transaction"
            else self._lifetime.during
        )
        # One group at a time: a second one under way was measured not to help.
        self._appends: Coalescer[Append] = Coalescer(
            self._lifetime, self._commit, _size, by_halves=True
        )
        self._guesses: dict[str, int] = {}

    @classmethod
    def from_url(
        cls, url: str, *, message_type: Any, options: PostgresOptions
    ) -> PostgresCheckpointer[Any]:
        return cls(url, message_type=message_type, **options.model_dump())

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
        """Let what is in flight finish and close the connections; idempotent."""
        await self._lifetime.end(self._connections.close)

    async def _open(self) -> None:
        await self._connections.open()

        try:
            rows = await self._connections.ask(self._sql.settings)
        except BackendUnavailable as exc:
            if not is_missing(exc.__cause__):
                raise

            await create(self._connections, self._schema)
            rows = await self._connections.ask(self._sql.settings)

        self._settings = Settings.checked(rows, self._lifetime.name)

    @property
    def durability(self) -> Durability:
        if self._settings is None:
            raise Closed(self._lifetime.name)

        return self._settings.durability

    def __repr__(self) -> str:
        return f"<PostgresCheckpointer {self._lifetime.name}>"

    # The six methods

    async def load(self, thread_id: str) -> CheckpointData[MessageT] | None:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        rows = await self._read(self._sql.load, thread_id)

        if not rows:
            return None

        rows.sort(key=itemgetter(0), reverse=True)
        _, _, last, extra, pending = rows.pop()
        end = 0 if last is None else last + 1
        messages = await self._messages(rows, thread_id, 0, end)
        return CheckpointData(
            messages,
            self._codec.extra(extra, thread_id),
            [self._codec.record(_stored(call)) for call in pending],
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

        if not write.bodies:
            return await self._checked_version(write)

        version: int = await self._appends.run(write)
        return version

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        self._lifetime.check()
        write = self._codec.merge(thread_id, extra)

        if write.items:
            await self._write(
                self._sql.save_extra,
                write.thread_id,
                [key.decode() for key, _ in write.items],
                [value.decode() for _, value in write.items],
            )

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self._lifetime.check()
        write = self._codec.claim(thread_id, call)
        rows = await self._write(
            self._sql.claim,
            write.thread_id,
            write.call.call_id,
            write.call.tool_name,
            write.args.decode(),
            write.call.idempotency_key,
        )

        if not rows:
            return None

        stored = _stored(rows[0])
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
        rows = await self._write(
            self._sql.resolve,
            write.thread_id,
            write.call_id,
            write.status,
            write.result.decode(),
        )

        if not rows:
            raise UnknownCall(write.thread_id, write.call_id)

        return self._codec.record(_stored(rows[0]))

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        record = await self.find_call(idempotency_key)
        return record if record is not None and record.status == "completed" else None

    # The optional protocols

    async def list_threads(
        self, *, prefix: str = "", after: str | None = None, limit: int = 100
    ) -> list[ThreadInfo]:
        self._lifetime.check()
        prefix, after, limit = check_page(prefix, after, limit)
        rows = await self._read(
            self._sql.threads,
            max(prefix, after or ""),
            after,
            prefix_end(prefix) or _ABOVE_ALL_IDS,
            limit,
        )
        return [ThreadInfo(*row) for row in rows]

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[MessageT]:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        span(start, stop, 0)  # a wrong argument raises even where there is no thread
        rows = await self._read(
            self._sql.read,
            thread_id,
            _clamped(start),
            _INT4_MAX if stop is None else _clamped(stop),
        )

        if not rows:
            return []

        rows.sort(key=itemgetter(0), reverse=True)
        _, _, version = rows.pop()
        return await self._messages(rows, thread_id, *span(start, stop, version))

    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        rows = await self._read(self._sql.calls, thread_id)
        return [self._codec.record(_stored(row)) for row in rows]

    async def find_call(self, idempotency_key: str) -> CallRecord | None:
        self._lifetime.check()
        key = check_id("idempotency_key", idempotency_key)
        rows = await self._read(self._sql.last_attempt, key)

        if not rows:
            return None

        last = _stored(rows[0])
        return None if last.status == "failed" else self._codec.record(last)

    async def delete_thread(self, thread_id: str, *, forget_keys: bool = False) -> None:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        await self._write(self._sql.erase, thread_id, bool(forget_keys))

    # The statements

    async def _commit(self, appends: list[Append]) -> Sequence[object]:
        if len(appends) == 1:
            return [await self._through(self._append_alone(appends[0]))]

        group = AppendGroup(appends)

        while entries := group.next_entries():
            try:
                answers = await self._append(entries)
            except CheckpointerError as exc:
                group.fail(entries, exc)
            else:
                group.settle(entries, answers)

        return group.outcomes

    async def _append_alone(self, append: Append) -> int:
        thread_id, expected = append.thread_id, append.expected_version
        bodies = [body.decode() for body in append.bodies]
        answer = await self._append_to_one(thread_id, expected, bodies)

        if answer < 0:
            assert expected is not None
            raise VersionConflict(thread_id, expected, -1 - answer)

        return answer

    async def _append(self, entries: list[Entry]) -> list[int]:
        """Run one statement; return a version, or -1 - version, for each entry."""
        if len(entries) > 1:
            return await self._append_to_many(entries)

        one = entries[0]
        return [await self._append_to_one(one.thread_id, one.expected, one.bodies)]

    async def _append_to_one(
        self, thread_id: str, expected: int | None, bodies: list[str]
    ) -> int:
        rows = await self._connections.ask(
            self._sql.append,
            thread_id,
            _clamped(expected),
            bodies[0],
            bodies[1:] or None,
            self._guesses.get(thread_id, 0),
            writes=True,
        )
        end: int = rows[0][0]

        if end < 0:
            return end

        self._remember([(thread_id, end)])
        return end & _VERSION

    async def _append_to_many(self, entries: list[Entry]) -> list[int]:
        threads = [entry.thread_id for entry in entries]
        sizes = [len(entry.bodies) for entry in entries]
        rows = await self._connections.ask(
            self._sql.append_many,
            threads,
            [_clamped(entry.expected) for entry in entries],
            [self._guesses.get(thread, 0) & _VERSION for thread in threads],
            sizes,
            [place for place, size in enumerate(sizes, 1) for _ in range(size)],
            [nth for size in sizes for nth in range(size)],
            [body for entry in entries for body in entry.bodies],
            writes=True,
        )
        answers: list[int] = rows[0][0]
        ends = zip(threads, answers, strict=True)
        self._remember((thread, end) for thread, end in ends if end >= 0)
        return answers

    def _remember(self, ends: Iterable[tuple[str, int]]) -> None:
        if len(self._guesses) > _GUESSES:
            self._guesses.clear()

        self._guesses.update(ends)

    async def _checked_version(self, write: Append) -> int:
        """Return the version, for an append of no messages."""
        rows = await self._read(self._sql.version, write.thread_id)
        version = rows[0][0] if rows else 0

        if write.expected_version not in (None, version):
            raise VersionConflict(write.thread_id, write.expected_version, version)

        return version

    async def _write(self, sql: str, *args: object) -> list[Record]:
        return await self._through(self._connections.ask(sql, *args, writes=True))

    async def _read(self, sql: str, *args: object) -> list[Record]:
        return await self._through(self._connections.ask(sql, *args))

    async def _messages(
        self, rows: list[Record], thread_id: str, first: int, end: int
    ) -> list[MessageT]:
        """Decode rows, the last position first, that should go from first to end.

        The rows are used up on the way, so that no message is held twice.
        """
        # Positions are unique, so the number of them and the two ends tell.
        if len(rows) != end - first or (
            rows and (rows[-1][0], rows[0][0]) != (first, end - 1)
        ):
            missing = {*range(first, end)} - {row[0] for row in rows}
            raise CorruptThread(
                thread_id, f"message {min(missing, default=end)}", "it is missing"
            )

        many = len(rows) > _MANY_MESSAGES or (
            sum(len(row[1]) for row in rows) > _MANY_CHARACTERS
        )
        bodies = _used_up(rows)

        if many:
            return await asyncio.to_thread(
                self._codec.messages, bodies, thread_id, first
            )

        return self._codec.messages(bodies, thread_id, first)


def _used_up(rows: list[Record]) -> Iterator[str]:
    while rows:
        yield rows.pop()[1]


def _stored(row: Record) -> StoredCall:
    issued_at, resolved_at = row[7], row[9]
    return StoredCall(*row)._replace(
        issued_at=_micros(issued_at),
        resolved_at=None if resolved_at is None else _micros(resolved_at),
    )


def _micros(time: datetime) -> int:
    return (time - _EPOCH) // _MICROSECOND


def _clamped(number: int | None) -> int | None:
    """Return a number that Postgres takes, and that means the same for a version."""
    return None if number is None else max(-_INT4_MAX, min(number, _INT4_MAX))


def _size(append: Append) -> int:
    return sum(map(len, append.bodies))
