"""Faults of this machine are told by name, at once; URLs of hosted services work."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from cpkit import BackendUnavailable, open_checkpointer
from cpkit_postgres import PostgresCheckpointer
from cpkit_postgres.errors import failure
from tests.postgres.conftest import MakeStore
from tests.postgres.test_outages import make_certificate
from tests.servers.postgres import PostgresServer, shared_postgres

Store = PostgresCheckpointer[Any]


async def refusal(url: str) -> str:
    """Return why a store cannot be opened; it is not tried again."""
    with pytest.raises(BackendUnavailable) as told:
        async with open_checkpointer(url, connect_timeout=1000):
            pass

    assert told.value.rejected
    assert "is the server running" not in str(told.value)
    return str(told.value)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")
@pytest.mark.parametrize("name", ["sslrootcert", "sslcert", "sslkey", "sslcrl"])
@pytest.mark.parametrize("place", ["missing.pem", ""])
async def test_a_file_that_cannot_be_read(
    name: str, place: str, tmp_path: Path
) -> None:
    """The error names it: a certificate, a key, or a folder in its place."""
    make_certificate(tmp_path, "good")
    given = dict.fromkeys(("sslcert", "sslrootcert"), tmp_path / "good.crt")
    given |= {"sslkey": tmp_path / "good.key", name: tmp_path / place}
    query = "&".join(f"{one}={path}" for one, path in given.items())
    told = await refusal(f"{shared_postgres()}?sslmode=require&{query}")
    assert f"cannot read {tmp_path / place}: " in told


async def test_a_file_without_a_certificate(tmp_path: Path) -> None:
    """The error names the parameters that name files."""
    empty = tmp_path / "empty.pem"
    empty.touch()
    url = f"{shared_postgres()}?sslmode=require&sslrootcert={empty}"
    assert "see sslrootcert" in await refusal(url)


async def test_a_server_without_tls() -> None:
    """The error names the parameter that asks for it."""
    told = await refusal(f"{shared_postgres()}?sslmode=require")
    assert "sslmode asks for TLS" in told


async def test_a_user_id_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers have it: the URL needs a user."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)

    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    told = await refusal("postgresql://127.0.0.1/postgres")
    assert "user id 4000000000 has no name" in told
    assert "PGUSER" in told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_the_home_of_another_user(tmp_path: Path) -> None:
    """As with ``sudo -u``: the error names the file that cannot be read there."""
    home = tmp_path / "home"
    (home / ".postgresql").mkdir(parents=True)
    home.chmod(0o700)
    place = Path(__file__).parents[2]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.postgres.other_user", shared_postgres(schema="home")),
        env=os.environ | {"HOME": str(home)},
        cwd=place,
        stdout=subprocess.PIPE,
    )
    out = (await process.communicate())[0].decode().partition("as another user")
    assert out[0] == "opened\n"
    assert f"cannot read {home}/.postgresql/" in out[2]
    assert "Permission denied" in out[2]


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


async def test_a_url_that_asks_for_tls(tmp_path: Path) -> None:
    """``ssl=true`` does, and the system's authorities can be named."""
    base = f"{shared_postgres()}?"
    assert "asks for TLS" in await refusal(f"{base}ssl=true")
    system = ssl.get_default_verify_paths().openssl_cafile
    told = await refusal(f"{base}sslmode=verify-full&sslrootcert=system")
    assert ("asks for TLS" if Path(system).exists() else system) in told


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
