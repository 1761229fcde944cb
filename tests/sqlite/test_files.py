"""The file: its place, permissions, other contents, and open descriptors."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cpkit import (
    BackendUnavailable,
    CorruptThread,
    Survives,
    ToolCall,
    open_checkpointer,
)
from cpkit.driver import StoreFailure
from cpkit_sqlite import SQLiteCheckpointer
from cpkit_sqlite.connection import Connection
from tests.mounts import mounted
from tests.processes import UNPRIVILEGED, Workers
from tests.sqlite.inside import on, reader, store_of, writer

Store = SQLiteCheckpointer[Any]


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Let every user read and write what this process creates."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may reach; pytest's folders are for one user."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


# Places


@pytest.mark.usefixtures("no_umask")
async def test_files_and_folders_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Modes are 0600 for file, log and index, and 0700 for every new folder."""
    path = tmp_path / "a" / "agent.db"

    async with Store(path) as cp:
        await cp.append("t", [{}])
        files = sorted(path.parent.iterdir())
        assert [file.name for file in files] == [
            "agent.db",
            "agent.db-shm",
            "agent.db-wal",
        ]
        assert [mode(file) for file in files] == [0o600] * 3

    assert mode(tmp_path / "a") == 0o700
    assert mode(path) == 0o600


async def test_the_permissions_of_an_existing_file_are_kept(
    path: str,
) -> None:
    """A file for a group stays one, and its log and index are for the group too."""
    Path(path).touch()
    os.chmod(path, 0o660)

    async with Store(path) as cp:
        await cp.append("t", [{}])
        assert [mode(path + end) for end in ("", "-wal", "-shm")] == [0o660] * 3


async def test_a_relative_path_stays_where_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that changes its working directory keeps using the same file."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    async with open_checkpointer("sqlite:///agent.db") as cp:
        await cp.append("t", [{}])
        monkeypatch.chdir(tmp_path / "elsewhere")
        await cp.append("t", [{}])
        data = await cp.load("t")
        assert data is not None
        assert data.version == 2

    assert not list((tmp_path / "elsewhere").iterdir())


async def test_a_directory_changed_during_opening_does_not_split_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both connections of a handle use one file."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    cp = Store("agent.db")
    opening = asyncio.create_task(cp.__aenter__())

    while not (tmp_path / "agent.db").exists():  # noqa: ASYNC110  # a file cannot be awaited
        await asyncio.sleep(0)

    monkeypatch.chdir(tmp_path / "elsewhere")
    await opening
    await cp.append("t", [{}])
    assert await cp.read("t") == [{}]
    await cp.aclose()
    assert not list((tmp_path / "elsewhere").iterdir())


async def test_each_handle_in_memory_is_a_store_of_its_own(tmp_path: Path) -> None:
    """``:memory:`` does not create a file, and its durability is ``none``."""
    async with (
        open_checkpointer("sqlite:///:memory:") as one,
        Store(":memory:") as other,
    ):
        await one.append("t", [{}])
        assert await other.load("t") is None
        assert other.durability.survives is Survives.NONE


async def test_a_name_with_a_meaning_for_sqlite_is_a_plain_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that looks like a URI or a wildcard is taken literally."""
    monkeypatch.chdir(tmp_path)

    for name in ("file:x.db?mode=memory", "a%b.db", "'; --.db", "é ü.db"):
        async with Store(name) as cp:
            await cp.append("t", [{}])

        assert (tmp_path / name).is_file()


async def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    """The log is beside the file, where every other program looks for it."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to(tmp_path / "agent.db")

    for _ in range(2):  # the first opening creates the file
        async with Store(tmp_path / "elsewhere" / "link") as cp:
            await cp.append("t", [{}])
            assert (tmp_path / "agent.db-wal").is_file()


async def test_the_file_may_hold_other_tables(
    path: str, raw: sqlite3.Connection
) -> None:
    """The user's own tables, indexes and version number are not touched."""
    raw.executescript(
        "CREATE TABLE threads (x); INSERT INTO threads VALUES (1);"
        "CREATE TABLE messages (y); CREATE INDEX i ON messages (y);"
        "PRAGMA user_version = 7; PRAGMA application_id = 9;"
    )

    async with Store(path) as cp:
        await cp.append("t", [{}])
        await cp.delete_thread("t", forget_keys=True)

    assert raw.execute("SELECT * FROM threads").fetchall() == [(1,)]
    assert raw.execute("PRAGMA user_version").fetchone() == (7,)
    assert raw.execute("PRAGMA application_id").fetchone() == (9,)
    names = {name for (name,) in raw.execute("SELECT name FROM sqlite_master")}
    ours = {name for name in names if "cpkit_" in name}
    assert names - ours == {"threads", "messages", "i"}


# Promises


async def setting(connection: Connection, pragma: str) -> Any:
    sql = f"PRAGMA {pragma}"
    return (await on(connection, lambda db: db.execute(sql).fetchone()))[0]


@pytest.mark.parametrize(
    ("options", "synchronous", "survives"),
    [
        ({}, 2, Survives.MACHINE),
        ({"durability": "full"}, 2, Survives.MACHINE),
        ({"durability": "normal"}, 1, Survives.PROCESS),
    ],
)
async def test_both_connections_are_set_up_as_promised(
    path: str, options: dict[str, Any], synchronous: int, survives: Survives
) -> None:
    """``durability`` reports the settings that SQLite has."""
    async with Store(path, busy_timeout=3, **options) as cp:
        for connection in (writer(cp), reader(cp)):
            for pragma, value in [
                ("journal_mode", "wal"),
                ("synchronous", synchronous),
                ("trusted_schema", 0),
                ("busy_timeout", 3000),
                ("wal_autocheckpoint", 0),
            ]:
                assert await setting(connection, pragma) == value, pragma

        least = {survives, store_of(cp)._file.system.survives}
        assert cp.durability.survives is min(least, key=[*Survives].index)
        assert f"synchronous={'FULL' if synchronous == 2 else 'NORMAL'}" in str(
            cp.durability
        )


# A full disk


async def test_a_full_database_writes_nothing_and_then_works_again(path: str) -> None:
    """All or none of the messages are stored, and the error says none."""
    async with Store(path) as cp:
        version = await cp.append("t", [{"pad": "x" * 1000}] * 10)
        # SQLite raises the limit to the pages that exist.
        await setting(writer(cp), "max_page_count = 1")
        big = [{"pad": "x" * 1000}] * 50

        with pytest.raises(BackendUnavailable, match="full") as raised:
            await cp.append("t", big)

        assert raised.value.maybe_applied is False
        assert len(await cp.read("t")) == version
        await setting(writer(cp), "max_page_count = 100000")
        assert await cp.append("t", big, expected_version=version) == version + 50


def test_a_file_that_may_not_grow_is_unavailable_and_then_works_again(
    path: str, workers: Workers
) -> None:
    """No append is half written, and at most the last one is in doubt."""
    (worker,) = workers(1)
    answer = worker.ask("fill_up_to", f"sqlite:///{path}", 1_000_000)

    assert path in answer["failure"]
    assert answer["acknowledged"] > 50
    assert answer["loaded"] - answer["acknowledged"] in (0, 1)
    assert answer["after"] == answer["loaded"] + 1


async def test_a_full_disk_is_unavailable_and_then_works_again(full_disk: Path) -> None:
    """With ENOSPC acknowledged appends stay readable."""
    ballast = full_disk / "ballast"
    ballast.write_bytes(b"x" * 200_000)

    async with Store(full_disk / "agent.db") as cp:
        acknowledged, failure = 0, None

        while failure is None:
            try:
                acknowledged = await cp.append("t", [{"pad": "x" * 1000}])
            except BackendUnavailable as exc:
                failure = exc

        assert acknowledged > 0
        version = len(await cp.read("t"))
        assert version - acknowledged in ((0, 1) if failure.maybe_applied else (0,))

        ballast.unlink()
        assert await cp.append("t", [{}]) == version + 1


@pytest.mark.parametrize("what", ["folder", "file", "new file"])
def test_what_may_not_be_written_is_unavailable(
    folder: Path, what: str, workers: Workers
) -> None:
    """A place without a store is refused, and left as it is."""
    path = folder / "agent.db"

    if what != "new file":
        sqlite3.connect(path).execute("CREATE TABLE mine (x)").connection.close()

    if os.getuid() == 0:
        for place in (folder, *folder.iterdir()):
            os.chown(place, UNPRIVILEGED, UNPRIVILEGED)

    before = contents(folder)

    if what == "file":
        os.chmod(path, 0o400)
    else:
        os.chmod(folder, 0o500)

    (worker,) = workers(1)
    said = worker.ask("open_unprivileged", f"sqlite:///{path}")
    os.chmod(folder, 0o700)

    assert str(path) in said
    assert "nothing was written" in said
    assert contents(folder) == before


# Files and folders that may only be read


async def write_some(path: Path) -> None:
    async with Store(path) as cp:
        await cp.append("t", [{"n": 1}])
        await cp.record_issued("t", ToolCall("c", "tool", {}, "key"))
        await cp.record_result("t", "c", "paid")


@pytest.mark.parametrize("what", ["folder", "file", "both"])
async def test_what_may_only_be_read_is_read(
    folder: Path, what: str, workers: Workers
) -> None:
    """Every write is refused and has not run; no other file is created."""
    path = folder / "agent.db"
    await write_some(path)

    if os.getuid() == 0:
        for place in (folder, path):
            os.chown(place, UNPRIVILEGED, UNPRIVILEGED)

    if what != "folder":
        os.chmod(path, 0o400)

    if what != "file":
        os.chmod(folder, 0o500)

    before = path.read_bytes()
    (worker,) = workers(1)
    said = worker.ask("read_unprivileged", f"sqlite:///{path}")
    os.chmod(folder, 0o700)

    assert said["messages"] == [{"n": 1}]
    assert (said["found"], said["listed"]) == ("paid", 1)
    assert said["refused"] == [False] * 4
    assert "may only be read" in said["advice"]
    assert list(folder.iterdir()) == [path]
    assert path.read_bytes() == before


@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
async def test_a_reader_without_rights_sees_what_a_writer_has_committed(
    folder: Path, workers: Workers
) -> None:
    """The log of a writer that has the file open is read too."""
    path = folder / "agent.db"

    async with Store(path) as cp:
        await cp.append("t", [{"n": 1}])

        for place in folder.iterdir():
            os.chown(place, UNPRIVILEGED, UNPRIVILEGED)
            os.chmod(place, 0o400)

        os.chmod(folder, 0o755)
        (worker,) = workers(1)
        worker.tell("read_unprivileged", f"sqlite:///{path}")
        said = await asyncio.to_thread(worker.answer)
        assert said["messages"] == [{"n": 1}]
        assert said["refused"] == [False] * 4
        assert await cp.append("t", [{"n": 2}]) == 2


async def test_a_file_read_without_locks_is_refused_once_it_is_written(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads raise and never return a torn state; opening again reads the new one."""
    await write_some(Path(path))

    with monkeypatch.context() as only_reading:
        only_reading.setattr(os, "access", lambda *_: False)
        reading = await Store(path).__aenter__()

    assert await reading.read("t") == [{"n": 1}]

    async with Store(path) as cp:
        with pytest.raises(BackendUnavailable, match="open the store again"):
            await reading.load("t")

        await cp.append("t", [{"n": 2}])

    with pytest.raises(BackendUnavailable, match="readonly") as raised:
        await reading.append("t", [{}])

    assert raised.value.maybe_applied is False
    await reading.aclose()

    with monkeypatch.context() as only_reading:
        only_reading.setattr(os, "access", lambda *_: False)

        async with Store(path) as again:
            assert await again.read("t") == [{"n": 1}, {"n": 2}]


# Folders


async def test_a_created_folder_is_made_lasting_in_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite syncs the folder of its log, but not the name of that folder."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda one: synced.append(os.fstat(one).st_ino))

    async with Store(tmp_path / "a" / "agent.db"):
        assert synced == [tmp_path.stat().st_ino]


async def test_a_folder_above_the_last_one_is_not_created(tmp_path: Path) -> None:
    """A missing folder is more often a mistake in the URL; the error names it."""
    with pytest.raises(BackendUnavailable, match="nowhere"):
        await Store(tmp_path / "nowhere" / "data" / "agent.db").__aenter__()

    assert list(tmp_path.iterdir()) == []


async def test_a_folder_that_cannot_be_synced_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store does not open, and the next opening syncs the folder again."""

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "the disk is on fire")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)

        with pytest.raises(BackendUnavailable, match="on fire") as raised:
            await Store(tmp_path / "a" / "agent.db").__aenter__()

        assert raised.value.maybe_applied is False

    async with Store(tmp_path / "a" / "agent.db") as cp:
        assert await cp.append("t", [{}]) == 1


# Open descriptors


def open_files() -> set[str]:
    found = set()

    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue  # the descriptor of the listing

    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
async def test_closing_leaves_no_file_open(path: str) -> None:
    """Nor after an error in the context, or an opening that failed."""

    async def work() -> None:
        async with Store(path) as cp:
            await cp.append("t", [{}])
            assert any(path in name for name in open_files())
            raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await work()

        Path(path + ".no").write_text("no database " * 100)

        with pytest.raises(Exception, match="not a database"):
            await Store(path + ".no").__aenter__()

    assert not [name for name in open_files() if path in name]
    assert not Path(path + "-wal").exists()


async def test_listening_to_a_file_that_was_moved_is_a_failure_of_the_store(
    tmp_path: Path,
) -> None:
    """The handle logs it in one line, and not as an unexpected error."""
    path = tmp_path / "agent.db"

    async with SQLiteCheckpointer[Any](path) as cp:
        path.rename(tmp_path / "aside.db")

        with pytest.raises(StoreFailure, match="unable to open"):
            await store_of(cp).listen(lambda _: None)


# Files that are moved, deleted, replaced or overwritten while they are open


async def rows(path: Path, count: int) -> None:
    async with Store(path) as cp:
        for n in range(count):
            await cp.append("t", [{"n": n}])


def checkpointed(path: Path) -> None:
    """Copy the log into the file, as another program may at any time."""
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def run(command: str, folder: Path) -> None:
    subprocess.run(command, shell=True, cwd=folder, check=True)


CHANGES = {
    "moved": "mv agent.db elsewhere.db",
    "deleted": "rm agent.db",
    "all deleted": "rm agent.db*",
    "replaced": "mv backup.db agent.db",
    "restored": "rm agent.db* && cp -a backup.db agent.db",
    "folder restored": "mv ../data ../old && cp -a ../old ../data",
    "overwritten": "cp -a backup.db agent.db",
    "overwritten by an older file": "touch -d 2025-01-01 b* && cp -a b* agent.db",
    "log deleted": "rm agent.db-wal",
    "log replaced": "rm agent.db-wal && touch agent.db-wal",
    "log and index deleted": "rm agent.db-wal agent.db-shm",
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_file_that_another_file_took_the_place_of_is_not_written(
    tmp_path: Path, change: str
) -> None:
    """Nothing is acknowledged that the next opening of the path would not find."""
    path = tmp_path / "data" / "agent.db"
    await rows(path, 3)
    shutil.copy2(path, path.with_name("backup.db"))

    async with Store(path) as cp:
        await cp.append("t", [{"n": 3}])
        checkpointed(path)
        assert await cp.append("t", [{"n": 4}]) == 5
        run(CHANGES[change], path.parent)

        for write in (cp.append("t", [{}]), cp.save_extra("t", {"k": 1})):
            with pytest.raises(BackendUnavailable, match="open the store again") as got:
                await write

            assert not got.value.maybe_applied

        with pytest.raises(BackendUnavailable, match="open the store again"):
            await cp.load("t")


async def test_a_file_that_is_moved_back_is_written_again(tmp_path: Path) -> None:
    """The paths lead to the open files again."""
    path, aside = tmp_path / "agent.db", tmp_path / "aside.db"

    async with Store(path) as cp:
        await cp.append("t", [{}])
        path.rename(aside)

        with pytest.raises(BackendUnavailable, match="open the store again"):
            await cp.append("t", [{}])

        aside.rename(path)
        assert await cp.append("t", [{}]) == 2


async def test_other_programs_may_use_a_file_that_is_open(
    tmp_path: Path,
) -> None:
    """Commits and checkpoints of others, other permissions, a link, a copy of it."""
    path = tmp_path / "agent.db"

    async with Store(path) as cp, Store(path) as other:
        for count in range(1, 9, 2):
            assert await cp.append("t", [{}]) == count
            assert await other.append("t", [{}]) == count + 1
            checkpointed(path)

            if count > 1:
                assert await cp.load("t") == await other.load("t")
                path.chmod(0o640)
                (tmp_path / f"link {count}").hardlink_to(path)
                shutil.copy2(path, tmp_path / f"copy {count}")


# A -wal file that was left beside the file


async def left_behind(path: Path) -> None:
    """Leave a backup, and a log of a later and larger state as after a crash."""
    await rows(path, 3)
    shutil.copy2(path, path.with_name("backup.db"))

    async with Store(path) as cp:
        await cp.append("later", [{"pad": "x" * 1000}] * 2000)
        await asyncio.to_thread(checkpointed, path)
        await cp.append("latest", [{"n": 1}])
        shutil.copy2(path, f"{path}-now")
        shutil.copy2(f"{path}-wal", f"{path}-log")

    Path(f"{path}-now").rename(path)
    Path(f"{path}-log").rename(f"{path}-wal")


async def test_a_restored_file_beside_an_older_log_is_refused(tmp_path: Path) -> None:
    """SQLite would mix them; neither is changed, and the cure is named."""
    path = tmp_path / "agent.db"
    await left_behind(path)
    log = Path(f"{path}-wal")
    shutil.copy(path.with_name("backup.db"), path)
    before = path.read_bytes(), log.read_bytes()

    for _ in range(2):
        with pytest.raises(CorruptThread, match="delete .*-wal and .* again"):
            await Store(path).__aenter__()

        assert (path.read_bytes(), log.read_bytes()) == before

    log.unlink()

    async with Store(path) as cp:
        assert await cp.append("t", [{}]) == 4


async def test_a_log_of_a_crash_is_applied(tmp_path: Path) -> None:
    """It belongs to the file that is beside it."""
    path = tmp_path / "agent.db"
    await left_behind(path)

    async with Store(path) as cp:
        assert len(await cp.read("later")) == 2000
        assert await cp.read("latest") == [{"n": 1}]


async def test_a_snapshot_that_may_only_be_read_says_how_to_read_its_log(
    tmp_path: Path,
) -> None:
    """SQLite needs a -shm file beside it, and cannot create it there."""
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "agent.db"
    await left_behind(path)
    place = tmp_path / "snapshot"

    with mounted(place, "mount", "--bind", "-o", "ro", path.parent):
        with pytest.raises(
            BackendUnavailable, match=f"copy {place}/agent.db and"
        ) as got:
            await Store(place / "agent.db").__aenter__()

        assert got.value.rejected
        (tmp_path / "copy").mkdir()

        for name in ("agent.db", "agent.db-wal"):
            shutil.copy(place / name, tmp_path / "copy")

    async with Store(tmp_path / "copy" / "agent.db") as cp:
        assert await cp.read("latest") == [{"n": 1}]
