"""Optional: reading a part of a thread, like a slice of a list."""

from __future__ import annotations

from typing import Any

from conformance.case import Case, raises
from conformance.clause import clause
from conformance.sample_ids import matching_patterns
from cpkit import ReadsRanges

WRAPS = (2**31, 2**32, 2**63, 2**64)
"""What integers of engines wrap at."""


@clause("read.is-a-slice", ReadsRanges)
async def is_a_slice(case: Case) -> None:
    """read(start, stop) returns messages[start:stop], for any integers."""
    thread = case.id()
    messages = [{"n": n} for n in range(7)]
    await case.cp.append(thread, messages[:3])
    await case.cp.append(thread, messages[3:])
    ends = [-(2**70), -8, -7, -3, -1, 0, 1, 4, 6, 7, 8, 2**70]

    for start in ends:
        for stop in (*ends, None):
            seen = await case.cp.read(thread, start, stop)
            expected = messages[start:stop]
            assert seen == expected, f"[{start}:{stop}]"

    for far in WRAPS:
        for start, stop in (
            (far + 2, None),
            (0, far + 2),
            (-far - 2, 2),
            (-far, -far + 3),
        ):
            seen = await case.cp.read(thread, start, stop)
            assert seen == messages[start:stop], f"[{start}:{stop}]"


@clause("read.defaults-to-all", ReadsRanges)
async def defaults_to_all(case: Case) -> None:
    """read without a range returns all messages."""
    thread = case.id()
    messages = [{"n": n} for n in range(5)]
    await case.cp.append(thread, messages)
    assert await case.cp.read(thread) == messages
    assert await case.cp.read(thread, 2) == messages[2:]
    assert await case.cp.read(thread, stop=2) == messages[:2]


@clause("read.missing-is-empty", ReadsRanges)
async def missing_is_empty(case: Case) -> None:
    """read of a missing thread, or one without messages, returns an empty list."""
    thread, only_extra = case.id(), case.id()
    await case.cp.save_extra(only_extra, {"k": 1})

    for one in (thread, only_extra):
        for bounds in ((0, None), (0, 5), (-3, None), (5, -5)):
            assert await case.cp.read(one, *bounds) == []

    assert await case.cp.load(thread) is None


@clause("read.is-the-callers", ReadsRanges)
async def is_the_callers(case: Case) -> None:
    """Changing a read message does not change the stored one."""
    thread = case.id()
    await case.cp.append(thread, [{"list": [1]}])
    mine = await case.cp.read(thread)
    mine[0]["list"].append(2)
    mine.clear()
    assert await case.cp.read(thread) == [{"list": [1]}]


@clause("read.arguments", ReadsRanges)
async def arguments(case: Case) -> None:
    """A bound that is not an integer is a TypeError."""
    thread = case.id()
    wrong: list[Any] = ["1", 1.0, True]

    for value in wrong:
        with raises(TypeError, f"start {value!r}"):
            await case.cp.read(thread, value)

        with raises(TypeError, f"stop {value!r}"):
            await case.cp.read(thread, 0, value)

    nothing: Any = None

    with raises(TypeError, "start None"):
        await case.cp.read(thread, nothing)


@clause("read.id-is-not-a-pattern", ReadsRanges)
async def id_is_not_a_pattern(case: Case) -> None:
    """Reading an id with wildcards returns no message of another thread."""
    threads, patterns = matching_patterns(case.id("t"))

    for thread in threads:
        await case.cp.append(thread, [{"id": thread}])

    for pattern in patterns:
        seen = await case.cp.read(pattern)
        assert seen == [], f"read of {pattern!r}"
