"""Restored threads are exact, in any order, and beside claims and deletions."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Coroutine
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cpkit import (
    BackendUnavailable,
    CallRecord,
    CheckpointerError,
    KeyTaken,
    ThreadDump,
    ToolCall,
    VersionConflict,
)
from cpkit.driver import FullHandle
from cpkit.memory import MemoryCheckpointer
from cpkit_file import FileCheckpointer
from tests.sweeps import sweep

Store = FileCheckpointer[Any]


def failed(thread_id: str, call_id: str, attempt: int, key: str = "key") -> CallRecord:
    now = datetime.fromisoformat("2026-11-21T03:34:05.123456+00:00")
    call = ToolCall(call_id, "tool", {}, key)
    return CallRecord(thread_id, call, "failed", attempt, now, "busy", now)


def dump_of(thread_id: str, *attempts: int) -> ThreadDump:
    """Return a thread with failed attempts at the key ``key``."""
    calls = [failed(thread_id, f"c{number}", number) for number in attempts]
    return ThreadDump(thread_id, [], {}, calls, calls[0].issued_at, calls[0].issued_at)


async def fill(cp: FullHandle[Any]) -> None:
    """Write all kinds of lines, and calls of each status."""
    await cp.append("t", [{"n": 1}])
    await cp.append("t", [{"n": 2}, {"n": 3}], extra={"a": None, "b": [1, {}]})
    await cp.append("t", [], extra={"b": 2})

    for name, success in (("x", False), ("y", True), ("z", None)):
        await cp.record_issued("t", ToolCall(name, "pay", {"n": name}, f"key {name}"))

        if success is not None:
            await cp.record_result("t", name, {"ok": success}, success=success)


@pytest.mark.parametrize("steps", ["live", "erased", "begun again"])
async def test_a_thread_is_moved_exactly(tmp_path: Path, steps: str) -> None:
    """Messages, extra and every field of every call; the store behaves the same."""
    async with Store(tmp_path / "here") as here, Store(tmp_path / "there") as there:
        await fill(here)

        if steps != "live":
            await here.delete_thread("t")

        if steps == "begun again":
            await here.append("t", [{}])

        dump = await here.dump_thread("t")
        assert dump is not None
        await there.restore_thread(dump)
        assert await there.dump_thread("t") == dump
        assert await there.load("t") == await here.load("t")
        listed = await here.list_threads(erased=True)
        assert await there.list_threads(erased=True) == listed
        assert len(listed) == 1

        for key in ("key x", "key y", "key z"):
            assert await there.find_call(key) == await here.find_call(key)

        with pytest.raises(VersionConflict):
            await there.restore_thread(dump)

        record = await there.record_result("t", "z", 1)
        assert record.erased is (steps != "live")
        assert await there.append("t", [{}]) == len(dump.messages) + 1


@pytest.mark.parametrize("is_short", [False, True])
async def test_a_long_thread_is_read_in_parts_after_it_was_moved(
    tmp_path: Path, is_short: bool
) -> None:
    """Each message has its own line, so that a range can be found."""
    async with Store(tmp_path) as cp:
        messages = [{} if is_short else {"n": n} for n in range(3000)]
        await cp.append("t", messages)
        dump = await cp.dump_thread("t")
        assert dump is not None
        await cp.delete_thread("t")
        await cp.restore_thread(dump)
        assert await cp.read("t", 1500, 1502) == messages[1500:1502]
        assert await cp.dump_thread("t") == dump


@pytest.mark.parametrize("order", ["1 2 3", "3 2 1", "2 3 1", "9 1 5", "3 1"])
async def test_attempts_are_restored_in_any_order(tmp_path: Path, order: str) -> None:
    """The newest attempt is found, and the next claim has the number after it."""
    attempts = [int(number) for number in order.split()]

    async with Store(tmp_path) as cp:
        for number in attempts:
            await cp.restore_thread(dump_of(f"t{number}", number))

        call = ToolCall("c", "tool", {}, "key")
        assert await cp.record_issued("new", call) is None
        holder = await cp.find_call("key")
        assert holder is not None
        assert (holder.thread_id, holder.attempt) == ("new", max(attempts) + 1)

        with pytest.raises(KeyTaken, match="'new'"):
            await cp.restore_thread(dump_of("late", *attempts[:1]))


async def test_a_key_of_many_threads_is_found_after_each_is_forgotten(
    tmp_path: Path,
) -> None:
    """Then the attempt before it is the newest."""
    async with Store(tmp_path) as cp:
        for number in (4, 2, 1, 3):
            await cp.restore_thread(dump_of(f"t{number}", number, number + 10))

        for number in (4, 3, 2, 1):
            await cp.record_issued("probe", ToolCall("c", "tool", {}, "key"))
            holder = await cp.find_call("key")
            assert holder is not None
            assert holder.attempt == number + 11
            await cp.delete_thread("probe", forget_keys=True)
            await cp.delete_thread(f"t{number}", forget_keys=True)

        assert await cp.record_issued("probe", ToolCall("c", "tool", {}, "key")) is None
        (call,) = await cp.list_calls("probe")
        assert call.attempt == 1


@pytest.mark.parametrize("done", range(4))
async def test_a_restore_that_ends_before_its_log_claims_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    """The lines in the registers are void, and count when the thread is restored."""
    write = os.write
    left = done

    def fail_later(fd: int, data: bytes) -> int:
        nonlocal left

        if left == 0:
            raise OSError(5, "Input/output error")

        left -= 1
        return write(fd, data)

    calls = [failed("late", f"{key}{n}", n, key) for key in "abc" for n in (2, 3)]
    late = ThreadDump("late", [{}], {}, calls, calls[0].issued_at, calls[0].issued_at)

    async with Store(tmp_path) as cp:
        monkeypatch.setattr(os, "write", fail_later)

        with pytest.raises(BackendUnavailable, match="Input/output"):
            await cp.restore_thread(late)

        monkeypatch.undo()
        assert await cp.load("late") is None

        for key in ("a", "b", "c"):
            call = ToolCall(key, "tool", {}, key)
            assert await cp.record_issued("a", call) is None
            (held,) = [one for one in await cp.list_calls("a") if one.call == call]
            assert held.attempt == 1

        await cp.delete_thread("a", forget_keys=True)
        await cp.restore_thread(late)
        assert await cp.list_calls("late") == calls
        assert await cp.record_issued("a", ToolCall("c", "tool", {}, "a")) is None
        (held,) = await cp.list_calls("a")
        assert held.attempt == 4


async def outcome_of(operation: Any) -> Any:
    """Return what an operation returns or raises, without times."""
    try:
        found = await operation
    except CheckpointerError as exc:
        return type(exc), str(exc)

    if isinstance(found, CallRecord):
        return found.thread_id, found.call, found.status, found.attempt, found.erased

    return found


async def random_operation(
    chance: random.Random, model: FullHandle[Any], dumps: list[ThreadDump], step: int
) -> tuple[str, Callable[[FullHandle[Any]], Coroutine[Any, Any, Any]]]:
    """Choose an operation for both stores, often on calls that are on record."""
    thread_id = f"t{chance.randrange(5)}"
    key = f"key {chance.randrange(3)}"
    kind = chance.choice("claim claim fail fail win erase forget restore".split())

    if kind == "claim":
        call = ToolCall(f"c{step - chance.randrange(2)}", "tool", {}, key)
        return kind, lambda cp: cp.record_issued(thread_id, call)

    if kind in ("fail", "win"):
        holder = await model.find_call(key) or failed(thread_id, "unknown", 1)
        place = holder.thread_id, holder.call.call_id
        return kind, lambda cp: cp.record_result(*place, 1, success=kind == "win")

    if kind == "restore":
        dump = chance.choice([*dumps, dump_of("t0", 3)])
        return kind, lambda cp: cp.restore_thread(dump)

    return kind, lambda cp: cp.delete_thread(thread_id, forget_keys=kind == "forget")


@pytest.mark.parametrize("seed", sweep(range(8), range(3)))
async def test_claims_restores_and_deletions_agree_with_the_model(
    tmp_path: Path, seed: int
) -> None:
    """In any order, and with any attempts missing."""
    chance = random.Random(seed)
    dumps: list[ThreadDump] = []

    async with (
        Store(tmp_path) as ours,
        MemoryCheckpointer[Any]() as model,
    ):
        for step in range(250):
            kind, operation = await random_operation(chance, model, dumps, step)
            found = await outcome_of(operation(ours))
            assert found == await outcome_of(operation(model)), f"{step}: {kind}"

            if chance.random() < 0.3:
                thread_id = f"t{chance.randrange(5)}"
                dump = await model.dump_thread(thread_id)
                dumps += [] if dump is None else [dump]

                for cp in (ours, model):
                    await cp.delete_thread(thread_id, forget_keys=True)

            for number in range(3):
                found = await outcome_of(ours.find_call(f"key {number}"))
                expected = await outcome_of(model.find_call(f"key {number}"))
                assert found == expected, f"{step}: {kind}"
