"""The handle: opening, closing, errors, and use from another event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from conformance.case import Case, Store, raises
from conformance.clause import clause
from conformance.sample_dumps import made_dump
from cpkit import (
    CallRecord,
    Checkpointer,
    Closed,
    Durability,
    InvalidId,
    KeepsReceipts,
    ListsThreads,
    MovesThreads,
    ReadsRanges,
    StatesDurability,
    UnknownCall,
    VersionConflict,
    WrongEventLoop,
)


def _calls(case: Case, cp: Store) -> dict[str, Callable[[], Awaitable[object]]]:
    """Return a call of each method that the handle has, with empty writes too."""
    thread = case.id()
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "load": lambda: cp.load(thread),
        "append": lambda: cp.append(thread, [{"n": 1}]),
        "append of nothing": lambda: cp.append(thread, []),
        "save_extra": lambda: cp.save_extra(thread, {"k": 1}),
        "save_extra of nothing": lambda: cp.save_extra(thread, {}),
        "record_issued": lambda: cp.record_issued(thread, case.call()),
        "record_result": lambda: cp.record_result(thread, case.id("call"), 1),
        "find_completed": lambda: cp.find_completed(case.id("key")),
        "read": lambda: cp.read(thread),
        "load_range": lambda: cp.load_range(thread),
        "list_threads": lambda: cp.list_threads(prefix=thread),
        "list_calls": lambda: cp.list_calls(thread),
        "find_call": lambda: cp.find_call(case.id("key")),
        "delete_thread": lambda: cp.delete_thread(thread),
        "dump_thread": lambda: cp.dump_thread(thread),
        "restore_thread": lambda: cp.restore_thread(made_dump(case.id())),
    }
    return _that_it_has(cp, calls)


def _wrong_calls(case: Case, cp: Store) -> dict[str, Callable[[], Awaitable[object]]]:
    """Return a call of methods that the handle has with wrong arguments."""
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "load": lambda: cp.load(""),
        "append": lambda: cp.append(case.id(), [object()]),
        "find_completed": lambda: cp.find_completed(""),
        "read": lambda: cp.read(""),
        "load_range": lambda: cp.load_range(""),
        "list_threads": lambda: cp.list_threads(limit=0),
        "list_calls": lambda: cp.list_calls(""),
        "find_call": lambda: cp.find_call(""),
        "delete_thread": lambda: cp.delete_thread(""),
        "dump_thread": lambda: cp.dump_thread(""),
        "restore_thread": lambda: cp.restore_thread(made_dump("")),
    }
    return _that_it_has(cp, calls)


def _that_it_has(
    cp: Store, calls: dict[str, Callable[[], Awaitable[object]]]
) -> dict[str, Callable[[], Awaitable[object]]]:
    return {
        name: call for name, call in calls.items() if hasattr(cp, name.split(" ")[0])
    }


@clause("handle.is-a-checkpointer")
async def is_a_checkpointer(case: Case) -> None:
    """An open handle has the six methods."""
    cp: object = case.cp
    assert isinstance(cp, Checkpointer)


@clause("handle.closed-after")
async def closed_after(case: Case) -> None:
    """Every method of a closed handle raises Closed, for empty writes too."""
    async with case.open() as cp:
        await cp.load(case.id())

    for name, use in _calls(case, cp).items():
        with raises(Closed, name):
            await use()


@clause("handle.closed-before")
async def closed_before(case: Case) -> None:
    """Every method of a handle that is not open yet raises Closed."""
    manager: Any = case.open()

    if not isinstance(manager, Checkpointer):
        case.skip("the harness returns no handle object before it is open")

    for name, use in _calls(case, manager).items():
        with raises(Closed, name):
            await use()


@clause("handle.closed-comes-first")
async def closed_comes_first(case: Case) -> None:
    """A closed handle raises Closed even if the arguments are wrong too."""
    async with case.open() as cp:
        await cp.load(case.id())

    for name, use in _wrong_calls(case, cp).items():
        with raises(Closed, f"{name} with a wrong argument on a closed handle"):
            await use()


@clause("handle.close-is-idempotent")
async def close_is_idempotent(case: Case) -> None:
    """Closing a closed handle does nothing."""
    async with case.open() as cp:
        await cp.load(case.id())
        close = getattr(cp, "aclose", None)

        if close is None:
            case.skip("the handle has no aclose()")

        assert close is not None
        await close()
        await close()

    await close()


@clause("handle.close-lets-writes-finish", "handles")
async def close_lets_writes_finish(case: Case) -> None:
    """Closing waits for operations in flight; every acknowledged write is stored."""
    threads = [case.id() for _ in range(10)]

    async with case.open() as cp:
        tasks = [asyncio.create_task(cp.append(t, [{"n": 1}])) for t in threads]
        await asyncio.sleep(0)

    answers = await asyncio.gather(*tasks, return_exceptions=True)

    for thread, answer in zip(threads, answers, strict=True):
        there = await case.cp.load(thread)
        written = there is not None
        assert answer == 1 or isinstance(answer, Closed)
        assert written == (answer == 1), "stored exactly if acknowledged"


@clause("handle.close-leaves-no-task")
async def close_leaves_no_task(case: Case) -> None:
    """A closed handle has no task left in the event loop."""
    before = asyncio.all_tasks()

    async with case.open() as cp:
        await asyncio.gather(*(cp.append(case.id(), [{"n": 1}]) for _ in range(5)))

    left = asyncio.all_tasks() - before
    assert not left


@clause("handle.opens-again", "handles")
async def opens_again(case: Case) -> None:
    """A handle sees what an earlier, closed handle wrote."""
    thread, call = case.id(), case.call()

    async with case.open() as first:
        await first.append(thread, [{"n": 1}, {"n": 2}])
        await first.save_extra(thread, {"plan": "a"})
        await first.record_issued(thread, call)
        before = await first.load(thread)

    async with case.open() as second:
        after = await second.load(thread)

    assert after == before
    assert after is not None


@clause("handle.shares-the-store", "handles")
async def shares_the_store(case: Case) -> None:
    """Two open handles see each other's acknowledged writes at once."""
    thread = case.id()

    async with case.open() as other:
        for n in range(5):
            here, there = (case.cp, other) if n % 2 else (other, case.cp)
            await here.append(thread, [{"n": n}])
            seen = await there.load(thread)
            assert seen is not None
            assert seen.messages == [{"n": i} for i in range(n + 1)]

            for cp in (here, there):
                assert await cp.append(thread, []) == n + 1
                await _check_looks(cp, thread, seen.messages)


async def _check_looks(cp: Any, thread: str, messages: list[Any]) -> None:
    """Check that every look at a thread that the store has shows the messages."""
    if isinstance(cp, ReadsRanges):
        assert await cp.read(thread) == messages
        loaded = await cp.load_range(thread, -2)
        assert loaded is not None
        assert (loaded.messages, loaded.version) == (messages[-2:], len(messages))

    if isinstance(cp, ListsThreads):
        listed = await cp.list_threads(prefix=thread)
        assert [info.version for info in listed] == [len(messages)]

    if isinstance(cp, MovesThreads):
        dump = await cp.dump_thread(thread)
        assert dump is not None
        assert list(dump.messages) == messages


@clause("handle.shares-calls", "handles")
async def shares_calls(case: Case) -> None:
    """A claim or result that one handle acknowledged counts for every handle."""
    thread = case.id()

    async with case.open() as other:
        for here, there in ((case.cp, other), (other, case.cp)):
            await there.load(thread)
            call = case.call()
            await here.record_issued(thread, call)
            seen = await there.load(thread)
            holder = await there.record_issued(
                case.id(), case.call(call.idempotency_key)
            )
            assert seen is not None
            assert [record.call for record in seen.pending] == [call]
            assert holder is not None
            assert holder.call == call
            await _check_receipts(here, holder)
            await _check_receipts(there, holder)

            done = await there.record_result(thread, call.call_id, "done")
            seen = await here.load(thread)
            assert seen is not None
            assert seen.pending == []
            assert await here.find_completed(call.idempotency_key) == done
            await _check_receipts(there, done)
            await _check_receipts(here, done)


async def _check_receipts(cp: object, record: CallRecord) -> None:
    """Check that a record is the last of its thread, and holds its key."""
    if isinstance(cp, KeepsReceipts):
        listed = await cp.list_calls(record.thread_id)
        assert listed[-1] == record
        assert await cp.find_call(record.call.idempotency_key) == record


@clause("handle.wrong-loop")
async def wrong_loop(case: Case) -> None:
    """Use from another event loop raises WrongEventLoop at once and never hangs."""
    for name, use in _calls(case, case.cp).items():

        async def elsewhere(
            name: str = name, use: Callable[[], Awaitable[object]] = use
        ) -> None:
            with raises(WrongEventLoop, name):
                await asyncio.wait_for(use(), 5)

        await asyncio.to_thread(asyncio.run, elsewhere())


@clause("handle.wrong-loop-does-no-harm")
async def wrong_loop_does_no_harm(case: Case) -> None:
    """A handle that was used from another event loop still works in its own."""
    thread = case.id()

    async def elsewhere() -> None:
        with raises(WrongEventLoop):
            await asyncio.wait_for(case.cp.append(thread, [{"n": 0}]), 5)

    await asyncio.to_thread(asyncio.run, elsewhere())
    version = await case.cp.append(thread, [{"n": 1}])
    assert version == 1


@clause("handle.works-after-errors")
async def works_after_errors(case: Case) -> None:
    """After an error the handle still works and blocks no other operation."""
    thread = case.id()
    await case.cp.append(thread, [{"n": 0}])

    for n in range(1, 20):
        with raises(VersionConflict):
            await case.cp.append(thread, [{"n": -1}], expected_version=n + 100)

        with raises(InvalidId):
            await case.cp.load("")

        version = await case.cp.append(thread, [{"n": n}])
        assert version == n + 1


@clause("handle.lets-others-run")
async def lets_others_run(case: Case) -> None:
    """Every operation lets other tasks run, so that a loop of it does not block."""
    calls = _calls(case, case.cp)
    del calls["save_extra of nothing"]  # it has nothing to do

    for name, use in calls.items():
        others_ran = asyncio.Event()
        asyncio.get_running_loop().call_soon(others_ran.set)

        with suppress(UnknownCall):  # of record_result
            await use()

        assert others_ran.is_set(), name


@clause("handle.states-durability", StatesDurability)
async def states_durability(case: Case) -> None:
    """durability is a Durability with a level and a text for people."""
    stated = getattr(case.cp, "durability", None)
    assert isinstance(stated, Durability)
    assert stated.words.strip()
