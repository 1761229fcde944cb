"""Every kind of write: other handles see it at once, and it is whole in every way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from conformance.case import Case, Store, raises
from conformance.clause import Level, clause
from conformance.difference import check_equal
from conformance.operations import (
    VERSION,
    Place,
    Write,
    prepare,
    reads_of,
    state,
    tell_outcome,
    writes_of,
)
from conformance.sample_dumps import made_call, made_dump
from conformance.workers import workers
from cpkit import (
    CallMismatch,
    CheckpointerError,
    Closed,
    InvalidId,
    KeyTaken,
    MovesThreads,
    PayloadTooLarge,
    SerializationError,
    ToolCall,
    UnknownCall,
    VersionConflict,
)

CONCURRENT = Level.CONCURRENT

WRAPS = [2**31, 2**32, 2**53, 2**63, 2**64, 2**128]
"""What integers of engines wrap at, or round."""

ELSEWHERE = "IST-5:30"
"""The time zone of the other process: five and a half hours ahead."""


async def places(
    case: Case, writes: list[Write], cp: Store | None = None
) -> list[tuple[Write, Place]]:
    """Return a prepared place for each write."""
    at = cp or case.cp
    made = [(write, Place(case.id("p"))) for write in writes]
    await asyncio.gather(*(prepare(at, place, write) for write, place in made))
    return made


@clause("handle.shares-every-write", "handles", deadline=40)
async def shares_every_write(case: Case) -> None:
    """Every read of another handle shows each kind of write at once."""
    async with case.open() as other:
        for n, (write, place) in enumerate(await places(case, writes_of(case.cp))):
            here, there = (case.cp, other) if n % 2 else (other, case.cp)
            await state(here, place, write.at, case.random)
            await state(there, place, write.at, case.random)  # it may remember that
            await write.do(here, place)
            seen = await state(there, place, write.at, case.random)
            expected = await state(here, place, write.at)
            check_equal(seen, expected, f"{write.name} by another handle")
            assert await tell_outcome(write, seen, "seen by another handle"), write.name


@clause("handle.shares-with-processes", "processes", level=CONCURRENT, deadline=60)
async def shares_with_processes(case: Case) -> None:
    """Every read of a process in another time zone shows each kind of write at once."""
    environment = {**os.environ, "TZ": ELSEWHERE}
    job = {"does": "mirror", "with": {}, "clients": ["mirror"], "seed": 0}
    made = await places(case, writes_of(case.cp))

    async with workers(case.harness, [{**job, "environment": environment}]) as (other,):
        for n, (write, place) in enumerate(made):
            look = {"look": write.at, "token": place.token}
            await other.ask(look)

            if n % 2:
                await write.do(case.cp, place)
            else:
                await other.ask({"write": write.name, "token": place.token})

            seen = await other.ask(look)
            expected = await state(case.cp, place, write.at)
            by = "this process" if n % 2 else "the other process"
            check_equal(seen, expected, f"another process, after {write.name} by {by}")
            assert await tell_outcome(write, seen, f"by {by}"), write.name

        thread, calls = case.id(), [case.call() for _ in range(12)]

        for n, call in enumerate(calls):
            if n % 2:
                await case.cp.record_issued(thread, call)
            else:
                names = [call.call_id, call.tool_name, call.args, call.idempotency_key]
                await other.ask({"claim": names, "token": thread})

        await _check_order(case.cp, thread, calls)


def _mistakes(case: Case, cp: Store) -> dict[str, Callable[[], Awaitable[object]]]:
    """Return operations that are refused, by the error and the method."""
    thread, call = case.id(), case.call()
    wrong: Any = {"deep": [object()]}
    found: dict[str, tuple[type | None, Callable[[], Awaitable[object]]]] = {
        "a message": (None, lambda: cp.append(thread, [{"n": 1}, wrong])),
        "a value of extra": (None, lambda: cp.save_extra(thread, wrong)),
        "extra beside a message": (
            None,
            lambda: cp.append(thread, [{"n": 1}], extra=wrong),
        ),
        "args": (None, lambda: cp.record_issued(thread, case.call(args=wrong))),
        "a result": (None, lambda: cp.record_result(thread, call.call_id, wrong)),
        "a dump": (
            MovesThreads,
            lambda: cp.restore_thread(made_dump(thread, messages=[wrong])),
        ),
    }
    limits = getattr(cp, "limits", None)

    if limits is not None and limits.max_value < 2**25:
        large = {"text": "x" * limits.max_value}
        found["a message that is too large"] = (
            None,
            lambda: cp.append(thread, [large]),
        )

    return {
        name: use
        for name, (need, use) in found.items()
        if need is None or isinstance(cp, need)
    }


@clause("handle.works-after-mistakes", deadline=40)
async def works_after_mistakes(case: Case) -> None:
    """After a value that is refused every kind of write works as before."""
    writes = writes_of(case.cp)

    mistakes = [*_mistakes(case, case.cp).items()]
    count = min(len(mistakes), case.times(len(mistakes)))

    for name, mistake in case.random.sample(mistakes, count):
        made = await places(case, writes)
        case.random.shuffle(made)

        with raises((SerializationError, PayloadTooLarge), name):
            await mistake()

        await asyncio.gather(*(write.do(case.cp, place) for write, place in made))

        for write, place in made:
            seen = await state(case.cp, place, write.at)
            where = f"after {name} that was refused"
            assert await tell_outcome(write, seen, where), f"{write.name}, {where}"


@clause("handle.works-after-refusals", deadline=40)
async def works_after_refusals(case: Case) -> None:
    """After a refused write of any kind the handle's next write works as before."""
    cp = case.cp
    ((_, held),) = await places(case, writes_of(cp)[:1])
    used = held.call(2).call_id
    refused: list[tuple[type[CheckpointerError], Callable[[], Awaitable[object]]]] = [
        (CallMismatch, lambda: cp.record_issued(held.thread, case.call(call_id=used))),
        (UnknownCall, lambda: cp.record_result(held.thread, case.id("call"), 1)),
        (InvalidId, lambda: cp.load("")),
    ]
    refused += [
        (VersionConflict, partial(write.do, cp, held, VERSION + 1))
        for write in writes_of(cp)
        if write.is_fenced
    ]

    if isinstance(cp, MovesThreads):
        taken = made_call(case.id(), "completed", key=held.keys[2])
        refused += [
            (VersionConflict, lambda: cp.restore_thread(made_dump(held.thread))),
            (KeyTaken, lambda: cp.restore_thread(made_dump(taken.thread_id, taken))),
        ]

    for n, (expected, use) in enumerate(refused, 1):
        with raises(expected):
            await use()

        assert await cp.append(held.fresh, [{"n": n}]) == n, expected.__name__
        await cp.save_extra(held.fresh, {"n": n})
        assert await cp.record_issued(held.fresh, case.call()) is None
        loaded = await cp.load(held.fresh)
        assert loaded is not None
        assert (loaded.version, loaded.extra, len(loaded.pending)) == (n, {"n": n}, n)


@clause("handle.close-lets-writes-finish", "handles", deadline=40)
async def close_lets_writes_finish(case: Case) -> None:
    """Closing waits for writes of every kind; one is stored exactly if acknowledged."""
    kept = await prepare(case.cp, Place(case.id("p")))

    for turns in (1, 2, 3):
        made = await places(case, writes_of(case.cp))

        async with case.open() as cp:
            tasks = [asyncio.create_task(write.do(cp, place)) for write, place in made]
            reads = [
                asyncio.ensure_future(read.run(cp, kept.thread))
                for read in reads_of(cp)
                if not read.of_key
            ]

            for _ in range(turns):
                await asyncio.sleep(0)

        for answer in await asyncio.gather(*reads, return_exceptions=True):
            told = answer is not None and not isinstance(answer, BaseException)
            assert told or isinstance(answer, Closed), "a read begun before the close"

        answers = await asyncio.gather(*tasks, return_exceptions=True)

        for (write, place), answer in zip(made, answers, strict=True):
            failed = isinstance(answer, BaseException)
            assert not failed or isinstance(answer, Closed), write.name
            seen = await state(case.cp, place, write.at)
            written = await tell_outcome(write, seen, "begun before the close")
            assert written != failed, f"{write.name} is stored exactly if acknowledged"


@clause("append.expected-version-of-any-size", deadline=40)
async def expected_version_of_any_size(case: Case) -> None:
    """A fence compares versions beyond 32 and 64 bits exactly, in each fenced write."""
    for write, place in await places(case, writes_of(case.cp)):
        if not write.is_fenced:
            continue

        before = await state(case.cp, place, write.at)

        for wrong in (n + low for n in WRAPS for low in (0, VERSION)):
            with raises(VersionConflict, f"{write.name} {wrong}") as caught:
                await write.do(case.cp, place, wrong)

            assert caught.error.actual == VERSION, write.name

        seen = await state(case.cp, place, write.at)
        check_equal(seen, before, f"{write.name} that was refused")
        await write.do(case.cp, place)
        seen = await state(case.cp, place, write.at)
        assert await tell_outcome(write, seen, "after conflicts"), write.name


@clause("claim.order-of-two-handles", "handles", deadline=40)
async def order_of_two_handles(case: Case) -> None:
    """Claims of handles that take turns are in the order of the claims, everywhere."""
    thread, calls = case.id(), [case.call() for _ in range(24)]

    async with case.open() as other, case.open() as third:
        for n, call in enumerate(calls):
            await (case.cp, other)[n % 2].record_issued(thread, call)

        for cp in (case.cp, other, third):
            await _check_order(cp, thread, calls)


async def _check_order(cp: Store, thread: str, calls: list[ToolCall]) -> None:
    """Check the order of a thread's calls in every read that has them."""
    for read in reads_of(cp):
        answer: Any = await read.run(cp, thread)
        found = getattr(answer, "pending", getattr(answer, "calls", None))

        if read.method == "list_calls":
            found = answer

        if found is not None:
            order = [record.call.call_id for record in found]
            check_equal(order, [call.call_id for call in calls], read.name)
