"""The folder: its place, permissions, full disks, and open descriptors."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpkit import (
    BackendUnavailable,
    InvalidURL,
    SchemaMismatch,
    ToolCall,
    UnknownCall,
    VersionConflict,
    open_checkpointer,
)
from cpkit.driver import file_system
from cpkit.registry import inspect_store
from cpkit_file import FileCheckpointer, schema
from tests.file.conftest import open_files
from tests.mounts import small_disk
from tests.processes import UNPRIVILEGED, Workers

Store = FileCheckpointer[Any]


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Let every user read and write what this process creates."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system that can be filled."""
    with small_disk(tmp_path / "small", 256) as place:
        yield place


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that every user may reach; pytest's folders are for one user."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


# Places


@pytest.mark.usefixtures("no_umask")
async def test_files_and_folders_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Modes are 0600 for files and 0700 for folders, with any umask."""
    home = tmp_path / "a" / "b" / "store"

    async with Store(home) as cp:
        await cp.append("t", [{}])
        await cp.record_issued("t", ToolCall("c", "tool", {}, "key"))
        await cp.append("other", [{}])
        await cp.delete_thread("t")
        (log,) = (home / "threads").glob("other*")

        with log.open("ab") as file:
            file.write(b'{"add":{"torn"')

        await cp.append("other", [{}])

    found = [*(tmp_path / "a").rglob("*")]
    assert {mode(path) for path in found if path.is_dir()} == {0o700}
    assert {mode(path) for path in found if path.is_file()} == {0o600}
    assert len([path for path in found if path.suffix == ".torn"]) == 1
    assert mode(tmp_path / "a") == 0o700


async def test_the_permissions_of_an_existing_folder_are_kept(
    home: Path,
) -> None:
    """A folder made for a group stays one."""
    home.mkdir()
    os.chmod(home, 0o770)

    async with Store(home) as cp:
        await cp.append("t", [{}])

    assert mode(home) == 0o770


@pytest.mark.parametrize(
    "url", ["file://{}/a%20b", "file:{}/a%20b", "FILE:{}/a b", "file://{}/a%20b/"]
)
async def test_each_form_of_url_names_the_folder(tmp_path: Path, url: str) -> None:
    """``%``-escapes are decoded."""
    async with open_checkpointer(url.format(tmp_path)) as cp:
        await cp.append("t", [{}])

    async with Store(tmp_path / "a b") as cp:
        assert await cp.read("t") == [{}]
        assert repr(cp) == f"<FileCheckpointer file://{tmp_path}/a b>"


@pytest.mark.parametrize(
    "url",
    [
        "file:",
        "file://",
        "file:///",
        "file://host/path",
        "file:x?durability=full",
        "file:x?fsync=1",
    ],
)
def test_a_url_that_names_no_folder_is_refused(url: str) -> None:
    """The error says what to write instead."""
    with pytest.raises(InvalidURL):
        open_checkpointer(url)


async def test_a_relative_path_is_resolved_when_the_store_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that changes its working directory keeps the same store."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    async with open_checkpointer("file:agent") as cp:
        await cp.append("t", [{}])
        monkeypatch.chdir(tmp_path / "elsewhere")
        await cp.append("t", [{}])
        data = await cp.load("t")
        assert data is not None
        assert data.version == 2

    assert not list((tmp_path / "elsewhere").iterdir())


# Promises


async def test_durability_is_stated_as_facts(on_disk: Path) -> None:
    """A level, and what it rests on: the sync and the file system."""
    async with Store(on_disk) as cp:
        durability = cp.durability

    system = await asyncio.to_thread(file_system, str(on_disk))
    assert durability.survives is system.survives
    assert durability.settings == {"sync": "fdatasync", "file_system": system.type}
    assert tuple(durability.advice) == system.advice


async def test_a_platform_without_locks_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written."""
    monkeypatch.setattr(schema, "fcntl", None)

    with pytest.raises(BackendUnavailable, match="sqlite:///"):
        await Store(home).__aenter__()

    assert not home.exists()


@pytest.mark.parametrize("exists", [True, False])
async def test_a_file_system_without_locks_is_refused_and_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    """It is tried before anything is created."""
    home = tmp_path / "a" / "store"

    if exists:
        home.mkdir(parents=True)
        (home / "notes").touch()

    before = sorted(tmp_path.rglob("*"))
    flock = fcntl.flock

    def refuse(fd: int, how: int) -> None:
        if how != fcntl.LOCK_UN:
            raise OSError(errno.ENOTSUP, "Operation not supported")

        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", refuse)

    with pytest.raises(BackendUnavailable, match="not supported") as raised:
        await Store(home).__aenter__()

    assert raised.value.maybe_applied is False
    assert sorted(tmp_path.rglob("*")) == before


async def test_a_folder_says_what_its_files_are(home: Path) -> None:
    """For a person who finds it."""
    async with Store(home) as cp:
        await cp.append("t", [{}])
        names = {path.name for path in home.iterdir()}
        assert names == {"README", "cpkit.json", "threads", "used-keys"}
        text = (home / "README").read_text()

        for name in ("threads/", "used-keys/", "cpkit.json", ".torn", ".tmp"):
            assert name in text


@pytest.mark.parametrize("name", ["link", "link/store"])
async def test_a_link_may_lead_to_the_folder(tmp_path: Path, name: str) -> None:
    """A store is the folder that a symbolic link in its path leads to."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    async with Store(tmp_path / name) as cp:
        await cp.append("t", [{}])

    async with Store(tmp_path / name.replace("link", "real")) as cp:
        assert await cp.read("t") == [{}]


async def test_a_folder_of_a_newer_version_gets_no_subfolders(home: Path) -> None:
    """The version is read first, also where subfolders are missing."""
    home.mkdir()
    (home / "cpkit.json").write_bytes(b'{"cpkit":"file","version":2}')

    with pytest.raises(SchemaMismatch):
        await Store(home).__aenter__()

    assert [path.name for path in home.iterdir()] == ["cpkit.json"]


@pytest.mark.parametrize("made_by_another", [True, False])
async def test_every_folder_is_made_lasting_in_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_by_another: bool
) -> None:
    """It is synced before the store is used, also if another process created it."""
    home = tmp_path / "a" / "b" / "store"
    steps: list[str] = []
    fsync = os.fsync

    def note_sync(fd: int) -> None:
        steps.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note_sync)

    if made_by_another:
        home.mkdir(parents=True)

    async with Store(home):
        folders = [home / "used-keys", home, home.parent]

        if not made_by_another:
            folders += [tmp_path / "a", tmp_path]

        assert {*map(str, folders)} <= {*steps}


# Limits of the system


def test_a_file_that_may_not_grow_is_unavailable_and_then_works_again(
    home: Path, workers: Workers
) -> None:
    """EFBIG in the middle of a write: the written part is removed."""
    (worker,) = workers(1)
    answer = worker.ask("fill_up_to", str(home), 500_000)

    assert str(home) in answer["failure"]
    assert answer["acknowledged"] > 50
    assert answer["maybe_applied"] is False
    assert answer["loaded"] == answer["acknowledged"]
    assert answer["size"] < 500_000
    assert answer["after"] == answer["loaded"] + 1


async def test_a_full_disk_is_unavailable_and_then_works_again(full_disk: Path) -> None:
    """ENOSPC: each write is refused as a whole, reads work, and so do later writes."""
    ballast = full_disk / "ballast"
    ballast.write_bytes(b"x" * 50_000)
    acknowledged, failure = 0, None

    async with Store(full_disk / "store") as cp:
        while failure is None:
            try:
                acknowledged = await cp.append("t", [{"pad": "x" * 1000}] * 3)
            except BackendUnavailable as exc:
                failure = exc

        assert acknowledged > 0
        assert failure.maybe_applied is False

        for use in (
            cp.append("new", [{"pad": "x" * 9000}]),
            cp.save_extra("t", {"pad": "x" * 9000}),
            cp.record_issued("t", ToolCall("c", "tool", {"p": "x" * 9000}, "key")),
        ):
            with pytest.raises(BackendUnavailable) as raised:
                await use

            assert raised.value.maybe_applied is False

        data = await cp.load("t")
        assert data is not None
        assert (data.version, data.extra, data.pending) == (acknowledged, {}, [])
        assert await cp.load("new") is None
        assert await cp.find_call("key") is None

        ballast.unlink()
        assert await cp.append("t", [{}]) == acknowledged + 1
        assert await cp.record_issued("t", ToolCall("c", "t", {}, "key")) is None
        await cp.delete_thread("t")
        assert await cp.append("t", [{}]) == 1


async def test_a_torn_write_is_cut_off_where_the_disk_has_no_space_for_it(
    full_disk: Path,
) -> None:
    """It was never acknowledged, and the next write needs the space."""
    log = full_disk / "store" / "threads" / schema.log_name("t")

    async with Store(full_disk / "store") as cp:
        await cp.append("t", [{}])

        with log.open("ab") as file:
            file.write(b'{"add":{"x":"' + b"x" * 130_000)

        assert await cp.append("t", [{"pad": "x" * 9000}]) == 2
        assert len(await cp.read("t")) == 2


def half_write(fd: int, data: bytes, write: Any = os.write) -> int:
    """Write half of the bytes each time; fail when few are left."""
    if len(data) < 50:
        raise OSError(5, "Input/output error")

    written: int = write(fd, data[: len(data) // 2])
    return written


@pytest.mark.parametrize("first", [True, False])
async def test_a_write_that_fails_is_removed(
    home: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Its bytes are cut off under the same lock."""
    async with Store(home) as cp:
        if not first:
            await cp.append("t", [{"n": 0}])

        monkeypatch.setattr(os, "write", half_write)

        with pytest.raises(BackendUnavailable, match="Input/output") as raised:
            await cp.append("t", [{"n": 1}] * 20)

        monkeypatch.undo()
        assert raised.value.maybe_applied is False
        assert isinstance(raised.value.__cause__, OSError)
        assert await cp.read("t") == ([] if first else [{"n": 0}])
        assert (await cp.list_threads() == []) is first
        assert await cp.append("t", [{"n": 1}]) == (1 if first else 2)

    assert not list((home / "threads").glob("*.torn"))


async def test_a_write_that_cannot_be_removed_may_be_applied(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes half of it, and then nothing: the handle is not used further."""

    def fail(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    async with Store(home) as cp:
        await cp.append("t", [{"n": 0}])
        monkeypatch.setattr(os, "write", half_write)
        monkeypatch.setattr(os, "ftruncate", fail)

        with pytest.raises(BackendUnavailable, match="Read-only") as raised:
            await cp.append("t", [{"n": 1}] * 20)

        monkeypatch.undo()
        assert raised.value.maybe_applied

        with pytest.raises(BackendUnavailable, match="open the store again"):
            await cp.append("t", [{"n": 1}])

    async with Store(home) as cp:
        assert (await cp.read("t"))[0] == {"n": 0}
        assert await cp.append("t", [{"n": 2}])


async def test_a_restore_that_fails_leaves_no_thread(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that it leaves is removed by the next one, or by a deletion."""

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    async with Store(home) as cp:
        await cp.append("t", [{"n": 1}])
        dump = await cp.dump_thread("t")
        assert dump is not None
        await cp.delete_thread("t")

        for broken in ("write", "rename"):
            monkeypatch.setattr(os, broken, fail)

            with pytest.raises(BackendUnavailable, match="No space") as raised:
                await cp.restore_thread(dump)

            monkeypatch.undo()
            assert not raised.value.maybe_applied
            assert await cp.load("t") is None

        await cp.delete_thread("t")
        assert list((home / "threads").iterdir()) == []
        await cp.restore_thread(dump)
        assert await cp.dump_thread("t") == dump


async def test_without_free_descriptors_nothing_is_done_and_no_lock_is_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EMFILE is a typed error, and operations work when descriptors are free."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    async with Store(home) as cp:
        await cp.append("t", [{}])

    async with Store(home) as cp:
        monkeypatch.setattr(os, "open", fail)

        for use in (cp.append("t", [{}]), cp.load("t"), cp.list_calls("t")):
            with pytest.raises(BackendUnavailable, match="Too many") as raised:
                await use

            assert raised.value.maybe_applied is False

        monkeypatch.undo()
        assert await cp.append("t", [{}]) == 2


def bound(places: list[Path]) -> None:
    """Make the user of the worker the owner of files; permissions bind that user."""
    if os.getuid() == 0:
        for place in places:
            os.lchown(place, UNPRIVILEGED, UNPRIVILEGED)


async def test_a_folder_that_may_only_be_read_is_read(
    reachable: Path, workers: Workers
) -> None:
    """Reads work, writes are refused, and nothing changes."""
    home = reachable / "store"

    async with Store(home) as cp:
        await cp.append("t", [{"n": 1}])
        await cp.record_issued("t", ToolCall("c", "tool", {}, "key"))

    everything = [home, *home.rglob("*")]
    bound(everything)

    for path in everything:
        os.chmod(path, 0o500 if path.is_dir() else 0o400)

    (worker,) = workers(1)
    said = worker.ask("use_unprivileged", str(home))
    assert sorted([home, *home.rglob("*")]) == sorted(everything)

    for path in everything:
        if path.is_dir():
            os.chmod(path, 0o700)

    assert "{'n': 1}" in said["load"]
    assert "call_id='c'" in said["calls"]

    for name in ("append", "new thread", "claim", "delete"):
        assert "nothing was written" in said[name], name
        assert str(home) in said[name]


def test_a_place_that_may_not_be_written_is_refused_at_open(
    reachable: Path, workers: Workers
) -> None:
    """The error has its name, and nothing is changed."""
    bound([reachable])
    os.chmod(reachable, 0o555)
    (worker,) = workers(1)
    said = worker.ask("open_unprivileged", str(reachable / "store"))
    os.chmod(reachable, 0o755)
    assert str(reachable / "store") in said
    assert "nothing was written" in said
    assert not list(reachable.iterdir())


# Leftovers


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
async def test_nothing_stays_open(home: Path) -> None:
    """After an operation no file is open, after closing no thread is left."""

    async def work() -> None:
        async with Store(home) as cp:
            await cp.append("t", [{}])
            await cp.record_issued("t", ToolCall("c", "tool", {}, "key"))
            await cp.find_call("key")
            await cp.append("u", [{}])
            await cp.delete_thread("t")

            with pytest.raises(BackendUnavailable):
                await Store(home / "cpkit.json").__aenter__()

            assert not open_files(home)
            assert any("cpkit-file" in t.name for t in threading.enumerate())
            raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await work()

    assert not any("cpkit-file" in t.name for t in threading.enumerate())
    assert not open_files(home)


async def test_a_look_at_a_store_in_use_survives_files_that_go(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion can remove a file meanwhile."""
    lstat = os.lstat

    def removed(path: str) -> os.stat_result:
        if path.startswith(f"{home}/threads/"):
            os.unlink(path)

        return lstat(path)

    async with Store(home) as cp:
        await cp.append("t", [{}])
        monkeypatch.setattr(os, "lstat", removed)
        found = await inspect_store(f"file://{home}")
        assert found is not None
        rest = [home / "cpkit.json", home / "README"]
        assert found.size == sum(path.stat().st_size for path in rest)


async def test_a_refused_write_leaves_no_file(home: Path) -> None:
    """A missing thread does not get a log from a write that was refused."""
    async with Store(home) as cp:
        with pytest.raises(VersionConflict):
            await cp.append("t", [{}], expected_version=3)

        with pytest.raises(UnknownCall):
            await cp.record_result("t", "c", 1)

        await cp.append("t", [])
        await cp.save_extra("t", {})
        await cp.delete_thread("t")
        assert list((home / "threads").iterdir()) == []


def test_a_handle_that_is_not_closed_does_not_keep_the_process_alive(
    on_disk: Path,
) -> None:
    """The interpreter ends although worker threads are waiting for work."""
    script = f"""
import asyncio
from cpkit_file import FileCheckpointer

async def main():
    cp = await FileCheckpointer({str(on_disk)!r}).__aenter__()
    print(await cp.append("t", [{{}}]))

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n", "")
