"""Optional: removing the oldest messages of a thread."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from conformance.answers import answers
from conformance.case import Case, raises
from conformance.clause import clause
from conformance.difference import check_equal
from conformance.operations import reads_of
from conformance.sample_dumps import made_call, made_dump
from cpkit import (
    ErasesThreads,
    JsonValue,
    ListsThreads,
    MovesThreads,
    ReadsRanges,
    ToolCall,
    TrimsThreads,
    VersionConflict,
)

BATCHES = (1, 3, 1, 4, 2)
"""Messages of each append: a store may keep those of one append in one row."""

COUNT = sum(BATCHES)


def _message(n: int) -> dict[str, JsonValue]:
    return {"n": n, "text": f"message {n} " + "x" * (n * 40) + "."}


MESSAGES = [_message(n) for n in range(COUNT)]


async def _filled(case: Case, thread: str | None = None) -> tuple[str, list[ToolCall]]:
    """Return a thread with `MESSAGES`, extra, and its calls of each status."""
    thread, calls = thread or case.id(), [case.call() for _ in range(3)]
    left = list(MESSAGES)

    for size in BATCHES:
        await case.cp.append(thread, left[:size], extra={"left": len(left)})
        del left[:size]

    for call in calls:
        await case.cp.record_issued(thread, call)

    await case.cp.record_result(thread, calls[0].call_id, "paid")
    await case.cp.record_result(thread, calls[1].call_id, "no", success=False)
    return thread, calls


async def _is_left(case: Case, thread: str, first: int, where: str) -> None:
    """Check that a load has `MESSAGES` from ``first`` on."""
    loaded = await case.cp.load(thread)
    assert loaded is not None, where
    seen = loaded.first, loaded.version, loaded.messages
    check_equal(seen, (first, COUNT, MESSAGES[first:]), f"load, {where}")


@clause("trim.removes-below", TrimsThreads)
async def removes_below(case: Case) -> None:
    """Messages below the position go, the others stay in place, at any position."""
    for before in range(COUNT + 1):
        thread, _ = await _filled(case)
        assert await case.cp.trim(thread, before) == before
        await _is_left(case, thread, before, f"trimmed before {before}")


@clause("trim.again-and-again", TrimsThreads)
async def again_and_again(case: Case) -> None:
    """Each trim counts the messages that it removed itself, and removes no other."""
    thread, _ = await _filled(case)
    first = 0

    for before in (1, 2, 2, 0, 6, 5, COUNT - 1, 3, COUNT, COUNT):
        removed = await case.cp.trim(thread, before)
        assert removed == max(0, before - first), f"trimmed before {before}"
        first = max(first, before)
        await _is_left(case, thread, first, f"trimmed before {before}")


@clause("trim.appends-go-on", TrimsThreads)
async def appends_go_on(case: Case) -> None:
    """An append after a trim goes on at the version, also where nothing is left."""
    for before in (4, COUNT):
        thread, _ = await _filled(case)
        await case.cp.trim(thread, before)

        with raises(VersionConflict) as caught:
            await case.cp.append(thread, [_message(0)], expected_version=COUNT - before)

        assert caught.error.actual == COUNT
        version = await case.cp.append(thread, [_message(1)], expected_version=COUNT)
        assert version == COUNT + 1
        assert await case.cp.append(thread, [_message(2)]) == COUNT + 2
        loaded = await case.cp.load(thread)
        assert loaded is not None
        assert (loaded.first, loaded.version) == (before, COUNT + 2)
        expected = [*MESSAGES[before:], _message(1), _message(2)]
        check_equal(loaded.messages, expected, f"appended after a trim at {before}")
        assert await case.cp.trim(thread, COUNT + 1) == COUNT + 1 - before
        loaded = await case.cp.load(thread)
        assert loaded is not None
        assert loaded.messages == [_message(2)]


@clause("trim.beyond-the-version", TrimsThreads)
async def beyond_the_version(case: Case) -> None:
    """A position beyond the version removes all messages, and the thread stays."""
    for before in (COUNT + 1, 2**31, 2**32 + 1, 2**53, 2**64 + 3, 2**128):
        thread, _ = await _filled(case)
        assert await case.cp.trim(thread, before) == COUNT
        await _is_left(case, thread, COUNT, f"trimmed before {before}")


@clause("trim.is-gone-for-others", TrimsThreads, "handles")
async def is_gone_for_others(case: Case) -> None:
    """No read of another handle, and no dump, has what was trimmed, at any position."""
    async with case.open() as other:
        for before in range(1, COUNT + 1):
            thread, _ = await _filled(case)
            await other.load(thread)  # it may remember that
            await case.cp.trim(thread, before)

            for read in reads_of(other):
                seen = repr(None if read.of_key else await read.run(other, thread))

                for message in MESSAGES[:before]:
                    assert str(message["text"]) not in seen, read.name


@clause("trim.keeps-the-rest", TrimsThreads)
async def keeps_the_rest(case: Case) -> None:
    """Extra, calls and their keys stay, and so do the times of the thread."""
    thread, calls = await _filled(case)
    keys = [call.idempotency_key for call in calls]
    before = await answers(case.cp, thread, keys)

    for position in (3, COUNT):
        await case.cp.trim(thread, position)
        after = await answers(case.cp, thread, keys)
        load = before["load"]
        expected = {
            **before,
            "load": replace(load, messages=MESSAGES[position:], first=position),
        }

        if isinstance(case.cp, ReadsRanges):
            expected["read"] = MESSAGES[position:]
            last = max(position, COUNT - 2)
            expected["load_range"] = replace(load, messages=MESSAGES[last:], first=last)

        check_equal(after, expected, f"trimmed before {position}")

    held = await case.cp.record_issued(case.id(), case.call(keys[0]))
    assert held is not None, "a completed call holds its key"
    assert await case.cp.record_result(thread, calls[2].call_id, "late") is not None


@clause("trim.nothing-to-remove", TrimsThreads)
async def nothing_to_remove(case: Case) -> None:
    """A trim of a missing thread, or of one without messages, returns 0."""
    missing, only_extra, only_calls = case.id(), case.id(), case.id()
    await case.cp.save_extra(only_extra, {"k": 1})
    await case.cp.record_issued(only_calls, case.call())

    for before in (0, 1, 10):
        assert await case.cp.trim(missing, before) == 0
        assert await case.cp.load(missing) is None

        for thread in (only_extra, only_calls):
            assert await case.cp.trim(thread, before) == 0
            loaded = await case.cp.load(thread)
            assert loaded is not None
            assert (loaded.version, loaded.first) == (0, 0)

    if isinstance(case.cp, ListsThreads):
        assert await case.cp.list_threads(prefix=missing, erased=True) == []

    for thread in (missing, only_extra, only_calls):
        assert await case.cp.append(thread, [_message(0)]) == 1
        loaded = await case.cp.load(thread)
        assert loaded is not None
        assert (loaded.messages, loaded.first) == ([_message(0)], 0)


@clause("trim.leaves-the-neighbours", TrimsThreads)
async def leaves_the_neighbours(case: Case) -> None:
    """Only the thread of this id is trimmed, and not one with a similar id."""
    middle = case.id("t%")
    others = [middle[:-1], f"{middle}0", f"{middle}*", middle.upper(), middle + " "]

    for thread in (middle, *others):
        await _filled(case, thread)

    assert await case.cp.trim(middle, COUNT - 1) == COUNT - 1

    for thread in others:
        await _is_left(case, thread, 0, "another thread was trimmed")

    await _is_left(case, middle, COUNT - 1, "between others")


@clause("trim.ranges", TrimsThreads, ReadsRanges)
async def ranges(case: Case) -> None:
    """A range has what is left of it, and says where that begins."""
    thread, _ = await _filled(case)
    ends = [-COUNT - 1, -COUNT, -4, -1, 0, 1, 4, 5, 6, COUNT - 1, COUNT, COUNT + 3]

    for trimmed in (5, COUNT):
        await case.cp.trim(thread, trimmed)

        for start in ends:
            for stop in (*ends, None):
                where = f"[{start}:{stop}], trimmed before {trimmed}"
                asked = range(COUNT)[start:stop]
                expected = [MESSAGES[n] for n in asked if n >= trimmed]
                loaded = await case.cp.load_range(thread, start, stop)
                assert loaded is not None
                check_equal(loaded.messages, expected, where)
                assert await case.cp.read(thread, start, stop) == expected, where
                assert loaded.version == COUNT, where
                first = expected[0]["n"] if expected else loaded.first
                assert loaded.first == first, where
                assert trimmed <= loaded.first <= COUNT, where

        nothing = await case.cp.load_range(thread, stop=0)
        assert nothing is not None
        assert nothing.first == trimmed, "load_range(stop=0) tells where it begins"


@clause("trim.expected-version", TrimsThreads)
async def expected_version(case: Case) -> None:
    """A trim that expects another version raises, and removes nothing."""
    thread, _ = await _filled(case)

    for first in (0, 3, COUNT):
        assert await case.cp.trim(thread, first, expected_version=COUNT) <= COUNT

        for wrong in (0, COUNT - first, COUNT - 1, COUNT + 1):
            for before in () if wrong == COUNT else (0, 2, 5, COUNT, 99):
                with raises(VersionConflict, f"{wrong}, before {before}") as caught:
                    await case.cp.trim(thread, before, expected_version=wrong)

                error = caught.error
                facts = (error.thread_id, error.expected, error.actual)
                assert facts == (thread, wrong, COUNT)

        await _is_left(case, thread, first, "after trims that were refused")

    missing = case.id()

    with raises(VersionConflict, "a missing thread is at version 0") as caught:
        await case.cp.trim(missing, 1, expected_version=1)

    assert caught.error.actual == 0
    assert await case.cp.trim(missing, 1, expected_version=0) == 0


@clause("trim.arguments", TrimsThreads)
async def arguments(case: Case) -> None:
    """A negative position or version is a ValueError; a non-int is a TypeError."""
    thread, _ = await _filled(case)
    wrong: list[Any] = ["2", 2.0, True]

    for one in (thread, case.id()):
        with raises(ValueError, "before -1"):
            await case.cp.trim(one, -1)

        with raises(ValueError, "expected_version -1"):
            await case.cp.trim(one, 1, expected_version=-1)

        for value in (*wrong, None):
            with raises(TypeError, f"before {value!r}"):
                await case.cp.trim(one, value)

        for value in wrong:
            with raises(TypeError, f"expected_version {value!r}"):
                await case.cp.trim(one, 1, expected_version=value)

    await _is_left(case, thread, 0, "after trims that were refused")


@clause("trim.deleted-begins-at-0", TrimsThreads, ErasesThreads)
async def deleted_begins_at_0(case: Case) -> None:
    """A trimmed thread that was deleted begins again at position 0."""
    for before in (3, COUNT):
        thread, (paid, *_) = await _filled(case)
        await case.cp.trim(thread, before)

        with raises(VersionConflict, "the version of a trimmed thread stays"):
            await case.cp.delete_thread(thread, expected_version=COUNT - before)

        await case.cp.delete_thread(thread, expected_version=COUNT)
        assert await case.cp.load(thread) is None
        assert await case.cp.trim(thread, 2) == 0
        held = await case.cp.record_issued(case.id(), case.call(paid.idempotency_key))
        assert held is not None, "a paid call stays paid"
        await _filled(case, thread)
        await _is_left(case, thread, 0, "begun again")


@clause("trim.moves", TrimsThreads, MovesThreads, ErasesThreads)
async def moves(case: Case) -> None:
    """A dump and its restore carry the position of the first message."""
    for before in (0, 4, COUNT):
        thread, _ = await _filled(case)
        await case.cp.trim(thread, before)
        dump = await case.cp.dump_thread(thread)
        assert dump is not None
        assert (dump.first, list(dump.messages)) == (before, MESSAGES[before:])
        expected = await answers(case.cp, thread)
        await case.cp.delete_thread(thread, forget_keys=True)
        await case.cp.restore_thread(dump)
        seen = await answers(case.cp, thread)
        check_equal(seen, expected, f"restored, trimmed before {before}")
        check_equal(await case.cp.dump_thread(thread), dump, "dumped again")
        assert await case.cp.append(thread, [_message(1)]) == COUNT + 1
        assert await case.cp.trim(thread, COUNT) == COUNT - before

    empty = made_dump(case.id(), messages=[], extra={}, first=7)
    await case.cp.restore_thread(empty)
    assert await case.cp.append(empty.thread_id, [], expected_version=7) == 7


@clause("trim.invalid-dumps", TrimsThreads, MovesThreads)
async def invalid_dumps(case: Case) -> None:
    """A dump with another first position than a store could have is refused."""
    wrong: list[Any] = [-1, 1.0, True, None, "0", 2**31, 2**64]

    for first in wrong:
        with raises((TypeError, ValueError), f"first {first!r}"):
            await case.cp.restore_thread(made_dump(case.id(), first=first))

    thread = case.id()
    erased = replace(made_call(thread), erased=True, result=None)
    erased = replace(erased, call=replace(erased.call, args={}))
    nothing: dict[str, Any] = {"messages": [], "extra": {}}

    with raises((TypeError, ValueError), "no times"):
        await case.cp.restore_thread(
            made_dump(
                thread, erased, **nothing, first=1, created_at=None, updated_at=None
            )
        )
