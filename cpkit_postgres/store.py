"""Agent state in a schema of a Postgres database, for any number of machines.

``docs/drivers.md`` is the manual.

URL forms
    ``postgresql://user:password@host:port/database`` or ``postgres://…``, with all that
    asyncpg reads. Options: ``schema``, ``pooler``, ``pool_size``, and those of every
    server. In place of a URL: the caller's `asyncpg.Pool`.

What is atomic
    A write is one statement, and so a transaction; a restore, and a deletion that
    forgets keys, is one that locks the calls. The appends and merges of a batch share a
    statement; its other writes run at the same time, as far as they share no thread and
    no key. If a batch fails in part, the fate of all its writes is
    unknown. A load is one statement, so it sees one moment.

Caveats
    Postgres 12 or newer, a database in UTF8. Times are those of the writer's clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
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
    EraseCalls,
    Findings,
    Heard,
    KeyHeld,
    Limits,
    Merge,
    Outcome,
    Resolve,
    Restore,
    SearchingHandle,
    Snapshot,
    StoredCall,
    StoredDump,
    StoreFailure,
    StoreInfo,
    Trim,
    Write,
    decode_rows,
    from_micros,
    key_is_held,
    prefix_end,
    span,
)
from cpkit.driver.together import Together
from cpkit.errors import CheckpointerError, CorruptThread
from cpkit.records import Durability, Survives, ThreadInfo
from cpkit.registry import redacted
from cpkit_postgres import queries, schema
from cpkit_postgres.connections import Connections, Fetch, Pool, Record
from cpkit_postgres.errors import CANCELLED, sqlstate
from cpkit_postgres.examine import examine
from cpkit_postgres.options import CLIENT_PARAMETERS, PostgresOptions, as_pasted

__all__ = ["PostgresCheckpointer", "PostgresStore"]

MessageT = TypeVar("MessageT")

Placed: TypeAlias = tuple[int, Any]  # a write, behind its place in the batch

_MAX_BYTES = 2**29  # a value, and a whole array, can have 1 GiB
_INT8_MAX = 2**63 - 1  # no version is larger
_ABOVE_ALL_IDS = "\U0010ffff" * 129

# What a write returns if another writer was faster, and how often it looks again then.
# A row that lost this many turns is not busy: this role cannot change it.
_AGAIN = Conflict(-1)
_TURNS = range(50)


class PostgresStore:
    """A schema of a Postgres database."""

    Options: ClassVar[type[PostgresOptions]] = PostgresOptions
    survives_by_default = Survives.MACHINE
    client_options: ClassVar[frozenset[str]] = CLIENT_PARAMETERS
    limits = Limits(_MAX_BYTES, _MAX_BYTES)
    max_writes = 256
    locks_threads = False
    erases = trims = erases_calls = True

    def __init__(self, where: str | Pool, options: PostgresOptions) -> None:
        if isinstance(where, str):
            where, options = as_pasted(where, options)
            place = redacted(where.partition("?")[0])
        else:
            place = "postgresql:pool"

        self.name = f"{place}?schema={quote(options.schema)}"
        self.timeout = options.timeout
        self._connections = Connections(where, self.name, options)
        self._together = Together[str, Snapshot | None]()
        self._durability = Durability(Survives.NONE, {})

    @classmethod
    def from_url(cls, url: str, options: PostgresOptions) -> PostgresStore:
        return cls(url, options)

    @classmethod
    async def inspect(cls, url: str, options: PostgresOptions) -> StoreInfo | None:
        """Tell whether the store exists; ``None`` where the server does not answer."""
        return await schema.inspect(cls(url, options)._connections)

    @classmethod
    async def examine(cls, url: str, options: PostgresOptions, whole: bool) -> Findings:
        return await examine(cls(url, options)._connections, whole)

    async def open(self) -> None:
        self._durability = await schema.open_schema(self._connections)

    async def close(self) -> None:
        await self._connections.close()

    def durability(self) -> Durability:
        return self._durability

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        if len(batch) == 1:
            return [await self._apply(batch[0])]

        outcomes: list[Outcome] = [None] * len(batch)
        shared, left = _divided(batch)
        applied = len(shared)

        if shared:  # what is in it afterwards was not written
            await _append_many(self._connections.fetch, shared, outcomes)
            applied -= len(shared)
            left += [placed for writes in shared.values() for placed in writes]

        async def run(chain: list[Placed]) -> None:
            nonlocal applied

            for place, write in chain:
                outcomes[place] = await self._apply(write)
                applied += 1

        try:
            chains = await self._chains(sorted(left)) if left else []
            ended = await asyncio.gather(*map(run, chains), return_exceptions=True)

            for failure in sorted(filter(None, ended), key=_is_decided):
                raise failure
        except (StoreFailure, CheckpointerError) as exc:
            if applied:
                reason = exc.reason if isinstance(exc, StoreFailure) else str(exc)
                raise StoreFailure("unknown", reason) from exc

            raise

        return outcomes

    async def _apply(self, write: Write, locked: Fetch | None = None) -> Outcome:
        """Apply one write, and look again where another writer was faster."""
        if locked is None and (
            type(write) is Restore or (type(write) is Erase and write.forget_keys)
        ):
            async with self._connections.transaction() as fetch:
                await fetch(queries.LOCK_CALLS)
                return await self._apply(write, fetch)

        apply = _APPLY[type(write)]

        for _ in _TURNS:
            outcome = await apply(locked or self._connections.fetch, write)

            if outcome is not _AGAIN:
                return outcome

        raise _hidden()

    async def _chains(self, writes: list[Placed]) -> list[list[Placed]]:
        """Divide writes into chains that have no thread and no key in common.

        A result or a deletion changes a key if its thread has an attempt at it.
        """
        keys = [write.idempotency_key for _, write in writes if type(write) is Claim]
        attempts: list[Record] = []
        chains: list[tuple[set[object], list[Placed]]] = []

        if keys and len(keys) < len(writes):
            attempts = await self._connections.fetch(queries.CALLS_OF_KEYS, keys)

        for place, write in writes:
            names: set[object] = {write.thread_id}

            if type(write) is Claim:
                key = write.idempotency_key
                names |= {(key,), *(row[0] for row in attempts if row[4] == key)}
            elif type(write) is Restore:
                names |= {(call.idempotency_key,) for call in write.calls}

            joined = [chain for chain in chains if chain[0] & names]
            chains = [chain for chain in chains if not chain[0] & names]
            members = sorted([one for _, some in joined for one in some])
            names = names.union(*(some for some, _ in joined))
            chains.append((names, [*members, (place, write)]))

        return [chain for _, chain in chains]

    async def snapshot(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> Snapshot | None:
        if start == stop == 0:
            return await self._together.read(thread_id, self._without_messages)

        version, bodies, found = await self._read(thread_id, start, stop, False)

        if version is None:
            return None

        first, end = span(start, stop, version, found.first)

        if (count := len(bodies)) != end - first:
            where = f"messages {first} to {end - 1}"
            raise CorruptThread(thread_id, where, f"there are {count}")

        messages = await decode_rows(decode, bodies, first)
        return Snapshot(messages, found.items, found.calls, version, first)

    async def _without_messages(self, thread_ids: list[str]) -> list[Snapshot | None]:
        rows = await self._connections.fetch(queries.READ_MANY, thread_ids)
        found: dict[str, Snapshot] = {}

        for thread_id, text in rows:
            version, items, calls, first = from_json(text)
            calls = [*map(StoredCall._make, calls or ())]
            found[thread_id] = Snapshot([], items or (), calls, version, first or 0)

        return [found.get(one) for one in thread_ids]

    async def dump(self, thread_id: str) -> StoredDump | None:
        version, _, found = await self._read(thread_id, 0, None, True)
        return None if version is None and not found.calls else found

    async def _read(
        self, thread_id: str, start: int, stop: int | None, every_call: bool
    ) -> tuple[int | None, list[Any], StoredDump]:
        """Return the version (``None``: no thread), the messages, and all as a dump."""
        last = _INT8_MAX if stop is None else _clamped(stop)
        rows = await self._connections.fetch(
            queries.READ, thread_id, _clamped(start), last, every_call
        )
        rows.sort(key=itemgetter(0))
        version, items, calls, *rest = from_json(rows[0][1])
        calls = [*map(StoredCall._make, calls or ())]
        bodies = [row[1] for row in rows[1:]]
        return version, bodies, StoredDump(bodies, items or (), calls, *rest)

    async def holder(self, key: str) -> StoredCall | None:
        rows = await self._connections.fetch(queries.HOLDER, key)
        return StoredCall._make(rows[0]) if rows else None

    async def threads(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[ThreadInfo]:
        start, end = max(prefix, after or ""), prefix_end(prefix) or _ABOVE_ALL_IDS
        page = start, after, end, limit, erased
        rows = await self._connections.fetch(queries.THREADS, *page)
        return [ThreadInfo(*row[:2], *map(from_micros, row[2:])) for row in rows]

    async def search(
        self, patterns: Sequence[str], prefix: str, limit: int, seconds: float
    ) -> list[tuple[str, int]]:
        end = prefix_end(prefix) or _ABOVE_ALL_IDS

        try:
            async with self._connections.transaction() as fetch:
                await fetch(queries.LIMIT_TIME, f"{max(1, seconds * 1000):.0f}")
                rows = await fetch(queries.SEARCH, prefix, end, patterns, limit)
        except StoreFailure as exc:
            if sqlstate(exc.__cause__) == CANCELLED:
                exc.fate = "rejected"  # a repeat would take as long

            raise

        return [(thread_id, position) for thread_id, position in rows]

    async def calls(self, thread_id: str) -> list[StoredCall]:
        rows = await self._connections.fetch(queries.CALLS, thread_id)
        return [*map(StoredCall._make, rows)]

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        rows = await self._connections.fetch(queries.MARKERS, thread_ids)
        return {thread_id: tuple(marker) for thread_id, *marker in rows}

    async def announce(self, thread_ids: Sequence[str]) -> bool:
        rows = await self._connections.fetch(
            queries.ANNOUNCE, self._connections.channel, thread_ids
        )
        return bool(rows)

    async def listen(self, heard: Heard) -> None:
        await self._connections.listen(heard)


class PostgresCheckpointer(SearchingHandle[MessageT]):
    """A handle of a store in a schema of a Postgres database.

    ``where`` is a URL, or an initialized `asyncpg.Pool`, which stays open. Options as
    in the URL; those about connections have no effect on a pool.
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


def _divided(batch: Sequence[Write]) -> tuple[dict[str, list[Placed]], list[Placed]]:
    """Return the writes that can share a statement, by thread, and the others.

    A thread can have one append that expects a version, or any number of appends and
    merges that do not. They look at no keys, so they may run before the others.
    """
    shared: dict[str, list[Placed]] = {}
    fenced: set[str] = set()
    others: set[str] = set()

    for place, write in enumerate(batch):
        shared.setdefault(write.thread_id, []).append((place, write))

        if type(write) is Append and (write.bodies or write.items):
            if write.expected_version is not None:
                fenced.add(write.thread_id)
        elif type(write) is not Merge:
            others.add(write.thread_id)

    others |= {one for one in fenced if shared[one][1:]}
    return shared, [placed for one in others for placed in shared.pop(one)]


async def _append_many(
    fetch: Fetch, shared: dict[str, list[Placed]], outcomes: list[Outcome]
) -> None:
    """Append to threads, and merge, in one statement; remove the threads written."""
    ids, bodies, fences = sorted(shared), {}, []
    items: dict[tuple[str, bytes], bytes] = {}

    for one in ids:
        appends = [write for _, write in shared[one] if type(write) is Append]
        bodies[one] = [body for write in appends for body in write.bodies]
        version = appends[0].expected_version if appends else None
        fences.append("" if version is None else str(version))

        for _, write in shared[one]:
            items |= {(one, key): value for key, value in write.items}

    counts = [len(bodies[one]) for one in ids]
    # All ids of a batch are too short to have every character.
    taken = "".join(ids) + "0123456789"
    mark = next(c for c in map(chr, range(1, 0xD800)) if c not in taken)
    rows = await fetch(
        queries.APPEND_MANY,
        mark.join(ids),
        mark.join(fences) if any(fences) else None,
        _now(),
        mark,
        mark.join(map(str, counts)),
        mark.join([one for one in ids for _ in bodies[one]]),
        mark.join([str(n) for count in counts for n in range(count, 0, -1)]),
        [body.decode() for one in ids for body in bodies[one]],
        [one for one, _ in items],
        [key.decode() for _, key in items],
        [value.decode() for value in items.values()],
    )

    for one, version in rows:
        reached = version - len(bodies[one])

        for place, write in shared.pop(one):
            if type(write) is Append:
                outcomes[place] = reached = reached + len(write.bodies)


async def _append(fetch: Fetch, write: Append) -> Outcome:
    """Append alone; the common cases have a statement of their own."""
    thread_id, bodies, expected, items, _ = write

    if bodies[1:] or items[1:]:
        shared: dict[str, list[Placed]] = {thread_id: [(0, write)]}
        outcomes: list[Outcome] = [None]
        await _append_many(fetch, shared, outcomes)

        if not shared:
            return outcomes[0]
    elif bodies or items:
        body = bodies[0].decode() if bodies else None
        key, value = map(bytes.decode, items[0]) if items else (None, None)
        rows = await fetch(
            queries.APPEND, thread_id, expected, _now(), body, key, value
        )

        if rows:
            return int(rows[0][0])

    rows = await fetch(queries.VERSION, thread_id)
    version: int = rows[0][0] if rows else 0

    if expected not in (None, version):
        return Conflict(version)

    return _AGAIN if bodies or items else version


async def _merge(fetch: Fetch, write: Merge) -> Outcome:
    reached = await _append(fetch, Append(write.thread_id, [], None, write.items))
    return reached if reached is _AGAIN else None


async def _claim(fetch: Fetch, write: Claim) -> Outcome:
    thread_id, call_id, tool_name, args, key, _ = write
    rows = await fetch(
        queries.CLAIM, thread_id, call_id, tool_name, args.decode(), key, _now()
    )
    claimed, *taken = rows[0]

    if claimed:
        return None

    return _AGAIN if taken[0] is None else StoredCall._make(taken)


async def _resolve(fetch: Fetch, write: Resolve) -> Outcome:
    thread_id, call_id, status, result, _ = write
    rows = await fetch(
        queries.RESOLVE, thread_id, call_id, status, result.decode(), _now()
    )

    if not rows:
        return None

    call = StoredCall._make(rows[0])
    return _AGAIN if call.status == "issued" else call


async def _erase(fetch: Fetch, write: Erase) -> Outcome:
    expected = write.expected_version
    rows = await fetch(queries.ERASE, write.thread_id, expected, write.forget_keys)
    seen, is_gone = rows[0]

    if expected not in (None, seen or 0):
        return Conflict(seen or 0)

    return None if is_gone or seen is None else _AGAIN


async def _trim(fetch: Fetch, write: Trim) -> Outcome:
    ((version, first, removed),) = await fetch(queries.TRIM, *write[:3])

    if removed:
        return int(removed)

    if write.expected_version not in (None, version):
        return Conflict(version)

    return 0 if min(write.before, version) <= first else _AGAIN


async def _erase_calls(fetch: Fetch, write: EraseCalls) -> Outcome:
    before = _clamped(write.before)
    expected = write.expected_version
    rows = await fetch(queries.ERASE_ENDED_CALLS, write.thread_id, before, expected)
    version, erased = rows[0]
    return erased if expected in (None, version) else Conflict(version)


async def _restore(fetch: Fetch, write: Restore) -> Outcome:
    """Restore a thread; the table of calls is locked, that of threads is not."""
    thread_id, calls = write.thread_id, write.calls
    keys = [call.idempotency_key for call in calls]
    rows = await fetch(queries.VERSION, thread_id)

    if rows or await fetch(queries.CALLS, thread_id):
        return Conflict(rows[0][0] if rows else 0)

    attempts = [*map(StoredCall._make, await fetch(queries.CALLS_OF_KEYS, keys))]

    for key, call in zip(keys, calls, strict=True):
        others = [other for other in attempts if other.idempotency_key == key]

        if key_is_held(call, others):
            return KeyHeld(key, others[-1].thread_id)

    if write.created_at is not None:
        begun = thread_id, write.created_at, write.first

        if not await fetch(queries.BEGIN_THREAD, *begun):
            return _AGAIN

        content = Append(thread_id, write.bodies, None, write.items)

        if await _append(fetch, content) is _AGAIN:
            raise _hidden()  # the new row is locked

        await fetch(queries.SET_TIME, thread_id, write.updated_at)

    records = [to_json(call._asdict()).decode() for call in calls]
    await fetch(queries.RESTORE_CALLS, records)
    return None


def _is_decided(failure: BaseException) -> bool:
    return getattr(failure, "fate", "") != "unknown"


def _hidden() -> StoreFailure:
    fault = "a row is in the way that this role cannot see or change"
    cure = "cpkit doctor names row-level security, triggers and rules of the tables"
    return StoreFailure("rejected", f"{fault}: {cure}")


def _clamped(number: int) -> int:
    return max(-_INT8_MAX, min(number, _INT8_MAX))


def _now() -> int:
    return time.time_ns() // 1000


_APPLY: dict[type[Write], Callable[[Fetch, Any], Awaitable[Outcome]]] = {
    Append: _append,
    Merge: _merge,
    Claim: _claim,
    Resolve: _resolve,
    Erase: _erase,
    Trim: _trim,
    EraseCalls: _erase_calls,
    Restore: _restore,
}
