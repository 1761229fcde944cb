"""The write-ahead log: copied under the write lock, kept small, never in the way."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from conformance import Clause, Status, run_clause, select
from cpkit_sqlite import SQLiteCheckpointer, store
from tests.sqlite.inside import on, writer
from tests.sqlite.small_log import LOG_BYTES, SmallLogHarness

Store = SQLiteCheckpointer[Any]

LIMIT = 256 * 1024
MESSAGE = {"pad": "x" * 4000}


@pytest.fixture
def small_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LOG_BYTES", LIMIT)


@contextmanager
def old_reader(path: str) -> Iterator[None]:
    """Keep the state of now in use, as a program does that reads for an hour."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN")
        db.execute("SELECT * FROM cpkit_messages").fetchall()
        yield


def log_size(path: str) -> int:
    return os.path.getsize(f"{path}-wal")


async def fill(cp: Store, limits: float) -> None:
    """Append so many times the limit of the log, one message at a time."""
    for _ in range(int(limits * LIMIT / 4000)):
        await cp.append("t", [MESSAGE])


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
        await on(writer(cp), lambda db: db.set_trace_callback(look))
        await fill(cp, 5)
        await on(writer(cp), lambda db: db.set_trace_callback(None))

    assert len(copied) > 2


@pytest.mark.usefixtures("small_log")
async def test_the_log_is_restarted_at_its_limit(path: str) -> None:
    """Ten times the limit is written, and the log does not grow far beyond it."""
    async with Store(path) as cp:
        await fill(cp, 10)
        assert LIMIT <= log_size(path) < 1.5 * LIMIT
        assert len(await cp.read("t")) == 10 * LIMIT // 4000


@pytest.mark.usefixtures("small_log")
async def test_a_log_that_another_process_left_large_is_copied(path: str) -> None:
    """The size is that of the log, so it does not matter which process filled it."""
    async with Store(path) as cp:
        await cp.append("t", [{}])

        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("PRAGMA wal_autocheckpoint = 0")
            other.execute("CREATE TABLE mine (x)")

            for _ in range(200):
                other.execute("INSERT INTO mine VALUES (zeroblob(4000))")

        assert log_size(path) > 2 * LIMIT
        await cp.append("t", [{}])  # copies the log
        await cp.append("t", [{}])  # restarts it
        assert log_size(path) == LIMIT


@pytest.mark.usefixtures("small_log")
async def test_an_old_reader_does_not_stop_appends(path: str) -> None:
    """The log grows while the reader needs it, and is cut to its limit afterwards.

    A copy is tried now and then, not after each commit, and nothing waits.
    """
    tried: list[str] = []

    async with Store(path) as cp:
        await cp.append("t", [{}])
        await on(writer(cp), lambda db: db.set_trace_callback(tried.append))

        with old_reader(path):
            await fill(cp, 2)
            assert log_size(path) > 2 * LIMIT
            copies = [one for one in tried if "wal_checkpoint" in one]
            assert 3 < len(copies) < LIMIT / 4000  # half of the commits

        await on(writer(cp), lambda db: db.set_trace_callback(None))
        await fill(cp, 0.5)
        assert log_size(path) == LIMIT


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
        with monkeypatch.context() as broken:
            broken.setattr(sqlite3, "connect", fail)
            await fill(cp, 2)

        assert failed
        assert log_size(path) > 2 * LIMIT
        await fill(cp, 0.5)
        assert log_size(path) == LIMIT


@pytest.mark.usefixtures("small_log")
async def test_another_writer_is_not_waited_for_after_a_commit(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is left to a later commit while another process has the lock."""
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect
    other = connect(path, check_same_thread=False, isolation_level=None)

    def connect_too_late(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        with suppress(sqlite3.OperationalError):
            other.execute("BEGIN IMMEDIATE")

        return connect(*args, **kwargs)

    async with Store(path) as cp:
        monkeypatch.setattr(sqlite3, "connect", connect_too_late)

        while not other.in_transaction:
            await cp.append("t", [MESSAGE])

        monkeypatch.setattr(sqlite3, "connect", connect)
        assert log_size(path) > LIMIT
        other.execute("ROLLBACK")
        await fill(cp, 0.5)
        assert log_size(path) == LIMIT
        other.close()


@pytest.mark.long
@pytest.mark.parametrize("clause", select(levels=["powerloss"]), ids=lambda one: one.id)
def test_a_log_that_is_restarted_survives_a_power_loss(
    path: str, monkeypatch: pytest.MonkeyPatch, clause: Clause
) -> None:
    """All that was acknowledged is there, wherever the copy of the log was cut off."""
    monkeypatch.setattr(store, "LOG_BYTES", LOG_BYTES)
    outcome = run_clause(clause, SmallLogHarness(path))
    assert outcome.status in (Status.PASSED, Status.SKIPPED), outcome


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


async def test_durability_names_the_engine(path: str) -> None:
    """A version before 3.51.3 loses commits where another program writes the file."""
    async with Store(path) as cp:
        assert cp.durability.settings["sqlite"] == sqlite3.sqlite_version
