"""What the suite cannot know of the example for MariaDB."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from cpkit import (
    BackendUnavailable,
    InvalidURL,
    PayloadTooLarge,
    Survives,
    ToolCall,
    open_checkpointer,
)
from cpkit.registry import inspect_store
from tests.servers.mariadb import DATABASE, MariaDBServer
from tests.servers.process import free_port


def fresh() -> str:
    return f"thread-{uuid4().hex}"


@asynccontextmanager
async def setting(server: MariaDBServer, name: str, value: str) -> AsyncIterator[None]:
    """Set a variable for sessions that begin inside the block."""
    ((_, before),) = await server.rows(f"SHOW GLOBAL VARIABLES LIKE '{name}'")
    await server.rows(f"SET GLOBAL {name} = {value}")

    try:
        yield
    finally:
        given = before if before.isdecimal() else f"'{before}'"
        await server.rows(f"SET GLOBAL {name} = {given}")


@pytest.mark.parametrize(
    "url",
    [
        "mariadb:agents",
        "mariadb://localhost",
        "mariadb://localhost/",
        "mariadb://localhost/a/b",
        "mariadb:///agents",
        "mariadb://user:se/cret@localhost/agents",
        "mariadb://user:secret@localhost:port/agents",
        "mariadb://user:secret@h1,,h2/agents",
    ],
)
def test_a_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidURL, match="write mariadb://user:password@host") as told:
        open_checkpointer(url)

    assert "cret" not in str(told.value)


async def test_the_next_host_is_used(server: MariaDBServer) -> None:
    """The first host of the URL refuses connections."""
    thread_id = fresh()
    hosts = f"127.0.0.1:{free_port()},127.0.0.1:{server.port}"
    url = f"mariadb://{server.login}@{hosts}/{DATABASE}"

    async with open_checkpointer(url) as cp:
        assert await cp.append(thread_id, [{}]) == 1


async def test_a_wrong_password_is_told_at_once(server: MariaDBServer) -> None:
    url = f"mariadb://cpkit:wrong@127.0.0.1:{server.port}/{DATABASE}"

    with pytest.raises(BackendUnavailable, match="Access denied") as refused:
        async with open_checkpointer(url):
            pass

    assert refused.value.rejected


async def test_tls_checks_the_certificate(server: MariaDBServer) -> None:
    """The user must encrypt; only an authority of the tests signed the certificate."""
    await server.rows("CREATE OR REPLACE USER secure@'127.0.0.1' REQUIRE SSL")
    await server.rows(f"GRANT ALL ON {DATABASE}.* TO secure@'127.0.0.1'")
    url = f"mariadb://secure@127.0.0.1:{server.port}/{DATABASE}"

    async with open_checkpointer(f"{url}?tls_ca={server.ca}") as cp:
        assert await cp.append(fresh(), [{}]) == 1

    with pytest.raises(BackendUnavailable, match="Access denied"):
        async with open_checkpointer(url):
            pytest.fail("it opened")

    with pytest.raises(BackendUnavailable, match=r"(?i)certificate"):
        async with open_checkpointer(f"{url}?tls=true&connect_timeout=0.2"):
            pytest.fail("it opened")

    with pytest.raises(InvalidURL, match="tls_ca"):
        open_checkpointer(f"{url}?tls_ca=/no/such/file")


async def test_a_value_of_the_largest_size_fits_into_a_packet(
    server: MariaDBServer,
) -> None:
    """Each of its bytes needs a backslash; an append has any number of them."""
    thread_id = fresh()

    async with setting(server, "max_allowed_packet", str(2**20)):
        async with open_checkpointer(server.url, max_payload=2**30) as cp:
            largest = 2**20 - 2**14
            message = {"text": "'" * (largest // 2)}

            with pytest.raises(PayloadTooLarge):
                await cp.append(thread_id, [message])

            message["text"] = "'" * (largest // 2 - len('{"text":""}'))
            assert await cp.append(thread_id, [message] * 5) == 5
            assert await cp.read(thread_id) == [message] * 5


async def test_a_batch_writes_each_key_once(server: MariaDBServer) -> None:
    """A claim of a stored key beside a restored thread that claimed its key twice."""
    thread_id, other, first, second = fresh(), fresh(), fresh(), fresh()

    async with open_checkpointer(server.url) as cp:
        for key, attempts in ((first, 1), (second, 2)):
            for number in range(attempts):
                call = ToolCall(f"{key} {number}", "pay", {}, key)
                assert await cp.record_issued(key, call) is None
                await cp.record_result(key, call.call_id, "refused", success=False)

        dump = await cp.dump_thread(second)
        assert dump is not None
        await cp.delete_thread(second, forget_keys=True)

        # The first write is on its way alone; the others wait, and share a batch.
        await asyncio.gather(
            cp.append(thread_id, [{}]),
            cp.record_issued(other, ToolCall("c", "pay", {}, first)),
            cp.restore_thread(dump),
        )
        assert [call.attempt for call in await cp.list_calls(second)] == [1, 2]
        assert [call.attempt for call in await cp.list_calls(other)] == [2]


async def test_the_servers_sql_mode_is_not_the_sessions(server: MariaDBServer) -> None:
    """Without backslash escapes, or with quoted names, a text would be another one."""
    modes = "'ANSI_QUOTES,NO_BACKSLASH_ESCAPES'"
    thread_id = f"{fresh()} \\' \" \\\\ %s ; -- 😀"

    async with setting(server, "sql_mode", modes):
        async with open_checkpointer(server.url) as cp:
            message = {"text": "\\' OR 1=1; -- %s", "\\": '"'}
            assert await cp.append(thread_id, [message], expected_version=0) == 1
            assert await cp.read(thread_id) == [message]


@pytest.mark.parametrize(
    ("flush", "survives"),
    [("0", Survives.NONE), ("1", Survives.MACHINE), ("2", Survives.PROCESS)],
)
async def test_durability_is_what_the_server_says(
    server: MariaDBServer, flush: str, survives: Survives
) -> None:
    name = "innodb_flush_log_at_trx_commit"

    async with setting(server, name, flush), open_checkpointer(server.url) as cp:
        durability = cp.durability
        assert durability.survives is survives
        assert durability.settings[name] == flush
        assert bool(durability.advice) is (flush != "1")


async def test_inspection_creates_nothing(server: MariaDBServer) -> None:
    database = f"empty_{uuid4().hex[:8]}"
    await server.rows(f"CREATE DATABASE {database}")
    url = server.url.replace(f"/{DATABASE}", f"/{database}")

    info = await inspect_store(url)
    assert info is not None
    assert not info.exists
    assert not await server.rows(f"SHOW TABLES FROM {database}")

    async with open_checkpointer(url):
        pass

    info = await inspect_store(url)
    assert info is not None
    assert (info.exists, info.version) == (True, 1)
    assert info.size


async def test_a_locked_thread_is_told_as_not_written(server: MariaDBServer) -> None:
    """A person's transaction holds the row; another handle's threads go on."""
    thread_id, other = fresh(), fresh()

    async with (
        open_checkpointer(server.url, timeout=1) as cp,
        open_checkpointer(server.url) as beside,
        server.connected() as connection,
        connection.cursor() as person,
    ):
        assert await cp.append(thread_id, [{}]) == 1
        await person.execute("BEGIN")
        query = "SELECT * FROM cpkit_threads WHERE thread_id = %s FOR UPDATE"
        await person.execute(query, thread_id)
        blocked = asyncio.create_task(cp.append(thread_id, [{}]))
        assert await beside.append(other, [{}]) == 1

        with pytest.raises(BackendUnavailable, match="no answer within 1 s") as refused:
            await blocked

        assert not refused.value.maybe_applied
        await person.execute("ROLLBACK")
        assert await cp.append(thread_id, [{}]) == 2
