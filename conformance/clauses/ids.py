"""Ids: opaque texts, compared exactly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from pydantic_core import to_json

from conformance.case import Case, Store, raises
from conformance.clause import clause
from conformance.difference import check_equal
from conformance.failure import Failure
from conformance.operations import reads_of
from conformance.sample_ids import invalid_ids, matching_patterns, similar_ids
from cpkit import (
    ErasesThreads,
    InvalidId,
    JsonValue,
    KeepsReceipts,
    ListsThreads,
    MovesThreads,
    ReadsRanges,
    ToolCall,
    UnknownCall,
    WatchesThreads,
)

PATIENCE = 15.0
"""Seconds for a yield of a watch."""

TOGETHER = 32
"""Threads that are written at the same time."""


@clause("ids.threads-never-meet")
async def threads_never_meet(case: Case) -> None:
    """Two thread ids are never mixed up, however similar, hostile or long."""
    threads = similar_ids(case.id("t"))

    for n, thread in enumerate(threads):
        version = await case.cp.append(thread, [{"n": n}])
        assert version == 1, f"{thread!r:.120} mixed up with another thread id"
        await case.cp.save_extra(thread, {"n": n})

    for n, thread in enumerate(threads):
        loaded = await case.cp.load(thread)
        assert loaded is not None
        assert (loaded.messages, loaded.extra) == ([{"n": n}], {"n": n})


@clause("ids.keys-never-meet")
async def keys_never_meet(case: Case) -> None:
    """Two idempotency keys are never mixed up, however similar, hostile or long."""
    thread, keys = case.id(), similar_ids(case.id("k"))

    for n, key in enumerate(keys):
        call = case.call(key, call_id=f"call-{n}", args={"n": n})
        seen = await case.cp.record_issued(thread, call)
        assert seen is None, f"{key!r:.120} mixed up with another key"
        await case.cp.record_result(thread, f"call-{n}", n)

    for n, key in enumerate(keys):
        found = await case.cp.find_completed(key)
        assert found is not None
        assert (found.result, found.call.idempotency_key) == (n, key)


@clause("ids.calls-never-meet")
async def calls_never_meet(case: Case) -> None:
    """Two call ids or tool names are never mixed up, however similar or long."""
    call_ids = similar_ids(case.id("c"))
    calls = [case.call(call_id=one, tool=one, args={"id": one}) for one in call_ids]
    await _all_separate(case, case.id(), calls)

    for thread in filter(_is_longest, similar_ids(case.id("t"))):
        keys = [case.id("k").ljust(512, "x") for _ in call_ids]
        await _all_separate(
            case,
            thread,
            [
                case.call(key, call_id=one, tool=one, args={"id": one})
                for key, one in zip(keys, call_ids, strict=True)
                if _is_longest(one)
            ],
        )


def _is_longest(text: str) -> bool:
    return len(text.encode()) == 512


async def _all_separate(case: Case, thread: str, calls: list[ToolCall]) -> None:
    for call in calls:
        seen = await case.cp.record_issued(thread, call)
        assert seen is None, f"{call.call_id!r:.120} mixed up with another call"

    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert [record.call for record in loaded.pending] == calls

    for call in calls:
        done = await case.cp.record_result(thread, call.call_id, call.call_id)
        assert (done.call, done.result) == (call, call.call_id)


@clause("ids.extra-keys-never-meet")
async def extra_keys_never_meet(case: Case) -> None:
    """Two keys of extra are never mixed up, however similar, hostile or long."""
    thread, other = case.id(), case.id()
    names = similar_ids(case.id("x"))
    names = [name for name in names if len(to_json(name)) <= 512 + len('""')]
    expected: dict[str, JsonValue] = {name: n for n, name in enumerate(names)}
    await case.cp.save_extra(thread, expected)
    await case.cp.append(other, [{"n": 1}], extra=expected)

    for n, name in enumerate(names):
        if n % 3 == 0:
            await case.cp.save_extra(thread, {name: -n})

    seen = await case.cp.load(thread)
    assert seen is not None
    changed = {name: n if n % 3 else -n for n, name in enumerate(names)}
    check_equal(seen.extra, changed, "extra after merges")
    seen = await case.cp.load(other)
    assert seen is not None
    check_equal(seen.extra, expected, "extra of an append")


@asynccontextmanager
async def _yielded(case: Case, ids: list[str]) -> AsyncIterator[None]:
    """Watch the ids in the block, and wait until each was yielded."""
    cp: object = case.cp

    if not isinstance(cp, WatchesThreads):
        yield
        return

    async with cp.watch(*ids) as changes:
        yield
        left = {*ids}

        while left:
            try:
                async with asyncio.timeout(PATIENCE):
                    left.discard(await anext(changes))
            except TimeoutError:
                some = f"{len(left)} not, among them {min(left)!r:.120}"
                raise Failure("a yield of each watched id", some) from None


@clause("ids.every-operation-finds-them", deadline=60)
async def every_operation_finds_them(case: Case) -> None:
    """A hostile or long id is found by every read and write, in every place at once."""
    ids = similar_ids(case.id("i"))
    cp, erases = case.cp, isinstance(case.cp, ErasesThreads)
    moves = isinstance(cp, MovesThreads)

    def call(one: str) -> ToolCall:
        return ToolCall(one, one, {"id": one}, one)

    async def write(one: str) -> None:
        assert await cp.append(one, [{"id": one}], expected_version=0) == 1
        assert await cp.record_issued(one, call(one)) is None
        assert await cp.append(one, [], expected_version=1, extra={"id": one}) == 1
        done = await cp.record_result(one, one, {"id": one})
        assert done.call == call(one)

    async def check(one: str, cp: Store) -> None:
        where = f"the id {one!r:.120}"
        done = await cp.find_completed(one)
        assert done is not None, where
        facts = (done.thread_id, done.call, done.result)
        check_equal(facts, (one, call(one), {"id": one}), where)

        for read in reads_of(cp):
            answer = await read.run(cp, one)

            if read.method == "list_calls":
                check_equal(answer, [done], where)
            elif read.name == "list_threads(after)":
                continue  # the next id is that of another one of them
            elif read.method == "list_threads":
                found = [info.version for info in answer if info.thread_id == one]
                assert found == [1], f"{read.name}, {where}"
            elif read.method == "read":
                check_equal(answer, [{"id": one}], where)
            elif read.of_key:
                check_equal(answer, done, where)
            elif read.method != "append":
                assert answer is not None, f"{read.name}, {where}"
                check_equal(answer.extra, {"id": one}, f"{read.name}, {where}")

    async def change(n: int, one: str) -> None:
        """Move some of them, and delete others."""
        if moves and erases and n % 3 == 0:
            dump = await cp.dump_thread(one)
            await cp.delete_thread(one, forget_keys=True, expected_version=1)
            assert dump is not None
            await cp.restore_thread(dump)
        elif erases and n % 3 == 1:
            await cp.delete_thread(one, expected_version=1)

    async with _yielded(case, ids):
        for start in range(0, len(ids), TOGETHER):
            await asyncio.gather(*map(write, ids[start : start + TOGETHER]))

    await asyncio.gather(*(change(n, one) for n, one in enumerate(ids)))
    left = [one for n, one in enumerate(ids) if not (erases and n % 3 == 1)]

    async with case.open() if case.has_handles() else nullcontext(cp) as other:
        for n, one in enumerate(left):
            await check(one, (cp, other)[n % 2])

        for one in {*ids} - {*left}:
            assert await cp.load(one) is None, f"the id {one!r:.120} that was deleted"
            found = await other.find_completed(one)
            assert found is not None, f"the key {one!r:.120} of a deleted thread"
            assert (found.erased, found.result, found.call.args) == (True, None, {})


@clause("ids.thread-is-not-a-pattern")
async def thread_is_not_a_pattern(case: Case) -> None:
    """A thread id with wildcards is never matched against other thread ids."""
    threads, patterns = matching_patterns(case.id("t"))

    for thread in threads:
        await case.cp.append(thread, [{"id": thread}])
        await case.cp.save_extra(thread, {"id": thread})
        await case.cp.record_issued(thread, case.call(call_id="c"))

    before = [await case.cp.load(thread) for thread in threads]

    for pattern in patterns:
        assert await case.cp.load(pattern) is None, f"load of {pattern!r}"
        version = await case.cp.append(pattern, [], expected_version=0)
        assert version == 0, f"append to {pattern!r}"

        with raises(UnknownCall, f"the thread {pattern!r}"):
            await case.cp.record_result(pattern, "c", 1)

    for pattern in patterns:
        version = await case.cp.append(pattern, [{"id": pattern}], expected_version=0)
        assert version == 1, f"append to {pattern!r}"
        await case.cp.save_extra(pattern, {"id": pattern})

    assert [await case.cp.load(thread) for thread in threads] == before


@clause("ids.key-is-not-a-pattern")
async def key_is_not_a_pattern(case: Case) -> None:
    """An idempotency key with wildcards is never matched against other keys."""
    thread, (keys, patterns) = case.id(), matching_patterns(case.id("k"))

    for key in keys:
        call = case.call(key)
        await case.cp.record_issued(thread, call)
        await case.cp.record_result(thread, call.call_id, key)

    for pattern in patterns:
        found = await case.cp.find_completed(pattern)
        assert found is None, f"find_completed of {pattern!r}"
        holder = await case.cp.record_issued(thread, case.call(pattern))
        assert holder is None, f"claim of {pattern!r}"


@clause("ids.call-is-not-a-pattern")
async def call_is_not_a_pattern(case: Case) -> None:
    """A call id with wildcards is never matched against other call ids."""
    thread, (call_ids, patterns) = case.id(), matching_patterns(case.id("c"))
    calls = [case.call(call_id=call_id) for call_id in call_ids]

    for call in calls:
        await case.cp.record_issued(thread, call)

    for pattern in patterns:
        with raises(UnknownCall, f"the call {pattern!r}"):
            await case.cp.record_result(thread, pattern, 1)

    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert [record.call for record in loaded.pending] == calls


@clause("ids.parts-never-mix")
async def parts_never_mix(case: Case) -> None:
    """Thread and call ids are never joined: ("a:b", "c") is not ("a", "b:c")."""
    token = case.id("p")

    for mark in (":", "/", "|", "\n", " ", ".", "-", "::", "}", "%3A"):
        one, two = f"{token}{mark}b", token
        first = case.call(call_id="c", args={"n": 1})
        second = case.call(call_id=f"b{mark}c", args={"n": 2})
        assert await case.cp.record_issued(one, first) is None
        assert await case.cp.record_issued(two, second) is None
        done = await case.cp.record_result(two, second.call_id, 2)
        loaded = await case.cp.load(one)
        assert done.call == second
        assert loaded is not None
        assert [record.call for record in loaded.pending] == [first]


@clause("ids.kinds-never-mix")
async def kinds_never_mix(case: Case) -> None:
    """One text can be a thread id, call id, tool name and key at the same time."""
    text, other = case.id(), case.id()
    await case.cp.append(text, [{"n": 1}])
    await case.cp.save_extra(text, {text: 1})
    call = ToolCall(text, text, {}, text)
    assert await case.cp.record_issued(other, call) is None
    assert await case.cp.record_issued(text, case.call(call_id=text)) is None
    done = await case.cp.record_result(other, text, "x")
    loaded = await case.cp.load(text)
    assert done.call == call
    assert loaded is not None
    assert (loaded.messages, loaded.extra) == ([{"n": 1}], {text: 1})
    assert len(loaded.pending) == 1


class _Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "not the id"


@clause("ids.subclass-is-its-text")
async def subclass_is_its_text(case: Case) -> None:
    """An id of a str subclass is the same id as its plain text."""
    thread, key = case.id(), case.id("key")
    await case.cp.append(_Text(thread), [{"n": 1}])
    call = case.call(_Text(key), call_id=_Text("c"), tool=_Text("pay"))
    await case.cp.record_issued(_Text(thread), call)
    await case.cp.record_result(_Text(thread), _Text("c"), 1)
    loaded = await case.cp.load(thread)
    found = await case.cp.find_completed(key)
    assert loaded is not None
    assert loaded.messages == [{"n": 1}]
    assert found is not None
    assert (found.thread_id, found.call.tool_name) == (thread, "pay")
    assert type(found.thread_id) is str


async def _refused(uses: dict[str, Callable[[Any], Awaitable[object]]]) -> None:
    for name, use in uses.items():
        for what, value in invalid_ids().items():
            with raises(InvalidId, f"{what} in {name}"):
                await use(value)


@clause("ids.refused")
async def refused(case: Case) -> None:
    """An id that is empty, over 512 bytes, with NUL or not a str is an InvalidId."""
    thread = case.id()
    cp = case.cp
    await _refused(
        {
            "load": lambda bad: cp.load(bad),
            "append": lambda bad: cp.append(bad, [{"n": 1}]),
            "append of nothing": lambda bad: cp.append(bad, []),
            "save_extra": lambda bad: cp.save_extra(bad, {"k": 1}),
            "save_extra of nothing": lambda bad: cp.save_extra(bad, {}),
            "record_issued": lambda bad: cp.record_issued(bad, case.call()),
            "a call id": lambda bad: cp.record_issued(
                thread, ToolCall(bad, "t", {}, case.id("key"))
            ),
            "a tool's name": lambda bad: cp.record_issued(
                thread, ToolCall(case.id("call"), bad, {}, case.id("key"))
            ),
            "a key": lambda bad: cp.record_issued(
                thread, ToolCall(case.id("call"), "t", {}, bad)
            ),
            "record_result": lambda bad: cp.record_result(bad, "c", 1),
            "record_result's call id": lambda bad: cp.record_result(thread, bad, 1),
            "find_completed": lambda bad: cp.find_completed(bad),
        }
    )
    assert await cp.load(thread) is None


@clause("ids.refused-first")
async def refused_first(case: Case) -> None:
    """An invalid id is refused before an invalid value is checked."""
    wrong: Any = object()

    with raises(InvalidId):
        await case.cp.append("", [wrong])

    with raises(InvalidId):
        await case.cp.save_extra("", {"a": wrong})

    with raises(InvalidId):
        await case.cp.record_result("", "c", wrong)


@clause("ids.refused-in-list", ListsThreads)
async def refused_in_list(case: Case) -> None:
    """list_threads refuses an invalid id in after, and a prefix with NUL."""
    beyond = invalid_ids()
    del beyond["None"]  # is the default of after

    for what, value in beyond.items():
        with raises(InvalidId, f"{what} in after"):
            await case.cp.list_threads(after=value)

    for value in ("a\0", "x" * 513, "\ud800", None, b"a"):
        with raises(InvalidId, f"prefix {value!r:.20}"):
            await case.cp.list_threads(prefix=value)  # type: ignore[arg-type]  # the point


@clause("ids.refused-in-read", ReadsRanges)
async def refused_in_read(case: Case) -> None:
    """read and load_range refuse an invalid id."""
    await _refused(
        {
            "read": lambda bad: case.cp.read(bad, 0, 1),
            "load_range": lambda bad: case.cp.load_range(bad, 0, 1),
        }
    )


@clause("ids.refused-in-receipts", KeepsReceipts)
async def refused_in_receipts(case: Case) -> None:
    """list_calls and find_call refuse an invalid id."""
    await _refused(
        {
            "list_calls": lambda bad: case.cp.list_calls(bad),
            "find_call": lambda bad: case.cp.find_call(bad),
        }
    )


@clause("ids.refused-in-delete", ErasesThreads)
async def refused_in_delete(case: Case) -> None:
    """delete_thread refuses an invalid id."""
    await _refused({"delete_thread": lambda bad: case.cp.delete_thread(bad)})
