"""The session service of Google's ADK, in every store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

import pytest
from google.adk.agents import BaseAgent
from google.adk.errors import StaleSessionError
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events import Event, EventActions
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit import (
    BackendUnavailable,
    InvalidId,
    MemoryCheckpointer,
    SerializationError,
    open_checkpointer,
)
from cpkit.integrations import google_adk
from cpkit.integrations.google_adk import SessionService, session_thread
from cpkit.sync import SyncCheckpointer
from tests.sessions.spy import RangeSpy, Spy

IDS: Any = {"app_name": "app", "user_id": "user", "session_id": "session"}
WHO: Any = {"app_name": "app", "user_id": "user"}


def event(text: str = "", *, author: str = "user", at: float = 0, **delta: Any) -> Any:
    return Event(
        author=author,
        invocation_id="invocation",
        timestamp=at or time.time(),
        content=types.Content(role="user", parts=[types.Part(text=text)]),
        actions=EventActions(state_delta=delta),
    )


def texts(session: Any) -> list[str]:
    return [one.content.parts[0].text for one in session.events]


async def test_it_behaves_as_the_adks_own_service(url: str) -> None:
    """The same calls give the same sessions, states of all kinds included."""
    async with open_checkpointer(url) as cp:
        answers = [
            await play(one) for one in (InMemorySessionService(), SessionService(cp))
        ]

    assert answers[0] == answers[1]


async def play(service: Any) -> list[Any]:
    """Call every method; return what can be compared."""
    seen: list[Any] = []

    def note(session: Any) -> None:
        kept = session and (
            session.id,
            session.state,
            texts(session),
            [one.actions.state_delta for one in session.events],
        )
        seen.append(kept)

    state = {"own": 1, "app:all": 2, "user:mine": [3], "temp:gone": 4}
    first = await service.create_session(**IDS, state=state)
    note(first)

    with pytest.raises(AlreadyExistsError):
        await service.create_session(**IDS)

    for n in range(4):
        delta: Any = {"own": n, "app:all": f"a{n}", "user:mine": None, "temp:x": n}
        added = await service.append_event(first, event(f"{n}", at=n + 1.5, **delta))
        seen.append(added.actions.state_delta)

    await service.append_event(first, Event(author="user", partial=True))
    note(first)

    for config in (
        None,
        GetSessionConfig(num_recent_events=2),
        GetSessionConfig(num_recent_events=0),
        GetSessionConfig(after_timestamp=2.5),
        GetSessionConfig(num_recent_events=3, after_timestamp=4.0),
    ):
        note(await service.get_session(**IDS, config=config))

    await service.create_session(app_name="app", user_id="other", session_id=" s/2 ")
    await service.create_session(app_name="else", user_id="user", session_id="s3")

    for who in (WHO, {"app_name": "app"}, {"app_name": "none"}):
        listed = (await service.list_sessions(**who)).sessions
        seen.append([(one.user_id, one.id, one.state, one.events) for one in listed])

    seen.append(await service.get_user_state(**WHO))

    for session_id in (" ", "none", IDS["session_id"]):
        await service.delete_session(**WHO, session_id=session_id)
        note(await service.get_session(**WHO, session_id=session_id))

    with pytest.raises(SessionNotFoundError):
        await service.append_event(first, event("late"))

    again = await service.create_session(**IDS)
    note(again)
    return seen


async def test_a_stale_session_is_refused(url: str) -> None:
    """Its event and its state change nothing; a new copy can append."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        services = [SessionService(one), SessionService(two)]
        await services[0].create_session(**IDS, state={"n": 0})
        copies: list[Any] = [await service.get_session(**IDS) for service in services]
        await services[0].append_event(copies[0], event("first", n=1))

        with pytest.raises(StaleSessionError):
            await services[1].append_event(copies[1], event("stale", n=2))

        assert copies[1].events == []
        fresh: Any = await services[1].get_session(**IDS)
        assert (texts(fresh), fresh.state) == (["first"], {"n": 1})
        await services[1].append_event(fresh, event("second", n=3))
        # The first service has not read the second event.
        with pytest.raises(StaleSessionError):
            await services[0].append_event(copies[0], event("stale", n=4))

        last: Any = await services[0].get_session(**IDS)
        assert (texts(last), last.state) == (["first", "second"], {"n": 3})


async def test_one_of_many_writers_appends_at_a_time(url: str) -> None:
    """No event is lost, and the state is that of the last event."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        services = [SessionService(one), SessionService(two)]
        await services[0].create_session(**IDS)

        async def write(service: Any, name: str) -> None:
            for n in range(5):
                while True:
                    session: Any = await service.get_session(**IDS)

                    try:
                        text = f"{name}{n}"
                        await service.append_event(session, event(text, last=text))
                        break
                    except StaleSessionError:
                        continue

        await asyncio.gather(
            *(write(one, name) for one, name in zip(services, "ab", strict=True))
        )
        session: Any = await services[0].get_session(**IDS)

    assert sorted(texts(session)) == sorted(
        f"{name}{n}" for name in "ab" for n in range(5)
    )
    assert session.state == {"last": texts(session)[-1]}


async def test_a_shared_session_takes_events_of_parallel_tasks(url: str) -> None:
    """Branches of one invocation share the session object."""
    async with open_checkpointer(url) as cp:
        service = SessionService(cp)
        session: Any = await service.create_session(**IDS)
        deltas: list[dict[str, Any]] = [{f"k{n}": n} for n in range(8)]
        await asyncio.gather(
            *(service.append_event(session, event("x", **delta)) for delta in deltas)
        )
        stored: Any = await service.get_session(**IDS)

    assert texts(stored) == texts(session)
    assert stored.state == session.state == {f"k{n}": n for n in range(8)}


async def test_a_session_that_was_read_without_events_can_append(url: str) -> None:
    """It is stale only if another event was appended since."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        services = [SessionService(one), SessionService(two)]
        whole: Any = await services[0].create_session(**IDS)
        await services[0].append_event(whole, event("a"))
        config = GetSessionConfig(num_recent_events=0)
        copies: list[Any] = [
            await service.get_session(**IDS, config=config) for service in services
        ]
        await services[0].append_event(copies[0], event("b"))

        with pytest.raises(StaleSessionError):
            await services[1].append_event(copies[1], event("stale"))

        assert texts(await services[1].get_session(**IDS)) == ["a", "b"]


@pytest.fixture
async def spy() -> AsyncIterator[Spy]:
    async with MemoryCheckpointer[Any]() as inner:
        yield Spy(inner)


async def test_an_event_with_a_lost_answer_is_stored_once(spy: Spy) -> None:
    """A retry by the caller finds it too."""
    service = SessionService(spy)
    session: Any = await service.create_session(**IDS)
    spy.faults.append("lost after")
    await service.append_event(session, event("a"))
    spy.faults.extend(["lost after", "lost before", "lost before"])
    spy.read_faults.extend(["refused"] * 3)
    again = event("b")

    with pytest.raises(BackendUnavailable):
        await service.append_event(session, again)

    spy.faults.clear()
    spy.read_faults.clear()
    await service.append_event(session, again)
    assert texts(await service.get_session(**IDS)) == ["a", "b"] == texts(session)


async def test_a_change_of_shared_state_survives_a_crash(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The process died after the event, and before the app's state was changed."""
    service = SessionService(cp)
    session: Any = await service.create_session(**IDS)
    owed: Any = {"app": {"all": 1}, "user": {"mine": 2}}
    stored = event("a").model_dump(mode="json", exclude_none=True)
    await cp.append(
        session_thread("app", "user", "session"),
        [{"event": stored}],
        extra={"owed": owed},
    )
    del session
    found: Any = await SessionService(cp).get_session(**IDS)
    assert found.state == {"app:all": 1, "user:mine": 2}
    assert await service.get_user_state(**WHO) == {"mine": 2}


class Paused(SessionService):
    """Applies changes of shared state only after ``go_on`` is set."""

    def __init__(self, cp: Any) -> None:
        super().__init__(cp)
        self.is_paused = asyncio.Event()
        self.go_on = asyncio.Event()

    async def _apply_shared(self, *args: Any) -> None:
        self.is_paused.set()
        await self.go_on.wait()
        await super()._apply_shared(*args)


class Dying(SessionService):
    """Dies before it applies changes of shared state."""

    async def _apply_shared(self, *args: Any) -> None:
        raise RuntimeError("died")


async def test_a_shared_state_that_cannot_be_written_waits(
    cp: MemoryCheckpointer[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The event is stored, the session goes on, and the next read applies it."""
    store: Any = Spy(cp)
    service: Any = SessionService(store)
    session: Any = await service.create_session(**IDS)
    append = store.append

    async def refuse(thread_id: str, messages: Any, **options: Any) -> Any:
        if "app:" in thread_id and options.get("extra"):
            raise BackendUnavailable("test", "away")

        return await append(thread_id, messages, **options)

    store.append = refuse
    change: Any = {"app:n": 1, "mine": 2}
    await service.append_event(session, event("a", **change))
    assert "a shared state waits" in caplog.text
    assert texts(session) == ["a"]
    await service.append_event(session, event("b"))
    store.append = append
    found: Any = await service.get_session(**IDS)
    assert (texts(found), found.state) == (["a", "b"], change)


@pytest.mark.parametrize("dies", [False, True])
async def test_a_paused_writer_undoes_no_later_change_of_shared_state(
    cp: MemoryCheckpointer[Any], dies: bool
) -> None:
    """And a change whose process died before it was applied stays marked."""
    quick, slow = SessionService(cp), Paused(cp)
    first: Any = await quick.create_session(**IDS)
    change: Any = {"app:n": 1, "user:n": 1}
    writing = asyncio.create_task(slow.append_event(first, event("a", **change)))
    await slow.is_paused.wait()
    second: Any = await quick.get_session(**IDS)
    assert second.state == change
    later: Any = {"app:n": 2, "user:n": 2}

    if dies:
        with pytest.raises(RuntimeError, match="died"):
            await Dying(cp).append_event(second, event("b", **later))
    else:
        await quick.append_event(second, event("b", **later))

    slow.go_on.set()
    await writing
    found: Any = await quick.get_session(**IDS)
    assert (texts(found), found.state) == (["a", "b"], later)


async def test_a_deleted_session_leaves_its_change_of_shared_state_and_nothing_else(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The deletion came between the event and the change."""
    service = Paused(cp)
    service.go_on.set()
    session: Any = await service.create_session(**IDS)
    service.go_on.clear()
    service.is_paused.clear()
    change: Any = {"app:n": 1}
    writing = asyncio.create_task(service.append_event(session, event("a", **change)))
    await service.is_paused.wait()
    await SessionService(cp).delete_session(**IDS)
    service.go_on.set()
    await writing
    assert await cp.load(session_thread("app", "user", "session")) is None
    assert (await service.create_session(**IDS)).state == change


@pytest.mark.parametrize("is_copy", [False, True])
async def test_an_event_that_is_delivered_again_is_stored_once(
    url: str, is_copy: bool
) -> None:
    """As by the ADK's own service, also if other events followed it."""
    async with open_checkpointer(url) as cp:
        for service in (InMemorySessionService(), SessionService(cp)):
            session: Any = await service.create_session(**IDS)
            first = event("a", n=1)
            again = first.model_copy(deep=True) if is_copy else first
            await service.append_event(session, first)
            await service.append_event(session, again)
            await service.append_event(session, event("b", n=2))
            assert await service.append_event(session, again) == first
            stored: Any = await service.get_session(**IDS)
            assert texts(stored) == texts(session) == ["a", "b"]
            assert stored.state == session.state == {"n": 2}


async def test_no_event_replaces_a_change_that_waits(
    cp: MemoryCheckpointer[Any],
) -> None:
    """It is applied first, or the event is refused; an event without one applies it."""
    store: Any = Spy(cp)
    service: Any = SessionService(store)
    session: Any = await service.create_session(**IDS)
    append = store.append

    async def refuse(thread_id: str, messages: Any, **options: Any) -> Any:
        if "user:" in thread_id and options.get("extra"):
            raise BackendUnavailable("test", "away")

        return await append(thread_id, messages, **options)

    store.append = refuse
    await service.append_event(session, event("a", **of_user(a=1)))

    with pytest.raises(BackendUnavailable):
        await service.append_event(session, event("b", **of_user(b=2)))

    assert texts(session) == ["a"]
    store.append = append
    await service.append_event(session, event("c", **of_user(c=3)))
    assert await service.get_user_state(**WHO) == {"a": 1, "c": 3}
    store.append = refuse
    await service.append_event(session, event("d", **of_user(d=4)))
    store.append = append
    await service.append_event(session, event("e"))
    assert await service.get_user_state(**WHO) == {"a": 1, "c": 3, "d": 4}


@pytest.mark.parametrize("was_applied", [False, True])
async def test_a_list_does_not_turn_a_shared_value_back(
    cp: MemoryCheckpointer[Any], was_applied: bool
) -> None:
    """A process died before it applied a change, or before it marked it as applied."""
    service = SessionService(cp)
    first: Any = await service.create_session(**IDS)
    second: Any = await service.create_session(**WHO, session_id="other")
    dying = SessionService(Mortal(cp, 3 if was_applied else 2))

    with pytest.raises(RuntimeError, match="died"):
        await dying.append_event(first, event("a", **of_user(status="free")))

    now = await service.get_user_state(**WHO)
    assert now == ({"status": "free"} if was_applied else {})
    await service.append_event(second, event("b", **of_user(status="paid")))

    for one in (await service.list_sessions(**WHO)).sessions:
        assert one.state == of_user(status="paid")

    await service.delete_session(**IDS)
    assert await service.get_user_state(**WHO) == {"status": "paid"}


async def test_a_late_try_undoes_no_later_change_of_shared_state(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The event was stored without an answer, and another session went on."""
    spy = Spy(cp)
    service, other = SessionService(spy), SessionService(cp)
    session: Any = await service.create_session(**IDS)
    second: Any = await other.create_session(**WHO, session_id="other")
    spy.faults.extend(["", "lost after", "refused", "refused"])
    spy.read_faults.extend(["", "refused", "refused", "refused"])
    late = event("a", **of_user(n=1))

    with pytest.raises(BackendUnavailable):
        await service.append_event(session, late)

    spy.faults.clear()
    spy.read_faults.clear()
    await other.append_event(second, event("b", **of_user(n=2)))
    await service.append_event(session, late)
    assert texts(session) == ["a"]
    assert await other.get_user_state(**WHO) == {"n": 2}


class Mortal(RangeSpy):
    """A store whose process dies after some appends."""

    def __init__(self, inner: MemoryCheckpointer[Any], appends: int) -> None:
        super().__init__(inner)
        self.appends = appends

    async def append(self, *args: Any, **options: Any) -> int:
        if not self.appends:
            raise RuntimeError("died")

        self.appends -= 1
        return await super().append(*args, **options)


steps = st.lists(
    st.tuples(
        st.integers(0, 2),  # the session
        st.sampled_from(["app:a", "user:a", "user:b"]),
        st.integers(0, 7) | st.none(),  # appends until the process dies
        st.booleans(),  # whether another process reads a session
    ),
    max_size=12,
)


@given(steps)
@settings(max_examples=12, deadline=None)
def test_shared_values_only_go_forward(steps: list[Any]) -> None:
    """Whenever processes die, each stored change is applied, and undoes no later."""

    async def play() -> None:
        async with MemoryCheckpointer[Any]() as cp:
            reader = SessionService(cp)
            stored: dict[str, int] = {}
            seen: dict[str, int] = {}
            ids = [{**IDS, "session_id": f"{n}"} for n in range(3)]

            for each in ids:
                await reader.create_session(**each)

            for value, (number, key, lives, is_read) in enumerate(steps, 1):
                copy: Any = await reader.get_session(**ids[number])
                before = len(copy.events)
                change: Any = {key: value}
                service = SessionService(Mortal(cp, 99 if lives is None else lives))

                with suppress(RuntimeError):
                    await service.append_event(copy, event("x", **change))

                messages = await cp.read(session_thread(*ids[number].values()))

                if len(messages) == before + 2:
                    stored[key] = value

                if is_read:
                    found: Any = await reader.get_session(**ids[value % 3])
                    assert all(found.state[k] >= seen[k] for k in seen)
                    assert all(stored[k] >= v for k, v in found.state.items())
                    seen = found.state

            for session in (await reader.list_sessions(**WHO)).sessions:
                assert session.state == stored

    asyncio.run(play())


async def test_a_list_reads_no_events(cp: MemoryCheckpointer[Any]) -> None:
    """It reads each session once, and each shared state once."""
    spy = RangeSpy(cp)
    service = SessionService(spy)

    for n in range(4):
        session: Any = await service.create_session(**WHO, session_id=f"{n}")
        await service.append_event(session, event("a", **of_user(n=[n])))

    await cp.append("cpkit:google-adk:app/user/foreign/thread", [{"a": 1}])
    spy.list_threads = cp.list_threads  # type: ignore[attr-defined]  # an ability
    spy.calls.clear()
    listed = (await service.list_sessions(**WHO)).sessions
    # Four sessions, the foreign thread, and the two shared states.
    assert spy.calls == [("load_range", 0, 0)] * 7
    listed[0].state["user:n"].append("changed")
    assert [one.state for one in listed[1:]] == [of_user(n=[3])] * 3


async def test_a_list_reads_again_only_what_has_changed(
    cp: MemoryCheckpointer[Any],
) -> None:
    """By any process; and no caller shares a value with a later list."""
    spy, other = RangeSpy(cp), SessionService(cp)
    spy.list_threads = cp.list_threads  # type: ignore[attr-defined]  # an ability
    service = SessionService(spy)

    for n in range(4):
        await other.create_session(**WHO, session_id=f"{n}", state={"n": [n]})

    before = (await service.list_sessions(**WHO)).sessions
    before[0].state["n"].append("changed")
    changed: Any = await other.get_session(**WHO, session_id="2")
    await other.append_event(changed, event("a", n=["new"]))
    await other.delete_session(**WHO, session_id="3")
    await other.create_session(**WHO, session_id="3", state={"n": ["again"]})
    spy.calls.clear()
    listed = (await service.list_sessions(**WHO)).sessions
    # Two sessions, and the two shared states.
    assert spy.calls == [("load_range", 0, 0)] * 4
    states = {one.id: one.state["n"] for one in listed}
    assert states == {"0": [0], "1": [1], "2": ["new"], "3": ["again"]}
    await service.append_event(listed[0], event("b"))  # it knows its version


async def test_a_list_of_known_sessions_starts_no_task_for_them(
    cp: MemoryCheckpointer[Any],
) -> None:
    """Only the sessions that changed and the two shared states have a task each."""
    service, started = SessionService(cp), 0

    def start(loop: Any, work: Any, **options: Any) -> asyncio.Task[Any]:
        nonlocal started
        started += 1
        return asyncio.Task(work, loop=loop, **options)

    for n in range(20):
        session: Any = await service.create_session(**WHO, session_id=f"{n}")

    await service.list_sessions(**WHO)
    await service.append_event(session, event("a"))
    asyncio.get_running_loop().set_task_factory(start)

    for expected in (3, 2):
        started = 0
        assert len((await service.list_sessions(**WHO)).sessions) == 20
        assert started == expected


async def test_a_service_keeps_the_states_of_few_sessions(
    cp: MemoryCheckpointer[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer list is complete, and is read again."""
    monkeypatch.setattr(google_adk, "_LISTED", 2)
    service = SessionService(cp)

    for n in range(5):
        await service.create_session(**WHO, session_id=f"{n}")

    for _ in range(2):
        assert len((await service.list_sessions(**WHO)).sessions) == 5
        assert len(service._listed) == 2


@pytest.mark.parametrize("count", range(5))
async def test_a_page_of_a_list_that_is_not_full_is_the_last_one(
    count: int, cp: MemoryCheckpointer[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is complete, and asks for no page behind it."""
    list_threads, pages = cp.list_threads, 0

    async def count_pages(**options: Any) -> Any:
        nonlocal pages
        pages += 1
        return await list_threads(**options)

    monkeypatch.setattr(google_adk, "_PAGE_SIZE", 2)
    monkeypatch.setattr(cp, "list_threads", count_pages)
    service = SessionService(cp)

    for n in range(count):
        await service.create_session(**WHO, session_id=f"{n}")

    assert len((await service.list_sessions(**WHO)).sessions) == count
    assert pages == count // 2 + 1


async def test_events_after_a_time_are_read_from_the_end(
    cp: MemoryCheckpointer[Any],
) -> None:
    """As many as are needed, and not the whole session."""
    spy = RangeSpy(cp)
    service = SessionService(spy)
    session: Any = await service.create_session(**IDS)

    for n in range(200):
        await service.append_event(session, event(f"{n}", at=n + 1))

    for after, reads in ((190.0, 1), (100.0, 2), (0.5, 3)):
        spy.calls.clear()
        config = GetSessionConfig(after_timestamp=after)
        found: Any = await service.get_session(**IDS, config=config)
        assert [one.timestamp for one in found.events] == [
            n + 1.0 for n in range(200) if n + 1 >= after
        ]
        starts = [call[1] for call in spy.calls if call[1:] != (0, 0)]
        assert starts == [-32, -128, -512][:reads]


def of_user(**values: Any) -> Any:
    """Return a change of the user's state."""
    return {f"user:{name}": value for name, value in values.items()}


async def test_a_change_of_a_dead_process_survives_a_list_and_a_deletion(
    cp: MemoryCheckpointer[Any],
) -> None:
    """Of shared state: they apply it before a later event or the deletion hides it."""
    service = SessionService(cp)
    first: Any = await service.create_session(**IDS)

    with pytest.raises(RuntimeError, match="died"):
        await Dying(cp).append_event(first, event("a", **of_user(a=1)))

    listed: Any = (await service.list_sessions(**WHO)).sessions[0]
    await service.append_event(listed, event("b", **of_user(b=2)))
    assert await service.get_user_state(**WHO) == {"a": 1, "b": 2}

    with pytest.raises(RuntimeError, match="died"):
        await Dying(cp).append_event(listed, event("c", **of_user(c=3)))

    await service.delete_session(**IDS)
    assert await service.get_user_state(**WHO) == {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize("recent", [0, 1])
async def test_an_event_is_stored_once_in_a_session_without_its_first_events(
    cp: MemoryCheckpointer[Any], recent: int
) -> None:
    """The state does not go back to that of the event either."""
    service = SessionService(cp)
    session: Any = await service.create_session(**IDS)
    first = event("a", n=1, **of_user(n=1))
    await service.append_event(session, first)
    await service.append_event(session, event("b", n=2, **of_user(n=2)))
    config = GetSessionConfig(num_recent_events=recent)
    read: Any = await service.get_session(**IDS, config=config)
    assert await service.append_event(read, first) == first
    assert texts(read) == ["b"][:recent]
    found: Any = await service.get_session(**IDS)
    assert texts(found) == ["a", "b"]
    assert found.state == read.state == {"n": 2, "user:n": 2}


async def test_sessions_without_events_are_compared_by_their_number(
    cp: MemoryCheckpointer[Any],
) -> None:
    """Not by the time of the last one, which another event may have too."""
    one, two = SessionService(cp), SessionService(cp)
    session: Any = await one.create_session(**IDS)
    await one.append_event(session, event("a"))
    listed: Any = (await two.list_sessions(**WHO)).sessions[0]
    same_time = event("b")
    same_time.timestamp = session.last_update_time
    await one.append_event(session, same_time)

    with pytest.raises(StaleSessionError):
        await two.append_event(listed, event("c"))

    listed = (await two.list_sessions(**WHO)).sessions[0]
    await two.append_event(listed, event("c"))
    assert texts(await one.get_session(**IDS)) == ["a", "b", "c"]


async def test_a_session_that_a_program_made_itself_is_compared_by_its_events(
    cp: MemoryCheckpointer[Any],
) -> None:
    """It has no mark of this service."""
    service = SessionService(cp)
    session: Any = await service.create_session(**IDS)
    await service.append_event(session, event("a"))
    made: Any = type(session).model_validate(session.model_dump())
    await service.append_event(made, event("b"))
    assert texts(made) == ["a", "b"]

    other: Any = type(session).model_validate(session.model_dump())

    with pytest.raises(StaleSessionError):
        await service.append_event(other, event("c"))


async def test_a_cancelled_append_leaves_the_session_usable(
    cp: MemoryCheckpointer[Any],
) -> None:
    """What is stored is in the session, so other tasks can go on with it."""
    service = SessionService(cp)
    session: Any = await service.create_session(**IDS)

    for turns in range(12):
        append = asyncio.create_task(
            service.append_event(session, event(f"{turns}", **of_user(n=turns)))
        )

        for _ in range(turns):
            await asyncio.sleep(0)

        append.cancel()
        await asyncio.wait([append])
        found: Any = await service.get_session(**IDS)
        assert texts(found) == texts(session)

    await service.append_event(session, event("last"))
    assert texts(session)[-1] == "last"


async def test_an_id_too_long_for_the_user_creates_nothing(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The thread of the user's state has a longer prefix than that of a session."""
    service = SessionService(cp)
    ids: Any = {**IDS, "user_id": "u" * 488, "session_id": "s"}

    with pytest.raises(InvalidId):
        await service.create_session(**ids)

    assert await cp.list_threads() == []


async def test_a_few_events_cost_a_few(cp: MemoryCheckpointer[Any]) -> None:
    """The store reads the newest ones only; the session knows its version."""
    spy = RangeSpy(cp)
    service = SessionService(spy)
    session: Any = await service.create_session(**IDS)

    for text in "abc":
        await service.append_event(session, event(text))

    spy.calls.clear()
    config = GetSessionConfig(num_recent_events=2)
    few: Any = await service.get_session(**IDS, config=config)
    assert ("load_range", -2, None) in spy.calls
    assert texts(few) == ["b", "c"]
    await service.append_event(few, event("d"))
    assert texts(await service.get_session(**IDS)) == list("abcd")


async def test_text_and_numbers_come_back_as_the_adk_writes_them(url: str) -> None:
    """Half a character is kept, as text and as key. NaN is null in an event."""
    cut: Any = {"\ud83d": {"\udfff": "cut \ud83d", "n": [1, 2.5, None, True]}}
    call = types.FunctionCall(name="f", args={"x": float("nan"), **cut})
    answer = types.FunctionResponse(name="f", response=cut)
    made = event("cut \ud83d", own=cut, **{"user:\ud83d": cut})
    made.content.parts += [
        types.Part(function_call=call, thought_signature=b"\xfb\xff"),
        types.Part(function_response=answer),
        types.Part(inline_data=types.Blob(data=b"\xfb\xff", mime_type="image/png")),
    ]
    made.avg_logprobs = float("inf")
    made.long_running_tool_ids = {"a", "b"}
    made.custom_metadata = {"at": datetime(2026, 1, 1, tzinfo=UTC), **cut}

    async with open_checkpointer(url) as cp:
        service = SessionService(cp)
        session: Any = await service.create_session(**IDS, state={"\ud83d": "\udfff"})
        await service.append_event(session, made)
        assert await service.append_event(session, made) is made  # delivered again
        found: Any = await service.get_session(**IDS)

    assert found.state == {"\ud83d": "\udfff", "own": cut, "user:\ud83d": cut}
    call.args = {"x": None, **cut}
    made.avg_logprobs = None
    made.custom_metadata["at"] = "2026-01-01T00:00:00Z"
    assert found.events == [made]


async def test_an_event_without_halves_is_stored_as_pydantic_dumps_it(
    cp: MemoryCheckpointer[Any],
) -> None:
    """A program that reads the thread finds the ADK's own JSON."""
    made = event("a", own=1)
    made.content.parts.append(types.Part(inline_data=types.Blob(data=b"\xfb\xff")))
    made.long_running_tool_ids = {"b", "a"}
    made.actions.agent_state = {"level": Level.HIGH, "at": timedelta(seconds=3)}
    made.custom_metadata = {"pair": (1, 2), "models": [types.Part(text="x")]}
    service = SessionService(cp)
    await service.append_event(await service.create_session(**IDS), made)
    (_, stored) = await cp.read(session_thread(*IDS.values()))
    assert stored["event"] == made.model_dump(mode="json", exclude_none=True)


async def test_a_state_that_is_not_json_is_refused(cp: MemoryCheckpointer[Any]) -> None:
    """Nothing of the event is written: null is another value of the state."""
    service = SessionService(cp)
    session: Any = await service.create_session(**IDS)

    with pytest.raises(SerializationError):
        await service.append_event(session, event("a", n=float("nan")))

    assert (await service.get_session(**IDS)).events == []  # type: ignore[union-attr]  # it exists


class Level(Enum):
    HIGH = "high"


class Echo(BaseAgent):  # type: ignore[misc]  # types are not followed
    """Answers with the number of events that it was shown."""

    async def _run_async_impl(self, ctx: Any) -> AsyncIterator[Any]:
        count = len(ctx.session.events)
        yield event(f"shown {count}", author=self.name, count=count)


async def ask(service: Any, text: str) -> list[str]:
    runner = Runner(app_name="app", agent=Echo(name="echo"), session_service=service)
    message = types.Content(role="user", parts=[types.Part(text=text)])
    return [
        one.content.parts[0].text
        async for one in runner.run_async(
            user_id="user", session_id="session", new_message=message
        )
    ]


async def test_the_adks_runner_continues_on_another_handle(url: str) -> None:
    """The second turn sees the events of the first."""
    async with open_checkpointer(url) as cp:
        await SessionService(cp).create_session(**IDS)
        assert await ask(SessionService(cp), "one") == ["shown 1"]

    async with open_checkpointer(url) as cp:
        assert await ask(SessionService(cp), "two") == ["shown 3"]
        session: Any = await SessionService(cp).get_session(**IDS)

    assert texts(session) == ["one", "shown 1", "two", "shown 3"]
    assert session.state == {"count": 3}


def test_a_sync_checkpointer_serves_any_loop() -> None:
    """The store has an event loop of its own."""
    with SyncCheckpointer("memory://") as cp:
        service = SessionService(cp)
        asyncio.run(service.create_session(**IDS))
        assert asyncio.run(ask(service, "one")) == ["shown 1"]
