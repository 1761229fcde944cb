"""Optional: which threads there are, in order and by pages."""

from __future__ import annotations

from typing import Any

from conformance.case import Case, raises
from conformance.clause import clause
from conformance.clauses.claim import is_utc
from conformance.samples import neighbours
from cpkit import ListsThreads, ThreadInfo


async def _info(case: Case, thread: str) -> ThreadInfo | None:
    found = await case.cp.list_threads(prefix=thread, limit=1)
    return found[0] if found and found[0].thread_id == thread else None


@clause("threads.ordered-by-code-point", ListsThreads)
async def ordered_by_code_point(case: Case) -> None:
    """Threads are listed once each, in the order of code points of their ids."""
    token = case.id("t")
    tails = ["b", "a", "B", "\uffff", "\U0001f600", "é", "e\u0301", "~", "10", "9", ""]
    threads = [token + tail for tail in tails]

    for thread in threads:
        await case.cp.append(thread, [{"n": 1}])
        await case.cp.append(thread, [{"n": 2}])

    listed = await case.cp.list_threads(prefix=token)
    assert [info.thread_id for info in listed] == sorted(threads)


@clause("threads.pages", ListsThreads)
async def pages(case: Case) -> None:
    """Pages of any size, each started after the last id, cover every thread once."""
    token = case.id("t")
    threads = sorted(f"{token}-{n}" for n in range(23))

    for thread in threads:
        await case.cp.append(thread, [{"n": 1}])

    for limit in (1, 7, 22, 23, 24, 10**9):
        seen: list[str] = []
        after = None

        while page := await case.cp.list_threads(
            prefix=token, after=after, limit=limit
        ):
            assert len(page) <= limit
            seen += [info.thread_id for info in page]
            after = seen[-1]
            assert len(seen) <= len(threads)

        assert seen == threads


@clause("threads.limit-is-100", ListsThreads)
async def limit_is_100(case: Case) -> None:
    """Without a limit a page has 100 threads."""
    token = case.id("t")

    for n in range(103):
        await case.cp.save_extra(f"{token}-{n}", {"n": n})

    first = await case.cp.list_threads(prefix=token)
    rest = await case.cp.list_threads(prefix=token, after=first[-1].thread_id)
    assert (len(first), len(rest)) == (100, 3)


@clause("threads.after-is-exclusive", ListsThreads)
async def after_is_exclusive(case: Case) -> None:
    """A page starts after an id, which itself is not listed and need not exist."""
    token = case.id("t")

    for tail in "ace":
        await case.cp.append(token + tail, [{"n": 1}])

    expected = {"": "ace", "a": "ce", "b": "ce", "c": "e", "d": "e", "e": "", "f": ""}

    for tail, rest in expected.items():
        listed = await case.cp.list_threads(prefix=token, after=token + tail)
        assert [info.thread_id for info in listed] == [token + r for r in rest]

    before = await case.cp.list_threads(prefix=token, after="\x01")
    assert len(before) == 3
    beyond = await case.cp.list_threads(prefix=token, after="\U0010ffff")
    assert beyond == []


@clause("threads.prefix-is-literal", ListsThreads)
async def prefix_is_literal(case: Case) -> None:
    """A prefix is text, without patterns, and compared exactly."""
    token = case.id("t")
    threads = neighbours(token)

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
    tails += ["\uffff", "\U0010ffff", "x" * 100]

    for prefix in (*(token + tail for tail in tails), f"%{token}", f"{{{token}"):
        listed = await case.cp.list_threads(prefix=prefix, limit=1000)
        expected = sorted(thread for thread in threads if thread.startswith(prefix))
        assert [info.thread_id for info in listed] == expected


@clause("threads.tells-version-and-times", ListsThreads)
async def tells_version_and_times(case: Case) -> None:
    """A thread is listed with its version and times in UTC; created_at stays."""
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


@clause("threads.updated-by-every-change", ListsThreads)
async def updated_by_every_change(case: Case) -> None:
    """updated_at moves with every write that changed something, and with no other."""
    thread, call = case.id(), case.call()
    cp = case.cp
    await cp.append(thread, [{"n": 1}])
    changes: list[Any] = [
        lambda: cp.append(thread, [{"n": 2}]),
        lambda: cp.save_extra(thread, {"k": 1}),
        lambda: cp.record_issued(thread, call),
        lambda: cp.record_result(thread, call.call_id, 1),
    ]
    idle: list[Any] = [
        lambda: cp.append(thread, []),
        lambda: cp.save_extra(thread, {}),
        lambda: cp.record_issued(thread, call),
        lambda: cp.record_issued(thread, case.call(call.idempotency_key)),
        lambda: cp.record_result(thread, call.call_id, 2),
        lambda: cp.load(thread),
    ]

    for change in changes:
        before = await _info(case, thread)
        assert before is not None
        after = before

        # A clock of milliseconds may stand still for a write or two.
        while after == before or after.updated_at == before.updated_at:
            await change()
            seen = await _info(case, thread)
            assert seen is not None
            after = seen

            if changes.index(change) > 1:
                break

        assert after.updated_at >= before.updated_at

    for nothing in idle:
        before = await _info(case, thread)
        await nothing()
        assert await _info(case, thread) == before


@clause("threads.knows-those-without-messages", ListsThreads)
async def knows_those_without_messages(case: Case) -> None:
    """A thread that has only extra or only calls is listed, at version 0."""
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
    """A thread to which nothing was written is not listed."""
    token = case.id("t")
    key = case.id("key")
    await case.cp.record_issued(case.id("elsewhere"), case.call(key))
    await case.cp.append(token, [])
    await case.cp.save_extra(token, {})
    await case.cp.load(token)
    await case.cp.record_issued(token, case.call(key))
    listed = await case.cp.list_threads(prefix=token)
    assert listed == []


@clause("threads.arguments", ListsThreads)
async def arguments(case: Case) -> None:
    """A limit below 1 is a ValueError, one that is no int a TypeError."""
    for limit in (0, -1):
        with raises(ValueError, f"limit {limit}"):
            await case.cp.list_threads(limit=limit)

    wrong: list[Any] = [None, 1.0, "1", True]

    for value in wrong:
        with raises(TypeError, f"limit {value!r}"):
            await case.cp.list_threads(limit=value)
