"""The cost of an operation does not grow with the thread, or with other threads.

Costs are counted, not timed. One clause has to time, because the work that it looks for
is done by the server.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.failure import Skip
from cpkit import ListsThreads, ReadsRanges

BOUNDED = Level.BOUNDED

SHORT, LONG = 300, 3000
"""Messages in the two compared threads; both are larger than most buffers."""

MESSAGE: dict[str, Any] = {"role": "assistant", "content": "x" * 1000}

ALLOWANCE = 64 * 1024
"""Bytes of difference that are allowed: a page or two, a tree one level deeper."""

SAMPLES = 9

Use = Callable[[str, int], Awaitable[object]]
Read = Callable[[], Awaitable[float]]


async def _filled(case: Case, cp: Store) -> list[str]:
    """Return a short thread and a long one."""
    threads = [case.id(), case.id()]

    for thread, length in zip(threads, (SHORT, LONG), strict=True):
        for _ in range(0, length, 100):
            await cp.append(thread, [MESSAGE] * 100)

    return threads


async def _compare(
    threads: list[str], start: Read, end: Read, use: Use
) -> tuple[float, float]:
    """Return the median cost of a use of each thread: ``end()`` minus ``start()``.

    The threads take turns, so that occasional background work hits both.
    """
    costs: list[list[float]] = [[], []]

    for n in range(SAMPLES + 1):
        for thread, found in zip(threads, costs, strict=True):
            before = await start()
            await use(thread, n)
            after = await end()

            if n:  # not counted: the first use may set things up
                found.append(after - before)

    return median(costs[0]), median(costs[1])


async def _check_memory(case: Case, use: Use) -> None:
    """Compare the peak memory of the uses, in bytes."""
    threads = await _filled(case, case.cp)

    async def start() -> float:
        tracemalloc.reset_peak()
        return tracemalloc.get_traced_memory()[0]

    async def end() -> float:
        return tracemalloc.get_traced_memory()[1]

    tracemalloc.start()

    try:
        short, long = await _compare(threads, start, end, use)
    finally:
        tracemalloc.stop()

    assert long <= 2 * short + ALLOWANCE


@clause("bounded.append-memory", level=BOUNDED, deadline=50)
async def append_memory(case: Case) -> None:
    """The memory that an append takes does not grow with the thread."""
    await _check_memory(case, lambda thread, _: case.cp.append(thread, [MESSAGE]))


@clause("bounded.append-bytes", level=BOUNDED, deadline=50)
async def append_bytes(case: Case) -> None:
    """The bytes that an append writes do not grow with the thread."""
    own = await case.harness.bytes_written() is not None

    async def written() -> float:
        figure = await case.harness.bytes_written() if own else await _process_bytes()
        assert figure is not None
        return figure

    threads = await _filled(case, case.cp)
    short, long = await _compare(
        threads,
        written,
        written,
        lambda thread, _: case.cp.append(thread, [MESSAGE]),
    )

    if short < len(MESSAGE["content"]):
        case.skip("neither the harness nor the process counts written bytes")

    assert long <= 2 * short + ALLOWANCE


async def _process_bytes() -> int:
    """Return how many bytes this process has written, by Linux's count."""
    try:
        counters = await asyncio.to_thread(Path("/proc/self/io").read_text)
    except OSError:
        raise Skip("the harness does not count written bytes") from None

    return int(counters.partition("wchar: ")[2].split()[0])


def _check_calls(case: Case, use: Callable[[Any, str], Awaitable[object]]) -> None:
    """Compare the function calls of the uses, in every thread of the process."""
    count = 0

    def profile(*_: object) -> None:
        nonlocal count
        count += 1

    async def counted() -> float:
        return count

    async def run() -> tuple[float, float]:
        async with case.open() as cp:
            threads = await _filled(case, cp)
            return await _compare(
                threads, counted, counted, lambda thread, _: use(cp, thread)
            )

    previous = sys.getprofile(), threading.getprofile()
    # Set before the handle opens, so that its worker threads are counted too.
    sys.setprofile(profile)
    threading.setprofile(profile)

    try:
        short, long = asyncio.run(run())
    finally:
        sys.setprofile(previous[0])
        threading.setprofile(previous[1])

    assert long <= 1.5 * short + 100


@clause("bounded.append-calls", level=BOUNDED, deadline=50)
def append_calls(case: Case) -> None:
    """The number of function calls of an append does not grow with the thread."""
    _check_calls(case, lambda cp, thread: cp.append(thread, [MESSAGE]))


@clause("bounded.range-calls", level=BOUNDED, deadline=50)
def range_calls(case: Case) -> None:
    """The number of function calls of a load_range does not grow with the thread."""

    async def load(cp: Any, thread: str) -> None:
        if not isinstance(cp, ReadsRanges):
            case.skip("the store does not implement ReadsRanges")

        await cp.load_range(thread, -5)
        await cp.load_range(thread, stop=0)

    _check_calls(case, load)


@clause("bounded.merge-memory", level=BOUNDED, deadline=50)
async def merge_memory(case: Case) -> None:
    """The memory that a merge takes does not grow with the thread."""
    await _check_memory(case, lambda thread, n: case.cp.save_extra(thread, {"step": n}))


@clause("bounded.claim-memory", level=BOUNDED, deadline=50)
async def claim_memory(case: Case) -> None:
    """The memory that a claim and its result take does not grow with the thread."""

    async def claim(thread: str, _: int) -> None:
        call = case.call()
        await case.cp.record_issued(thread, call)
        await case.cp.record_result(thread, call.call_id, "done")

    await _check_memory(case, claim)


@clause("bounded.read-memory", ReadsRanges, level=BOUNDED, deadline=50)
async def read_memory(case: Case) -> None:
    """The memory of a read depends on the result, not on the thread's length."""
    await _check_memory(case, lambda thread, _: case.cp.read(thread, -5))


@clause("bounded.range-memory", ReadsRanges, level=BOUNDED, deadline=50)
async def range_memory(case: Case) -> None:
    """The memory of a load_range depends on the range, not on the thread's length."""

    async def load(thread: str, _: int) -> None:
        await case.cp.load_range(thread, -5)
        await case.cp.load_range(thread, 1, 3)
        await case.cp.load_range(thread, stop=0)

    await _check_memory(case, load)


@clause("bounded.list-memory", ListsThreads, level=BOUNDED, deadline=50)
async def list_memory(case: Case) -> None:
    """Listing threads does not read their messages."""
    await _check_memory(case, lambda thread, _: case.cp.list_threads(prefix=thread))


HUGE, BATCH = 50_000, 5000
"""Small messages in the huge thread, and in one append to it."""

PAIRS = 31
"""Loads that are timed, each next to an operation that reads no message."""

TRIES = 12
"""How often they are timed again beside other work."""

SLOWER = 3
"""How much slower a load may become: far above noise, and below reading 50,000 rows."""


async def _relative_cost(case: Case, thread: str) -> float:
    """Return the median cost of a load, in units of an operation without messages.

    Both are timed next to each other, so that the machine's load affects both.
    """
    ratios = []

    for n in range(PAIRS + 5):
        start = time.perf_counter()
        await case.cp.load(thread)
        middle = time.perf_counter()
        await case.cp.find_completed(thread)
        end = time.perf_counter()

        if n >= 5:  # the first ones may prepare statements
            ratios.append((middle - start) / (end - middle))

    return median(ratios)


@clause("bounded.load-beside-huge", level=BOUNDED, deadline=100)
async def load_beside_huge(case: Case) -> None:
    """A load of a small thread costs no more when a huge thread is in the store."""
    small, huge = case.id("small"), case.id("huge")
    await case.cp.append(small, [{"n": n} for n in range(100)])
    await case.harness.gather_statistics()
    # The larger of two: a busy machine can slow the other operation down in one.
    before = max([await _relative_cost(case, small) for _ in range(2)])

    for first in range(0, HUGE, BATCH):
        await case.cp.append(huge, [{"n": n} for n in range(first, first + BATCH)])

    await case.harness.gather_statistics()
    # Beside other work the smallest counts.
    after = await _relative_cost(case, small)

    for _ in range(TRIES):
        if after > SLOWER * before:
            after = min(after, await _relative_cost(case, small))

    assert after <= SLOWER * before
