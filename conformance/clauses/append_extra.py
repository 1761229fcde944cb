"""Appending with extra: messages and a merge in one atomic step."""

from __future__ import annotations

from typing import Any

from conformance.case import Case, raises
from conformance.clause import clause
from cpkit import SerializationError, VersionConflict


async def _loaded(case: Case, thread: str) -> tuple[list[Any], dict[str, Any]]:
    loaded = await case.cp.load(thread)
    assert loaded is not None
    return loaded.messages, loaded.extra


@clause("append.extra-is-stored")
async def extra_is_stored(case: Case) -> None:
    """An append with extra stores the messages and the extra."""
    thread = case.id()
    version = await case.cp.append(thread, [{"n": 1}], extra={"plan": {"step": 1}})
    messages, extra = await _loaded(case, thread)
    assert version == 1
    assert messages == [{"n": 1}]
    assert extra == {"plan": {"step": 1}}


@clause("append.extra-merges")
async def extra_merges(case: Case) -> None:
    """The extra of an append is merged: keys that it does not name stay."""
    thread = case.id()
    await case.cp.save_extra(thread, {"a": 1, "b": {"x": 1}})
    await case.cp.append(thread, [{"n": 1}], extra={"b": {"y": 2}, "c": 3})
    await case.cp.append(thread, [], extra={"c": 4})
    messages, extra = await _loaded(case, thread)
    assert messages == [{"n": 1}]
    assert extra == {"a": 1, "b": {"y": 2}, "c": 4}


@clause("append.extra-stores-none")
async def extra_stores_none(case: Case) -> None:
    """None in the extra of an append is stored as a value."""
    thread = case.id()
    await case.cp.save_extra(thread, {"a": 1})
    await case.cp.append(thread, [{"n": 1}], extra={"a": None, "b": None})
    _, extra = await _loaded(case, thread)
    assert extra == {"a": None, "b": None}


@clause("append.conflict-writes-no-extra")
async def conflict_writes_no_extra(case: Case) -> None:
    """An append that conflicts writes neither its messages nor its extra."""
    thread, missing = case.id(), case.id()
    await case.cp.append(thread, [{"n": 1}], extra={"a": 1})
    before = await case.cp.load(thread)

    for wrong in (0, 2):
        with raises(VersionConflict, f"version 1 expected to be {wrong}"):
            await case.cp.append(
                thread, [{"n": 2}], expected_version=wrong, extra={"a": 2, "b": 2}
            )

    after = await case.cp.load(thread)
    assert after == before

    with raises(VersionConflict, "a missing thread"):
        await case.cp.append(missing, [{"n": 1}], expected_version=1, extra={"a": 1})

    assert await case.cp.load(missing) is None


@clause("append.extra-is-fenced")
async def extra_is_fenced(case: Case) -> None:
    """Without messages, an expected version fences the update of extra."""
    thread = case.id()
    await case.cp.append(thread, [{"n": 1}, {"n": 2}], extra={"a": 1})
    version = await case.cp.append(thread, [], expected_version=2, extra={"a": 2})
    assert version == 2

    for wrong in (0, 1, 3):
        with raises(VersionConflict, f"version 2 expected to be {wrong}"):
            await case.cp.append(thread, [], expected_version=wrong, extra={"a": 3})

    messages, extra = await _loaded(case, thread)
    assert messages == [{"n": 1}, {"n": 2}]
    assert extra == {"a": 2}


@clause("append.extra-creates-thread")
async def extra_creates_thread(case: Case) -> None:
    """An append of extra alone creates a missing thread, at version 0."""
    for expected in (None, 0):
        thread = case.id()
        version = await case.cp.append(
            thread, [], expected_version=expected, extra={"a": 1}
        )
        messages, extra = await _loaded(case, thread)
        assert version == 0
        assert messages == []
        assert extra == {"a": 1}


@clause("append.empty-extra-changes-nothing")
async def empty_extra_changes_nothing(case: Case) -> None:
    """An append of no messages and empty extra changes nothing."""
    thread = case.id()
    version = await case.cp.append(thread, [], extra={})
    assert version == 0
    assert await case.cp.load(thread) is None

    await case.cp.append(thread, [{"n": 1}], extra={"a": 1})
    before = await case.cp.load(thread)
    version = await case.cp.append(thread, [], extra={})
    after = await case.cp.load(thread)
    assert version == 1
    assert after == before

    with raises(VersionConflict, "version 1 expected to be 0"):
        await case.cp.append(thread, [], expected_version=0, extra={})


@clause("append.extra-is-checked-first")
async def extra_is_checked_first(case: Case) -> None:
    """Extra that JSON cannot hold raises SerializationError; no message is written."""
    thread = case.id()
    wrong: dict[str, Any] = {
        "an object": object(),
        "NaN": float("nan"),
        "bytes": b"x",
    }

    for name, value in wrong.items():
        with raises(SerializationError, name) as caught:
            await case.cp.append(thread, [{"n": 1}], extra={"a": 1, "b": [value]})

        assert caught.error.path == ("b", 0), name

    with raises(SerializationError, "a wrong message beside extra"):
        await case.cp.append(thread, [{"n": object()}], extra={"a": 1})

    assert await case.cp.load(thread) is None


@clause("append.extra-is-a-mapping")
async def extra_is_a_mapping(case: Case) -> None:
    """An extra that is not a mapping is a TypeError; no message is written."""
    thread = case.id()
    wrong: list[Any] = [[("a", 1)], "a", 1, False]

    for value in wrong:
        with raises(TypeError, repr(value)):
            await case.cp.append(thread, [{"n": 1}], extra=value)

    assert await case.cp.load(thread) is None
