"""One table: what a caller sees of each fault in each operation, and what is stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

import asyncpg
import pytest

from conformance.proxy import Fault
from conformance.slowdown import slowdown
from cpkit import BackendUnavailable, ThreadDump, ToolCall
from cpkit_postgres import PostgresCheckpointer
from tests.postgres.proxy import Proxy
from tests.servers.postgres import PostgresServer
from tests.sweeps import table

Store = PostgresCheckpointer[Any]

WAITING = "SELECT pid FROM pg_locks WHERE NOT granted"


class Operation(NamedTuple):
    """``run`` changes what `look` returns by ``change``; a read changes nothing."""

    run: Callable[[Store], Awaitable[object]]
    change: dict[str, object] = {}
    is_transaction: bool = False

    @property
    def kind(self) -> str:
        if self.is_transaction:
            return "transaction"

        return "write" if self.change else "read"


class Seen(NamedTuple):
    """``error``: "maybe" or "not" applied, or none; and whether the store changed."""

    error: str | None
    is_changed: bool


@pytest.fixture
async def admin(server: PostgresServer) -> AsyncIterator[asyncpg.Connection]:
    """A connection beside the store's."""
    connection = await asyncpg.connect(server.url)
    yield connection
    connection.terminate()


async def together(*calls: Awaitable[object]) -> None:
    """Run calls that share one statement; raise their error if all have the same."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert len({type(outcome) for outcome in outcomes}) == 1

    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome


AT = datetime(2024, 1, 1, tzinfo=UTC)
COPY = ThreadDump("copy", [{"n": 1}], {"a": 1}, [], AT, AT)

OPERATIONS = {
    "append": Operation(lambda cp: cp.append("t", [{"n": 1}]), {"t": 2}),
    "append of many": Operation(
        lambda cp: cp.append("t", [{"n": 1}] * 2, extra={"late": 1}),
        {"t": 3, "extra": {"late": 1}},
    ),
    "appends to many": Operation(
        lambda cp: together(cp.append("t", [{}]), cp.append("gone", [{}])),
        {"t": 2, "gone": 2},
    ),
    "save_extra": Operation(
        lambda cp: cp.save_extra("t", {"late": 1}), {"extra": {"late": 1}}
    ),
    "record_issued": Operation(
        lambda cp: cp.record_issued("t", ToolCall("late", "x", {}, "late")),
        {"calls": {"given": "issued", "late": "issued"}},
    ),
    "record_result": Operation(
        lambda cp: cp.record_result("t", "given", 1), {"calls": {"given": "completed"}}
    ),
    "trim": Operation(lambda cp: cp.trim("t", 1), {"first": 1}),
    "delete_thread": Operation(lambda cp: cp.delete_thread("gone"), {"gone": None}),
    "delete_thread, forgetting": Operation(
        lambda cp: cp.delete_thread("gone", forget_keys=True),
        {"gone": None, "kept": 0},
        is_transaction=True,
    ),
    "restore_thread": Operation(
        lambda cp: cp.restore_thread(COPY), {"copy": 1}, is_transaction=True
    ),
    "load": Operation(lambda cp: cp.load("t")),
    "find_call": Operation(lambda cp: cp.find_call("given")),
    "list_threads": Operation(lambda cp: cp.list_threads()),
}


async def prepare(cp: Store) -> None:
    """Write what the operations need, and prepare their statements."""
    for thread in ("t", "gone"):
        await cp.append(thread, [{}])

    await cp.record_issued("t", ToolCall("given", "x", {}, "given"))
    await cp.record_issued("gone", ToolCall("kept", "x", {}, "kept"))
    await asyncio.gather(*(cp.append(f"other {n}", [{}]) for n in range(3)))
    await cp.append("other", [{}, {}], extra={"a": 1})
    await cp.append("other", [{}])
    await cp.trim("other", 1)
    await cp.save_extra("other", {"b": 1})
    await cp.record_issued("other", ToolCall("c", "x", {}, "other"))
    await cp.record_result("other", "c", 1)
    await cp.delete_thread("other")
    await cp.load("t")
    await cp.find_call("given")
    await cp.list_threads()


async def look(cp: Store) -> dict[str, object]:
    """Return what is stored."""
    t, gone, copy = [await cp.load(thread) for thread in ("t", "gone", "copy")]
    assert t is not None
    calls = await cp.list_calls("t")
    return {
        "t": t.version,
        "first": t.first,
        "extra": t.extra,
        "calls": {record.call.call_id: record.status for record in calls},
        "gone": gone and gone.version,
        "kept": len(await cp.list_calls("gone")),
        "copy": copy and copy.version,
    }


class CommitProxy(Proxy):
    """A proxy that can lose the request or the answer of a COMMIT."""

    at_commit: str | None = None

    async def pass_on(self, part: str, data: bytes, writer: Any) -> None:
        if part == self.at_commit and b"COMMIT" in data:
            self.at_commit = None
            self.lost += 1
            raise ConnectionAbortedError

        await super().pass_on(part, data, writer)


class Case(NamedTuple):
    """A store behind a proxy, a connection beside it, and what to run."""

    cp: Store
    proxy: CommitProxy
    admin: asyncpg.Connection
    schema: str
    operation: Operation

    def run(self) -> Awaitable[object]:
        return self.operation.run(self.cp)

    @asynccontextmanager
    async def blocked(self) -> AsyncIterator[asyncio.Future[object]]:
        """Run the operation while it waits for a lock, which ends with the block."""
        tables = f"{self.schema}.threads, {self.schema}.calls"
        await self.admin.execute(f"BEGIN; LOCK TABLE {tables}")
        task = asyncio.ensure_future(self.run())

        try:
            while not await self.admin.fetch(WAITING):
                await self.admin.execute("SELECT pg_sleep(0.002)")

            yield task
        finally:
            await self.admin.execute("ROLLBACK")


async def answer_lost(case: Case) -> None:
    await lose(case, "answer")


async def request_lost(case: Case) -> None:
    await lose(case, "request")


async def lose(case: Case, part: Any) -> None:
    if case.operation.is_transaction:
        case.proxy.at_commit = part
    else:
        case.proxy.lose(Fault(part, "cut"))

    try:
        await case.run()
    finally:
        assert case.proxy.lost == 1


async def first_answer_lost(case: Case) -> None:
    case.proxy.lose(Fault("answer", "cut"))

    try:
        await case.run()
    finally:
        assert case.proxy.lost == 1


async def process_ended(case: Case) -> None:
    async with case.blocked() as task:
        pid = await case.admin.fetchval(WAITING)
        await case.admin.execute("SELECT pg_terminate_backend($1)", pid)

        while await case.admin.fetch(f"{WAITING} AND pid = {pid}"):
            await case.admin.execute("SELECT pg_sleep(0.002)")

    await task


async def statement_cancelled(case: Case) -> None:
    """By an administrator; a lock timeout and a statement timeout do the same."""
    async with case.blocked() as task:
        pid = await case.admin.fetchval(WAITING)
        await case.admin.execute("SELECT pg_cancel_backend($1)", pid)

    await task


async def no_time_left(case: Case) -> None:
    async with case.blocked() as task:
        await asyncio.wait([task])

        # The server's own limit ends the statement.
        while await case.admin.fetch(WAITING):
            await case.admin.execute("SELECT pg_sleep(0.002)")

    await task


async def read_only(case: Case) -> None:
    await case.admin.execute("SET default_transaction_read_only = off")
    await set_read_only(case, "on")

    try:
        await case.run()
    finally:
        await set_read_only(case, "off")


async def set_read_only(case: Case, value: str) -> None:
    """Change it for every session, and wait until the store's have noticed."""
    await case.admin.execute(
        f"ALTER SYSTEM SET default_transaction_read_only = {value}"
    )
    await case.admin.execute("SELECT pg_reload_conf()")
    fetch = case.cp.store._connections.fetch  # type: ignore[attr-defined]  # inspected

    while (await fetch("SHOW default_transaction_read_only"))[0][0] != value:
        await case.admin.execute("SELECT pg_sleep(0.002)")


# What each kind of operation makes of a fault.
ANSWERED = Seen(None, True)
FAULTS: dict[str, tuple[Callable[[Case], Awaitable[None]], dict[str, Seen]]] = {
    "the answer is lost": (
        answer_lost,
        {
            "read": ANSWERED,
            "write": Seen("maybe", True),
            "transaction": Seen("maybe", True),
        },
    ),
    "the request is lost": (
        request_lost,
        {
            "read": ANSWERED,
            "write": Seen("maybe", False),
            "transaction": Seen("maybe", False),
        },
    ),
    "the first answer is lost": (
        first_answer_lost,
        {"read": ANSWERED, "write": Seen("maybe", True), "transaction": ANSWERED},
    ),
    "the server's process is ended": (
        process_ended,
        {"read": ANSWERED, "write": Seen("maybe", False), "transaction": ANSWERED},
    ),
    "the statement is cancelled": (
        statement_cancelled,
        {"read": ANSWERED, "write": ANSWERED, "transaction": ANSWERED},
    ),
    "no time is left": (
        no_time_left,
        {
            "read": Seen("not", False),
            "write": Seen("maybe", False),
            "transaction": Seen("maybe", False),
        },
    ),
    "the server takes no writes": (
        read_only,
        {
            "read": ANSWERED,
            "write": Seen("not", False),
            "transaction": Seen("not", False),
        },
    ),
}


@pytest.mark.parametrize(("fault", "name"), table(FAULTS, OPERATIONS))
async def test_a_fault(
    fault: str,
    name: str,
    server: PostgresServer,
    schema: str,
    admin: asyncpg.Connection,
) -> None:
    """The error is true, the store is whole, and the handle works again."""
    operation = OPERATIONS[name]
    happen, expected = FAULTS[fault]
    seen = expected[operation.kind]
    timeout = 1.0 * slowdown() if happen is no_time_left else 60.0

    async with (
        CommitProxy(server.url) as proxy,
        Store(
            proxy.url, schema=schema, timeout=timeout, connect_timeout=30, notify=False
        ) as cp,
        Store(server.url, schema=schema, notify=False) as beside,
    ):
        await prepare(cp)
        before = await look(beside)
        error: BackendUnavailable | None = None

        try:
            await happen(Case(cp, proxy, admin, schema, operation))
        except BackendUnavailable as exc:
            error = exc

        if error is not None:
            assert error.__cause__ is not None
            assert error.rejected == (happen is read_only)

        words = {True: "maybe", False: "not"}
        assert (error and words[error.maybe_applied]) == seen.error
        changed = before | operation.change if seen.is_changed else before
        assert await look(beside) == changed
        assert await cp.append("other", [], extra={"c": 1}) == 0
        assert await cp.load("t") == await beside.load("t")


async def test_a_server_that_is_away(server: PostgresServer, schema: str) -> None:
    """Nothing is written; every operation works when the server is back."""
    async with Store(server.url, schema=schema, connect_timeout=1 * slowdown()) as cp:
        await prepare(cp)
        await asyncio.to_thread(server.stop)
        outcomes = await asyncio.gather(
            *(one.run(cp) for one in OPERATIONS.values()), return_exceptions=True
        )

        for outcome in outcomes:
            assert isinstance(outcome, BackendUnavailable)
            assert not outcome.maybe_applied
            assert not outcome.rejected

        await asyncio.to_thread(server.start)
        assert await cp.append("t", [{}]) == 2
        operations = OPERATIONS.values()
        await asyncio.to_thread(server.restart)
        await asyncio.gather(*(one.run(cp) for one in operations if not one.change))


async def test_a_batch_that_fails_in_part(
    server: PostgresServer, schema: str, admin: asyncpg.Connection
) -> None:
    """What was applied is not repeated, and the fate of every write is unknown."""

    async with Store(server.url, schema=schema) as cp:
        await prepare(cp)
        await admin.execute(
            f"ALTER TABLE {schema}.calls ADD CHECK (call_id <> 'refused')"
        )

        def claim(call_id: str) -> Awaitable[object]:
            return cp.record_issued("t", ToolCall(call_id, "x", {}, call_id))

        outcomes = await asyncio.gather(
            cp.append("gone", [{}]),
            claim("refused"),
            cp.save_extra("gone", {"a": 1}),
            return_exceptions=True,
        )

        for outcome in outcomes:
            assert isinstance(outcome, BackendUnavailable)
            assert outcome.maybe_applied

        # Where nothing was applied, each write is tried alone.
        refused, applied = await asyncio.gather(
            claim("refused"), claim("next"), return_exceptions=True
        )
        assert isinstance(refused, BackendUnavailable)
        assert refused.rejected
        assert not refused.maybe_applied
        assert applied is None
        state = await look(cp)
        assert state["gone"] == 2
        assert state["calls"] == {"given": "issued", "next": "issued"}


async def test_a_batch_that_fails_in_part_while_it_connects(
    server: PostgresServer, schema: str
) -> None:
    """So too where a file of the URL is missing by now, and asyncpg blames the URL."""

    async with Store(server.url, schema=schema) as cp:
        store: Any = cp.store
        await cp.append("t", [{}])  # one connection is idle now
        store._connections._where += "?sslmode=unknown"
        outcomes = await asyncio.gather(
            cp.append("t", [{}]),
            *[
                cp.record_issued(f"t{n}", ToolCall(f"c{n}", "x", {}, f"k{n}"))
                for n in range(2)
            ],
            return_exceptions=True,
        )

        for outcome in outcomes:
            assert isinstance(outcome, BackendUnavailable)
            assert outcome.maybe_applied

        assert await cp.append("t", []) == 2


async def test_a_callers_pool_keeps_its_connections(
    server: PostgresServer, schema: str, admin: asyncpg.Connection
) -> None:
    """Where its own limit ends a write, and where a connection is lost."""
    async with (
        Proxy(server.url) as proxy,
        asyncpg.create_pool(
            proxy.url, min_size=1, max_size=1, command_timeout=1 * slowdown()
        ) as pool,
        Store(pool, schema=schema, notify=False) as cp,
    ):
        await prepare(cp)
        await admin.execute(f"BEGIN; LOCK TABLE {schema}.threads")

        with pytest.raises(BackendUnavailable) as caught:
            await cp.append("t", [{}])

        assert caught.value.maybe_applied
        await admin.execute("ROLLBACK")
        await prepare(cp)
        proxy.lose(Fault("answer", "cut"))

        with pytest.raises(BackendUnavailable) as caught:
            await cp.append("gone", [{}])

        assert caught.value.maybe_applied
        assert await cp.append("gone", []) == 3
        assert pool.get_idle_size() == pool.get_size() == 1
