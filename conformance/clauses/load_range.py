"""Optional: loading a thread with a part of its messages."""

from __future__ import annotations

from typing import Any

from conformance.case import Case, raises
from conformance.clause import clause
from conformance.clauses.read import WRAPS
from conformance.sample_ids import matching_patterns
from cpkit import ErasesThreads, ReadsRanges


async def _filled(case: Case, count: int) -> str:
    """Return a thread with messages, extra, a pending call and a completed one."""
    thread, done = case.id(), case.call()
    await case.cp.append(thread, [{"n": n} for n in range(count)], extra={"plan": "a"})
    await case.cp.record_issued(thread, done)
    await case.cp.record_result(thread, done.call_id, "done")
    await case.cp.record_issued(thread, case.call())
    await case.cp.save_extra(thread, {"step": [1, 2]})
    return thread


@clause("range.is-a-slice", ReadsRanges)
async def is_a_slice(case: Case) -> None:
    """load_range has messages[start:stop], their first position, and the version."""
    thread = await _filled(case, 4)
    await case.cp.append(thread, [{"n": n} for n in range(4, 7)])
    messages = [{"n": n} for n in range(7)]
    ends = [-(2**70), -8, -7, -3, -1, 0, 1, 4, 6, 7, 8, 2**70]

    for start in ends:
        for stop in (*ends, None):
            loaded = await case.cp.load_range(thread, start, stop)
            expected = messages[start:stop]
            assert loaded is not None
            assert loaded.messages == expected, f"[{start}:{stop}]"
            assert loaded.version == 7, f"[{start}:{stop}]"
            first = expected[0]["n"] if expected else loaded.first
            assert loaded.first == first, f"[{start}:{stop}]"
            assert 0 <= loaded.first <= 7, f"[{start}:{stop}]"

    for far in WRAPS:
        for start, stop in (
            (far + 2, None),
            (0, far + 2),
            (-far - 2, 2),
            (-far, -far + 3),
        ):
            loaded = await case.cp.load_range(thread, start, stop)
            assert loaded is not None
            assert loaded.messages == messages[start:stop], f"[{start}:{stop}]"


@clause("range.has-the-rest", ReadsRanges)
async def has_the_rest(case: Case) -> None:
    """Extra and pending calls are complete in every range, and in one of no message."""
    thread = await _filled(case, 5)
    whole = await case.cp.load(thread)
    assert whole is not None
    assert len(whole.pending) == 1

    for bounds in ((0, None), (-2, None), (1, 3), (0, 0), (5, None), (3, 1)):
        loaded = await case.cp.load_range(thread, *bounds)
        assert loaded is not None
        assert loaded.extra == whole.extra, f"{bounds}"
        assert loaded.pending == whole.pending, f"{bounds}"


@clause("range.defaults-to-all", ReadsRanges)
async def defaults_to_all(case: Case) -> None:
    """load_range without a range returns what load returns."""
    thread = await _filled(case, 5)
    whole = await case.cp.load(thread)
    assert whole is not None
    assert await case.cp.load_range(thread) == whole
    from_two = await case.cp.load_range(thread, 2)
    to_two = await case.cp.load_range(thread, stop=2)
    assert from_two is not None
    assert to_two is not None
    assert from_two.messages == whole.messages[2:]
    assert to_two.messages == whole.messages[:2]


@clause("range.missing-is-none", ReadsRanges)
async def missing_returns_none(case: Case) -> None:
    """load_range returns None for a missing thread only, and records nothing."""
    thread, only_extra, only_calls = case.id(), case.id(), case.id()
    await case.cp.save_extra(only_extra, {"k": 1})
    await case.cp.record_issued(only_calls, case.call())

    for bounds in ((0, None), (0, 0), (-3, None), (5, -5)):
        assert await case.cp.load_range(thread, *bounds) is None

        for one in (only_extra, only_calls):
            loaded = await case.cp.load_range(one, *bounds)
            assert loaded is not None
            assert (loaded.messages, loaded.version, loaded.first) == ([], 0, 0)

    assert await case.cp.load(thread) is None

    if isinstance(case.cp, ErasesThreads):
        await case.cp.delete_thread(only_calls)
        assert await case.cp.load_range(only_calls, stop=0) is None, "erased calls"


@clause("range.is-the-callers", ReadsRanges)
async def is_the_callers(case: Case) -> None:
    """Changing what load_range returned does not change the stored thread."""
    thread = await _filled(case, 3)
    expected = await case.cp.load(thread)
    mine: Any = await case.cp.load_range(thread, -2)
    mine.messages[0]["n"] = "changed"
    mine.messages.clear()
    mine.extra["step"].append(3)
    mine.pending[0].call.args["new"] = 1
    mine.pending.clear()
    assert await case.cp.load_range(thread) == expected


@clause("range.arguments", ReadsRanges)
async def arguments(case: Case) -> None:
    """A bound of load_range that is not an integer is a TypeError."""
    thread = await _filled(case, 1)
    wrong: list[Any] = ["1", 1.0, True]

    for one in (thread, case.id()):
        for value in wrong:
            with raises(TypeError, f"start {value!r}"):
                await case.cp.load_range(one, value)

            with raises(TypeError, f"stop {value!r}"):
                await case.cp.load_range(one, 0, value)

        nothing: Any = None

        with raises(TypeError, "start None"):
            await case.cp.load_range(one, nothing)


@clause("range.id-is-not-a-pattern", ReadsRanges)
async def id_is_not_a_pattern(case: Case) -> None:
    """load_range of an id with wildcards finds no other thread."""
    threads, patterns = matching_patterns(case.id("t"))

    for thread in threads:
        await case.cp.append(thread, [{"id": thread}])

    for pattern in patterns:
        seen = await case.cp.load_range(pattern, -1)
        assert seen is None, f"load_range of {pattern!r}"
