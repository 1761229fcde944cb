"""What a session costs, counted in what is asked of the store and looked at."""

from __future__ import annotations

from typing import Any

import pytest

from cpkit import MemoryCheckpointer
from cpkit.sessions import SessionLog
from tests.sessions.spy import RangeSpy, Spy
from tests.sessions.talk import texts, user

COUNT = 10_000


class Counted(dict[str, Any]):
    """An entry that counts how often its fields are looked at."""

    looks = 0

    def __getitem__(self, key: str) -> Any:
        Counted.looks += 1
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        Counted.looks += 1
        return super().get(key, default)


class CountingSpy(RangeSpy):
    """One that returns entries which count."""

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[Any]:
        return [Counted(line) for line in await super().read(thread_id, start, stop)]


@pytest.fixture
def looks() -> type[Counted]:
    """The count, from zero on."""
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
    """Each of 10,000 entries is looked at a handful of times, and copied never."""
    async with MemoryCheckpointer[Any]() as store:
        await fill(store, session_id, COUNT)
        spy = CountingSpy(store)
        await SessionLog.open(spy, session_id)
        assert spy.calls == [("read", 0, None)]
        # Type (thrice), message, id, parent; the parser made some twenty objects of
        # each, so this is well below the half of a load that it may cost.
        assert looks.looks < 8 * COUNT


async def test_a_context_touches_the_branch_alone(
    session_id: str, looks: type[Counted]
) -> None:
    """Ten entries deep costs ten entries, whatever else the log holds."""
    async with MemoryCheckpointer[Any]() as store:
        await fill(store, session_id, COUNT)
        spy = CountingSpy(store)
        log = await SessionLog.open(spy, session_id)
        tenth = log.entries[9]["id"]
        looks.looks = 0
        assert len(log.context(tenth).messages) == 10
        assert looks.looks < 20 * 10
        assert len(spy.calls) == 1


async def test_an_append_is_one_append(session_id: str) -> None:
    """Of one entry, at the version that is known, and nothing is read."""
    async with MemoryCheckpointer[Any]() as store:
        await fill(store, session_id, 100)
        spy = RangeSpy(store)
        log = await SessionLog.open(spy, session_id)
        spy.calls.clear()
        await log.append_message(user("one"))
        await log.move_to(log.entries[0]["id"])
        assert spy.calls == [("append", 1, 101), ("append", 1, 102)]


async def test_refresh_reads_what_is_new(session_id: str) -> None:
    """And the last line that is known, to see that it is still there."""
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
    """A store without ranges is loaded."""
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
