"""Keys: registers of claims, and the logs that they lead to."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from conformance.slowdown import slowdown
from cpkit import BackendUnavailable, CallRecord, CorruptThread, ToolCall, UnknownCall
from cpkit_file import FileCheckpointer
from cpkit_file.schema import log_name, register_name

Store = FileCheckpointer[Any]

CALL = ToolCall("c", "pay", {"n": 1}, "key")


@pytest.fixture
def register(home: Path) -> Path:
    """The register of the key ``key``."""
    return home / "used-keys" / register_name("key")


def claims(register: Path) -> list[tuple[str, str, int]]:
    found = [json.loads(line) for line in register.read_bytes().splitlines()]
    return [(one["thread"], one["call"], one["attempt"]) for one in found]


async def test_a_claim_is_a_line_in_a_register_and_in_a_log(
    home: Path, log: Path, register: Path
) -> None:
    """A claim that is refused writes nothing."""
    async with Store(home) as cp:
        await cp.record_issued("t", CALL)
        before = register.read_bytes(), log.read_bytes()
        assert claims(register) == [("t", "c", 1)]
        await cp.record_issued("t", CALL)
        await cp.record_issued("u", ToolCall("d", "pay", {}, "key"))
        assert (register.read_bytes(), log.read_bytes()) == before
        assert not (log.parent / log_name("u")).exists()


async def test_a_line_of_a_register_without_its_call_is_void(
    home: Path, register: Path
) -> None:
    """A crash leaves one, and so does a deletion that forgets keys."""
    async with Store(home) as cp:
        await cp.record_issued("t", CALL)
        await cp.delete_thread("t", forget_keys=True)
        assert claims(register) == [("t", "c", 1)]
        assert await cp.find_call("key") is None

        # Neither another key of that call, nor another attempt, gives the line back.
        await cp.record_issued("t", ToolCall("c", "pay", {}, "another key"))
        assert await cp.find_call("key") is None
        await cp.delete_thread("t", forget_keys=True)
        await cp.record_issued("u", CALL)
        await cp.record_result("u", "c", "declined", success=False)
        assert await cp.record_issued("t", CALL) is None
        await cp.record_result("t", "c", "declined", success=False)
        await cp.delete_thread("u", forget_keys=True)
        again = ToolCall("c2", "pay", {}, "key")
        assert await cp.record_issued("u", again) is None
        found = await cp.find_call("key")
        assert found is not None
        assert (found.thread_id, found.attempt) == ("u", 3)


async def test_a_void_claim_of_a_later_attempt_hides_no_holder(home: Path) -> None:
    """The number of the line is not that of the call, which was claimed again."""
    async with Store(home) as cp:
        for name in ("u", "v", "t"):
            await cp.record_issued(name, CALL)
            await cp.record_result(name, "c", "declined", success=False)

        for name in ("u", "v", "t"):
            await cp.delete_thread(name, forget_keys=True)

        await cp.record_issued("t", CALL)  # attempt 1; another line says 3
        await cp.record_result("t", "c", "declined", success=False)
        await cp.record_issued("u", ToolCall("d", "pay", {}, "key"))
        found = await cp.find_call("key")
        assert found is not None
        assert (found.thread_id, found.attempt, found.status) == ("u", 2, "issued")


async def test_a_damaged_register_frees_no_key(home: Path, register: Path) -> None:
    """Its keys cannot be claimed; others can."""
    async with Store(home) as cp:
        await cp.record_issued("t", CALL)
        await cp.record_result("t", "c", 1)

    register.write_bytes(register.read_bytes().replace(b'"attempt":1', b'"attempt":2'))

    async with Store(home) as cp:
        for use in (
            cp.find_completed("key"),
            cp.record_issued("u", ToolCall("d", "pay", {}, "key")),
        ):
            with pytest.raises(CorruptThread) as raised:
                await use

            assert raised.value.where == f"{register}, line 1"

        assert await cp.record_issued("u", ToolCall("d", "pay", {}, "other")) is None
        assert len(await cp.list_calls("t")) == 1


@pytest.mark.parametrize("torn", [b'{"key":"key","att', b"\0" * 90])
async def test_a_torn_claim_is_set_aside_by_the_next_one(
    home: Path, register: Path, torn: bytes
) -> None:
    """It was never acknowledged."""
    async with Store(home) as cp:
        await cp.record_issued("t", CALL)
        register.write_bytes(register.read_bytes() + torn)
        assert await cp.find_call("key") is not None
        await cp.record_result("t", "c", "declined", success=False)
        assert await cp.record_issued("u", CALL) is None
        assert claims(register) == [("t", "c", 1), ("u", "c", 2)]
        aside = register.with_name(f"{register.name}.torn")
        assert aside.read_bytes() == torn + b"\n"


async def test_a_copy_in_the_order_of_names_knows_the_key_of_each_call(
    home: Path,
) -> None:
    """As rsync and tar make it, while agents write."""
    copy = home.with_name("copy")

    async with Store(home) as cp:
        for number in range(40):
            call = ToolCall(f"c{number}", "pay", {}, f"key {number}")
            await cp.record_issued(f"t{number % 3}", call)
            await cp.record_result(f"t{number % 3}", call.call_id, "paid")

            if number == 20:
                for name in sorted(path.name for path in home.iterdir()):
                    if name == "threads":
                        shutil.copytree(home / name, copy / name)

        for path in home.iterdir():
            if path.name != "threads":
                copier = shutil.copytree if path.is_dir() else shutil.copyfile
                copier(path, copy / path.name)

    async with Store(copy) as cp:
        for number in range(40):
            call = ToolCall("other", "pay", {}, f"key {number}")
            found = await cp.find_completed(call.idempotency_key)
            assert (found is not None) is (number <= 20)
            assert (await cp.record_issued("new", call) is None) is (number > 20)
            await cp.delete_thread("new", forget_keys=True)


@pytest.mark.parametrize("kept_open", [True, False])
@pytest.mark.parametrize("forget", [True, False])
async def test_the_log_is_replaced_while_a_writer_waits_for_it(
    home: Path,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept_open: bool,
    forget: bool,
) -> None:
    """The writer does not write to the old file, which a backup gave another name."""
    flock = fcntl.flock

    async with Store(home) as cp, Store(home) as rival:
        await rival.append("t", [{"old": 1}])
        await rival.record_issued("t", CALL)
        os.link(log, home / "backup")  # as cp -al does

        if kept_open:
            await cp.append("t", [{"old": 2}])

        def delete_first(fd: int, how: int) -> None:
            monkeypatch.undo()
            deletion = rival.delete_thread("t", forget_keys=forget)
            asyncio.run_coroutine_threadsafe(deletion, loop).result()
            flock(fd, how)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(fcntl, "flock", delete_first)
        assert await cp.append("t", [{"new": 1}]) == 1
        assert await cp.read("t") == await rival.read("t") == [{"new": 1}]
        assert b"new" not in (home / "backup").read_bytes()


async def test_a_folder_of_logs_that_is_a_link_is_listed(home: Path) -> None:
    """It may stand on another disk."""
    async with Store(home) as cp:
        (home / "threads").rename(home.with_name("disk"))
        (home / "threads").symlink_to(home.with_name("disk"))
        await cp.record_issued("t", CALL)
        await cp.delete_thread("t")
        assert len(await cp.list_threads(erased=True)) == 1


async def test_a_log_that_was_created_again_is_read_again(home: Path) -> None:
    """A handle that has read calls of the old log does not find them in the new one."""
    async with Store(home) as cp, Store(home) as other:
        for round_ in range(5):
            call = ToolCall("c", "pay", {"round": round_}, "key")
            assert await other.record_issued("t", call) is None
            record = await cp.find_call("key")
            assert record is not None
            assert record.call == call
            assert await cp.list_calls("t") == [record]
            await other.delete_thread("t", forget_keys=True)
            assert await cp.list_calls("t") == []
            assert await cp.find_call("key") is None


async def test_a_deletion_that_meets_a_lock_deletes_nothing(
    home: Path, register: Path
) -> None:
    """It changes nothing before it holds all locks, and deletes later claims too."""
    later = ToolCall("c2", "pay", {}, "a second key")

    async with Store(home, timeout=0.2 * slowdown()) as cp, Store(home) as rival:
        await cp.record_issued("t", CALL)

        # A lock of another file description acts as one of another process.
        with register.open() as stopped:
            fcntl.flock(stopped, fcntl.LOCK_EX)

            with pytest.raises(BackendUnavailable, match="the lock of") as raised:
                await cp.delete_thread("t", forget_keys=True)

            assert not raised.value.maybe_applied
            assert await rival.record_issued("t", later) is None
            assert len(await rival.list_calls("t")) == 2

        await cp.delete_thread("t", forget_keys=True)
        assert await rival.list_calls("t") == []


async def test_the_newest_of_many_attempts_is_found(home: Path) -> None:
    """They are in the order of their numbers, not of their lines."""
    async with Store(home) as cp:
        for attempt in range(1, 41):
            call = ToolCall(f"c{attempt}", "pay", {}, "key")
            assert await cp.record_issued(f"t{attempt % 3}", call) is None
            await cp.record_result(
                f"t{attempt % 3}", call.call_id, None, success=attempt == 40
            )

        found = await cp.find_completed("key")
        assert found is not None
        assert (found.attempt, found.call.call_id) == (40, "c40")


async def test_claims_and_deletions_of_many_tasks_never_deadlock(home: Path) -> None:
    """A writer that meets a lock releases its own; each key has one holder."""

    async def work(cp: Store, name: int) -> None:
        for i in range(12):
            thread_id = f"t{(name + i) % 4}"
            call = ToolCall(f"{name} {i}", "pay", {}, f"key {i % 5}")

            if await cp.record_issued(thread_id, call) is None and i % 2:
                with suppress(UnknownCall):  # another task has deleted it
                    await cp.record_result(
                        thread_id, call.call_id, i, success=i % 3 == 0
                    )

            await cp.append(thread_id, [{"i": i}])

            if i % 4 == 3:
                await cp.delete_thread(thread_id, forget_keys=i % 8 == 3)

    async with Store(home) as one, Store(home) as two:
        await asyncio.gather(*(work((one, two)[n % 2], n) for n in range(40)))
        held: list[CallRecord] = []

        for number in range(4):
            held += [
                record
                for record in await one.list_calls(f"t{number}")
                if record.status != "failed"
            ]

        keys = [record.call.idempotency_key for record in held]
        assert len(keys) == len(set(keys))

        for record in held:
            assert await two.find_call(record.call.idempotency_key) == record
