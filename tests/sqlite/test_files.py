"""The file: its place, permissions, other contents, and open descriptors."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpkit import BackendUnavailable, Survives, ToolCall, open_checkpointer
from cpkit.driver import StoreFailure
from cpkit_sqlite import SQLiteCheckpointer
from tests.processes import UNPRIVILEGED, Workers
from tests.sqlite.inside import reader, store_of, writer

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


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs os.mkfifo")
async def test_what_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    """A device or pipe gets no journal beside it; a link to a file is followed."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")

    for name in ("pipe", "link"):
        with pytest.raises(BackendUnavailable, match="not a regular file") as raised:
            await Store(tmp_path / name).__aenter__()

        assert raised.value.maybe_applied is False

    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]
    (tmp_path / "other").symlink_to(tmp_path / "agent.db")

    for _ in range(2):  # the first opening creates the file
        async with Store(tmp_path / "other") as cp:
            await cp.append("t", [{}])

    assert (tmp_path / "agent.db").is_file()


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
        for connection in (await writer(cp), reader(cp)):
            for pragma, value in [
                ("journal_mode", "wal"),
                ("synchronous", synchronous),
                ("trusted_schema", 0),
                ("busy_timeout", 3000),
            ]:
                cursor = await connection.execute(f"PRAGMA {pragma}")
                assert await cursor.fetchone() == (value,), pragma
                await cursor.close()

        assert cp.durability.survives is survives
        assert f"synchronous={'FULL' if synchronous == 2 else 'NORMAL'}" in str(
            cp.durability
        )


async def test_a_handle_that_only_reads_has_one_connection(path: str) -> None:
    """The first write opens another one, so that reads and writes do not wait."""
    async with Store(path) as cp:
        assert await cp.load("t") is None
        assert await cp.list_threads() == []
        assert len(store_of(cp)._connections) == 1
        await asyncio.gather(*(cp.append(f"t {i}", [{}]) for i in range(5)))
        assert len(store_of(cp)._connections) == 2
        assert await writer(cp) is not reader(cp)


async def test_a_first_write_that_cannot_connect_has_not_run(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next write connects."""

    def fail(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        raise sqlite3.OperationalError("unable to open database file")

    async with Store(path) as cp:
        with monkeypatch.context() as broken:
            broken.setattr(sqlite3, "connect", fail)

            with pytest.raises(BackendUnavailable, match="unable to open") as raised:
                await cp.append("t", [{}])

        assert raised.value.maybe_applied is False
        assert await cp.append("t", [{}]) == 1


# A full disk


async def test_a_full_database_writes_nothing_and_then_works_again(path: str) -> None:
    """All or none of the messages are stored, and the error says none."""
    async with Store(path) as cp:
        version = await cp.append("t", [{"pad": "x" * 1000}] * 10)
        # SQLite raises the limit to the pages that exist.
        await (await writer(cp)).execute_fetchall("PRAGMA max_page_count = 1")
        big = [{"pad": "x" * 1000}] * 50

        with pytest.raises(BackendUnavailable, match="full") as raised:
            await cp.append("t", big)

        assert raised.value.maybe_applied is False
        assert len(await cp.read("t")) == version
        await (await writer(cp)).execute_fetchall("PRAGMA max_page_count = 100000")
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


@pytest.mark.parametrize(
    "what", ["folder", "file", "new file", "unreadable folder", "new file unreadable"]
)
def test_what_may_not_be_written_is_unavailable(
    folder: Path, what: str, workers: Workers
) -> None:
    """A place without a store is refused at open, and left as it is.

    A folder that may be written and not read is refused too: it cannot be synced.
    """
    path = folder / "agent.db"

    if not what.startswith("new file"):
        sqlite3.connect(path).execute("CREATE TABLE mine (x)").connection.close()

    if os.getuid() == 0:
        for place in (folder, *folder.iterdir()):
            os.chown(place, UNPRIVILEGED, UNPRIVILEGED)

    before = contents(folder)

    if what == "file":
        os.chmod(path, 0o400)
    else:
        os.chmod(folder, 0o300 if "unreadable" in what else 0o500)

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

    with pytest.raises(BackendUnavailable, match="open the store again") as raised:
        await reading.append("t", [{}])

    assert raised.value.maybe_applied is False
    await reading.aclose()

    with monkeypatch.context() as only_reading:
        only_reading.setattr(os, "access", lambda *_: False)

        async with Store(path) as again:
            assert await again.read("t") == [{"n": 1}, {"n": 2}]


# Folders


class FolderSyncs:
    """Records which folders are synced, and whether the log existed by then."""

    def __init__(self, path: Path) -> None:
        self.log = Path(f"{path}-wal")
        self.made: list[tuple[int, bool]] = []
        self.failing: int | None = None

    def sync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)

        if stat.S_ISDIR(found.st_mode):
            self.made.append((found.st_ino, self.log.exists()))

            if found.st_ino == self.failing:
                raise OSError(errno.EIO, "the disk is on fire")


@pytest.fixture
def syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderSyncs:
    found = FolderSyncs(tmp_path / "a" / "agent.db")
    monkeypatch.setattr(os, "fsync", found.sync)
    return found


async def test_a_created_folder_is_made_lasting_in_its_parent(
    tmp_path: Path, syncs: FolderSyncs
) -> None:
    """The folder of the file is synced once the log exists."""
    folder = tmp_path / "a"

    async with Store(folder / "agent.db"):
        inodes = [os.stat(one).st_ino for one in (tmp_path, folder)]
        assert syncs.made == [(inodes[0], False), (inodes[1], True)]


async def test_a_folder_above_the_last_one_is_not_created(tmp_path: Path) -> None:
    """A missing folder is more often a mistake in the URL; the error names it."""
    with pytest.raises(BackendUnavailable, match="there is no folder .*nowhere'"):
        await Store(tmp_path / "nowhere" / "data" / "agent.db").__aenter__()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("depth", [0, 1])
async def test_a_folder_that_cannot_be_synced_is_unavailable(
    tmp_path: Path, syncs: FolderSyncs, depth: int
) -> None:
    """The store does not open, and the next opening syncs the folder again."""
    folder = tmp_path / "a"
    place = (tmp_path, folder)[depth]
    place.mkdir(exist_ok=True)
    syncs.failing = place.stat().st_ino

    with pytest.raises(BackendUnavailable, match="on fire") as raised:
        await Store(folder / "agent.db").__aenter__()

    assert raised.value.maybe_applied is False
    failing, syncs.failing = syncs.failing, None
    syncs.made.clear()

    async with Store(folder / "agent.db") as cp:
        assert failing in [inode for inode, _ in syncs.made]
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


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
async def test_a_file_that_lost_its_name_is_not_written(
    tmp_path: Path, how: str
) -> None:
    """Nothing is acknowledged that the next opening of the path would not find."""
    path = tmp_path / "agent.db"
    aside = tmp_path / "aside.db"

    async with Store(str(path)) as cp:
        await cp.append("t", [{"n": 1}])

        if how == "replaced":
            async with Store(str(aside)) as other:
                await other.append("t", [{"other": 1}])

            aside.rename(path)
        elif how == "moved":
            path.rename(aside)
        else:
            path.unlink()

        with pytest.raises(BackendUnavailable, match="moved, deleted or rep") as caught:
            await cp.append("t", [{"n": 2}])

        assert not caught.value.maybe_applied

        with pytest.raises(BackendUnavailable, match="open the store again"):
            await cp.load("t")

        if how == "moved":
            aside.rename(path)
            assert await cp.append("t", [{"n": 2}]) == 2


@pytest.mark.parametrize("ends", [["-wal"], ["-shm"], ["-wal", "-shm"]])
async def test_a_store_that_lost_its_log_or_index_is_not_written(
    path: str, ends: list[str]
) -> None:
    """The next opening has every acknowledged write, if no other process wrote."""
    async with Store(path) as cp:
        await cp.append("t", [{"n": 1}])
        os.utime(path, (0, 0))  # the file's clock may be too coarse for this test

        for end in ends:
            os.unlink(path + end)

        with pytest.raises(BackendUnavailable, match=f"its {ends[0]} file") as raised:
            await cp.append("t", [{"n": 2}])

        assert not raised.value.maybe_applied

        if "-wal" in ends:
            with pytest.raises(BackendUnavailable, match="open the store again"):
                await cp.load("t")

    async with Store(path) as cp:
        assert await cp.read("t") == [{"n": 1}]
        assert await cp.append("t", [{"n": 2}]) == 2


async def test_a_first_write_without_the_log_creates_no_other_log(path: str) -> None:
    """A handle that only read refuses to write too."""
    async with Store(path) as cp:
        await cp.load("t")
        os.unlink(f"{path}-wal")

        with pytest.raises(BackendUnavailable, match="its -wal file") as raised:
            await cp.append("t", [{}])

        assert not raised.value.maybe_applied
        assert not os.path.exists(f"{path}-wal")


@pytest.mark.parametrize("is_old", [True, False], ids=["old", "new"])
async def test_a_deleted_log_is_seen_whatever_the_time_of_the_folder(
    tmp_path: Path, is_old: bool
) -> None:
    """An old time proves that no name changed; a new one may be of two changes."""
    path = tmp_path / "agent.db"

    async with SQLiteCheckpointer[Any](path) as cp:
        await cp.append("t", [{}])
        now = time.time_ns()
        times = (now, now - (3_600_000_000_000 if is_old else 0))
        os.utime(tmp_path, ns=times)
        assert await cp.append("t", [{}]) == 2
        os.unlink(f"{path}-wal")

        if not is_old:
            os.utime(tmp_path, ns=times)

        with pytest.raises(BackendUnavailable, match="its -wal file was deleted"):
            await cp.append("t", [{}])

        with pytest.raises(BackendUnavailable, match="its -wal file was deleted"):
            await cp.load("t")


async def test_the_index_of_a_file_that_was_not_in_wal_mode_is_known(
    path: str, raw: sqlite3.Connection
) -> None:
    """A copy by ``VACUUM INTO`` is such a file."""
    await write_some(Path(path))
    assert raw.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)

    async with Store(path) as cp:
        os.unlink(f"{path}-shm")

        with pytest.raises(BackendUnavailable, match="its -shm file"):
            await cp.append("t", [{}])


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_deleted_log_is_not_copied_over_another_process_s_writes(
    path: str, workers: Workers, is_killed: bool
) -> None:
    """Each write that was acknowledged to the other process is found."""
    url = f"sqlite:///{path}"

    async with Store(path) as cp:
        await cp.append("mine", [{}])
        os.unlink(f"{path}-wal")
        os.unlink(f"{path}-shm")
        (worker,) = workers(1)

        if is_killed:
            worker.tell("write_for_ever", url, "w")
            lines = [await asyncio.to_thread(worker.answer) for _ in range(9)]
            lines += worker.kill()
            written = max(line[1] for line in lines if line[0] == "append")
        else:
            worker.ask("append_one", url)
            written = 1

        with pytest.raises(BackendUnavailable, match="its -wal file"):
            await cp.record_issued("mine", ToolCall("c", "pay", {}, "key"))

    async with Store(path) as cp:
        found = await cp.read("t" if is_killed else "shared")
        assert len(found) >= written
        assert await cp.load("mine") is None
