"""Sessions of frameworks are cut by a policy that names them, and read on."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

from agents.memory import SQLiteSession
from claude_agent_sdk import get_session_messages_from_store, project_key_for_directory
from google.adk.events import Event, EventActions
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types

from cpkit import MemoryCheckpointer, open_checkpointer
from cpkit.integrations import claude_agent_sdk, google_adk, openai_agents
from cpkit.retention import Retention, prune

LAST = 5


async def cut(cp: Any, thread_id: str) -> int:
    """Apply a policy to a thread, and return where it begins then."""
    assert not (await prune(cp, Retention(keep_last=LAST))).cut_threads
    policy = Retention(prefix=thread_id, keep_last=LAST)
    assert (await prune(cp, policy)).cut_threads == 1
    return (await cp.load(thread_id)).first  # type: ignore[no-any-return]


def openai_turn(n: int) -> list[Any]:
    name = f"call_{n}"
    return [
        {"role": "user", "content": f"question {n}"},
        {"type": "function_call", "call_id": name, "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": name, "output": "found"},
        {"role": "assistant", "content": f"answer {n}"},
    ]


async def test_an_openai_session_is_cut(any_url: str) -> None:
    """It has the newest items, and goes on as the SDK's own session does."""
    with closing(SQLiteSession("s")) as expected:
        async with open_checkpointer(any_url) as cp:
            await _openai_session_is_cut(cp, expected)


async def _openai_session_is_cut(cp: Any, expected: SQLiteSession) -> None:
    session = openai_agents.Session("s", cp)

    for n in range(5):
        await session.add_items(openai_turn(n))

    thread_id = openai_agents.session_thread("s")
    assert await cut(cp, thread_id) == 12
    await expected.add_items([*openai_turn(3), *openai_turn(4)])
    opened = openai_agents.Session("s", cp)
    assert await opened.get_items() == await expected.get_items()
    assert await opened.pop_item() == await expected.pop_item()

    for one in (opened, expected):
        await one.add_items(openai_turn(5))

    assert await opened.get_items() == await expected.get_items()
    assert await openai_agents.Session("s", cp).get_items(2) == openai_turn(5)[-2:]


async def test_a_removal_of_what_was_cut_is_passed_over() -> None:
    """The item was added before the cut, and removed after it."""
    async with MemoryCheckpointer[Any]() as cp:
        session = openai_agents.Session("s", cp)
        await session.add_items([*openai_turn(0), *openai_turn(1)[:1]])

        for _ in range(3):
            await session.pop_item()

        await session.add_items([*openai_turn(2), *openai_turn(3)])
        left = await session.get_items()
        await cp.trim(openai_agents.session_thread("s"), 4)
        opened = openai_agents.Session("s", cp)
        assert await opened.get_items() == left[2:]
        assert await cut(cp, openai_agents.session_thread("s")) == 8
        assert await openai_agents.Session("s", cp).get_items() == left[2:]


async def test_an_open_openai_session_goes_on_after_a_cut_elsewhere() -> None:
    """Another process removed items, and what says so was cut before it was read."""
    async with MemoryCheckpointer[Any]() as cp:
        opened, other = (openai_agents.Session("s", cp) for _ in range(2))
        thread_id = openai_agents.session_thread("s")
        await opened.add_items(openai_turn(0))
        await other.clear_session()
        await other.add_items(openai_turn(1))
        await cp.trim(thread_id, 6)
        assert await opened.get_items() == openai_turn(1)[1:]
        await other.add_items(openai_turn(2)[:2])
        await cp.trim(thread_id, 10)

        for _ in range(3):  # the last two of turn 2, and one that was cut
            await other.pop_item()

        assert await opened.get_items() == []
        await opened.add_items(openai_turn(3))
        assert await openai_agents.Session("s", cp).get_items() == openai_turn(3)


async def test_an_open_adk_session_goes_on_after_a_cut_elsewhere() -> None:
    """Its version is the thread's still; an event that comes again is known."""
    ids: Any = {"app_name": "app", "user_id": "u", "session_id": "s"}

    async with MemoryCheckpointer[Any]() as cp:
        service = google_adk.SessionService(cp)
        session = await service.create_session(**ids)

        for n in range(4):
            await service.append_event(session, adk_event(n, "user", k=n))

        await cp.trim(google_adk.session_thread("app", "u", "s"), 5)

        for n in (3, 4):
            await service.append_event(session, adk_event(n, "user", k=n))

        opened = await google_adk.SessionService(cp).get_session(**ids)
        assert opened is not None
        assert [event.id for event in opened.events] == ["4 user"]
        assert opened.state == {"k": 4}


def adk_event(n: int, role: str, *parts: Any, **state: Any) -> Event:
    return Event(
        id=f"{n} {role}",
        author=role,
        timestamp=float(n),
        content=types.Content(role=role, parts=[*parts]),
        actions=EventActions(state_delta=state),
    )


async def test_an_adk_session_is_cut(any_url: str) -> None:
    """It has the newest events and the whole state, and goes on."""
    ids = {"app_name": "app", "user_id": "u", "session_id": "s"}
    call = types.Part.from_function_call(name="look", args={})
    found = types.Part.from_function_response(name="look", response={"n": 1})

    async with open_checkpointer(any_url) as cp:
        service = google_adk.SessionService(cp)
        session = await service.create_session(**ids, state={"from": "start"})

        for n in range(5):
            turn = [
                adk_event(n, "user", types.Part(text=f"question {n}"), **{f"k{n}": n}),
                adk_event(n, "model", call),
                adk_event(n, "user", found).model_copy(update={"id": f"{n} tool"}),
                adk_event(n, "model", types.Part(text="answer")).model_copy(
                    update={"id": f"{n} answer"}
                ),
            ]

            for event in turn:
                await service.append_event(session, event)

        thread_id = google_adk.session_thread("app", "u", "s")
        assert await cut(cp, thread_id) == 13
        names = [f"{n} {word}" for n in (3, 4) for word in _WORDS]

        for config in (None, GetSessionConfig(after_timestamp=1.0)):
            opened = await google_adk.SessionService(cp).get_session(
                **ids, config=config
            )
            assert opened is not None
            assert [event.id for event in opened.events] == names
            assert opened.state == {"from": "start", **{f"k{n}": n for n in range(5)}}

        again = adk_event(5, "user", types.Part(text="question 5"))
        await service.append_event(opened, again)
        await service.append_event(opened, again)  # delivered twice
        opened = await service.get_session(**ids)
        assert opened is not None
        assert [event.id for event in opened.events] == [*names, "5 user"]
        await cp.trim(thread_id, 99)
        opened = await service.get_session(**ids)
        assert opened is not None
        assert opened.events == []
        await service.append_event(opened, adk_event(6, "user", types.Part(text="?")))


_WORDS = ("user", "model", "tool", "answer")


def claude_turn(n: int) -> list[Any]:
    contents: list[tuple[str, Any]] = [
        ("user", f"question {n}"),
        ("assistant", [{"type": "tool_use", "id": f"t{n}", "name": "look"}]),
        ("user", [{"type": "tool_result", "tool_use_id": f"t{n}", "content": "x"}]),
        ("assistant", [{"type": "text", "text": f"answer {n}"}]),
    ]
    return [
        {
            "type": role,
            "uuid": _uuid(4 * n + i),
            "parentUuid": _uuid(4 * n + i - 1) if n + i else None,
            "sessionId": _uuid(999),
            "timestamp": f"2026-01-01T00:00:{4 * n + i:02}Z",
            "message": {"role": role, "content": content},
        }
        for i, (role, content) in enumerate(contents)
    ]


def _uuid(n: int) -> str:
    return f"00000000-0000-4000-8000-{n:012}"


async def test_a_claude_transcript_is_cut(any_url: str) -> None:
    """The SDK reads the newest messages, its summary stays, and it goes on."""
    key: Any = {"project_key": project_key_for_directory("/"), "session_id": _uuid(999)}

    async with open_checkpointer(any_url) as cp:
        store = claude_agent_sdk.ClaudeSessionStore(cp)

        for n in range(5):
            await store.append(key, claude_turn(n))

        before = await store.list_session_summaries(key["project_key"])
        thread_id = claude_agent_sdk.transcript_thread(key)
        assert await cut(cp, thread_id) == 12
        opened = claude_agent_sdk.ClaudeSessionStore(cp)
        assert await opened.load(key) == [*claude_turn(3), *claude_turn(4)]
        after = await opened.list_session_summaries(key["project_key"])
        assert [one["data"] for one in after] == [one["data"] for one in before]

        for one in (opened, store):  # the second has the transcript in memory
            await one.append(key, claude_turn(5))

        messages = await get_session_messages_from_store(
            opened, key["session_id"], directory="/"
        )
        read = [one.uuid for one in messages]
        assert read == [_uuid(n) for n in range(12, 24)]


async def test_old_messages_of_sessions_go_by_their_own_time() -> None:
    """Each event of the ADK and each entry of the Claude Agent SDK says when it was."""
    now, day = datetime.now(UTC), timedelta(days=1)
    ids: Any = {"app_name": "app", "user_id": "u", "session_id": "s"}
    key: Any = {"project_key": "p", "session_id": _uuid(999)}

    async with MemoryCheckpointer[Any]() as cp:
        service = google_adk.SessionService(cp)
        session = await service.create_session(**ids)
        store = claude_agent_sdk.ClaudeSessionStore(cp)

        for n, time in enumerate([now - 40 * day, now - 35 * day, now - day]):
            event = adk_event(n, "user", types.Part(text="?"))
            event.timestamp = time.timestamp()
            await service.append_event(session, event)
            turn = [{**one, "timestamp": time.isoformat()} for one in claude_turn(n)]
            await store.append(key, turn)

        policy = Retention(prefix="cpkit:", messages_older_than=30 * day)
        assert (await prune(cp, policy)).cut_threads == 2
        assert [one["uuid"] for one in await store.load(key) or []] == [
            one["uuid"] for one in claude_turn(2)
        ]
        opened = await google_adk.SessionService(cp).get_session(**ids)
        assert opened is not None
        assert [event.id for event in opened.events] == ["2 user"]


async def test_an_import_brings_nothing_back_that_was_cut(any_url: str) -> None:
    """A new process delivers the whole transcript again, as the SDK's import does."""
    key: Any = {"project_key": "p", "session_id": _uuid(999)}

    async with open_checkpointer(any_url) as cp:
        for n in range(5):
            await claude_agent_sdk.ClaudeSessionStore(cp).append(key, claude_turn(n))

        assert await cut(cp, claude_agent_sdk.transcript_thread(key)) == 12
        opened = claude_agent_sdk.ClaudeSessionStore(cp)

        for n in range(6):
            await opened.append(key, claude_turn(n))

        left = [one for n in (3, 4, 5) for one in claude_turn(n)]
        assert await opened.load(key) == left
        without_time: Any = [{"type": "user", "uuid": _uuid(1)}]
        await claude_agent_sdk.ClaudeSessionStore(cp).append(key, without_time)
        assert await opened.load(key) == [*left, *without_time]


async def test_a_clock_that_steps_back_loses_no_entry() -> None:
    """New entries follow what is left, and are older than it by their times."""
    key: Any = {"project_key": "p", "session_id": _uuid(999)}

    async with MemoryCheckpointer[Any]() as cp:
        for n in range(5):
            await claude_agent_sdk.ClaudeSessionStore(cp).append(key, claude_turn(n))

        await cut(cp, claude_agent_sdk.transcript_thread(key))
        late = [{**one, "timestamp": "2025-12-31T00:00:00Z"} for one in claude_turn(5)]
        opened = claude_agent_sdk.ClaudeSessionStore(cp)
        await opened.append(key, late)
        left = [one for n in (3, 4) for one in claude_turn(n)]
        assert await opened.load(key) == [*left, *late]


async def test_a_transcript_of_which_nothing_is_left_takes_all() -> None:
    """Without an entry that stayed there is no time to compare with."""
    key: Any = {"project_key": "p", "session_id": _uuid(999)}

    async with MemoryCheckpointer[Any]() as cp:
        await claude_agent_sdk.ClaudeSessionStore(cp).append(key, claude_turn(1))
        await cp.trim(claude_agent_sdk.transcript_thread(key), 4)
        opened = claude_agent_sdk.ClaudeSessionStore(cp)
        await opened.append(key, claude_turn(0))
        assert await opened.load(key) == claude_turn(0)
