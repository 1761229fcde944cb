"""Reading a SQLite file while other connections use it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from agents import SQLiteSession

from cpkit import open_checkpointer
from cpkit.tools.importing import BadSource, checked, import_from
from cpkit.tools.importing.sqlite import is_database, read_snapshot

TAKE_WRITE_LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=0)
try:
    connection.execute("BEGIN IMMEDIATE")
except sqlite3.OperationalError as exc:
    print(exc)
else:
    print("taken")
"""

OPEN_AND_CLOSE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
print(connection.execute("SELECT count(*) FROM agent_messages").fetchone()[0])
connection.close()
"""

ROWS = 2000


def in_another_process(script: str, path: Path) -> str:
    """Run a script with the path as its argument; return what it prints."""
    command = [sys.executable, "-c", script, str(path)]
    return subprocess.check_output(command, text=True).strip()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=0)
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    return connection


def add_message(connection: sqlite3.Connection) -> None:
    connection.execute(
        "INSERT INTO agent_messages (session_id, message_data) VALUES ('s', '{}')"
    )


@pytest.fixture(params=["delete", "wal"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file with one session of the Agents SDK, in either journal mode."""
    path = tmp_path / "sessions.db"
    asyncio.run(fill(path))

    with closing(connected(path)) as connection:
        connection.execute(f"PRAGMA journal_mode = {request.param}")

    assert files(tmp_path) == ["sessions.db"]
    return path


async def fill(path: Path) -> None:
    session = SQLiteSession("s", path)
    await session.add_items([{"role": "user", "content": "hello"}])
    session.close()


@pytest.fixture
def writer(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection of this process to the file."""
    with closing(connected(path)) as connection:
        yield connection


def test_reading_keeps_the_locks_of_this_process(
    path: Path, writer: sqlite3.Connection
) -> None:
    """Another process cannot write while a transaction of this process is open."""
    writer.execute("BEGIN IMMEDIATE")
    add_message(writer)
    assert in_another_process(TAKE_WRITE_LOCK, path) == "database is locked"

    assert checked(str(path), None) == "openai-agents"
    assert in_another_process(TAKE_WRITE_LOCK, path) == "database is locked"

    with pytest.raises(BadSource, match="not a file of transcripts"):
        checked(str(path), "transcripts")

    asyncio.run(imported(path))
    assert in_another_process(TAKE_WRITE_LOCK, path) == "database is locked"
    writer.execute("COMMIT")


async def imported(path: Path) -> int:
    """Import the file into a new store; return the number of messages."""
    async with open_checkpointer("memory://") as cp:
        return (await import_from(str(path), cp)).written


@pytest.mark.parametrize("path", ["wal"], indirect=True)
def test_reading_keeps_the_wal_of_an_open_connection(
    path: Path, writer: sqlite3.Connection
) -> None:
    """A connection of another process is not the last one, and removes nothing."""
    add_message(writer)
    checked(str(path), None)
    assert asyncio.run(imported(path)) == 2
    assert in_another_process(OPEN_AND_CLOSE, path) == "2"
    assert path.with_name("sessions.db-wal").stat().st_size > 0
    add_message(writer)
    assert in_another_process(OPEN_AND_CLOSE, path) == "3"


@pytest.mark.parametrize("path", ["wal"], indirect=True)
def test_a_snapshot_is_unchanged_by_a_writer_that_opens_later(path: Path) -> None:
    """Commits and checkpoints during the read do not change what it returns."""
    with closing(connected(path)) as connection:
        connection.execute("BEGIN")
        connection.execute("DELETE FROM agent_messages")

        for number in range(ROWS):
            connection.execute(
                "INSERT INTO agent_messages (session_id, message_data) VALUES (?, ?)",
                ("s", f'{{"role": "user", "content": "{number} {"x" * 500}"}}'),
            )

        connection.execute("COMMIT")

    assert files(path.parent) == ["sessions.db"]

    with read_snapshot(path) as snapshot:
        rows = snapshot.execute("SELECT message_data FROM agent_messages ORDER BY id")
        read = [rows.fetchone()]

        with closing(connected(path)) as writer:
            writer.execute("UPDATE agent_messages SET message_data = '{}'")
            writer.execute("PRAGMA wal_checkpoint(PASSIVE)")
            read += rows.fetchall()

    assert [text.partition(" x")[0] for (text,) in read] == [
        f'{{"role": "user", "content": "{number}' for number in range(ROWS)
    ]


@pytest.mark.parametrize("path", ["wal"], indirect=True)
def test_the_wal_that_a_reader_made_stays_for_a_writer(path: Path) -> None:
    """The reader's clean-up removes no file that a connection still uses."""
    with closing(connected(path)) as writer:
        with read_snapshot(path) as snapshot:
            assert snapshot.execute("SELECT count(*) FROM agent_messages").fetchone()
            add_message(writer)

        assert path.with_name("sessions.db-wal").stat().st_size > 0
        assert in_another_process(OPEN_AND_CLOSE, path) == "2"
        add_message(writer)

    assert in_another_process(OPEN_AND_CLOSE, path) == "3"


def test_no_file_stays_beside_the_source(path: Path) -> None:
    """The bytes of the file are unchanged, too."""
    before = path.read_bytes()
    assert asyncio.run(imported(path)) == 1
    assert files(path.parent) == ["sessions.db"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("path", ["wal"], indirect=True)
def test_the_wal_of_a_crashed_writer_is_read_and_kept(path: Path) -> None:
    """Its committed messages count, and neither file changes."""
    wal = path.with_name("sessions.db-wal")

    with closing(connected(path)) as connection:
        add_message(connection)
        # What a crash leaves: both files, and no process that holds a lock.
        crashed = path.with_name("crashed")
        crashed.mkdir()
        (crashed / path.name).write_bytes(path.read_bytes())
        (crashed / wal.name).write_bytes(wal.read_bytes())

    before = [(crashed / name).read_bytes() for name in (path.name, wal.name)]
    assert asyncio.run(imported(crashed / path.name)) == 2
    after = [(crashed / name).read_bytes() for name in (path.name, wal.name)]
    assert after == before


def test_a_database_that_is_being_created_keeps_its_lock(tmp_path: Path) -> None:
    """An empty file has no kind, and only SQLite opens it."""
    path = tmp_path / "new.db"

    with closing(connected(path)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        assert path.stat().st_size == 0

        with pytest.raises(BadSource, match="--kind says what it is"):
            checked(str(path), None)

        assert in_another_process(TAKE_WRITE_LOCK, path) == "database is locked"


def test_only_a_database_with_content_is_a_database(tmp_path: Path) -> None:
    """A pipe, a folder, an empty file and text are not."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    empty = tmp_path / "empty"
    empty.touch()
    text = tmp_path / "text"
    text.write_text("SQLite format 4")
    assert not any(map(is_database, [tmp_path, pipe, empty, text]))


def test_a_damaged_database_is_a_bad_source(path: Path) -> None:
    """The error names the file; no other file is left behind."""
    path.write_bytes(path.read_bytes()[:4096])

    with pytest.raises(BadSource, match=r"sessions\.db: database disk image"):
        checked(str(path), None)

    assert files(path.parent) == ["sessions.db"]
