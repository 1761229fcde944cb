"""Cancellation: a cancelled write is decided before later operations of its handle.

Hundreds of writes are cancelled at random moments. After each the caller looks with the
same handle, and remembers what it saw. If a write takes effect later, the same look
gives another answer at the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.history.interrupt import cancelled_after, cancelled_at
from conformance.sample_dumps import made_call, made_dump
from cpkit import (
    ErasesThreads,
    KeepsReceipts,
    ListsThreads,
    MovesThreads,
    ReadsRanges,
    ToolCall,
)

CONCURRENT = Level.CONCURRENT

AT_ONCE = 8
"""Writes that are cancelled at the same time, so that they queue and share commits."""

ROUNDS = 25

Work = Coroutine[Any, Any, Any]
Look = Callable[[], Awaitable[Any]]


class _Target(NamedTuple):
    """A thread with a message, extra and an issued call, and a fresh thread."""

    thread: str
    call: ToolCall
    fresh: str


async def _target(case: Case, cp: Store) -> _Target:
    thread, call = case.id(), case.call()
    await cp.append(thread, [{"n": 1}], extra={"a": 1})
    await cp.record_issued(thread, call)
    return _Target(thread, call, case.id())


Write = Callable[[Store, _Target], tuple[str, str, Work]]
"""Returns the thread and the key that a write changes, and the write."""


def _append(cp: Store, at: _Target) -> tuple[str, str, Work]:
    work = cp.append(at.thread, [{"n": 2}, {"n": 3}], extra={"a": 2})
    return at.thread, at.call.idempotency_key, work


def _fenced(cp: Store, at: _Target) -> tuple[str, str, Work]:
    work = cp.append(at.thread, [{"n": 2}], expected_version=1)
    return at.thread, at.call.idempotency_key, work


def _merge(cp: Store, at: _Target) -> tuple[str, str, Work]:
    work = cp.save_extra(at.thread, {"a": 2, "b": 2})
    return at.thread, at.call.idempotency_key, work


def _claim(cp: Store, at: _Target) -> tuple[str, str, Work]:
    key = f"{at.fresh}-key"
    call = ToolCall("call", "pay", {}, key)
    return at.thread, key, cp.record_issued(at.thread, call)


def _complete(cp: Store, at: _Target) -> tuple[str, str, Work]:
    work = cp.record_result(at.thread, at.call.call_id, "paid")
    return at.thread, at.call.idempotency_key, work


def _fail(cp: Store, at: _Target) -> tuple[str, str, Work]:
    work = cp.record_result(at.thread, at.call.call_id, "no", success=False)
    return at.thread, at.call.idempotency_key, work


def _forget(cp: Store, at: _Target) -> tuple[str, str, Work]:
    work = cp.delete_thread(at.thread, forget_keys=True)
    return at.thread, at.call.idempotency_key, work


def _delete(cp: Store, at: _Target) -> tuple[str, str, Work]:
    work = cp.delete_thread(at.thread, expected_version=1)
    return at.thread, at.call.idempotency_key, work


def _restore(cp: Store, at: _Target) -> tuple[str, str, Work]:
    done = made_call(at.fresh, "completed", result="paid")
    work = cp.restore_thread(made_dump(at.fresh, done))
    return at.fresh, done.call.idempotency_key, work


def _writes(cp: Store, always: list[Write]) -> list[Write]:
    """Return these writes, and the optional ones that the store supports."""
    erases = [_delete, _forget] if isinstance(cp, ErasesThreads) else []
    return [*always, *erases, *([_restore] if isinstance(cp, MovesThreads) else [])]


def _looks_at_thread(cp: Store, thread: str) -> list[Look]:
    looks: list[Look] = [partial(cp.load, thread)]

    if isinstance(cp, ReadsRanges):
        looks += [partial(cp.read, thread), partial(cp.load_range, thread)]

    if isinstance(cp, KeepsReceipts):
        looks.append(partial(cp.list_calls, thread))

    if isinstance(cp, ListsThreads):
        looks.append(partial(cp.list_threads, prefix=thread))

    if isinstance(cp, MovesThreads):
        looks.append(partial(cp.dump_thread, thread))

    return looks


def _looks_at_key(cp: Store, key: str) -> list[Look]:
    looks: list[Look] = [partial(cp.find_completed, key)]

    if isinstance(cp, KeepsReceipts):
        looks.append(partial(cp.find_call, key))

    return looks


async def _usual(case: Case, cp: Store) -> float:
    """Return the seconds that some concurrent appends take."""
    start = time.perf_counter()
    await asyncio.gather(*(cp.append(case.id(), [{"n": 1}]) for _ in range(AT_ONCE)))
    return time.perf_counter() - start


async def _cancel(case: Case, work: Work, usual: float) -> None:
    """Cancel a write at one of its first awaits, or after some time."""
    if case.random.random() < 0.5:
        # A write often waits only once: for the answer to its place in the queue.
        await cancelled_at(work, case.random.choice((1, 1, 1, 2, 3, 5)))
    else:
        await cancelled_after(work, usual * 1.5 * case.random.random())


async def _check(case: Case, writes: list[Write], by_key: bool) -> None:
    """Cancel writes; the first look after each must stay true until the end."""
    cp = case.cp
    usual = await _usual(case, cp)

    async def one() -> tuple[str, Look, Any]:
        write = case.random.choice(writes)
        thread, key, work = write(cp, await _target(case, cp))
        looks = _looks_at_key(cp, key) if by_key else _looks_at_thread(cp, thread)
        look = case.random.choice(looks)
        await _cancel(case, work, usual)
        return write.__name__, look, await look()

    seen: list[tuple[str, Look, Any]] = []

    for _ in range(case.times(ROUNDS)):
        seen += await asyncio.gather(*(one() for _ in range(AT_ONCE)))

    for name, look, first in seen:
        later = await look()
        assert later == first, f"after a cancelled write ({name.strip('_')})"


@clause("cancel.thread-is-decided", level=CONCURRENT, deadline=50)
async def thread_is_decided(case: Case) -> None:
    """After a cancelled write the same handle sees the final state of the thread."""
    always: list[Write] = [_append, _fenced, _merge, _claim, _complete, _fail]
    await _check(case, _writes(case.cp, always), by_key=False)


@clause("cancel.key-is-decided", level=CONCURRENT, deadline=50)
async def key_is_decided(case: Case) -> None:
    """After a cancelled write the same handle sees the final state of the key."""
    always: list[Write] = [_claim, _complete, _fail]
    await _check(case, _writes(case.cp, always), by_key=True)


@clause("cancel.close-waits", "handles", level=CONCURRENT, deadline=50)
async def close_waits(case: Case) -> None:
    """When a handle is closed, every write that was cancelled on it is decided."""
    usual = await _usual(case, case.cp)
    seen: list[tuple[str, Any]] = []

    for _ in range(case.times(ROUNDS)):
        threads = [case.id() for _ in range(AT_ONCE)]

        async with case.open() as cp:
            works = [cp.append(thread, [{"n": 1}]) for thread in threads]
            await asyncio.gather(*(_cancel(case, work, usual) for work in works))

        seen += [(thread, await case.cp.load(thread)) for thread in threads]

    for thread, first in seen:
        later = await case.cp.load(thread)
        assert later == first, "an append that was cancelled before the close"
