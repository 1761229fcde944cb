"""The cost of a session, in calls to the store and in reads of fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cpkit import CheckpointData, MemoryCheckpointer
from cpkit.sessions import SessionLog
from tests.sessions.spy import RangeSpy, Spy
from tests.sessions.talk import texts, user

COUNT = 10_000


class Counted(dict[str, Any]):
    """An entry that counts the reads of its fields."""

    looks = 0

    def __getitem__(self, key: str) -> Any:
        Counted.looks += 1
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        Counted.looks += 1
        return super().get(key, default)


class CountingSpy(RangeSpy):
    """A spy that returns counting entries."""

    async def load_range(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> CheckpointData[Any] | None:
        data = await super().load_range(thread_id, start, stop)
        return data and replace(data, messages=[*map(Counted, data.messages)])


@pytest.fixture
def looks() -> type[Counted]:
    """The counter, reset to zero."""
    Counted.looks = 0
    return Counted


async def fill(store: MemoryCheckpointer[Any], session_id: str, count: int) -> None:
    header = {"type": "session", "id": session_id, "version": 3}
    entries = [
        {
            "type": "message",
            "id": f"{n:08x}",
            "parentId": f"{n - 1:08x}" if n else None,
            "message": user(str(n)),
        }
        for n in range(count)
    ]
    await store.append(session_id, [header, *entries])


async def test_opening_is_one_read_and_one_pass(
    session_id: str, looks: type[Counted]
) -> None:
    """The fields of 10,000 entries are read fewer than 8 times each."""
    async with MemoryCheckpointer[Any]() as store:
        await fill(store, session_id, COUNT)
        spy = CountingSpy(store)
        await SessionLog.open(spy, session_id)
        assert spy.calls == [("load_range", 0, None)]
        # Type three times or four, message, id and parent once each. The parser makes
        # about twenty objects for each entry, so this is less than half of a load.
        assert looks.looks < 8 * COUNT


async def test_a_context_reads_only_its_branch(
    session_id: str, looks: type[Counted]
) -> None:
    """A branch of ten entries costs ten entries in a log of 10,000."""
    async with MemoryCheckpointer[Any]() as store:
        await fill(store, session_id, COUNT)
        spy = CountingSpy(store)
        log = await SessionLog.open(spy, session_id)
        tenth = log.entries[9]["id"]
        looks.looks = 0
        assert len(log.context(tenth).messages) == 10
        assert looks.looks < 20 * 10
        assert len(spy.calls) == 1


async def test_appending_an_entry_is_one_call(session_id: str) -> None:
    """The call appends one entry at the known version and reads nothing."""
    async with MemoryCheckpointer[Any]() as store:
        await fill(store, session_id, 100)
        spy = RangeSpy(store)
        log = await SessionLog.open(spy, session_id)
        spy.calls.clear()
        await log.append_message(user("one"))
        await log.move_to(log.entries[0]["id"])
        assert spy.calls == [("append", 1, 101), ("append", 1, 102)]


async def test_refresh_reads_only_new_entries(session_id: str) -> None:
    """It also reads the last known line, to detect a deleted thread."""
    async with MemoryCheckpointer[Any]() as store:
        await fill(store, session_id, 100)
        spy = RangeSpy(store)
        log = await SessionLog.open(spy, session_id)
        other = await SessionLog.open(store, session_id)
        await other.append_message(user("new"))
        spy.calls.clear()
        (entry,) = await log.refresh()
        assert spy.calls == [("read", 100, None)]
        assert entry == other.entries[-1]


async def test_six_methods_are_enough(session_id: str) -> None:
    """A store that cannot read ranges is loaded."""
    async with MemoryCheckpointer[Any]() as store:
        await fill(store, session_id, 3)
        spy = Spy(store)
        log = await SessionLog.open(spy, session_id)
        await log.append_message(user("3"))
        other = await SessionLog.open(spy, session_id)
        await log.append_message(user("4"))
        assert len(await other.refresh()) == 1
        assert texts(other.context().messages) == ["0", "1", "2", "3", "4"]
        assert {call[0] for call in spy.calls} == {"load", "append"}
