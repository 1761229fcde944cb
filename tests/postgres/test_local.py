"""Files of TLS, URLs of hosted services, and limits of time."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import asyncpg
import pytest

from cpkit import BackendUnavailable, open_checkpointer
from cpkit_postgres import PostgresCheckpointer
from cpkit_postgres.errors import failure
from cpkit_postgres.options import PostgresOptions, as_pasted
from tests.postgres.conftest import MakeStore
from tests.servers.postgres import PostgresServer, shared_postgres

Store = PostgresCheckpointer[Any]


@pytest.mark.parametrize("name", ["sslrootcert", "sslcert", "sslcrl"])
async def test_a_file_that_is_missing(name: str, tmp_path: Path) -> None:
    """asyncpg does not name it, but the error says where to look."""
    with pytest.raises(BackendUnavailable, match="Can the files of TLS be read"):
        async with open_checkpointer(
            f"{shared_postgres()}?sslmode=require&{name}={tmp_path}/missing.pem",
            connect_timeout=0.05,
        ):
            pass


async def test_a_socket_that_is_missing(tmp_path: Path) -> None:
    """The server may still start: that is not a fault of a file."""
    with pytest.raises(BackendUnavailable, match="is the server running") as told:
        async with open_checkpointer(
            f"postgresql:///db?host={tmp_path}", connect_timeout=0.05
        ):
            pass

    assert not told.value.rejected


PASTED = [
    "sslmode=prefer&channel_binding=require",
    "pgbouncer=true&connection_limit=1",
    "pgbouncer=true&connect_timeout=15&pool_timeout=0&sslmode=prefer",
    "sslmode=prefer&supa=base-pooler.x&workaround=supabase-pooler.vercel",
    "sslmode=prefer&uselibpqcompat=true&gssencmode=disable&sslsni=1",
    "statement_cache_size=0&sslaccept=strict&prepared_statements=false",
    "ssl=false&keepalives=1&keepalives_idle=30&client_encoding=utf8",
]


@pytest.mark.parametrize("query", PASTED)
@pytest.mark.parametrize("as_keywords", [False, True])
async def test_a_url_as_a_hosted_service_shows_it(
    query: str, as_keywords: bool, schema: str, url: str, store: MakeStore
) -> None:
    """What it has for other clients is left out; their PgBouncer counts."""
    if as_keywords:
        query = query.replace("connect_timeout=15&", "")
        cp: Any = store(f"{shared_postgres()}?{query}")
    else:
        cp = open_checkpointer(f"{url}&{query}")

    async with cp:
        assert await cp.append("t", [{}]) == 1
        assert ("pooler" in cp.durability.settings) == ("pgbouncer" in query)


def test_a_url_that_asks_for_tls() -> None:
    """``ssl=true`` does, and the system's authorities can be named."""
    base, options = "postgresql://h/d?", PostgresOptions()
    system = {"sslrootcert": ssl.get_default_verify_paths().openssl_cafile}

    for query, expected in (
        ("ssl=true", "sslmode=require"),
        ("sslrootcert=system", urlencode(system)),
    ):
        assert as_pasted(base + query, options) == (base + expected, options)


async def test_limits_of_time_are_not_a_refusal(
    server: PostgresServer, schema: str
) -> None:
    """A repeat works: each limit that ends a statement, from the role or the URL."""
    admin = await asyncpg.connect(server.url)

    async with Store(server.url, schema=schema) as cp:
        await cp.append("t", [{}])

    limits = ["statement_timeout", "lock_timeout", "transaction_timeout"]

    if admin.get_server_version().major < 17:
        limits.remove("transaction_timeout")

    for limit in limits:
        await admin.execute(f"ALTER ROLE postgres SET {limit} = '100ms'")
        await admin.execute(f"BEGIN; LOCK TABLE {schema}.calls, {schema}.threads")

        async with asyncpg.create_pool(server.url, min_size=0) as pool:
            async with Store(pool, schema=schema, connect_timeout=0.5) as cp:
                with pytest.raises(BackendUnavailable, match="timeout") as told:
                    await cp.append("t", [{}])

                assert not told.value.rejected
                assert not told.value.maybe_applied
                await admin.execute("ROLLBACK")
                assert await cp.append("t", []) == 1

        await admin.execute(f"ALTER ROLE postgres RESET {limit}")

    await admin.close()


@pytest.mark.parametrize("code", "57014 55P03 25P03 25P04 57P05 53200".split())
def test_a_limit_of_the_server_passes(code: str) -> None:
    """Of a statement, a lock, a transaction, a session, memory: a repeat can work."""
    error = asyncpg.PostgresError("over")
    vars(error)["sqlstate"] = code
    assert failure(error, "unknown").fate != "rejected"
