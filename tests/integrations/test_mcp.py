"""The events of MCP's sessions, beside a store in memory, and with the SDK's client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp.server.lowlevel import Server
from mcp.server.streamable_http import EventMessage
from mcp.types import JSONRPCNotification, JSONRPCResponse

from cpkit import InvalidId, MemoryCheckpointer, open_checkpointer
from cpkit.integrations.mcp import EventStore, SessionManager, session_thread
from tests.integrations.losing import LosesAnAnswer


def notification(n: int) -> JSONRPCNotification:
    """Return a message of the server."""
    return JSONRPCNotification(jsonrpc="2.0", method="m", params={"n": n, "x": None})


async def replayed(store: Any, after: str) -> tuple[str | None, list[Any]]:
    """Return what a client gets that has seen everything up to this event."""
    got: list[EventMessage] = []

    async def send(event: EventMessage) -> None:
        got.append(event)

    return await store.replay_events_after(after, send), got


streams = st.sampled_from(["1", "2", "_GET_stream"])
stories = st.lists(st.tuples(streams, st.none() | st.integers(0, 3)), max_size=12)


@given(stories)
@settings(max_examples=20, deadline=None)
def test_a_replay_is_the_rest_of_the_stream(story: list[tuple[str, Any]]) -> None:
    """After each event: the later messages of its stream, in order, with their ids."""

    async def play() -> None:
        async with MemoryCheckpointer[Any]() as cp:
            store, events = EventStore(cp, "s"), []

            for stream, n in story:
                message = None if n is None else notification(n)
                number = await store.store_event(stream, message)
                events.append((stream, message, number))

            again = EventStore(cp, "s")  # as in another process

            for index, (stream, _, number) in enumerate(events):
                rest = [
                    EventMessage(message, later)
                    for other, message, later in events[index + 1 :]
                    if other == stream and message is not None
                ]
                assert await replayed(again, number) == (stream, rest)

            for unknown in ("0", str(len(events) + 1), "x", "-1", ""):
                assert await replayed(again, unknown) == (None, [])

    asyncio.run(play())


async def test_events_outlive_the_handle(url: str) -> None:
    """A second process continues them, and every field of a message comes back."""
    answer = JSONRPCResponse(jsonrpc="2.0", id=7, result={"é": [1, 2.5, None]})

    async with open_checkpointer(url) as cp:
        first = await EventStore(cp, "s").store_event("7", None)

    async with open_checkpointer(url) as cp:
        store = EventStore(cp, "s")
        second = await store.store_event("7", answer)
        await EventStore(cp, "other").store_event("7", notification(1))
        assert await replayed(store, first) == ("7", [EventMessage(answer, second)])
        await store.delete()
        assert await replayed(store, first) == (None, [])
        # A session that goes on begins its events again.
        assert await store.store_event("7", answer) == first


async def test_events_at_once_all_get_an_id(cp: MemoryCheckpointer[Any]) -> None:
    """Also of two stores for one session, as while a process hands it over."""
    stores = [EventStore(cp, "s"), EventStore(cp, "s")]
    numbers = await asyncio.gather(
        *(one.store_event("1", notification(n)) for n in range(5) for one in stores)
    )
    assert sorted(map(int, numbers)) == list(range(1, 11))


async def test_an_event_whose_answer_is_lost_is_stored_once(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The client would get it twice."""
    losing = LosesAnAnswer(cp)
    store = EventStore(losing, "s")
    first = await store.store_event("1", None)
    await store.store_event("1", notification(1))
    assert losing.is_lost
    _, got = await replayed(store, first)
    assert [one.message for one in got] == [notification(1)]


async def test_each_session_of_a_manager_has_its_own_events(
    cp: MemoryCheckpointer[Any],
) -> None:
    """One client must not get what was sent to another one."""
    manager = SessionManager(Server[Any]("s"), cp, json_response=False)
    one, other = manager.event_store, manager.event_store
    assert one is not None
    assert other is not None
    number = await one.store_event("_GET_stream", None)
    await other.store_event("_GET_stream", None)
    await other.store_event("_GET_stream", notification(1))
    assert await replayed(one, number) == ("_GET_stream", [])

    with pytest.raises(TypeError):
        SessionManager(Server[Any]("s"), cp, event_store=one)


async def test_a_session_id_that_is_too_long_is_refused(
    cp: MemoryCheckpointer[Any],
) -> None:
    """It would not fit into the id of a thread."""
    with pytest.raises(InvalidId):
        EventStore(cp, "s" * 600)

    assert session_thread("s") == "cpkit:mcp:s"
