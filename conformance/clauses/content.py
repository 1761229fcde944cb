"""Optional: erasing the content of old calls; what they did stays on record."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from conformance.answers import answers
from conformance.case import Case, Store, raises
from conformance.clause import Level, clause
from conformance.clauses.concurrent import handles
from conformance.difference import check_equal
from conformance.operations import LATER, reads_of
from conformance.sample_dumps import made_call, made_dump
from conformance.sample_ids import matching_patterns
from cpkit import (
    CallRecord,
    ErasesCalls,
    ErasesThreads,
    JsonValue,
    KeepsReceipts,
    ListsThreads,
    MovesThreads,
    ToolCall,
    VersionConflict,
)

EARLIER = datetime(1980, 1, 1, tzinfo=UTC)

VERSION = 2

WORKERS = 4
"""Tasks that make `CALLS` calls each."""

CALLS = 8


async def _filled(case: Case, thread: str | None = None) -> tuple[str, list[ToolCall]]:
    """Return a thread, and its calls: a completed, a failed and an issued one."""
    thread = thread or case.id()
    secrets: list[JsonValue] = [f"{thread} secret {n}" for n in range(3)]
    calls = [case.call(args={"card": secret}) for secret in secrets]
    await case.cp.append(thread, [{"n": 1}, {"n": 2}], extra={"k": 1})

    for call in calls:
        assert await case.cp.record_issued(thread, call) is None

    await case.cp.record_result(thread, calls[0].call_id, {"paid": secrets[0]})
    await case.cp.record_result(thread, calls[1].call_id, secrets[1], success=False)
    return thread, calls


def _keys(calls: list[ToolCall]) -> list[str]:
    return [call.idempotency_key for call in calls]


def _erased(answer: Any) -> Any:
    """Return the answer of a read as it must be: calls without an outcome stay."""
    if isinstance(answer, list):
        return [_erased(one) for one in answer]

    if not isinstance(answer, CallRecord) or answer.resolved_at is None:
        return answer

    bare = replace(answer.call, args={})
    return replace(answer, call=bare, result=None, erased=True)


@clause("content.keeps-the-rest", ErasesCalls)
async def keeps_the_rest(case: Case) -> None:
    """Args and results of ended calls go; nothing else changes, times neither."""
    thread, calls = await _filled(case)
    before = await answers(case.cp, thread, _keys(calls))
    assert await case.cp.erase_calls(thread, LATER) == 2
    expected = {name: _erased(answer) for name, answer in before.items()}
    after = await answers(case.cp, thread, _keys(calls))
    check_equal(after, expected, "after an erasure of calls")
    assert await case.cp.erase_calls(thread, LATER) == 0, "each is erased once"


@clause("content.by-the-time-of-the-outcome", ErasesCalls, KeepsReceipts)
async def by_the_time_of_the_outcome(case: Case) -> None:
    """Calls with an outcome from before the time are erased, to the microsecond."""
    thread, calls = case.id(), [case.call() for _ in range(5)]

    for call in calls:
        await case.cp.record_issued(thread, call)

    for call in reversed(calls):  # not in the order of the claims
        await case.cp.record_result(thread, call.call_id, "paid")

    records = await case.cp.list_calls(thread)
    times = sorted({one.resolved_at for one in records if one.resolved_at is not None})
    zone = case.random.choice((UTC, datetime.now().astimezone().tzinfo))

    for time in (EARLIER, *times, times[-1] + timedelta(microseconds=1)):
        was = [
            one.call.call_id for one in await case.cp.list_calls(thread) if one.erased
        ]
        old = [
            one.call.call_id
            for one in records
            if one.resolved_at is not None and one.resolved_at < time
        ]
        erased = await case.cp.erase_calls(thread, time.astimezone(zone))
        assert erased == len(old) - len(was), f"erased before {time}"
        now = [
            one.call.call_id for one in await case.cp.list_calls(thread) if one.erased
        ]
        check_equal(now, old, f"erased before {time}")


@clause("content.keys-are-held", ErasesCalls)
async def keys_are_held(case: Case) -> None:
    """What was paid stays paid, and what failed may be tried again."""
    thread, calls = await _filled(case)
    await case.cp.erase_calls(thread, LATER)
    paid, failed, issued = calls
    held = await case.cp.record_issued(case.id(), case.call(paid.idempotency_key))
    assert held is not None, "a completed call holds its key"
    assert (held.thread_id, held.status, held.erased) == (thread, "completed", True)
    same = await case.cp.record_issued(thread, paid)
    assert same is not None, "the call is on record"
    assert same.status == "completed"
    again = case.call(failed.idempotency_key)
    assert await case.cp.record_issued(thread, again) is None, "a failed call does not"
    done = await case.cp.record_result(thread, again.call_id, "paid")
    assert (done.attempt, done.result, done.erased) == (2, "paid", False)
    late = await case.cp.record_result(thread, issued.call_id, "late")
    assert (late.call.args, late.result) == (issued.args, "late"), "it keeps everything"
    late = await case.cp.record_result(thread, paid.call_id, "another")
    assert (late.result, late.status) == (None, "completed"), "an outcome stays"


@clause("content.is-gone-for-others", ErasesCalls, "handles")
async def is_gone_for_others(case: Case) -> None:
    """No read of another handle, and no dump, has what was erased."""
    async with case.open() as other:
        thread, calls = await _filled(case)
        await answers(other, thread, _keys(calls))  # it may remember them
        await case.cp.erase_calls(thread, LATER)

        for read in reads_of(other):
            for one in _keys(calls) if read.of_key else [thread]:
                seen = repr(await read.run(other, one))
                assert f"{thread} secret 0" not in seen, read.name
                assert f"{thread} secret 1" not in seen, read.name


@clause("content.nothing-to-erase", ErasesCalls)
async def nothing_to_erase(case: Case) -> None:
    """Of a missing thread, and of one without ended calls, nothing is erased."""
    missing, plain, issued = case.id(), case.id(), case.id()
    await case.cp.append(plain, [{"n": 1}])
    await case.cp.record_issued(issued, case.call())

    for time in (EARLIER, LATER):
        for thread in (missing, plain, issued):
            before = await case.cp.load(thread)
            assert await case.cp.erase_calls(thread, time) == 0
            check_equal(await case.cp.load(thread), before, "load")

    if isinstance(case.cp, ListsThreads):
        assert await case.cp.list_threads(prefix=missing, erased=True) == []


@clause("content.leaves-the-neighbours", ErasesCalls)
async def leaves_the_neighbours(case: Case) -> None:
    """No call of another thread is erased, however similar its id is."""
    threads, patterns = matching_patterns(case.id("t"))
    filled = [await _filled(case, thread) for thread in threads]
    before = [await answers(case.cp, one, _keys(calls)) for one, calls in filled]

    for pattern in patterns:
        assert await case.cp.erase_calls(pattern, LATER) == 0

    after = [await answers(case.cp, one, _keys(calls)) for one, calls in filled]
    check_equal(after, before, "threads whose ids fit a pattern")


@clause("content.expected-version", ErasesCalls)
async def expected_version(case: Case) -> None:
    """An erasure that expects another version raises, and erases nothing."""
    missing = case.id()
    thread, calls = await _filled(case)
    before = await answers(case.cp, thread, _keys(calls))

    for time in (LATER, EARLIER):
        for wrong in (0, VERSION - 1, VERSION + 1):
            with raises(
                VersionConflict, f"it expects {wrong}, erases before {time}"
            ) as e:
                await case.cp.erase_calls(thread, time, expected_version=wrong)

            assert (e.error.expected, e.error.actual) == (wrong, VERSION)

    after = await answers(case.cp, thread, _keys(calls))
    check_equal(after, before, "after erasures that were refused")
    erased = await case.cp.erase_calls(thread, LATER, expected_version=VERSION)
    assert erased == 2

    with raises(VersionConflict, "a missing thread is at version 0"):
        await case.cp.erase_calls(missing, LATER, expected_version=1)

    assert await case.cp.erase_calls(missing, LATER, expected_version=0) == 0


@clause("content.arguments", ErasesCalls)
async def arguments(case: Case) -> None:
    """A time without a time zone, or another value, is refused."""
    thread, calls = await _filled(case)
    before = await answers(case.cp, thread, _keys(calls))
    wrong: list[Any] = [
        datetime(9000, 1, 1),
        None,
        1e18,
        2**62,
        "9000-01-01",
        LATER.date(),
    ]

    versions: list[Any] = [-1, True, 1.0, "1"]

    for one in (thread, case.id()):
        for value in wrong:
            with raises((TypeError, ValueError), f"before={value!r}"):
                await case.cp.erase_calls(one, value)

        for version in versions:
            with raises((TypeError, ValueError), f"expected_version={version!r}"):
                await case.cp.erase_calls(one, LATER, expected_version=version)

    after = await answers(case.cp, thread, _keys(calls))
    check_equal(after, before, "after erasures that were refused")

    for extreme in (datetime.min, datetime.max):
        await case.cp.erase_calls(case.id(), extreme.replace(tzinfo=UTC))


@clause("content.moves", ErasesCalls, MovesThreads, ErasesThreads)
async def moves(case: Case) -> None:
    """A dump has erased and other calls as they are, and a restore writes them so."""
    only, call = case.id(), case.call()
    await case.cp.record_issued(only, call)
    await case.cp.record_result(only, call.call_id, "paid")
    thread, calls = await _filled(case)

    for one, some in ((only, [call]), (thread, calls)):
        await case.cp.erase_calls(one, LATER)
        before = await answers(case.cp, one, _keys(some))
        dump = await case.cp.dump_thread(one)
        assert dump is not None
        await case.cp.delete_thread(one, forget_keys=True)
        await case.cp.restore_thread(dump)
        check_equal(await answers(case.cp, one, _keys(some)), before, "restored")

    restored = made_call(case.id(), "completed", key=case.id("key"), result="secret")
    await case.cp.restore_thread(made_dump(restored.thread_id, restored))
    assert await case.cp.erase_calls(restored.thread_id, LATER) == 1
    await case.cp.delete_thread(thread)
    assert await case.cp.load(thread) is None
    assert await case.cp.erase_calls(thread, LATER) == 0, "a deletion erased them"


@clause("concurrent.erased-calls-count-once", ErasesCalls, level=Level.CONCURRENT)
async def erased_calls_count_once(case: Case) -> None:
    """Erasures beside claims and results erase each call once, and lose no outcome."""
    async with handles(case) as cps:
        for _ in range(case.times(3)):
            await _count_once(case, cps)


async def _count_once(case: Case, cps: list[Store]) -> None:
    thread, left, ended, erased = case.id(), WORKERS, 0, 0

    async def work(cp: Store) -> None:
        nonlocal left, ended

        for n in range(CALLS):
            call = case.call()
            assert await cp.record_issued(thread, call) is None
            await cp.append(thread, [{"n": n}])
            done = await cp.record_result(thread, call.call_id, n)
            assert (done.status, done.result, done.erased) == ("completed", n, False)
            ended += 1
            found = await cp.find_completed(call.idempotency_key)
            assert found is not None, "it stays paid"
            check_equal(found, _erased(done) if found.erased else done, "found")

        left -= 1

    async def erase(cp: Store) -> None:
        nonlocal erased

        while left:
            count = await cp.erase_calls(thread, LATER)
            erased += count

    workers = [work(cps[n % 3]) for n in range(WORKERS)]
    await asyncio.gather(*workers, *(erase(cp) for cp in cps))
    erased += await case.cp.erase_calls(thread, LATER)
    assert erased == ended == WORKERS * CALLS, "together they erased each call once"
