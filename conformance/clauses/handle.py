"""The handle: opening, closing, errors, and use from another event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from conformance.case import Case, Store, raises
from conformance.clause import clause
from conformance.operations import LATER, READS, WRITES, Place
from conformance.sample_dumps import made_dump
from cpkit import (
    CallRecord,
    Checkpointer,
    CheckpointerError,
    Closed,
    Durability,
    KeepsReceipts,
    StatesDurability,
    WrongEventLoop,
)


def _calls(case: Case, cp: Store) -> dict[str, Callable[[], Awaitable[object]]]:
    """Return every operation that the handle has, with empty writes too.

    Nothing is prepared for them, so some raise an error of the contract.
    """
    place = Place(case.id("p"))
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "save_extra of nothing": lambda: cp.save_extra(place.thread, {})
    }

    for read in READS:
        if hasattr(cp, read.method):
            one = place.keys[0] if read.of_key else place.thread
            calls[read.name] = partial(read.run, cp, one)

    for write in WRITES:
        if hasattr(cp, write.method):
            calls[write.name] = partial(write.do, cp, place)

    return calls


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
        "trim": lambda: cp.trim("", 0),
        "erase_calls": lambda: cp.erase_calls("", LATER),
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
    uses = _calls(case, case.cp)

    if hasattr(case.cp, "aclose"):
        uses["aclose"] = case.cp.aclose

    for name, use in uses.items():

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


@clause("handle.lets-others-run")
async def lets_others_run(case: Case) -> None:
    """Every operation lets other tasks run, so that a loop of it does not block."""
    calls = _calls(case, case.cp)
    del calls["save_extra of nothing"]  # it has nothing to do

    for name, use in calls.items():
        others_ran = asyncio.Event()
        asyncio.get_running_loop().call_soon(others_ran.set)

        with suppress(CheckpointerError):  # of what is not prepared
            await use()

        assert others_ran.is_set(), name


@clause("handle.states-durability", StatesDurability)
async def states_durability(case: Case) -> None:
    """durability is a Durability with a level and a text for people."""
    stated = getattr(case.cp, "durability", None)
    assert isinstance(stated, Durability)
    assert stated.words.strip()
