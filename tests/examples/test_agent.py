"""The agent that people copy, brought to the moments that are hard to hit by a kill."""

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
    open_checkpointer,
)

FILE = Path(__file__).parents[2] / "examples" / "agent.py"
THREAD = "a-customer"
KEY = f"{THREAD}:1:0"

Message = dict[str, Any]
Store = MemoryCheckpointer[Message]


def asks(*tools: str) -> Message:
    """A reply that calls tools, all by the same id, as models do."""
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
    """A world of a fixed script, which counts what was done in it."""

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
    async with open_checkpointer("memory://") as store:
        assert isinstance(store, MemoryCheckpointer)
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
    """Messages, plan and spend are stored, and a call that changes something."""
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
    """Nothing that is stored is done again."""
    airline = Airline(asks("book"), answer("book"), BOOKED)
    await agent.Agent(cp, THREAD, airline).run()

    await agent.Agent(cp, THREAD, airline).run()

    assert await messages(cp) == airline.script
    assert airline.used == [KEY]


async def test_effect_that_happened_is_recorded_and_not_repeated(
    agent: Any, cp: Store
) -> None:
    """A call found pending, in the other side's books: killed behind its effect."""
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
    """A call found pending, in nobody's books: killed before its effect."""
    airline = Airline(asks("book"), answer("book"), BOOKED)
    await cp.append(THREAD, airline.script[:2])
    await cp.record_issued(THREAD, ToolCall("x", "book", {"seat": "11C"}, KEY))

    await agent.Agent(cp, THREAD, airline).run()

    assert await messages(cp) == airline.script
    assert airline.used == [KEY]
    assert await statuses(cp) == [("failed", 1), ("completed", 2)]


async def test_claim_that_landed_late_is_settled(agent: Any, cp: Store) -> None:
    """A dead runner's claim that shows only after the load is no less unclear."""
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
    """A completed call without its message: killed between the two."""
    airline = Airline(asks("book"), answer("book", "11C is yours"), BOOKED)
    await cp.append(THREAD, airline.script[:2])
    await cp.record_issued(THREAD, ToolCall("x", "book", {"seat": "11C"}, KEY))
    await cp.record_result(THREAD, "x", "11C is yours")

    await agent.Agent(cp, THREAD, airline).run()

    assert await messages(cp) == airline.script
    assert airline.used == []


async def test_second_call_of_a_message_goes_on_behind_the_first(
    agent: Any, cp: Store
) -> None:
    """Two equal calls in one message, by one id, are two; one answered stays so."""
    airline = Airline(asks("book", "book"), answer("book"), answer("book"), BOOKED)
    await cp.append(THREAD, airline.script[:3])

    await agent.Agent(cp, THREAD, airline).run()

    assert await messages(cp) == airline.script
    assert airline.used == [f"{THREAD}:1:1"]


async def test_superseded_runner_stops(agent: Any, cp: Store) -> None:
    """One whose call was released by another does not claim it once more."""
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
    """Two runners of a thread never mix their messages."""
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
    """The demo's worker goes on behind what its predecessor had sent to the server."""
    monkeypatch.syspath_prepend(FILE.parent)
    converse = import_module("demo.worker").converse
    airline = Airline(asks("look"), answer("look"), BOOKED)

    async def land() -> None:
        await cp.append(THREAD, [answer("look")], expected_version=2)

    airline.meanwhile = land

    await converse(cp, THREAD, airline)

    assert await messages(cp) == airline.script
    assert airline.used == [KEY]
