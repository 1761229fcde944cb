"""Optional: deleting a thread only where it is at the expected version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from conformance.answers import answers
from conformance.case import Case, raises
from conformance.clause import Level, clause
from conformance.clauses.concurrent import handles
from cpkit import ErasesThreads, ToolCall, VersionConflict


async def _filled(case: Case) -> tuple[str, list[ToolCall]]:
    """Return a thread at version 2, with extra, and its calls of each status."""
    thread, calls = case.id(), [case.call(args={"card": "4242"}) for _ in range(3)]
    await case.cp.append(thread, [{"n": 1}, {"n": 2}], extra={"k": 1})

    for call in calls:
        await case.cp.record_issued(thread, call)

    await case.cp.record_result(thread, calls[0].call_id, "paid")
    await case.cp.record_result(thread, calls[1].call_id, "no", success=False)
    return thread, calls


@clause("erase.expected-version-deletes", ErasesThreads)
async def expected_version_deletes(case: Case) -> None:
    """A deletion at the expected version deletes, and keys stay or go as without."""
    for forget_keys in (False, True):
        thread, (done, failed, issued) = await _filled(case)
        await case.cp.delete_thread(thread, expected_version=2, forget_keys=forget_keys)
        assert await case.cp.load(thread) is None
        free = [failed, done, issued] if forget_keys else [failed]

        for call in (done, failed, issued):
            again = case.call(call.idempotency_key)
            holder = await case.cp.record_issued(case.id(), again)
            assert (holder is None) == (call in free), f"forget_keys={forget_keys}"

        assert await case.cp.append(thread, [{"n": 3}], expected_version=0) == 1


@clause("erase.conflict-deletes-nothing", ErasesThreads)
async def conflict_deletes_nothing(case: Case) -> None:
    """A deletion that expects another version raises, and changes nothing."""
    thread, calls = await _filled(case)
    keys = [call.idempotency_key for call in calls]
    before = await answers(case.cp, thread, keys)

    for wrong in (0, 1, 3, 1_000_000):
        for forget_keys in (False, True):
            with raises(VersionConflict, f"version 2 expected to be {wrong}"):
                await case.cp.delete_thread(
                    thread, expected_version=wrong, forget_keys=forget_keys
                )

    assert await answers(case.cp, thread, keys) == before


@clause("erase.conflict-tells-the-facts", ErasesThreads)
async def conflict_has_the_facts(case: Case) -> None:
    """A refused deletion names the thread id, the expected and the actual version."""
    thread, _ = await _filled(case)

    with raises(VersionConflict) as caught:
        await case.cp.delete_thread(thread, expected_version=7)

    error = caught.error
    assert (error.thread_id, error.expected, error.actual) == (thread, 7, 2)


@clause("erase.missing-is-at-0", ErasesThreads)
async def missing_is_at_0(case: Case) -> None:
    """A thread without messages is at version 0, and so is a missing one."""
    missing, only_extra, erased = case.id(), case.id(), case.id()
    call = case.call()
    await case.cp.save_extra(only_extra, {"k": 1})
    await case.cp.append(erased, [{"n": 1}])
    await case.cp.record_issued(erased, call)
    await case.cp.delete_thread(erased)

    for thread in (missing, only_extra, erased):
        with raises(VersionConflict, "version 0 expected to be 1") as caught:
            await case.cp.delete_thread(thread, expected_version=1, forget_keys=True)

        assert caught.error.actual == 0

    assert await case.cp.load(only_extra) is not None
    holder = await case.cp.record_issued(case.id(), case.call(call.idempotency_key))
    assert holder is not None, "a refused deletion frees no key"

    for thread in (missing, only_extra, erased):
        await case.cp.delete_thread(thread, expected_version=0, forget_keys=True)
        assert await case.cp.load(thread) is None

    assert await case.cp.record_issued(erased, call) is None, "the key is free"


@clause("erase.expected-version-is-a-count", ErasesThreads)
async def expected_version_is_a_count(case: Case) -> None:
    """A negative expected version is a ValueError; a non-int is a TypeError."""
    thread, _ = await _filled(case)
    before = await case.cp.load(thread)

    with raises(ValueError, "-2"):
        await case.cp.delete_thread(thread, expected_version=-2)

    wrong: list[Any] = ["2", 2.0, True]

    for value in wrong:
        with raises(TypeError, repr(value)):
            await case.cp.delete_thread(thread, expected_version=value)

    assert await case.cp.load(thread) == before


@clause("concurrent.one-deletes-or-appends", ErasesThreads, level=Level.CONCURRENT)
async def one_deletes_or_appends(case: Case) -> None:
    """Of deletions and appends that expect the same version exactly one succeeds."""
    async with handles(case) as cps:
        for _ in range(case.times(12)):
            thread = case.id()
            await case.cp.append(thread, [{"n": 1}, {"n": 2}], extra={"k": 1})
            deletes = [case.random.random() < 0.5 for _ in range(9)]
            works: list[Awaitable[int | None]] = [
                cps[n % 3].delete_thread(thread, expected_version=2)
                if delete
                else cps[n % 3].append(thread, [{"by": n}], expected_version=2)
                for n, delete in enumerate(deletes)
            ]
            found = await asyncio.gather(*works, return_exceptions=True)
            won = [n for n, one in enumerate(found) if one in (None, 3)]
            lost = [one for one in found if isinstance(one, VersionConflict)]
            loaded = await case.cp.load(thread)
            messages = None if loaded is None else loaded.messages
            assert len(won) == 1
            assert len(lost) == 8
            (winner,) = won
            expected = [{"n": 1}, {"n": 2}, {"by": winner}]
            assert messages == (None if deletes[winner] else expected)
