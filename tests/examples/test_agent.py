"""The example agent, at the moments that a kill rarely hits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from cpkit import (
    KeepsReceipts,
    MemoryCheckpointer,
    ToolCall,
    VersionConflict,
)

FILE = Path(__file__).parents[2] / "examples" / "agent.py"
THREAD = "a-customer"
KEY = f"{THREAD}:1:0"

Message = dict[str, Any]
Store = MemoryCheckpointer[Message]


def asks(*tools: str) -> Message:
    """Return a reply with tool calls that all have the same id, as models do."""
    calls = [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": tool, "arguments": '{"seat": "11C"}'},
        }
        for tool in tools
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def answer(tool: str, content: str = "done") -> Message:
    return {"role": "tool", "tool_call_id": "call_1", "name": tool, "content": content}


PLEASE: Message = {"role": "user", "content": "Book 11C, please"}
BOOKED: Message = {"role": "assistant", "content": "You have 11C."}


class Airline:
    """A world with a fixed script, which records the tools that were used."""

    def __init__(self, *replies: Message) -> None:
        self.script = [PLEASE, *replies]
        self.books: dict[str, str] = {}
        self.used: list[str] = []
        self.meanwhile: Callable[[], Awaitable[object]] | None = None

    async def think(self, messages: list[Message]) -> tuple[Message, float] | None:
        reply = await self.listen(messages)
        return (reply, 0.25) if reply else None

    async def listen(self, messages: list[Message]) -> Message | None:
        return self.script[len(messages)] if len(messages) < len(self.script) else None

    def is_read_only(self, tool: str) -> bool:
        return tool == "look"

    async def use(self, tool: str, args: Message, key: str) -> str:
        assert args == {"seat": "11C"}
        self.used.append(key)
        self.books[key] = "done"

        if self.meanwhile is not None:
            await self.meanwhile()

        return "done"

    async def look_up(self, key: str) -> str | None:
        return self.books.get(key)


@pytest.fixture
async def cp() -> AsyncIterator[Store]:
    async with MemoryCheckpointer[Message]() as store:
        yield store


@pytest.fixture(scope="module")
def agent() -> Any:
    spec = spec_from_file_location("example_agent", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def statuses(cp: KeepsReceipts) -> list[tuple[str, int]]:
    return [(call.status, call.attempt) for call in await cp.list_calls(THREAD)]


async def messages(cp: Store) -> list[Message]:
    data = await cp.load(THREAD)
    assert data is not None
    assert not data.pending
    return data.messages


async def test_whole_conversation_is_kept(agent: Any, cp: Store) -> None:
    """The store has messages, plan and spend, and the call that changes something."""
    airline = Airline(asks("look"), answer("look"), asks("book"), answer("book"))
    airline.script.append(BOOKED)

    await agent.Agent(cp, THREAD, airline).run()

    data = await cp.load(THREAD)
    assert data is not None
    assert data.messages == airline.script
    assert data.extra == {"plan": [], "replies": 3, "spent_usd": 0.75}
    assert await statuses(cp) == [("completed", 1)]
    assert airline.used == [KEY, f"{THREAD}:3:0"]


async def test_finished_conversation_is_left_alone(agent: Any, cp: Store) -> None:
    """A second run repeats nothing."""
    airline = Airline(asks("book"), answer("book"), BOOKED)
    await agent.Agent(cp, THREAD, airline).run()

    await agent.Agent(cp, THREAD, airline).run()

    assert await messages(cp) == airline.script
    assert airline.used == [KEY]


async def test_effect_that_happened_is_recorded_and_not_repeated(
    agent: Any, cp: Store
) -> None:
    """The call is pending, and in the airline's books: killed after its effect."""
    airline = Airline(asks("book"), answer("book", "11C is yours"), BOOKED)
    airline.books[KEY] = "11C is yours"
    await cp.append(THREAD, airline.script[:2])
    await cp.record_issued(THREAD, ToolCall("x", "book", {"seat": "11C"}, KEY))

    await agent.Agent(cp, THREAD, airline).run()

    assert await messages(cp) == airline.script
    assert airline.used == []
    assert await statuses(cp) == [("completed", 1)]


async def test_effect_that_never_happened_is_made_under_its_key(
    agent: Any, cp: Store
) -> None:
    """The call is pending, and not in the books: killed before its effect."""
    airline = Airline(asks("book"), answer("book"), BOOKED)
    await cp.append(THREAD, airline.script[:2])
    await cp.record_issued(THREAD, ToolCall("x", "book", {"seat": "11C"}, KEY))

    await agent.Agent(cp, THREAD, airline).run()

    assert await messages(cp) == airline.script
    assert airline.used == [KEY]
    assert await statuses(cp) == [("failed", 1), ("completed", 2)]


async def test_claim_that_appears_after_the_load_is_resolved(
    agent: Any, cp: Store
) -> None:
    """A dead runner's claim can reach the store late, and is unclear too."""
    airline = Airline(asks("book"), answer("book"), BOOKED)
    listen = airline.listen

    async def late(messages: list[Message]) -> Message | None:
        if len(messages) == 1:
            await cp.record_issued(THREAD, ToolCall("x", "book", {"seat": "11C"}, KEY))
            airline.books[KEY] = "done"

        return await listen(messages)

    airline.listen = late  # type: ignore[method-assign]  # one step of the script

    await agent.Agent(cp, THREAD, airline).run()

    assert await messages(cp) == airline.script
    assert airline.used == []


async def test_recorded_result_is_replayed(agent: Any, cp: Store) -> None:
    """The call is completed, and its message missing: killed between the two."""
    airline = Airline(asks("book"), answer("book", "11C is yours"), BOOKED)
    await cp.append(THREAD, airline.script[:2])
    await cp.record_issued(THREAD, ToolCall("x", "book", {"seat": "11C"}, KEY))
    await cp.record_result(THREAD, "x", "11C is yours")

    await agent.Agent(cp, THREAD, airline).run()

    assert await messages(cp) == airline.script
    assert airline.used == []


async def test_second_call_of_a_message_runs_after_the_first(
    agent: Any, cp: Store
) -> None:
    """Two equal calls with one id are two calls; an answered one is not repeated."""
    airline = Airline(asks("book", "book"), answer("book"), answer("book"), BOOKED)
    await cp.append(THREAD, airline.script[:3])

    await agent.Agent(cp, THREAD, airline).run()

    assert await messages(cp) == airline.script
    assert airline.used == [f"{THREAD}:1:1"]


async def test_superseded_runner_stops(agent: Any, cp: Store) -> None:
    """A runner whose claim was released by another process does not claim it again."""
    airline = Airline(asks("book"), answer("book"))

    async def release() -> None:
        data = await cp.load(THREAD)
        assert data is not None
        await cp.record_result(
            THREAD, data.pending[0].call.call_id, None, success=False
        )

    airline.meanwhile = release

    with pytest.raises(RuntimeError, match="another runner took over"):
        await agent.Agent(cp, THREAD, airline).run()

    assert airline.used == [KEY]
    assert await messages(cp) == airline.script[:2]


async def test_other_writer_shows_as_conflict(agent: Any, cp: Store) -> None:
    """The messages of two runners of a thread never mix."""
    airline = Airline(asks("look"), answer("look"), BOOKED)
    other = {"role": "user", "content": "Hello?"}

    async def interfere() -> None:
        await cp.append(THREAD, [other])

    airline.meanwhile = interfere

    with pytest.raises(VersionConflict):
        await agent.Agent(cp, THREAD, airline).run()

    assert await messages(cp) == [*airline.script[:2], other]


async def test_late_write_of_a_killed_worker_costs_nothing(
    cp: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo's worker continues after a write that its predecessor had in flight."""
    monkeypatch.syspath_prepend(FILE.parent)
    converse = import_module("demo.worker").converse
    airline = Airline(asks("look"), answer("look"), BOOKED)

    async def land() -> None:
        await cp.append(THREAD, [answer("look")], expected_version=2)

    airline.meanwhile = land

    await converse(cp, THREAD, airline)

    assert await messages(cp) == airline.script
    assert airline.used == [KEY]
