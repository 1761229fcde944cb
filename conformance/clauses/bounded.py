"""What an operation costs does not grow with the thread: counted, not clocked."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from conformance.case import Case, Store
from conformance.clause import Level, Skip, clause
from cpkit import ListsThreads, ReadsRanges

BOUNDED = Level.BOUNDED

SHORT, LONG = 300, 3000
"""Messages in the two threads that are compared; both larger than most buffers."""

MESSAGE: dict[str, Any] = {"role": "assistant", "content": "x" * 1000}

ALLOWANCE = 64 * 1024
"""Bytes that may come on top: a page or two, a tree that is a level deeper."""

SAMPLES = 9

Measure = Callable[[Callable[[], Awaitable[object]]], Awaitable[float]]


async def _filled(case: Case, cp: Store, length: int) -> str:
    thread = case.id()

    for start in range(0, length, 100):
        await cp.append(thread, [MESSAGE] * min(100, length - start))

    return thread


async def _compare(
    case: Case,
    measure: Measure,
    use: Callable[[str, int], Awaitable[object]],
    cp: Store | None = None,
) -> tuple[float, float]:
    """Return what a use of a short thread and of a long one cost, at the median.

    In turn, so that whatever the store does now and then falls on both.
    """
    threads = [await _filled(case, cp or case.cp, n) for n in (SHORT, LONG)]
    costs: tuple[list[float], list[float]] = ([], [])

    for n in range(SAMPLES + 1):
        for thread, found in zip(threads, costs, strict=True):
            cost = await measure(partial(use, thread, n))

            if n:  # the first time there are things to set up
                found.append(cost)

    return median(costs[0]), median(costs[1])


@contextmanager
def _traced() -> Iterator[Measure]:
    """Measure the memory that an operation takes at its peak, in bytes."""
    tracemalloc.start()

    async def peak(use: Callable[[], Awaitable[object]]) -> float:
        gc.collect()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        await use()
        return tracemalloc.get_traced_memory()[1] - before

    try:
        yield peak
    finally:
        tracemalloc.stop()


@clause("bounded.append-memory", level=BOUNDED, deadline=60)
async def append_memory(case: Case) -> None:
    """The memory that an append takes does not grow with the thread."""
    with _traced() as peak:
        short, long = await _compare(
            case, peak, lambda thread, _: case.cp.append(thread, [MESSAGE])
        )

    assert long <= 2 * short + ALLOWANCE


@clause("bounded.append-bytes", level=BOUNDED, deadline=60)
async def append_bytes(case: Case) -> None:
    """The bytes that an append writes do not grow with the thread."""
    figure = case.harness.bytes_written

    if await figure() is None:
        figure = _process_bytes

    async def written(use: Callable[[], Awaitable[object]]) -> float:
        before = await figure()
        await use()
        after = await figure()
        assert before is not None
        assert after is not None
        return after - before

    short, long = await _compare(
        case, written, lambda thread, _: case.cp.append(thread, [MESSAGE])
    )

    if short < len(MESSAGE["content"]):
        case.skip("neither the harness nor the process has a figure of bytes written")

    assert long <= 2 * short + ALLOWANCE


async def _process_bytes() -> int:
    """Return how many bytes this process has written, as Linux counts them."""
    try:
        counters = await asyncio.to_thread(Path("/proc/self/io").read_text)
    except OSError:
        raise Skip("the harness has no figure of bytes written") from None

    return int(counters.partition("wchar: ")[2].split()[0])


@clause("bounded.append-calls", level=BOUNDED, deadline=60)
def append_calls(case: Case) -> None:
    """The calls that the code of the store makes for an append do not grow with it."""
    count = 0

    def profile(*_: object) -> None:
        nonlocal count
        count += 1

    async def calls(use: Callable[[], Awaitable[object]]) -> float:
        before = count
        await use()
        return count - before

    async def run() -> tuple[float, float]:
        async with case.open() as cp:
            return await _compare(
                case, calls, lambda thread, _: cp.append(thread, [MESSAGE]), cp
            )

    previous = sys.getprofile(), threading.getprofile()
    # Before the handle is opened, so that threads that it starts are counted too.
    sys.setprofile(profile)
    threading.setprofile(profile)

    try:
        short, long = asyncio.run(run())
    finally:
        sys.setprofile(previous[0])
        threading.setprofile(previous[1])

    assert long <= 1.5 * short + 100


@clause("bounded.merge-memory", level=BOUNDED, deadline=60)
async def merge_memory(case: Case) -> None:
    """The memory that a merge takes does not grow with the thread."""
    with _traced() as peak:
        short, long = await _compare(
            case, peak, lambda thread, n: case.cp.save_extra(thread, {"step": n})
        )

    assert long <= 2 * short + ALLOWANCE


@clause("bounded.claim-memory", level=BOUNDED, deadline=60)
async def claim_memory(case: Case) -> None:
    """The memory that a claim and its result take does not grow with the thread."""

    async def claim(thread: str, _: int) -> None:
        call = case.call()
        await case.cp.record_issued(thread, call)
        await case.cp.record_result(thread, call.call_id, "done")

    with _traced() as peak:
        short, long = await _compare(case, peak, claim)

    assert long <= 2 * short + ALLOWANCE


@clause("bounded.read-memory", ReadsRanges, level=BOUNDED, deadline=60)
async def read_memory(case: Case) -> None:
    """A read costs what it returns, not the length of the thread."""
    with _traced() as peak:
        short, long = await _compare(
            case, peak, lambda thread, _: case.cp.read(thread, -5)
        )

    assert long <= 2 * short + ALLOWANCE


@clause("bounded.list-memory", ListsThreads, level=BOUNDED, deadline=60)
async def list_memory(case: Case) -> None:
    """Listing threads does not read what is in them."""
    with _traced() as peak:
        short, long = await _compare(
            case, peak, lambda thread, _: case.cp.list_threads(prefix=thread)
        )

    assert long <= 2 * short + ALLOWANCE
