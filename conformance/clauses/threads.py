"""Optional: listing threads, in order and by pages."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from conformance.case import Case, raises
from conformance.clause import clause
from conformance.clauses.claim import is_utc
from conformance.operations import QUIET, Place, Write, prepare, writes_of
from conformance.sample_dumps import made_call, made_dump
from conformance.sample_ids import similar_ids
from cpkit import (
    CallMismatch,
    ErasesThreads,
    ListsThreads,
    MovesThreads,
    ThreadInfo,
    UnknownCall,
    VersionConflict,
)
from cpkit.records import CallStatus


async def _info(case: Case, thread: str) -> ThreadInfo | None:
    found = await case.cp.list_threads(prefix=thread, limit=1)
    return found[0] if found and found[0].thread_id == thread else None


@clause("threads.ordered-by-code-point", ListsThreads)
async def ordered_by_code_point(case: Case) -> None:
    """Each thread is listed once, ordered by code point, and so are pages."""
    token = case.id("t")
    tails = ["b", "a", "B", "\uffff", "\U0001f600", "é", "e\u0301", "~", "10", "9", ""]
    threads = [token + tail for tail in tails]

    for thread in threads:
        await case.cp.append(thread, [{"n": 1}])
        await case.cp.append(thread, [{"n": 2}])

    listed = await case.cp.list_threads(prefix=token)
    assert [info.thread_id for info in listed] == sorted(threads)

    for n, thread in enumerate(sorted(threads)):
        rest = await case.cp.list_threads(prefix=token, after=thread)
        assert [info.thread_id for info in rest] == sorted(threads)[n + 1 :]


@clause("threads.pages", ListsThreads)
async def pages(case: Case) -> None:
    """Pages of any size, each after the last id, contain every thread once."""
    token = case.id("t")
    threads = sorted(f"{token}-{n}" for n in range(23))

    for thread in threads:
        await case.cp.append(thread, [{"n": 1}])

    for limit in (1, 7, 22, 23, 24, 10**9, 2**32 + 1, 2**64 + 1, 2**70):
        seen: list[str] = []
        after = None

        while page := await case.cp.list_threads(
            prefix=token, after=after, limit=limit
        ):
            assert len(page) == min(limit, len(threads) - len(seen))
            seen += [info.thread_id for info in page]
            after = seen[-1]

        assert seen == threads


@clause("threads.limit-is-100", ListsThreads)
async def limit_is_100(case: Case) -> None:
    """Without a limit a page has at most 100 threads."""
    token = case.id("t")

    for n in range(103):
        await case.cp.save_extra(f"{token}-{n}", {"n": n})

    first = await case.cp.list_threads(prefix=token)
    rest = await case.cp.list_threads(prefix=token, after=first[-1].thread_id)
    assert (len(first), len(rest)) == (100, 3)


@clause("threads.after-is-exclusive", ListsThreads)
async def after_is_exclusive(case: Case) -> None:
    """A page starts after the given id; the id is excluded and need not exist."""
    token = case.id("t")

    for tail in ("", *"ace"):
        await case.cp.append(token + tail, [{"n": 1}])

    expected = {"": "ace", "a": "ce", "b": "ce", "c": "e", "d": "e", "e": "", "f": ""}

    for tail, rest in expected.items():
        listed = await case.cp.list_threads(prefix=token, after=token + tail)
        assert [info.thread_id for info in listed] == [token + r for r in rest]

    before = await case.cp.list_threads(prefix=token, after="\x01")
    assert len(before) == 4
    beyond = await case.cp.list_threads(prefix=token, after="\U0010ffff")
    assert beyond == []


@clause("threads.prefix-is-literal", ListsThreads)
async def prefix_is_literal(case: Case) -> None:
    """A prefix is plain text, not a pattern, and is compared exactly."""
    token = case.id("t")
    threads = similar_ids(token)

    for thread in threads:
        await case.cp.save_extra(thread, {"n": 1})

    tails = [
        "",
        ":",
        "*",
        "%",
        "_",
        "?",
        "[",
        "\\",
        "-a",
        "-A",
        "-é",
        "-e",
        "/",
        ".",
        "{",
    ]
    tails += ["\ud7ff", "\uffff", "\U0010ffff", "x" * 100]

    for prefix in (*(token + tail for tail in tails), f"%{token}", f"{{{token}"):
        listed = await case.cp.list_threads(prefix=prefix, limit=1000)
        expected = sorted(thread for thread in threads if thread.startswith(prefix))
        assert [info.thread_id for info in listed] == expected


@clause("threads.tells-version-and-times", ListsThreads)
async def lists_version_and_times(case: Case) -> None:
    """A thread is listed with its version and right times; created_at is fixed."""
    thread = case.id()
    await case.cp.append(thread, [{"n": 1}, {"n": 2}])
    first = await _info(case, thread)
    await case.cp.append(thread, [{"n": 3}])
    second = await _info(case, thread)
    assert first is not None
    assert second is not None
    assert (first.version, second.version) == (2, 3)
    assert is_utc(first.created_at)
    assert is_utc(first.updated_at)
    assert first.created_at == second.created_at
    assert first.created_at <= first.updated_at <= second.updated_at

    thread = case.id()
    await case.cp.save_extra(thread, {"k": 0})
    created = await _info(case, thread)
    assert created is not None
    await _clock_passes(case, created.updated_at)
    await case.cp.append(thread, [{"n": 1}])
    info = await _info(case, thread)
    assert info is not None
    assert info.created_at == created.created_at, "its first message"


async def _clock_passes(case: Case, time: datetime) -> None:
    """Wait until the store's clock is past a time. Writes to another thread."""
    other = case.id()
    n = 0

    while (info := await _info(case, other)) is None or info.updated_at <= time:
        n += 1
        await case.cp.save_extra(other, {"n": n})


def _changing(case: Case) -> list[Write]:
    """Return the writes after which the prepared thread is still there."""
    return [
        one
        for one in writes_of(case.cp)
        if one.at == "thread" and one.method != "delete_thread"
    ]


@clause("threads.updated-by-every-change", ListsThreads)
async def updated_by_every_change(case: Case) -> None:
    """updated_at moves with every write that changed something."""
    made = [
        (write, Place(case.id("p")))
        for write in _changing(case)
        if write.method not in QUIET
    ]

    for _, place in made:
        await prepare(case.cp, place)

    infos = {place: await _info(case, place.thread) for _, place in made}
    latest = max(info.updated_at for info in infos.values() if info)
    await _clock_passes(case, latest)

    for write, place in made:
        await write.do(case.cp, place)
        before, after = infos[place], await _info(case, place.thread)
        assert before is not None
        assert after is not None
        assert after.created_at == before.created_at, write.name
        assert after.updated_at > before.updated_at, write.name


@clause("threads.updated-never-goes-back", ListsThreads, MovesThreads)
async def updated_never_goes_back(case: Case) -> None:
    """updated_at does not go back where the store's clock is behind it."""
    later = datetime.now(UTC) + timedelta(days=2)

    for write in _changing(case):
        place = Place(case.id("p"))
        statuses: tuple[CallStatus, ...] = ("failed", "completed", "issued")
        calls = [
            replace(made_call(place.thread, status), call=place.call(n))
            for n, status in enumerate(statuses)
        ]
        dump = made_dump(place.thread, *calls, updated_at=later)
        await case.cp.restore_thread(dump)
        before = await _info(case, place.thread)
        await write.do(case.cp, place)
        after = await _info(case, place.thread)
        assert before is not None
        assert after is not None
        assert after.updated_at >= before.updated_at, write.name


@clause("threads.updated-by-changes-only", ListsThreads)
async def updated_by_changes_only(case: Case) -> None:
    """updated_at does not move with a read, or a write that changes nothing."""
    thread, call = case.id(), case.call()
    cp = case.cp
    await cp.append(thread, [{"n": 1}])
    await cp.record_issued(thread, call)
    await cp.record_result(thread, call.call_id, 1)
    before = await _info(case, thread)
    assert before is not None
    await _clock_passes(case, before.updated_at)
    await cp.load(thread)
    await cp.append(thread, [])
    await cp.append(thread, [], extra={})
    await cp.save_extra(thread, {})
    await cp.record_issued(thread, call)
    await cp.record_issued(thread, case.call(call.idempotency_key))
    await cp.record_result(thread, call.call_id, 2)

    with raises(VersionConflict):
        await cp.append(thread, [{"n": 2}], expected_version=7, extra={"k": 1})

    with raises(CallMismatch):
        await cp.record_issued(thread, case.call(call_id=call.call_id))

    with raises(UnknownCall):
        await cp.record_result(thread, case.id("call"), 1)

    after = await _info(case, thread)
    assert after == before


@clause("threads.knows-those-without-messages", ListsThreads)
async def knows_those_without_messages(case: Case) -> None:
    """A thread with only extra or only calls is listed, at version 0."""
    token = case.id("t")
    await case.cp.save_extra(f"{token}-a", {"k": 1})
    await case.cp.record_issued(f"{token}-b", case.call())
    listed = await case.cp.list_threads(prefix=token)
    assert [(info.thread_id, info.version) for info in listed] == [
        (f"{token}-a", 0),
        (f"{token}-b", 0),
    ]


@clause("threads.lists-no-others", ListsThreads)
async def lists_no_others(case: Case) -> None:
    """A thread without any write is not listed."""
    token = case.id("t")
    key = case.id("key")
    await case.cp.record_issued(case.id("elsewhere"), case.call(key))
    await case.cp.append(token, [])
    await case.cp.save_extra(token, {})
    await case.cp.load(token)
    await case.cp.record_issued(token, case.call(key))
    listed = await case.cp.list_threads(prefix=token)
    assert listed == []


async def _with_erased(case: Case, token: str, tails: str) -> None:
    """For each letter create a thread; delete those of capital letters."""
    for tail in tails:
        thread = f"{token}-{tail}"
        call = case.call()
        await case.cp.append(thread, [{"n": 1}])
        await case.cp.record_issued(thread, call)
        await case.cp.record_result(thread, call.call_id, "paid")

        if tail.isupper():
            await case.cp.delete_thread(thread)


@clause("threads.erased-are-listed", ListsThreads, ErasesThreads)
async def erased_are_listed(case: Case) -> None:
    """With erased, ids that have only erased calls are listed too, at version 0."""
    token = case.id("t")
    await _with_erased(case, token, "AbCd")
    await case.cp.append(f"{token}-E", [])
    await case.cp.delete_thread(f"{token}-F")
    alive = await case.cp.list_threads(prefix=token)
    every = await case.cp.list_threads(prefix=token, erased=True)
    assert [info.thread_id for info in alive] == [f"{token}-b", f"{token}-d"]
    assert [(info.thread_id, info.version) for info in every] == [
        (f"{token}-A", 0),
        (f"{token}-C", 0),
        (f"{token}-b", 1),
        (f"{token}-d", 1),
    ]
    assert every[2:] == alive


@clause("threads.erased-have-times", ListsThreads, ErasesThreads)
async def erased_have_times(case: Case) -> None:
    """An id that has only erased calls is listed with the times of its calls."""
    thread, first, last = case.id(), case.call(), case.call()
    await case.cp.record_issued(thread, first)
    await case.cp.record_issued(thread, last)
    loaded = await case.cp.load(thread)
    assert loaded is not None
    done = await case.cp.record_result(thread, first.call_id, "paid")
    await case.cp.delete_thread(thread)
    (info,) = await case.cp.list_threads(prefix=thread, erased=True)
    assert is_utc(info.created_at)
    assert is_utc(info.updated_at)
    assert info.created_at == loaded.pending[0].issued_at
    assert info.updated_at == done.resolved_at

    late = await case.cp.record_result(thread, last.call_id, "paid")
    (info,) = await case.cp.list_threads(prefix=thread, erased=True)
    assert info.updated_at == late.resolved_at, "a late result"

    thread, first = case.id(), case.call()
    await case.cp.record_issued(thread, first)
    await case.cp.record_result(thread, first.call_id, "no", success=False)
    await case.cp.record_issued(thread, case.call())
    loaded = await case.cp.load(thread)
    assert loaded is not None
    await case.cp.delete_thread(thread)
    (info,) = await case.cp.list_threads(prefix=thread, erased=True)
    assert info.updated_at == loaded.pending[0].issued_at, "a claim after a result"


@clause("threads.erased-by-pages", ListsThreads, ErasesThreads)
async def erased_by_pages(case: Case) -> None:
    """Pages and prefixes apply to ids with only erased calls as to other ids."""
    token = case.id("t")
    tails = "AbCDEFGhIjKLm"
    await _with_erased(case, token, tails)
    expected = sorted(f"{token}-{tail}" for tail in tails)

    for limit in (1, 2, 5, 13, 100):
        seen: list[str] = []
        after = None

        while page := await case.cp.list_threads(
            prefix=token, after=after, limit=limit, erased=True
        ):
            assert len(page) == min(limit, len(expected) - len(seen))
            seen += [info.thread_id for info in page]
            after = seen[-1]

        assert seen == expected

    alive = [one for one in expected if one[-1].islower()]

    for limit in (1, 2, 5):
        seen = []
        after = None

        while page := await case.cp.list_threads(
            prefix=token, after=after, limit=limit
        ):
            seen += [info.thread_id for info in page]
            after = seen[-1]

        assert seen == alive, "without the erased ones"

    one = await case.cp.list_threads(prefix=f"{token}-G", erased=True)
    assert [info.thread_id for info in one] == [f"{token}-G"]


@clause("threads.erased-until-forgotten", ListsThreads, ErasesThreads)
async def erased_until_forgotten(case: Case) -> None:
    """An id is not listed as erased after forget_keys; a new thread is listed once."""
    token = case.id("t")
    await _with_erased(case, token, "AB")
    await case.cp.delete_thread(f"{token}-A", forget_keys=True)
    await case.cp.save_extra(f"{token}-B", {"k": 1})
    listed = await case.cp.list_threads(prefix=token, erased=True)
    assert [(info.thread_id, info.version) for info in listed] == [(f"{token}-B", 0)]
    assert listed == await case.cp.list_threads(prefix=token)


@clause("threads.arguments", ListsThreads)
async def arguments(case: Case) -> None:
    """A limit below 1 is a ValueError; a non-int is a TypeError."""
    for limit in (0, -1):
        with raises(ValueError, f"limit {limit}"):
            await case.cp.list_threads(limit=limit)

    wrong: list[Any] = [None, 1.0, "1", True]

    for value in wrong:
        with raises(TypeError, f"limit {value!r}"):
            await case.cp.list_threads(limit=value)
