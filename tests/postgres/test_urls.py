"""URLs, options, passwords, and a caller's pool."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from urllib.parse import quote

import asyncpg
import pytest

from cpkit import BackendUnavailable, Closed, InvalidURL, open_checkpointer
from cpkit_postgres import PostgresCheckpointer, PostgresStore
from tests.postgres.conftest import PASSWORD, MakeStore
from tests.servers.postgres import PostgresServer, shared_postgres
from tests.servers.process import free_port

Store = PostgresCheckpointer[Any]

SECRET = "geheim"


async def test_both_schemes(url: str) -> None:
    """``postgres:`` is ``postgresql:``."""
    for scheme in ("postgresql", "postgres"):
        async with open_checkpointer(url.replace("postgresql", scheme)) as cp:
            await cp.append("t", [{}])

    async with open_checkpointer(url) as cp:
        data = await cp.load("t")
        assert data is not None
        assert data.version == 2


async def test_parameters_of_asyncpg_go_to_asyncpg(
    url: str, raw: asyncpg.Connection
) -> None:
    """They stay in the URL."""
    named = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'agent 7'"

    async with open_checkpointer(f"{url}&application_name=agent+7"):
        assert await raw.fetchval(named) == 1


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql:db", "postgresql://user"),
        ("postgresql:///db?pool_size=0", "pool_size"),
        ("postgresql:///db?pooler=statement", "'session' or 'transaction'"),
        ("postgresql:///db?connect_timeout=-1", "connect_timeout"),
        ("postgresql:///db?colour=red", "has no option 'colour'"),
        (f"postgresql://me:{SECRET}@{SECRET}@host/db", "%40"),
        (f"postgresql://me:{SECRET}/x@host/db", "%40|%2F"),
        ("postgresql:///db?timeout=0", "timeout"),
        ("postgresql:///db?command_timeout=5", "has no option 'command_timeout'"),
        ("postgresql:///db?dialect=portable", "has no option 'dialect'"),
        ("postgresql://localhost:123456789/db", "host:port"),
        (f"postgresql://me:{SECRET}", "host:port"),
        (f"postgresql://me:{SECRET}@host:port/db", "host:port"),
        (f"postgresql://me:{SECRET}?x@host/db", "%3F"),
    ],
)
def test_a_wrong_url(url: str, words: str) -> None:
    """It is refused at once; the error says what to write and shows no password."""
    with pytest.raises(InvalidURL, match=words) as caught:
        open_checkpointer(url)

    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("/db?host=127.0.0.1&sslmode=perhaps", "sslmode"),
        ("/db?host=127.0.0.1&port=65536", "port"),
        ("127.0.0.1:65536/db", "port"),
    ],
)
async def test_a_url_that_asyncpg_refuses(place: str, words: str) -> None:
    """The URL is wrong, not the server."""
    with pytest.raises(InvalidURL, match=words):
        async with open_checkpointer(f"postgresql://{place}"):
            pass


async def test_the_server_limits_statements(schema: str, url: str) -> None:
    """By ``timeout``, unless the URL has a limit of its own."""
    for query, timeout, expected in (
        ("", 7, "7s"),
        ("?statement_timeout=1234", 7, "1234ms"),
        ("", 7.5, "7500ms"),
    ):
        async with Store(
            shared_postgres() + query, schema=schema, timeout=timeout
        ) as cp:
            store = cp.store
            assert isinstance(store, PostgresStore)
            ((found,),) = await store._connections.fetch("SHOW statement_timeout")
            assert found == expected


async def test_the_password_is_never_shown(
    server: PostgresServer, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a repr, an error with its causes and attributes, nor a log has it."""
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    wrong = server.url.replace(quote(PASSWORD, safe=""), SECRET)
    nowhere = f"postgresql://postgres:{SECRET}@127.0.0.1:{free_port()}/postgres"
    in_query = f"postgresql://127.0.0.1:{server.port}/postgres?password={SECRET}"

    async with Store(server.url, schema=schema) as cp:
        shown += [repr(cp), str(cp.durability)]
        await cp.append("t", [{}])
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        await cp.append("t", [{}])

    with pytest.raises(Closed) as closed:
        await cp.load("t")

    shown += [repr(closed.value)]

    for url in (wrong, nowhere, in_query):
        with pytest.raises(BackendUnavailable) as caught:
            async with Store(url, connect_timeout=0.05):
                pass

        error: BaseException | None = caught.value

        while error is not None:
            shown += [str(error), repr(error), repr(vars(error))]
            error = error.__cause__ or error.__context__

    everything = "\n".join([*shown, caplog.text])
    assert "postgresql://postgres:***@127.0.0.1" in everything

    for secret in (SECRET, PASSWORD, quote(PASSWORD, safe="")):
        assert secret not in everything


async def test_a_callers_pool(schema: str, url: str) -> None:
    """It stays open, and one handle after another can use it."""
    async with asyncpg.create_pool(shared_postgres(), min_size=0, max_size=2) as pool:
        for version in (1, 2):
            async with Store(pool, schema=schema) as cp:
                assert "pool" in repr(cp)
                # The metrics call the store by what stands before the colon.
                assert cp.store.name.startswith("postgresql:pool?")
                versions = await asyncio.gather(
                    *(cp.append(f"{i}", [{}]) for i in range(9))
                )
                assert {*versions} == {version}

            assert await pool.fetchval("SELECT 1") == 1
            assert pool.get_idle_size() == pool.get_size()

    with pytest.raises(BackendUnavailable, match="pool is closed"):
        async with Store(pool, schema=schema):
            pass


async def test_a_handle_leaves_no_connection(
    store: MakeStore, raw: asyncpg.Connection
) -> None:
    """After the context every connection of it is gone from the server."""
    name = "leaves nothing"
    theirs = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1"
    url = f"{shared_postgres()}?application_name={quote(name)}"

    async with store(where=url) as cp:
        await asyncio.gather(*(cp.append(f"{i}", [{}]) for i in range(20)))
        await asyncio.gather(*(cp.load(f"{i}") for i in range(20)))
        assert await raw.fetchval(theirs, name) > 1

    while await raw.fetchval(theirs, name):
        await raw.execute("SELECT pg_sleep(0.002)")
