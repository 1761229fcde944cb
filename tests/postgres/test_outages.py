"""The server is killed, replaced, or full: what is acknowledged stays."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import pytest

from conformance.slowdown import slowdown
from cpkit import BackendUnavailable
from cpkit_postgres import PostgresCheckpointer
from tests.postgres.conftest import PASSWORD
from tests.servers.postgres import PostgresServer
from tests.servers.process import give, unprivileged

Store = PostgresCheckpointer[Any]


@asynccontextmanager
async def plain(server: PostgresServer) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(server.url)

    try:
        yield connection
    finally:
        await connection.close()


async def until(check: Callable[[], Awaitable[object]]) -> None:
    """Return when the check is true."""
    while True:
        if await check():
            return

        await asyncio.sleep(0.002)


async def test_killed_while_writing(server: PostgresServer, schema: str) -> None:
    """Acknowledged messages survive, none is stored twice, and the handle works on.

    The threads are trimmed to the newest messages meanwhile: nothing newer is lost, and
    nothing older comes back.
    """
    acknowledged: dict[str, int] = {}
    trimmed: dict[str, int] = {}
    progress = asyncio.Event()
    killed = asyncio.Event()

    async def write(cp: Store, thread_id: str) -> None:
        version = 0

        while True:
            acknowledged[thread_id] = version
            progress.set()

            try:
                version = await cp.append(
                    thread_id, [{"i": version}], expected_version=version
                )
            except BackendUnavailable as exc:
                if not exc.maybe_applied:
                    continue

                data = await cp.load(thread_id)
                now = data.version if data else 0
                assert now in (version, version + 1)
                version = now

            if killed.is_set() and version > acknowledged[thread_id] > 0:
                return

    async def trim(cp: Store, thread_id: str) -> None:
        while not killed.is_set():
            before = max(0, acknowledged[thread_id] - 3)

            with suppress(BackendUnavailable):
                await cp.trim(thread_id, before)
                trimmed[thread_id] = before

    async with Store(server.url, schema=schema, connect_timeout=30) as cp:
        writers = [asyncio.create_task(write(cp, f"t{i}")) for i in range(12)]
        writers += [asyncio.create_task(trim(cp, f"t{i}")) for i in range(0, 12, 2)]

        for _ in range(2):
            enough = sum(acknowledged.values()) + 100

            while sum(acknowledged.values()) < enough:
                await progress.wait()
                progress.clear()

            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)

        killed.set()
        await asyncio.gather(*writers)

        for thread_id, version in acknowledged.items():
            data = await cp.load(thread_id)
            assert data is not None
            assert data.version >= version
            assert trimmed.get(thread_id, 0) <= data.first <= max(0, version - 3)
            kept = range(data.first, data.version)
            assert data.messages == [{"i": i} for i in kept]


async def test_back_within_the_timeout(server: PostgresServer, schema: str) -> None:
    """A server that comes back within ``connect_timeout`` causes no error."""
    async with Store(server.url, schema=schema, connect_timeout=30) as cp:
        await cp.append("t", [{}])
        await asyncio.to_thread(server.stop)
        operations = [
            asyncio.create_task(cp.append("t", [{}], expected_version=1)),
            asyncio.create_task(cp.save_extra("t", {"a": 1})),
            asyncio.create_task(cp.find_call("k")),
        ]
        await asyncio.sleep(0)
        await asyncio.to_thread(server.start)
        assert await asyncio.gather(*operations) == [2, None, None]


async def test_failover(server: PostgresServer, schema: str) -> None:
    """A standby that is promoted takes over; the same handle finds it."""
    with server.standby() as other:
        secret = quote(PASSWORD, safe="")
        url = (
            f"postgresql://postgres:{secret}@127.0.0.1:{server.port},"
            f"127.0.0.1:{other.port}/postgres"
        )

        async with (
            Store(url, schema=schema, connect_timeout=30) as cp,
            plain(other) as replica,
        ):
            await cp.append("t", [{}])

            await until(
                lambda: replica.fetchval("SELECT to_regclass($1)", f"{schema}.calls")
            )
            await until(lambda: replica.fetchval(f"SELECT 1 FROM {schema}.messages"))
            await asyncio.to_thread(server.kill)
            append = asyncio.create_task(cp.append("t", [{}], expected_version=1))
            await asyncio.sleep(0)
            assert await replica.fetchval("SELECT pg_promote()")
            assert await append == 2
            assert (
                await replica.fetchval(f"SELECT count(*) FROM {schema}.messages") == 2
            )


async def test_a_standby_is_refused(server: PostgresServer, schema: str) -> None:
    """It may lag behind; only ``target_session_attrs=any`` accepts it."""
    async with Store(server.url, schema=schema) as cp:
        await cp.append("t", [{}])

        with server.standby() as other:
            with pytest.raises(BackendUnavailable, match="primary"):
                async with Store(other.url, schema=schema, connect_timeout=1):
                    pass

            url = f"{other.url}?target_session_attrs=any"

            async with Store(url, schema=schema) as replica:
                data = await replica.load("t")
                assert data is not None
                assert data.version == 1

                with pytest.raises(BackendUnavailable, match="no writes") as caught:
                    await replica.append("t", [{}])

                assert not caught.value.maybe_applied


async def test_a_server_without_free_connections(
    server: PostgresServer, schema: str
) -> None:
    """Wait, then raise; a later operation works when a connection is free."""
    others: list[asyncpg.Connection] = []

    async with Store(server.url, schema=schema, connect_timeout=1 * slowdown()) as cp:
        await cp.append("t", [{}])
        await asyncio.to_thread(server.restart)

        try:
            while len(others) < 30:
                others.append(await asyncpg.connect(server.url))
        except asyncpg.TooManyConnectionsError:
            pass

        try:
            with pytest.raises(BackendUnavailable, match="too many clients") as caught:
                await cp.append("t", [{}])
        finally:
            await asyncio.gather(*(other.close() for other in others))

        assert not caught.value.maybe_applied
        assert await cp.append("t", [{}]) == 2


@pytest.fixture
def small_disk(server: PostgresServer, tmp_path: Path) -> Iterator[Path]:
    """A file system of eight megabytes that the server may write to."""
    folder = server.data.parent / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)],
        stderr=subprocess.PIPE,
        check=False,
    )

    if mounted.returncode:
        folder.rmdir()
        pytest.skip(f"no right to mount: {mounted.stderr.decode()}")

    try:
        server.own(folder)
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


async def test_a_full_disk(
    server: PostgresServer, schema: str, small_disk: Path
) -> None:
    """The append that does not fit is not written; with more space the store works."""
    move = f"ALTER TABLE {schema}.messages SET TABLESPACE"

    async def fill(cp: Store, written: list[int]) -> None:
        while len(written) < 10_000:
            new = range(len(written), len(written) + 50)
            await cp.append("t", [{"i": i, "pad": "x" * 1500} for i in new])
            written += new

    async with plain(server) as admin:
        await admin.execute(f"CREATE TABLESPACE small LOCATION '{small_disk}'")

        try:
            async with Store(server.url, schema=schema) as cp:
                await admin.execute(f"{move} small")
                written: list[int] = []

                with pytest.raises(BackendUnavailable, match="No space left") as caught:
                    await fill(cp, written)

                assert not caught.value.maybe_applied
                data = await cp.load("t")
                assert data is not None
                assert [m["i"] for m in data.messages] == written
                await admin.execute(f"{move} pg_default")
                assert await cp.append("t", [{}]) == len(written) + 1
        finally:
            await admin.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
            await admin.execute("DROP TABLESPACE small")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")
async def test_a_certificate_that_is_not_trusted_any_more(schema: str) -> None:
    """The server is unavailable, and the URL is not wrong: a retry can succeed."""

    with PostgresServer() as server:
        trusted = quote(str(server.data / "good.crt"), safe="")
        url = f"{server.url}?sslmode=verify-ca&sslrootcert={trusted}"

        async def connects() -> bool:
            try:
                await (await asyncpg.connect(url)).close()
            except OSError:
                return False

            return True

        async def use(raw: asyncpg.Connection, name: str) -> None:
            await raw.execute(f"ALTER SYSTEM SET ssl_cert_file = '{name}.crt'")
            await raw.execute(f"ALTER SYSTEM SET ssl_key_file = '{name}.key'")
            await raw.execute("SELECT pg_reload_conf()")

            # The server reads its settings again a moment later.
            while await connects() != (name == "good"):  # noqa: ASYNC110  # no event
                await asyncio.sleep(0.01)

        for name in ("good", "bad"):
            make_certificate(server.data, name)

        async with plain(server) as raw:
            await raw.execute("ALTER SYSTEM SET ssl = on")
            await use(raw, "good")

            async with Store(url, schema=schema) as cp:
                await cp.append("t", [{}])
                await use(raw, "bad")
                await raw.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_ssl WHERE ssl"
                )

                with pytest.raises(BackendUnavailable, match="certificate"):
                    await cp.load("t")

                with pytest.raises(BackendUnavailable, match="certificate") as caught:
                    await cp.append("t", [{}])

                assert not caught.value.maybe_applied
                await use(raw, "good")
                assert await cp.append("t", [{}]) == 2


def make_certificate(folder: Path, name: str) -> None:
    """Create a key, and a certificate for 127.0.0.1 that signs itself."""
    subject = "-subj /CN=127.0.0.1 -addext keyUsage=keyCertSign,digitalSignature"
    key = f"-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {name}.key"
    subprocess.run(
        ["openssl", *f"req -x509 {key} -days 30 {subject} -out {name}.crt".split()],
        cwd=folder,
        stderr=subprocess.DEVNULL,
        check=True,
    )

    for kind in ("key", "crt"):
        give(folder / f"{name}.{kind}", unprivileged())
