"""Several writers of one session, and answers of the store that get lost."""

from __future__ import annotations

from typing import Any

import pytest

from cpkit import (
    BackendUnavailable,
    CorruptThread,
    MemoryCheckpointer,
    VersionConflict,
    open_checkpointer,
)
from cpkit.sessions import SessionLog
from tests.sessions.conftest import Store
from tests.sessions.spy import RangeSpy, Spy
from tests.sessions.talk import texts, user

# Two writers


async def test_one_of_two_writers_gets_a_conflict_and_can_retry(
    url: str, session_id: str
) -> None:
    """It writes nothing, refreshes, and follows the other writer."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        mine = await SessionLog.open(one, session_id)
        await mine.append_message(user("one"))
        theirs = await SessionLog.open(two, session_id)
        await theirs.append_message(user("two"))
        before = theirs.entries

        with pytest.raises(VersionConflict):
            await mine.append_message(user("three"))

        assert (await SessionLog.open(one, session_id)).entries == before
        assert await mine.refresh() == before[1:]
        await mine.append_message(user("three"))
        assert texts(mine.context().messages) == ["one", "two", "three"]
        assert await theirs.refresh() == mine.entries[2:]
        assert await theirs.refresh() == []


async def test_two_writers_can_start_one_session(cp: Store, session_id: str) -> None:
    """One writes the header; the other refreshes and uses it."""
    one = await SessionLog.open(cp, session_id, cwd="/one")
    two = await SessionLog.open(cp, session_id, cwd="/two")
    await one.append_message(user("one"))

    with pytest.raises(VersionConflict):
        await two.append_message(user("two"))

    await two.refresh()
    assert two.header == one.header
    await two.append_message(user("two"))
    assert texts(two.context().messages) == ["one", "two"]


async def test_a_deleted_session_is_detected(
    session_id: str,
) -> None:
    """A log does not continue with a thread that was deleted."""
    async with MemoryCheckpointer[Any]() as cp:
        log = await SessionLog.open(cp, session_id)
        await log.append_message(user("one"))
        await cp.delete_thread(session_id)

        with pytest.raises(CorruptThread, match="deleted or replaced"):
            await log.refresh()

        with pytest.raises(VersionConflict):
            await log.append_message(user("two"))


async def test_a_replaced_session_of_the_same_length_is_detected(
    session_id: str,
) -> None:
    """It took an append of the log that knew the deleted one."""
    async with MemoryCheckpointer[Any]() as cp:
        log = await SessionLog.open(cp, session_id)
        await log.append_message(user("one"))
        await log.append_message(user("two"))
        await cp.delete_thread(session_id)
        other = await SessionLog.open(cp, session_id)
        await other.append_message(user("other one"))
        await other.append_message(user("other two"))
        await log.append_message(user("three"))

        with pytest.raises(CorruptThread, match="deleted or replaced"):
            await log.refresh()


# Lost answers


@pytest.mark.parametrize("kind", [Spy, RangeSpy])
@pytest.mark.parametrize(
    "faults",
    [
        ["lost before"],
        ["lost after"],
        ["lost before", "lost after"],
        ["lost after", "lost before"],
        ["lost after", "refused"],
    ],
)
async def test_a_lost_answer_does_not_duplicate_an_entry(
    session_id: str, kind: type[Spy], faults: list[Any]
) -> None:
    """The entry is stored once, whether or not the first try was applied."""
    async with MemoryCheckpointer[Any]() as store:
        spy = kind(store)
        log = await SessionLog.open(spy, session_id)

        for text in "one", "two":
            spy.faults.extend(faults)
            await log.append_message(user(text))

        assert texts(log.context().messages) == ["one", "two"]
        assert (await SessionLog.open(store, session_id)).entries == log.entries


async def test_an_equal_entry_of_another_writer_is_a_conflict(session_id: str) -> None:
    """After a lost answer, another writer may have taken the version."""
    async with MemoryCheckpointer[Any]() as store:
        spy = RangeSpy(store)
        log = await SessionLog.open(spy, session_id)
        await log.append_message(user("one"))
        other = await SessionLog.open(store, session_id)
        await other.append_message(user("two"))
        spy.faults.append("lost before")

        with pytest.raises(VersionConflict):
            await log.append_message(user("two"))

        await log.refresh()
        assert log.entries == other.entries


@pytest.mark.parametrize("landed", [True, False])
async def test_an_append_without_any_answer_may_be_applied(
    session_id: str, landed: bool
) -> None:
    """The error says so, and refresh shows the truth."""
    async with MemoryCheckpointer[Any]() as store:
        spy = RangeSpy(store)
        log = await SessionLog.open(spy, session_id)
        await log.append_message(user("one"))
        spy.faults.extend(["lost after" if landed else "lost before", "refused"])
        spy.faults.append("refused")

        with pytest.raises(BackendUnavailable) as caught:
            await log.append_message(user("two"))

        assert caught.value.maybe_applied
        assert texts(await _messages(log)) == (["one", "two"] if landed else ["one"])


async def test_a_refused_append_is_not_retried(session_id: str) -> None:
    """The caller may repeat an append that was certainly not applied."""
    async with MemoryCheckpointer[Any]() as store:
        spy = RangeSpy(store)
        log = await SessionLog.open(spy, session_id)
        spy.faults.append("refused")

        with pytest.raises(BackendUnavailable) as caught:
            await log.append_message(user("one"))

        assert not caught.value.maybe_applied
        assert [call[0] for call in spy.calls] == ["load_range", "append"]
        await log.append_message(user("one"))
        assert log.version == 2


async def test_a_conflict_without_a_check_may_be_applied(session_id: str) -> None:
    """The conflict alone does not show which writer has the version."""
    async with MemoryCheckpointer[Any]() as store:
        spy = RangeSpy(store)
        log = await SessionLog.open(spy, session_id)
        spy.faults.append("lost after")
        spy.read_faults.extend(["refused", "refused"])

        with pytest.raises(BackendUnavailable) as caught:
            await log.append_message(user("one"))

        assert caught.value.maybe_applied
        assert texts(await _messages(log)) == ["one"]


async def _messages(log: SessionLog) -> list[Any]:
    await log.refresh()
    return log.context().messages
