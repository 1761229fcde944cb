"""Copies of a store in use: each key that a log has is known in the copy."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cpkit import ToolCall
from cpkit.driver import Findings
from cpkit_file import FileCheckpointer, FileStore
from cpkit_file.schema import register_name
from tests.file.test_cost import Counted

Store = FileCheckpointer[Any]

CALL = ToolCall("late", "pay", {}, "key")


async def pay(cp: Store, thread_id: str, call_id: str, key: str) -> None:
    await cp.record_issued(thread_id, ToolCall(call_id, "pay", {}, key))
    await cp.record_result(thread_id, call_id, "paid")


def run(command: str, folder: Path) -> None:
    subprocess.run(command, shell=True, check=True, cwd=folder)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


COPIES = {
    "cp": "cp -r store/used-keys store/README store/cpkit.json copy/",
    "cp -a": "cp -a store/used-keys store/README store/cpkit.json copy/",
    "tar": "tar -C store -c used-keys README cpkit.json | tar -C copy -x",
    "old registers": "cp -a store/. copy/",
}


@pytest.mark.parametrize("command", COPIES)
async def test_a_key_that_was_paid_while_a_copy_was_made_is_known_in_it(
    home: Path, command: str
) -> None:
    """Any order, any tool: no thread of the copy can claim it again."""
    copy = home.with_name("copy")
    copy.mkdir()

    async with Store(home) as cp:
        await pay(cp, "t", "c1", "before")
        run(COPIES[command], home.parent)

        for n in range(20):
            await pay(cp, f"t{n % 3}", f"paid {n}", f"key {n}")

        await cp.record_issued("t", ToolCall("busy", "pay", {}, "again"))
        await cp.record_result("t", "busy", "no", success=False)
        await pay(cp, "t", "c2", "again")
        await cp.delete_thread("t1")
        shutil.copytree(home / "threads", copy / "threads", dirs_exist_ok=True)
        keys = ["before", "again", *(f"key {n}" for n in range(20))]
        expected = [await cp.find_call(key) for key in keys]

    async with Store(copy) as copied:
        for key in keys:
            call = ToolCall("late", "pay", {}, key)
            assert await copied.record_issued("late", call) is not None

        assert [await copied.find_call(key) for key in keys] == expected

    async with Store(copy) as copied:
        assert [await copied.find_call(key) for key in keys] == expected


async def test_registers_that_were_deleted_are_made_again(home: Path) -> None:
    """Also where the folder of registers is another one."""
    async with Store(home) as cp:
        await pay(cp, "t", "c", "key")

    (home / "used-keys" / register_name("key")).unlink()

    async with Store(home) as cp:
        assert await cp.record_issued("u", CALL) == await cp.find_call("key")
        await pay(cp, "u", "c", "other")

    shutil.rmtree(home / "used-keys")

    async with Store(home) as cp:
        assert await cp.record_issued("u", CALL) == await cp.find_call("key")
        assert await cp.find_completed("other") is not None


async def test_a_log_that_is_damaged_does_not_keep_a_copy_closed(
    home: Path, log: Path
) -> None:
    """The keys of the others are made known; the damage is told where it is read."""
    async with Store(home) as cp:
        await pay(cp, "t", "c", "lost")
        await pay(cp, "u", "c", "key")

    shutil.rmtree(home / "used-keys")
    log.write_bytes(log.read_bytes().replace(b"paid", b"PAID"))

    async with Store(home) as cp:
        assert await cp.find_completed("key") is not None


async def test_only_a_copy_is_checked(home: Path, counted: Counted) -> None:
    """Later openings of a store read no log."""
    async with Store(home) as cp:
        await cp.append("t", [{"pad": "x" * 10_000}] * 10)
        await pay(cp, "t", "c", "key")

    copy = shutil.copytree(home, home.with_name("copy"))

    for place, is_copy in [(home, False), (copy, True), (copy, False)]:
        counted.take()

        async with Store(place):
            assert (counted.take().bytes_read > 100_000) is is_copy, place


async def test_a_copy_that_may_only_be_read_is_left_as_it_is(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be claimed there."""
    async with Store(home) as cp:
        await pay(cp, "t", "c", "key")

    copy = shutil.copytree(home, home.with_name("copy"))
    register = copy / "used-keys" / register_name("key")
    register.write_bytes(b"")
    monkeypatch.setattr(os, "access", lambda *_: False)

    async with Store(copy) as cp:
        assert len(await cp.list_calls("t")) == 1

    assert register.read_bytes() == b""


def test_ordinary_copies_take_the_logs_before_the_registers(home: Path) -> None:
    """So each call has its key; names are sorted by rsync -a and tar --sort=name."""
    for name in ("threads", "used-keys"):
        (home / name).mkdir(parents=True)
        (home / name / "1").touch()

    command = "tar --sort=name -c . | tar -t"
    listed = subprocess.check_output(command, shell=True, cwd=home, text=True)
    assert listed.index("./threads/1") < listed.index("./used-keys/1")

    if shutil.which("rsync"):
        command = "rsync -ai . ../copied"
        listed = subprocess.check_output(command, shell=True, cwd=home, text=True)
        assert listed.index("threads/1") < listed.index("used-keys/1")


async def test_a_copy_of_a_trimmed_thread_is_examined_like_others(home: Path) -> None:
    """Its calls are in the log that was written again, and so are their keys known."""
    async with Store(home) as cp:
        await cp.append("t", [{"n": n} for n in range(3)])
        await pay(cp, "t", "c", "key")
        await cp.trim("t", 2)

    shutil.rmtree(home / "used-keys")
    copy = shutil.copytree(home, home.with_name("copy"))

    async with Store(copy) as cp:
        data = await cp.load("t")
        assert data is not None
        assert (data.first, data.messages) == (2, [{"n": 2}])
        assert await cp.record_issued("u", CALL) == await cp.find_call("key")

    found = await FileStore.examine(f"file://{copy}", FileStore.Options(), True)
    assert found == Findings([], [], {})
