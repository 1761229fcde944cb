"""Claims and deletions that overlap at a chosen step."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cpkit import BackendUnavailable, CallMismatch, CallRecord, ToolCall, UnknownCall
from cpkit.driver.codec import Codec
from cpkit.driver.writes import Erase, StoreFailure
from cpkit_file import FileCheckpointer, claims, store
from cpkit_file.log import Folder
from cpkit_file.schema import claim_stem

Store = FileCheckpointer[Any]

CALL = ToolCall("c", "pay", {"n": 1}, "key")
CODEC: Codec[Any] = Codec()


def claim(folder: Folder, thread_id: str, call: ToolCall) -> object:
    """Claim in this thread, as another process would."""
    return claims.claim(folder, CODEC.claim(thread_id, call))


def folder_of(cp: Any) -> Folder:
    folder: Folder = cp._store._folder
    return folder


def meanwhile(
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
    other: Callable[[], object],
    *,
    before: bool = False,
) -> list[object]:
    """Run a function once, right after (or before) the next call of another one."""
    original = getattr(place, name)
    happened: list[object] = []

    def interrupted(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()

        if before:
            happened.append(other())
            return original(*args, **options)

        result = original(*args, **options)
        happened.append(other())
        return result

    monkeypatch.setattr(place, name, interrupted)
    return happened


def links(home: Path) -> list[str]:
    return sorted(
        path.name.partition(".")[2] + " " + path.parent.name
        for path in (home / "claims").rglob("*.*")
    )


async def test_one_call_id_under_two_keys_at_once_is_claimed_once(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two keys have different locks; the lock of the log decides."""
    other = ToolCall("c", "pay", {"n": 1}, "a second key")
    assert claim_stem("key")[0] != claim_stem("a second key")[0]

    async with Store(home) as cp, Store(home) as rival:
        happened = meanwhile(
            monkeypatch,
            claims._Key,
            "newest",
            lambda: claim(folder_of(rival), "t", other),
        )

        with pytest.raises(CallMismatch):
            await cp.record_issued("t", CALL)

        assert happened == [None]
        (record,) = await cp.list_calls("t")
        assert record.call == other
        assert await cp.find_call("key") is None
        assert await cp.record_issued("t2", CALL) is None


async def test_a_thread_deleted_in_the_middle_of_a_claim_keeps_the_claim(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim comes after the deletion, and holds its key."""
    async with Store(home) as cp, Store(home) as rival:
        await cp.append("t", [{}])
        meanwhile(
            monkeypatch,
            claims._Key,
            "newest",
            lambda: claims.erase(folder_of(rival), Erase("t", False)),
        )
        assert await cp.record_issued("t", CALL) is None
        data = await cp.load("t")
        assert data is not None
        assert (data.messages, [r.call for r in data.pending]) == ([], [CALL])
        assert await rival.find_call("key") == data.pending[0]


async def test_a_thread_forgotten_while_its_key_is_looked_up(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that counted links which were removed meanwhile finds the key free."""
    async with Store(home) as cp, Store(home) as rival:
        await cp.record_issued("t", CALL)
        meanwhile(
            monkeypatch,
            claims._Key,
            "_top",
            lambda: claims.erase(folder_of(rival), Erase("t", True)),
        )
        assert await cp.find_call("key") is None
        assert links(home) == []


@pytest.mark.parametrize("kept_open", [True, False])
@pytest.mark.parametrize("forget", [True, False])
@pytest.mark.parametrize("linked", [True, False])
async def test_the_log_is_replaced_while_a_writer_waits_for_it(
    home: Path,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept_open: bool,
    forget: bool,
    linked: bool,
) -> None:
    """The writer waited for a file that was replaced; it writes to the new one.

    A backup by hard links (``cp -al``) gives the old file another name.
    """
    async with Store(home) as cp, Store(home) as rival:
        await rival.append("t", [{"old": 1}])
        await rival.record_issued("t", CALL)

        if linked:
            os.link(log, home / "backup")

        if kept_open:
            await cp.append("t", [{"old": 2}])

        happened = meanwhile(
            monkeypatch,
            fcntl,
            "flock",
            partial(claims.erase, folder_of(rival), Erase("t", forget)),
            before=True,
        )
        assert await cp.append("t", [{"new": 1}]) == 1
        assert len(happened) == 1
        assert await cp.read("t") == await rival.read("t") == [{"new": 1}]


async def test_a_list_of_threads_and_a_replacement_of_a_log_exclude_each_other(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some file systems, a list made during a rename lacks the log's name."""

    def refused(work: Callable[..., object], *args: Any) -> None:
        with pytest.raises(StoreFailure, match="holds the lock"):
            work(*args)

    async with Store(home) as cp, Store(home) as rival:
        await cp.record_issued("t", CALL)
        folder = folder_of(rival)
        other = partial(refused, store._threads, folder, "", None, 9, True)
        happened = meanwhile(monkeypatch, os, "rename", other, before=True)
        await cp.delete_thread("t")
        assert happened == [None]

        await cp.append("t", [{}])
        other = partial(refused, claims.erase, folder, Erase("t", False))
        happened = meanwhile(monkeypatch, os, "listdir", other)
        assert len(await cp.list_threads(erased=True)) == 1
        assert happened == [None]
        assert [path.suffix for path in (home / "threads").iterdir()] == [".jsonl"]


async def test_a_folder_of_logs_that_is_a_link_is_listed(home: Path) -> None:
    """It may stand on another disk."""
    async with Store(home) as cp:
        (home / "threads").rename(home.with_name("disk"))
        (home / "threads").symlink_to(home.with_name("disk"))
        await cp.record_issued("t", CALL)
        await cp.delete_thread("t")
        assert len(await cp.list_threads(erased=True)) == 1


async def test_a_hard_link_to_an_empty_log_does_not_undo_a_restore(
    home: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The empty log that a restore locked is removed only from its own name."""
    async with Store(home) as cp:
        await cp.append("t", [{"n": 1}])
        dump = await cp.dump_thread("t")
        assert dump is not None
        await cp.delete_thread("t")
        backup = partial(os.link, log, home / "backup")
        meanwhile(monkeypatch, os, "rename", backup, before=True)
        await cp.restore_thread(dump)
        assert await cp.read("t") == [{"n": 1}]


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


async def test_a_key_is_not_forgotten_in_the_middle_of_a_claim(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of an attempt depends on the attempt before it."""
    again = ToolCall("c2", "pay", {"n": 1}, "key")

    async with Store(home) as cp, Store(home) as rival:
        await cp.record_issued("t", CALL)
        await cp.record_result("t", "c", None, success=False)

        def forget() -> None:
            with pytest.raises(StoreFailure, match="holds the lock"):
                claims.erase(folder_of(rival), Erase("t", True))

        happened = meanwhile(monkeypatch, claims._Key, "newest", forget)
        assert await cp.record_issued("t", again) is None
        assert happened == [None]
        assert [call.attempt for call in await rival.list_calls("t")] == [1, 2]


async def test_a_deletion_that_waits_for_a_lock_deletes_once(home: Path) -> None:
    """It changes nothing before it holds all locks, and deletes later claims too."""
    later = ToolCall("c2", "pay", {}, "a second key")
    shard = home / "claims" / claim_stem("key")[0]

    async with Store(home, timeout=0.2) as cp, Store(home) as rival:
        await cp.record_issued("t", CALL)

        # A lock of another file description acts as one of another process.
        stopped = os.open(shard, os.O_RDONLY)
        fcntl.flock(stopped, fcntl.LOCK_EX)

        with pytest.raises(BackendUnavailable, match="the lock of") as raised:
            await cp.delete_thread("t", forget_keys=True)

        assert not raised.value.maybe_applied
        assert await rival.record_issued("t", later) is None
        assert len(await rival.list_calls("t")) == 2
        os.close(stopped)

        await cp.delete_thread("t", forget_keys=True)
        assert await rival.list_calls("t") == []
        assert links(home) == []


async def test_dangling_links_are_skipped_and_replaced(home: Path) -> None:
    """Crashes leave them after the last attempt, or between two attempts."""
    stem = claim_stem("key")

    async with Store(home) as cp:
        await cp.append("void", [{}])
        shard = home / "claims" / stem[0]
        (void,) = (home / "threads").iterdir()

        def leave(*attempts: int) -> None:
            for attempt in attempts:
                (shard / f"{stem}.{attempt}").symlink_to(
                    f"../../threads/{void.name}#{attempt}"
                )

        leave(1, 2)
        assert await cp.find_call("key") is None
        assert await cp.record_issued("t", CALL) is None
        found = await cp.find_call("key")
        assert found is not None
        assert (found.thread_id, found.attempt) == ("t", 1)
        await cp.record_result("t", "c", None, success=False)

        leave(3)
        assert await cp.record_issued("t2", CALL) is None
        found = await cp.find_call("key")
        assert found is not None
        assert (found.thread_id, found.attempt) == ("t2", 2)
        await cp.record_result("t2", "c", None, success=False)
        await cp.delete_thread("t", forget_keys=True)
        assert await cp.record_issued("t3", CALL) is None
        found = await cp.find_call("key")
        assert found is not None
        assert (found.thread_id, found.attempt) == ("t3", 3)
        await cp.record_result("t3", "c", None, success=False)
        await cp.delete_thread("t2", forget_keys=True)
        await cp.delete_thread("t3", forget_keys=True)
        assert links(home) == []
        assert await cp.record_issued("t4", CALL) is None
        found = await cp.find_call("key")
        assert found is not None
        assert found.attempt == 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 100])
async def test_the_last_of_many_attempts_is_found(home: Path, count: int) -> None:
    """By binary search, so a key with a thousand attempts costs little more."""
    async with Store(home, durability="normal") as cp:
        for attempt in range(1, count + 1):
            call = ToolCall(f"c{attempt}", "pay", {}, "key")
            assert await cp.record_issued(f"t{attempt % 3}", call) is None
            await cp.record_result(
                f"t{attempt % 3}", call.call_id, None, success=attempt == count
            )

        found = await cp.find_completed("key")
        assert found is not None
        assert (found.attempt, found.call.call_id) == (count, f"c{count}")


async def test_claims_and_deletions_of_many_tasks_never_deadlock(home: Path) -> None:
    """Locks are taken in one order, by more tasks than there are worker threads.

    Each key has one holder afterwards.
    """

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

    async with Store(home, durability="normal") as one, Store(home) as two:
        await asyncio.wait_for(
            asyncio.gather(*(work((one, two)[n % 2], n) for n in range(40))), 50
        )
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
