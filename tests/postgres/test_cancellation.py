"""Cancelled at any point: applied or not applied, and no connection leaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any
from urllib.parse import quote

import asyncpg
import pytest

from cpkit import BackendUnavailable, Closed, ToolCall
from cpkit_postgres import PostgresCheckpointer, connections
from tests.postgres.conftest import MakeStore
from tests.postgres.proxy import Proxy
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import PostgresServer, shared_postgres
from tests.sweeps import sweep

Store = PostgresCheckpointer[Any]

OPERATIONS: list[Callable[[Store, int], Coroutine[Any, Any, Any]]] = [
    lambda cp, i: cp.append("t", [{"i": i, "half": 0}, {"i": i, "half": 1}]),
    lambda cp, i: cp.save_extra("t", {f"a {i}": i, f"b {i}": i}),
    lambda cp, i: cp.record_issued("t", ToolCall(f"{i}", "x", {}, f"{i}")),
    lambda cp, i: cp.record_result("t", "given", i),
    lambda cp, i: cp.load("t"),
    lambda cp, i: cp.list_threads(),
    lambda cp, i: cp.delete_thread(f"gone {i}"),
]

# Writes of one statement and of several; each waits for the thread's row.
WRITES: list[Callable[[Store], Coroutine[Any, Any, Any]]] = [
    lambda cp: cp.append("t", [{"late": 1}]),
    lambda cp: cp.save_extra("t", {"late": 1}),
    lambda cp: cp.append("t", [], extra={"late": 1}),
    lambda cp: cp.record_issued("t", ToolCall("late", "x", {}, "late")),
    lambda cp: cp.record_result("t", "given", "late"),
    lambda cp: cp.delete_thread("t"),
]

WAITING = """
SELECT count(*) FROM pg_stat_activity
WHERE wait_event_type = 'Lock' AND application_name = $1
"""


def go_on(pid: int) -> None:
    """Let a stopped process continue, unless it was ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def locked(raw: asyncpg.Connection, schema: str) -> AsyncIterator[None]:
    """Create thread t, and lock its row within the block."""
    async with Store(shared_postgres(), schema=schema) as cp:
        await prepared(cp)

    await raw.execute("BEGIN")
    await raw.fetch(f"SELECT FROM {schema}.threads WHERE thread_id = 't' FOR UPDATE")

    try:
        yield
    finally:
        await raw.execute("ROLLBACK")


async def until_waiting(raw: asyncpg.Connection, name: str, count: int) -> None:
    """Return when so many backends of an application wait for a lock."""
    while await raw.fetchval(WAITING, name) != count:
        await raw.execute("SELECT pg_sleep(0.002)")


async def prepared(cp: Store) -> None:
    await cp.append("t", [{}])
    await cp.record_issued("t", ToolCall("given", "x", {}, "given"))


async def check_not_applied(cp: Store) -> None:
    """Check that thread t is as `prepared` left it."""
    data = await cp.load("t")
    assert data is not None
    assert (data.version, data.extra) == (1, {})
    assert [record.call.call_id for record in data.pending] == ["given"]


@pytest.mark.parametrize("write", WRITES)
async def test_a_cancelled_write_ends_before_later_operations(
    write: Callable[[Store], Coroutine[Any, Any, Any]],
    store: MakeStore,
    schema: str,
    raw: asyncpg.Connection,
) -> None:
    """The server gives it up, so it is not applied after a later read or `aclose`."""
    name = f"ends {schema}"
    where = f"{shared_postgres()}?application_name={quote(name)}"

    async with locked(raw, schema), store(where, timeout=1) as cp:
        task = asyncio.create_task(write(cp))
        await until_waiting(raw, name, 1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

        while True:
            # The look waits for `timeout`, and the server may take a moment longer.
            with contextlib.suppress(BackendUnavailable):
                await check_not_applied(cp)
                break

        assert await raw.fetchval(WAITING, name) == 0

    async with store() as again:
        await check_not_applied(again)


async def test_late_writes_do_not_pile_up_at_the_server(
    store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """None of them is left at the server when the next one begins."""
    where = f"{shared_postgres()}?application_name=piled_up"

    async with locked(raw, schema), store(where, timeout=0.5, pool_size=1) as cp:
        for _ in range(3):
            with pytest.raises(BackendUnavailable):
                await cp.save_extra("t", {"late": 1})

            await until_waiting(raw, "piled_up", 0)


@pytest.mark.parametrize("limit", ["timeout", "command_timeout"])
async def test_a_late_write_of_a_pool_ends(
    limit: str, schema: str, url: str, raw: asyncpg.Connection
) -> None:
    """Also where the pool's own time limit ends it; the pool loses no connection."""
    async with asyncpg.create_pool(
        shared_postgres(),
        min_size=1,
        max_size=1,
        command_timeout=0.5 if limit == "command_timeout" else None,
        server_settings={"application_name": "pool"},
    ) as pool:
        timeout = 0.5 if limit == "timeout" else 30

        async with (
            locked(raw, schema),
            Store(pool, schema=schema, timeout=timeout) as cp,
        ):
            for write in WRITES[1:3]:
                with pytest.raises(BackendUnavailable) as caught:
                    await write(cp)

                assert caught.value.maybe_applied
                await until_waiting(raw, "pool", 0)
                await check_not_applied(cp)

        assert pool.get_idle_size() == pool.get_size()


async def test_a_late_write_behind_a_pooler_ends(
    schema: str, url: str, raw: asyncpg.Connection
) -> None:
    """PgBouncer passes the request to cancel on."""
    with PgBouncer(shared_postgres()) as pooler:
        where = f"{pooler.url}?application_name=pooled"

        async with (
            locked(raw, schema),
            Store(where, schema=schema, pooler="transaction", timeout=0.5) as cp,
        ):
            with pytest.raises(BackendUnavailable):
                await cp.append("t", [{"late": 1}])

            await until_waiting(raw, "pooled", 0)
            await check_not_applied(cp)


@pytest.mark.parametrize("write", [WRITES[0], WRITES[2]])
async def test_a_late_write_that_waits_for_a_standby(
    write: Callable[[Store], Coroutine[Any, Any, Any]],
    server: PostgresServer,
    schema: str,
) -> None:
    """It is on record at the primary already, so a later read sees it."""
    admin = await asyncpg.connect(server.url)

    async with Store(server.url, schema=schema, timeout=1) as cp:
        await prepared(cp)
        await admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'absent'")
        await admin.execute("SELECT pg_reload_conf()")

        try:
            while not await admin.fetchval("SHOW synchronous_standby_names"):
                await admin.execute("SELECT pg_sleep(0.002)")

            with pytest.raises(BackendUnavailable) as caught:
                await write(cp)

            assert caught.value.maybe_applied
            data = await cp.load("t")
            assert data is not None
            assert data.version == 2 or data.extra == {"late": 1}
        finally:
            await admin.execute("ALTER SYSTEM RESET synchronous_standby_names")
            await admin.execute("SELECT pg_reload_conf()")
            await admin.close()


async def test_cancelled_again_while_the_server_does_not_answer(
    server: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second cancellation closes the connection and waits for nothing."""
    monkeypatch.setattr(connections, "_CANCEL_TIMEOUT", 86_400.0)

    async with Store(server.url, schema=schema, timeout=0.5, pool_size=1) as cp:
        await prepared(cp)
        server.pause()

        try:
            for _ in range(2):  # the second one needs the first one's slot
                with pytest.raises(BackendUnavailable):
                    await cp.save_extra("t", {"a": 1})
        finally:
            server.resume()

        assert await cp.append("t", [{}]) == 2


@pytest.mark.parametrize(
    ("write", "is_pool"), [(WRITES[0], False), (WRITES[1], True), (WRITES[3], False)]
)
async def test_a_process_that_was_stopped_applies_nothing_late(
    write: Callable[[Store], Coroutine[Any, Any, Any]],
    is_pool: bool,
    server: PostgresServer,
    schema: str,
) -> None:
    """A process that gets its statement when it goes on is ended before later ones."""
    url = f"{server.url}?application_name=stopped"
    process = "SELECT pid FROM pg_stat_activity WHERE application_name = 'stopped'"
    admin = await asyncpg.connect(server.url)

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(admin.close)
        pool = asyncpg.create_pool(url, min_size=1, max_size=2)
        where: Any = await stack.enter_async_context(pool) if is_pool else url
        cp = await stack.enter_async_context(
            Store(where, schema=schema, timeout=1, notify=False)
        )
        await prepared(cp)
        pid = await admin.fetchval(process)
        os.kill(pid, signal.SIGSTOP)

        try:
            with pytest.raises(BackendUnavailable) as caught:
                await write(cp)

            assert caught.value.maybe_applied
            asyncio.get_running_loop().call_later(0.2, go_on, pid)
            look = await cp.dump_thread("t")
            assert look == await cp.dump_thread("t")
        finally:
            go_on(pid)

        while await admin.fetchval(f"{process} AND pid = {pid}"):
            await admin.execute("SELECT pg_sleep(0.002)")

        assert await cp.dump_thread("t") == look


async def test_a_write_that_waits_for_a_stopped_process_is_not_in_doubt(
    server: PostgresServer, schema: str
) -> None:
    """It was not sent, and its error says so; another write may have been applied."""
    url = f"{server.url}?application_name=doubt"
    process = "SELECT pid FROM pg_stat_activity WHERE application_name = 'doubt'"
    admin = await asyncpg.connect(server.url)

    async with Store(url, schema=schema, timeout=0.5, notify=False) as cp:
        await prepared(cp)
        pid = await admin.fetchval(process)
        os.kill(pid, signal.SIGSTOP)

        try:
            with pytest.raises(BackendUnavailable) as first:
                await cp.append("t", [{}])

            with pytest.raises(BackendUnavailable, match="an earlier write") as second:
                await cp.append("u", [{}])
        finally:
            go_on(pid)

        assert (first.value.maybe_applied, second.value.maybe_applied) == (True, False)
        assert await cp.append("u", [{}]) == 1

    await admin.close()


async def test_a_write_without_a_connection_is_not_in_doubt(
    server: PostgresServer, schema: str
) -> None:
    """A caller's pool may have none left, for a reason that is not the store's."""
    async with (
        asyncpg.create_pool(server.url, min_size=1, max_size=1) as pool,
        Store(pool, schema=schema, timeout=0.3, notify=False) as cp,
    ):
        await prepared(cp)

        async with pool.acquire():
            with pytest.raises(BackendUnavailable, match="no connection") as caught:
                await cp.append("u", [{}])

        assert not caught.value.maybe_applied
        assert await cp.append("u", [{}]) == 1


async def test_a_role_that_may_not_end_a_process(
    server: PostgresServer, schema: str
) -> None:
    """Its handle still works; the write that was given up is not waited for."""
    admin = await asyncpg.connect(server.url)
    function = "EXECUTE ON FUNCTION pg_terminate_backend"
    await admin.execute(
        f"REVOKE {function} FROM PUBLIC; CREATE ROLE app LOGIN PASSWORD 'app';"
        "GRANT CREATE ON DATABASE postgres TO app"
    )

    try:
        async with (
            Proxy(f"postgresql://app:app@127.0.0.1:{server.port}/postgres") as proxy,
            Store(proxy.url, schema=schema, notify=False) as cp,
        ):
            await prepared(cp)
            await admin.execute("BEGIN")
            await admin.fetch(f"SELECT FROM {schema}.threads FOR UPDATE")
            task = asyncio.create_task(cp.save_extra("t", {"late": 1}))

            while not await admin.fetch("SELECT FROM pg_locks WHERE NOT granted"):
                await admin.execute("SELECT pg_sleep(0.002)")

            proxy.cut()

            with pytest.raises(BackendUnavailable):
                await task

            await check_not_applied(cp)
            await admin.execute("ROLLBACK")
            assert await cp.append("t", [{}]) == 2
    finally:
        await admin.execute(
            f"ROLLBACK; GRANT {function} TO PUBLIC; DROP OWNED BY app CASCADE;"
            "DROP ROLE app"
        )
        await admin.close()


async def test_closed_while_processes_are_stopped(
    server: PostgresServer, schema: str
) -> None:
    """`aclose` does not wait for ever, and no connection is left."""
    url = f"{server.url}?application_name=closed"
    processes = "SELECT pid FROM pg_stat_activity WHERE application_name = 'closed'"
    admin = await asyncpg.connect(server.url)
    cp = await Store(url, schema=schema, timeout=0.5, notify=False).__aenter__()
    await prepared(cp)
    await asyncio.gather(*map(cp.load, "abcd"))
    pids = [row["pid"] for row in await admin.fetch(processes)]

    for pid in pids:
        os.kill(pid, signal.SIGSTOP)

    try:
        for _ in range(2):  # the second one waits until the first one is given up
            with pytest.raises(BackendUnavailable):
                await cp.append("t", [{}])

        with pytest.raises(BackendUnavailable):
            await cp.aclose()
    finally:
        for pid in pids:
            go_on(pid)

    while await admin.fetch(processes):
        await admin.execute("SELECT pg_sleep(0.002)")

    await admin.close()


@pytest.mark.parametrize("is_pool", [False, True])
async def test_a_write_on_a_cut_connection_is_not_applied_late(
    is_pool: bool, server: PostgresServer, schema: str
) -> None:
    """Its process waits for a lock, and is ended before the next operation."""
    admin = await asyncpg.connect(server.url)
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(admin.close)
        proxy = await stack.enter_async_context(Proxy(server.url))
        pool = asyncpg.create_pool(proxy.url, min_size=1, max_size=1)
        where: Any = await stack.enter_async_context(pool) if is_pool else proxy.url
        cp = await stack.enter_async_context(Store(where, schema=schema, notify=False))
        await prepared(cp)
        await admin.execute("BEGIN")
        await admin.fetch(f"SELECT FROM {schema}.threads FOR UPDATE")
        task = asyncio.create_task(cp.append("t", [{"late": 1}]))

        while not await admin.fetchval(waiting):
            await admin.execute("SELECT pg_sleep(0.002)")

        proxy.cut()

        with pytest.raises(BackendUnavailable):
            await task

        await check_not_applied(cp)
        assert await admin.fetchval(waiting) == 0
        await admin.execute("COMMIT")
        await check_not_applied(cp)


async def test_hundreds_of_cancelled_operations(
    store: MakeStore, raw: asyncpg.Connection
) -> None:
    """Each is applied wholly or not at all, and no connection is lost or left over."""
    order = random.Random(7)
    where = f"{shared_postgres()}?application_name=cancelled"
    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'cancelled'"

    async with store(where, pool_size=3) as cp:
        await cp.record_issued("t", ToolCall("given", "x", {}, "given"))

        for _ in range(6):
            tasks = [
                asyncio.create_task(
                    order.choice(OPERATIONS)(cp, order.randrange(10**9))
                )
                for _ in range(100)
            ]

            for task in order.sample(tasks, 80):
                for _ in range(order.randrange(3)):
                    await asyncio.sleep(0)

                task.cancel()

            await asyncio.gather(*tasks, return_exceptions=True)

        assert await cp.append("t", [{"i": -1, "half": 0}, {"i": -1, "half": 1}]) > 0
        data = await cp.load("t")
        assert data is not None
        halves = [message["half"] for message in data.messages]
        assert halves == [0, 1] * (len(halves) // 2)
        assert all((f"b{key[1:]}" in data.extra) for key in data.extra if key[0] == "a")

        # Three operations can still run at the same time, and not more.
        await asyncio.gather(*(cp.load("t") for _ in range(100)))

        while await raw.fetchval(count) > 3:  # servers of cut connections end late
            await raw.execute("SELECT pg_sleep(0.002)")

    while await raw.fetchval(count):
        await raw.execute("SELECT pg_sleep(0.002)")


async def test_a_cancelled_read_sends_nothing(schema: str, url: str) -> None:
    """Not even a request to cancel: a pooler could pass it to another statement."""
    async with Proxy(shared_postgres()) as proxy:
        async with Store(proxy.url, schema=schema, pool_size=1) as cp:
            await cp.append("t", [{}])

            for connections in range(1, 30):
                await cp.load("t")
                assert proxy.connections == connections
                sent = proxy.trips
                proxy.stalls = True
                reading = asyncio.create_task(cp.load("t"))

                while True:
                    await asyncio.sleep(0)

                    if proxy.trips > sent:
                        break

                reading.cancel()
                await asyncio.wait([reading])
                assert reading.cancelled()
                proxy.stalls = False


@pytest.mark.parametrize("turns", sweep(range(8), range(0, 8, 3)))
async def test_closing_waits_for_abandoned_operations(
    turns: int, store: MakeStore
) -> None:
    """An abandoned write ends before the connections do; a later call is refused."""
    async with store() as cp:
        await cp.append("t", [{}])
        task = asyncio.create_task(cp.append("t", [{}], expected_version=1))

        for _ in range(turns):
            await asyncio.sleep(0)

        task.cancel()

    with contextlib.suppress(asyncio.CancelledError):
        await task

    with pytest.raises(Closed):
        await cp.load("t")

    async with store() as again:
        data = await again.load("t")
        assert data is not None
        assert data.version in (1, 2)


async def test_cancelled_while_opening(store: MakeStore) -> None:
    """The next handle opens, however far the cancelled one came."""
    for turns in (0, 1, 2, 3, 5, 10, 20):
        opening = asyncio.create_task(store().__aenter__())

        for _ in range(turns):
            await asyncio.sleep(0)

        opening.cancel()

        with contextlib.suppress(asyncio.CancelledError):
            await (await opening).aclose()

    async with store() as cp:
        assert await cp.append("t", [{}]) == 1
