"""The write-ahead log: copied under the write lock, kept small, never in the way."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from conformance import Clause, Status, run_clause, select
from cpkit import BackendUnavailable, Survives
from cpkit_sqlite import SQLiteCheckpointer, connection
from cpkit_sqlite.connection import has_wal_reset_bug
from tests.sqlite.inside import reader, store_of, writer
from tests.sqlite.small_log import LOG_BYTES, SmallLogHarness

Store = SQLiteCheckpointer[Any]

LIMIT = 256 * 1024
MESSAGE = {"pad": "x" * 4000}


@pytest.fixture
def small_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LOG_BYTES", LIMIT)


def log_size(path: str) -> int:
    return os.path.getsize(f"{path}-wal")


async def test_sqlite_never_checkpoints_by_itself(path: str) -> None:
    """Its automatic checkpoints run without the write lock."""
    async with Store(path) as cp:
        for one in (await writer(cp), reader(cp)):
            (row,) = await one.execute_fetchall("PRAGMA wal_autocheckpoint")
            assert tuple(row) == (0,)


@pytest.mark.usefixtures("small_log")
async def test_no_connection_can_write_while_the_log_is_copied(path: str) -> None:
    """A commit that restarted the log then could lose later ones (WAL-reset bug)."""
    copied = []

    def look(statement: str) -> None:
        if "wal_checkpoint" not in statement:
            return

        # The other modes wait for the lock themselves, and go on without it.
        assert "PASSIVE" in statement

        with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other:
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")

            copied.append(statement)

    async with Store(path) as cp:
        await (await writer(cp)).set_trace_callback(look)

        for _ in range(300):
            await cp.append("t", [MESSAGE])

        await (await writer(cp)).set_trace_callback(lambda _: None)

    assert len(copied) > 2


@pytest.mark.usefixtures("small_log")
async def test_the_log_is_restarted_at_its_limit(path: str) -> None:
    """Ten times the limit is written, and the log does not grow far beyond it."""
    async with Store(path) as cp:
        for _ in range(10 * LIMIT // 4000):
            await cp.append("t", [MESSAGE])

        assert LIMIT < log_size(path) < 1.5 * LIMIT
        assert len(await cp.read("t")) == 10 * LIMIT // 4000


@pytest.mark.usefixtures("small_log")
async def test_a_log_that_another_process_left_large_is_copied(path: str) -> None:
    """The size is read from the log, so it does not matter which process filled it."""
    async with Store(path) as cp:
        await cp.append("t", [{}])

        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("PRAGMA wal_autocheckpoint = 0")
            other.execute("CREATE TABLE mine (x)")

            for _ in range(200):
                other.execute("INSERT INTO mine VALUES (zeroblob(4000))")

        large = log_size(path)
        assert large > 2 * LIMIT
        await cp.append("t", [{}])  # copies the log
        await cp.append("t", [{}])  # restarts it
        restarted = await (await writer(cp)).execute_fetchall(
            "PRAGMA wal_checkpoint(PASSIVE)"
        )
        ((_, frames, _),) = restarted
        assert frames < 20
        assert log_size(path) < large + 20_000


@pytest.mark.usefixtures("small_log")
async def test_an_old_reader_does_not_stop_appends(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log grows while the reader needs it, and is restarted afterwards."""
    monkeypatch.setattr(connection, "_READERS_TIMEOUT", 0.05)

    async with Store(path) as cp:
        await cp.append("t", [{}])
        old = sqlite3.connect(path, isolation_level=None)
        old.execute("BEGIN")
        old.execute("SELECT * FROM cpkit_messages").fetchall()

        for _ in range(2 * LIMIT // 4000):
            await cp.append("t", [MESSAGE])

        grown = log_size(path)
        assert grown > 2 * LIMIT
        old.execute("ROLLBACK")
        old.close()

        for _ in range(4 * LIMIT // 4000):
            await cp.append("t", [MESSAGE])

        assert log_size(path) < 1.5 * grown


@pytest.mark.usefixtures("small_log")
async def test_a_copy_does_not_wait_in_vain(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an old reader remains, the log cannot restart: writers go on at once."""
    slept: list[float] = []
    sleep = time.sleep

    def note(seconds: float) -> None:
        slept.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(connection, "_READERS_TIMEOUT", 0.05)
    monkeypatch.setattr(time, "sleep", note)

    async with Store(path) as cp:
        await cp.append("t", [{}])

        with closing(sqlite3.connect(path, isolation_level=None)) as old:
            old.execute("BEGIN")
            old.execute("SELECT * FROM cpkit_messages").fetchall()

            for _ in range(6 * LIMIT // 4000):
                await cp.append("t", [MESSAGE])

    assert slept
    assert max(slept) < connection._READERS_TIMEOUT


async def test_readers_that_overlap_do_not_let_the_log_grow_for_ever(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is always a reader, and the log is still restarted now and then."""
    limit = 65_536
    monkeypatch.setattr(connection, "LOG_BYTES", limit)

    async with Store(path) as cp:
        await cp.append("large", [{"i": i} for i in range(2000)])
        done = asyncio.Event()

        async def load() -> int:
            count = 0

            async with Store(path) as mine:
                while not done.is_set():
                    await mine.load("large")
                    count += 1

            return count

        readers = [asyncio.create_task(load()) for _ in range(3)]

        for _ in range(20 * limit // 4000):
            await cp.append("t", [MESSAGE])

        size = log_size(path)
        done.set()
        assert min(await asyncio.gather(*readers)) > 0
        assert size < 16 * limit


@pytest.mark.usefixtures("small_log")
async def test_a_copy_that_fails_does_not_fail_the_commit_before_it(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The append is done; the log is copied when that is possible again."""
    failed = []

    def fail(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        failed.append(args)
        raise sqlite3.OperationalError("unable to open database file")

    async with Store(path) as cp:
        await writer(cp)

        with monkeypatch.context() as broken:
            broken.setattr(sqlite3, "connect", fail)

            for i in range(2 * LIMIT // 4000):
                assert await cp.append("t", [MESSAGE]) == i + 1

        assert failed
        large = log_size(path)

        for _ in range(4 * LIMIT // 4000):
            await cp.append("t", [MESSAGE])

        assert log_size(path) < 1.2 * large


@pytest.mark.usefixtures("small_log")
async def test_another_writer_is_not_waited_for_after_a_commit(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is left to the next commit while another process has the lock."""
    monkeypatch.setattr(connection, "_LOCK_TIMEOUT", 0.0)
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect
    other = connect(path, check_same_thread=False, isolation_level=None)

    def connect_too_late(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        with suppress(sqlite3.OperationalError):
            other.execute("BEGIN IMMEDIATE")

        return connect(*args, **kwargs)

    async with Store(path) as cp:
        await writer(cp)
        monkeypatch.setattr(sqlite3, "connect", connect_too_late)
        version = 0

        while not other.in_transaction:
            version += 1
            assert await cp.append("t", [MESSAGE]) == version

        monkeypatch.setattr(sqlite3, "connect", connect)
        other.execute("ROLLBACK")
        assert await cp.append("t", [MESSAGE]) == version + 1
        assert await cp.append("t", [MESSAGE]) == version + 2
        other.close()
        rows = await (await writer(cp)).execute_fetchall(
            "PRAGMA wal_checkpoint(PASSIVE)"
        )
        ((_, frames, _),) = rows
        assert frames < 20


async def append_until_zeros(cp: Store, path: str) -> int:
    """Append until the log ends with zeros; return how many messages there are."""
    version = 0

    while not Path(f"{path}-wal").read_bytes().endswith(bytes(16_384)):
        assert log_size(path) < LIMIT
        version = await cp.append("t", [MESSAGE])

    return version


@pytest.mark.usefixtures("small_log")
async def test_commits_seldom_make_the_log_longer(path: str) -> None:
    """From a quarter of the limit on, they write over zeros, up to the limit."""
    async with Store(path) as cp:
        sizes = []

        for _ in range(5 * LIMIT // 4000):
            await cp.append("t", [MESSAGE])
            sizes.append(log_size(path))

    long = [size for size in sizes if size > LIMIT // 4]
    assert len(long) > 300
    assert len({*long}) < 8
    assert max(long) < 1.2 * LIMIT


@pytest.mark.usefixtures("small_log")
async def test_durability_normal_writes_no_zeros(path: str) -> None:
    """Its commits do not sync, so zeros would not make them faster."""
    async with Store(path, durability="normal") as cp:
        while log_size(path) < LIMIT:
            await cp.append("t", [MESSAGE])
            assert not Path(f"{path}-wal").read_bytes().endswith(bytes(4096))


@pytest.mark.usefixtures("small_log")
async def test_any_program_reads_a_log_that_ends_with_zeros(path: str) -> None:
    """Also from a copy of the files without the index, as a crash leaves them."""
    copy = f"{path}.copy"

    async with Store(path) as cp:
        version = await append_until_zeros(cp, path)
        Path(copy).write_bytes(Path(path).read_bytes())
        Path(f"{copy}-wal").write_bytes(Path(f"{path}-wal").read_bytes())

        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("CREATE TABLE mine (x)")
            other.execute("INSERT INTO mine VALUES (zeroblob(100000))")
            assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)

        await cp.append("t", [MESSAGE])
        assert await cp.read("t") == [MESSAGE] * (version + 1)

    with closing(sqlite3.connect(copy)) as other:
        assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        count = other.execute("SELECT count(*) FROM cpkit_messages").fetchone()
        assert count == (version,)

    async with Store(path) as cp:
        assert len(await cp.read("t")) == version + 1


@pytest.mark.usefixtures("small_log")
async def test_a_log_that_another_program_cuts_is_filled_again(path: str) -> None:
    """``wal_checkpoint(TRUNCATE)`` of another process leaves an empty log."""
    async with Store(path) as cp:
        await append_until_zeros(cp, path)

        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")

        assert log_size(path) == 0
        version = await append_until_zeros(cp, path)
        assert await cp.read("t") == [MESSAGE] * version


@pytest.mark.long
@pytest.mark.parametrize("clause", select(levels=["powerloss"]), ids=lambda one: one.id)
def test_a_log_with_zeros_survives_a_power_loss(
    path: str, monkeypatch: pytest.MonkeyPatch, clause: Clause
) -> None:
    """All that was acknowledged is there, whatever part of the zeros is on the disk."""
    monkeypatch.setattr(connection, "LOG_BYTES", LOG_BYTES)
    outcome = run_clause(clause, SmallLogHarness(path))
    assert outcome.status in (Status.PASSED, Status.SKIPPED), outcome


@pytest.mark.usefixtures("small_log")
async def test_zeros_that_cannot_be_written_fail_no_commit(path: str) -> None:
    """They only make commits faster."""
    async with Store(path) as cp:
        await cp.append("t", [MESSAGE])
        log = store_of(cp)._log
        assert log is not None
        log.close()
        log._file = open(f"{path}-wal", "rb", buffering=0)

        for version in range(2, 2 * LIMIT // 4000):
            assert await cp.append("t", [MESSAGE]) == version


@pytest.mark.usefixtures("small_log")
async def test_zeros_take_no_place_from_commits_on_a_full_disk(
    full_disk: Path,
) -> None:
    """Commits go on over the zeros, of which only a part was written."""
    path = str(full_disk / "agent.db")

    async with Store(path) as cp:
        await cp.append("t", [{}])
        free = os.statvfs(full_disk)
        (full_disk / "ballast").write_bytes(
            bytes(free.f_bavail * free.f_frsize - 100_000)
        )

        async def append_for_ever() -> None:
            while True:
                await cp.append("t", [MESSAGE])

        with pytest.raises(BackendUnavailable):
            await append_for_ever()

        log = Path(f"{path}-wal").read_bytes()
        assert os.statvfs(full_disk).f_bavail == 0
        (full_disk / "ballast").unlink()

    # The last frames are of the commit that failed.
    assert len(log.rstrip(b"\0")) > len(log) - 4 * 4120


async def test_closing_beside_an_open_connection_copies_nothing(path: str) -> None:
    """Only the last connection copies the log, while no other can open the file."""
    cp = await Store(path).__aenter__()
    await cp.append("t", [MESSAGE])

    async with Store(path) as other:
        assert await other.read("t") == [MESSAGE]
        before = Path(path).read_bytes()
        await cp.append("t", [MESSAGE])
        await cp.aclose()
        assert Path(path).read_bytes() == before
        assert len(await other.read("t")) == 2

    assert not Path(f"{path}-wal").exists()

    async with Store(path) as again:
        assert len(await again.read("t")) == 2


@pytest.mark.parametrize(
    ("version", "has_bug"),
    [
        ((3, 40, 1), True),
        ((3, 44, 5), True),
        ((3, 44, 6), False),
        ((3, 45, 0), True),
        ((3, 50, 6), True),
        ((3, 50, 7), False),
        ((3, 51, 0), True),
        ((3, 51, 2), True),
        ((3, 51, 3), False),
        ((3, 53, 0), False),
    ],
)
def test_versions_with_the_wal_reset_bug(
    version: tuple[int, ...], has_bug: bool
) -> None:
    """Fixed in 3.51.3, and in two older lines."""
    assert has_wal_reset_bug(version) is has_bug


@pytest.mark.parametrize("has_bug", [True, False])
async def test_durability_names_the_engine_and_its_bug(
    path: str, monkeypatch: pytest.MonkeyPatch, has_bug: bool
) -> None:
    """Another program that writes the file can hit the bug, so a person is told."""
    version = (3, 51, 2) if has_bug else (3, 51, 3)
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    monkeypatch.setattr(sqlite3, "sqlite_version", ".".join(map(str, version)))

    async with Store(path) as cp:
        durability = cp.durability

    assert durability.survives is Survives.MACHINE
    assert durability.settings["sqlite"] == sqlite3.sqlite_version
    assert ["WAL-reset bug" in one for one in durability.advice] == [True] * has_bug
