"""The server is killed, restarted, replaced, stopped or full: which error is raised."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import pytest

from conformance.slowdown import slowdown
from cpkit import BackendUnavailable, ToolCall, VersionConflict
from cpkit_postgres import PostgresCheckpointer
from tests.postgres.conftest import PASSWORD
from tests.postgres.proxy import Proxy
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


@asynccontextmanager
async def lossy(
    server: PostgresServer, schema: str
) -> AsyncIterator[tuple[Proxy, Store]]:
    """Return a proxy that can lose answers, and a store that sends nothing else."""
    async with (
        Proxy(server.url) as proxy,
        Store(proxy.url, schema=schema, notify=False) as cp,
    ):
        yield proxy, cp


async def until(check: Callable[[], Awaitable[object]]) -> None:
    """Return when the check is true."""
    while True:
        if await check():
            return

        await asyncio.sleep(0.002)


async def waiting_for_a_lock(connection: asyncpg.Connection) -> int:
    """Wait until a backend waits for a lock; return its process id."""
    while True:
        pid: int | None = await connection.fetchval(
            "SELECT pid FROM pg_locks WHERE NOT granted"
        )

        if pid is not None:
            return pid

        await asyncio.sleep(0.005)


async def lock_thread(
    connection: asyncpg.Connection, schema: str, thread_id: str
) -> None:
    """Lock a thread's row, as a deletion does that never commits."""
    await connection.execute("BEGIN")
    await connection.fetch(
        f"SELECT FROM {schema}.threads WHERE thread_id = $1 FOR UPDATE", thread_id
    )


async def test_a_restart_of_the_server_needs_no_retry_by_the_caller(
    server: PostgresServer, schema: str
) -> None:
    """The connections are lost; the next operations connect again."""
    async with Store(server.url, schema=schema) as cp:
        await asyncio.gather(*(cp.append(f"t{i}", [{}]) for i in range(20)))
        await asyncio.to_thread(server.restart)
        assert await cp.append("t1", [{}], expected_version=1) == 2
        await asyncio.to_thread(server.restart)
        assert await cp.record_issued("t1", ToolCall("c", "pay", {}, "k")) is None
        await asyncio.to_thread(server.restart)
        data = await cp.load("t1")
        assert data is not None
        assert (data.version, len(data.pending)) == (2, 1)


async def test_killed_while_writing(server: PostgresServer, schema: str) -> None:
    """Acknowledged messages survive, none is stored twice, and the handle works on."""
    acknowledged: dict[str, int] = {}
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

    async with Store(server.url, schema=schema, connect_timeout=30) as cp:
        writers = [asyncio.create_task(write(cp, f"t{i}")) for i in range(12)]

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
            assert data.messages == [{"i": i} for i in range(data.version)]


async def test_down_and_up_again(server: PostgresServer, schema: str) -> None:
    """Without a server the error says that nothing was written."""
    async with Store(server.url, schema=schema, connect_timeout=1 * slowdown()) as cp:
        await cp.append("t", [{}])
        await asyncio.to_thread(server.stop)
        outcomes = await asyncio.gather(
            cp.append("t", [{}]),
            cp.load("t"),
            cp.delete_thread("t"),
            return_exceptions=True,
        )

        for outcome in outcomes:
            assert isinstance(outcome, BackendUnavailable)
            assert not outcome.maybe_applied
            assert outcome.__cause__ is not None

        await asyncio.to_thread(server.start)
        assert await cp.append("t", [{}]) == 2


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


async def test_the_answer_to_an_append_is_lost(
    server: PostgresServer, schema: str
) -> None:
    """The error says that it may be applied; the same append again is refused."""
    async with lossy(server, schema) as (proxy, cp):
        # Each statement is prepared, so that the lost answer is that to the append.
        await cp.append("t", [{}])
        await cp.append("t", [{}])
        proxy.lose_answer()

        with pytest.raises(BackendUnavailable) as caught:
            await cp.append("t", [{"i": 1}], expected_version=2)

        assert caught.value.maybe_applied
        assert proxy.lost == 1

        with pytest.raises(VersionConflict):
            await cp.append("t", [{"i": 1}], expected_version=2)

        data = await cp.load("t")
        assert data is not None
        assert data.messages == [{}, {}, {"i": 1}]


async def test_the_answer_to_a_batch_is_lost(
    server: PostgresServer, schema: str
) -> None:
    """Each caller gets an error of its own that is true of its append."""
    async with lossy(server, schema) as (proxy, cp):
        await asyncio.gather(*(cp.append(f"t{i}", [{}]) for i in range(40)))
        gathered = asyncio.gather(
            *(cp.append(f"t{i % 20}", [{"i": i}]) for i in range(40)),
            return_exceptions=True,
        )
        proxy.lose_answer()
        outcomes = await gathered
        errors = [one for one in outcomes if isinstance(one, BackendUnavailable)]
        assert errors
        assert len(set(map(id, errors))) == len(errors)
        assert all(error.maybe_applied and error.__cause__ for error in errors)

        for i, outcome in enumerate(outcomes):
            data = await cp.load(f"t{i % 20}")
            assert data is not None
            assert (outcome in errors) or {"i": i} in data.messages


async def test_the_answer_to_a_call_is_lost(
    server: PostgresServer, schema: str
) -> None:
    """The same call again shows whether it was applied."""
    call = ToolCall("c", "pay", {"amount": 1}, "k")

    async with lossy(server, schema) as (proxy, cp):
        # Each statement prepared, so that the answer lost is that to the statement.
        await cp.record_issued("t", ToolCall("c0", "pay", {}, "k0"))
        await cp.record_result("t", "c0", None)
        proxy.lose_answer()

        with pytest.raises(BackendUnavailable) as caught:
            await cp.record_issued("t", call)

        assert caught.value.maybe_applied
        mine = await cp.record_issued("t", call)
        assert mine is not None
        assert (mine.status, mine.call, mine.attempt) == ("issued", call, 1)
        await cp.record_result("t", "c0", None)
        proxy.lose_answer()

        with pytest.raises(BackendUnavailable) as caught:
            await cp.record_result("t", "c", "paid")

        assert caught.value.maybe_applied
        assert (await cp.record_result("t", "c", "another")).result == "paid"


async def test_the_answer_to_the_commit_of_a_pool_is_lost(
    server: PostgresServer, schema: str
) -> None:
    """The pool has taken back the connection by then; the restore is not repeated."""

    class LosesCommit(Proxy):
        async def pass_on(
            self, part: str, data: bytes, writer: asyncio.StreamWriter
        ) -> None:
            if part == "answer" and b"COMMIT\0" in data:
                raise ConnectionAbortedError

            await super().pass_on(part, data, writer)

    async with Store(server.url, schema=schema, notify=False) as cp:
        await cp.append("t", [{"i": 1}])
        dump = await cp.dump_thread("t")
        assert dump is not None

    async with (
        LosesCommit(server.url) as proxy,
        asyncpg.create_pool(proxy.url, min_size=1, max_size=1) as pool,
        Store(pool, schema=schema, notify=False) as cp,
    ):
        with pytest.raises(BackendUnavailable) as caught:
            await cp.restore_thread(replace(dump, thread_id="copy"))

        assert caught.value.maybe_applied
        assert await cp.read("copy") == [{"i": 1}]


async def test_a_read_is_repeated(server: PostgresServer, schema: str) -> None:
    """A lost answer to a read raises no error."""
    async with lossy(server, schema) as (proxy, cp):
        await cp.append("t", [{}])
        await cp.load("t")
        proxy.lose_answer()
        data = await cp.load("t")
        assert data is not None
        assert data.version == proxy.lost == 1


async def test_no_answer_at_all(server: PostgresServer, schema: str) -> None:
    """After ``timeout`` the operation raises, and its connection is closed."""
    async with Proxy(server.url) as proxy:
        async with Store(
            proxy.url,
            schema=schema,
            timeout=1 * slowdown(),
            connect_timeout=1 * slowdown(),
        ) as cp:
            await cp.append("t", [{}])
            await cp.append("t", [{}])  # the statement is prepared
            proxy.stalls = True

            with pytest.raises(BackendUnavailable, match="no answer") as caught:
                await cp.append("t", [{}], expected_version=2)

            assert caught.value.maybe_applied
            proxy.stalls = False
            data = await cp.load("t")
            assert data is not None
            assert data.version == 3


async def test_a_stopped_server(server: PostgresServer, schema: str) -> None:
    """Each operation raises after ``timeout``; a write that was sent may be applied."""
    calls = [ToolCall(f"c{i}", "pay", {}, f"k{i}") for i in range(2)]

    async with Store(
        server.url,
        schema=schema,
        timeout=2 * slowdown(),
        connect_timeout=0.5 * slowdown(),
    ) as cp:
        await cp.append("t", [{}])
        await cp.append("gone", [{}])
        await cp.record_issued("t", calls[0])
        # One connection for each operation; the two appends share one.
        async with plain(server) as blocker:
            transaction = blocker.transaction()
            await transaction.start()
            await blocker.execute(f'LOCK TABLE "{schema}".threads')
            loads = asyncio.gather(*(cp.load("t") for _ in range(7)))
            waiting = "SELECT count(DISTINCT pid) = 7 FROM pg_locks WHERE NOT granted"
            await until(partial(blocker.fetchval, waiting))
            await transaction.rollback()
            await loads

        server.pause()

        try:
            writes = asyncio.gather(
                cp.append("t", [{}]),
                cp.append("u", [{}], extra={"a": 1}),
                cp.save_extra("t", {"a": 1}),
                cp.record_issued("t", calls[1]),
                cp.record_result("t", "c0", None),
                cp.delete_thread("gone"),
                return_exceptions=True,
            )
            reads = asyncio.gather(
                cp.load("t"), cp.find_completed("k0"), return_exceptions=True
            )

            for written in await writes:
                assert isinstance(written, BackendUnavailable)
                assert written.maybe_applied

            for read in await reads:
                assert isinstance(read, BackendUnavailable)
                assert not read.maybe_applied

            # The connections are closed, and no new one is possible.
            with pytest.raises(BackendUnavailable) as caught:
                await cp.append("t", [{}])

            assert not caught.value.maybe_applied
        finally:
            server.resume()

        data = await cp.load("t")
        assert data is not None
        assert data.version in (1, 2)
        assert await cp.append("t", [{}]) == data.version + 1


async def test_a_locked_thread_does_not_hold_up_the_others_of_a_batch(
    server: PostgresServer, schema: str
) -> None:
    """Its own appends wait for the lock, and keep their order."""
    async with (
        Store(server.url, schema=schema) as cp,
        plain(server) as holder,
        plain(server) as admin,
    ):
        await cp.append("a", [{}])
        await cp.append("b", [{}])
        await lock_thread(holder, schema, "a")
        locked = [
            asyncio.create_task(cp.append("a", [{}], expected_version=version))
            for version in (1, 2)
        ]
        others = (cp.append("b", [{}]), cp.append("new", [{}], expected_version=0))
        assert list(await asyncio.gather(*others)) == [2, 1]
        await waiting_for_a_lock(admin)
        assert await cp.append("b", [{}]) == 3
        await holder.execute("ROLLBACK")
        assert await asyncio.gather(*locked) == [2, 3]


async def test_the_backend_is_terminated(server: PostgresServer, schema: str) -> None:
    """The statement may be applied; the next one works."""
    async with (
        Store(server.url, schema=schema) as cp,
        plain(server) as holder,
        plain(server) as admin,
    ):
        await cp.append("t", [{}])
        await lock_thread(holder, schema, "t")
        append = asyncio.create_task(cp.append("t", [{}], expected_version=1))
        pid = await waiting_for_a_lock(admin)
        await admin.execute("SELECT pg_terminate_backend($1)", pid)

        with pytest.raises(BackendUnavailable) as caught:
            await append

        assert caught.value.maybe_applied
        await holder.execute("ROLLBACK")
        assert await cp.append("t", [{}], expected_version=1) == 2


async def test_the_statement_is_cancelled(server: PostgresServer, schema: str) -> None:
    """By an administrator, or by ``statement_timeout``: nothing was written."""
    url = f"{server.url}?statement_timeout=100"

    async with Store(url, schema=schema) as cp, plain(server) as holder:
        await cp.append("t", [{}])
        await lock_thread(holder, schema, "t")

        with pytest.raises(BackendUnavailable, match="statement timeout") as caught:
            await cp.append("t", [{}])

        assert not caught.value.maybe_applied
        await holder.execute("ROLLBACK")
        assert await cp.append("t", [{}]) == 2


async def test_a_lock_timeout_is_tried_again(
    server: PostgresServer, schema: str
) -> None:
    """It wrote nothing, so it is repeated without an error."""
    url = f"{server.url}?lock_timeout=20"

    async with (
        Store(url, schema=schema, connect_timeout=30) as cp,
        plain(server) as holder,
        plain(server) as admin,
    ):
        await cp.append("t", [{}])
        await lock_thread(holder, schema, "t")
        append = asyncio.create_task(cp.append("t", [{}]))
        first = await waiting_for_a_lock(admin)

        gone = "SELECT $1 NOT IN (SELECT pid FROM pg_locks WHERE NOT granted)"
        await until(lambda: admin.fetchval(gone, first))
        await holder.execute("ROLLBACK")
        assert await append == 2


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


async def test_a_server_that_takes_no_writes(
    server: PostgresServer, schema: str
) -> None:
    """Reads work; a write connects again, perhaps to another server."""
    async with plain(server) as admin:
        await admin.execute(
            "CREATE ROLE clerk SUPERUSER LOGIN PASSWORD 'x'; "
            "ALTER ROLE clerk SET default_transaction_read_only = on"
        )

        try:
            async with Store(server.url, schema=schema) as cp:
                await cp.append("t", [{}])

            url = f"postgresql://clerk:x@127.0.0.1:{server.port}/postgres"

            async with Store(url, schema=schema) as cp:
                assert await cp.load("t") is not None

                for _ in range(3):
                    with pytest.raises(BackendUnavailable, match="no writes") as caught:
                        await cp.append("t", [{}])

                    assert not caught.value.maybe_applied

                await admin.execute(
                    "ALTER ROLE clerk RESET default_transaction_read_only"
                )

                assert await cp.append("t", [{}]) == 2
        finally:
            await admin.execute("DROP ROLE clerk")


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
    made = f"-days 30 {subject} -keyout {name}.key -out {name}.crt"
    subprocess.run(
        ["openssl", *f"req -x509 -newkey rsa:2048 -nodes {made}".split()],
        cwd=folder,
        stderr=subprocess.DEVNULL,
        check=True,
    )

    for kind in ("key", "crt"):
        give(folder / f"{name}.{kind}", unprivileged())
