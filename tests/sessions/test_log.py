"""Further promises of a session log."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cpkit import (
    CorruptThread,
    MemoryCheckpointer,
    SchemaMismatch,
    SerializationError,
    VersionConflict,
    open_checkpointer,
)
from cpkit.messages import Message, UserMessage
from cpkit.sessions import NotASession, SessionLog, UnknownEntry
from tests.sessions.conftest import Store
from tests.sessions.spy import RangeSpy
from tests.sessions.talk import assistant, texts, user

# Opening


async def test_a_new_session_is_written_with_its_first_entry(
    cp: Store, session_id: str
) -> None:
    """Opening writes nothing; the first append writes the header too."""
    log = await SessionLog.open(cp, session_id, cwd="/work")
    assert (log.version, log.leaf_id, log.entries) == (0, None, [])
    assert await cp.load(session_id) is None

    entry_id = await log.append_message(user("hello"))
    data = await cp.load(session_id)
    assert data is not None
    header, entry = data.messages
    assert header["type"] == "session"
    assert header["version"] == 3
    assert (header["id"], header["cwd"]) == (session_id, "/work")
    assert entry == log.entry(entry_id)
    assert list(entry) == ["type", "id", "parentId", "timestamp", "message"]
    assert entry["parentId"] is None
    assert log.version == 2


async def test_a_thread_with_only_extra_is_a_new_session(
    cp: Store, session_id: str
) -> None:
    """Extra does not make a thread a session."""
    await cp.save_extra(session_id, {"budget": 5})
    log = await SessionLog.open(cp, session_id)
    await log.append_message(user("hello"))
    assert log.version == 2


async def test_a_thread_of_plain_messages_is_refused(
    cp: Store, session_id: str
) -> None:
    """Plain messages are not taken for entries."""
    await cp.append(session_id, [user("hello")])

    with pytest.raises(NotASession, match="is a plain thread"):
        await SessionLog.open(cp, session_id)


@pytest.mark.parametrize("message", ["text", 7, 1.5, True, None, [1]])
async def test_a_thread_of_other_json_is_refused(message: Any, session_id: str) -> None:
    """A store of any JSON, as the command line opens it, has threads of no objects."""
    async with open_checkpointer("memory://", message_type=Any) as cp:
        await cp.append(session_id, [message])

        with pytest.raises(NotASession, match="is a plain thread"):
            await SessionLog.open(cp, session_id)


async def test_a_store_of_typed_messages_is_refused(session_id: str) -> None:
    """The error says how to open the store."""
    async with open_checkpointer("memory://", message_type=Message) as cp:
        await cp.append(session_id, [UserMessage(content="hello")])

        with pytest.raises(TypeError, match="message_type"):
            await SessionLog.open(cp, session_id)


@pytest.mark.parametrize("version", [4, "3", True, None, 0])
async def test_another_version_is_refused(
    cp: Store, session_id: str, version: Any
) -> None:
    """A version above 3 raises SchemaMismatch."""
    await cp.append(
        session_id, [{"type": "session", "id": session_id, "version": version}]
    )

    with pytest.raises(SchemaMismatch):
        await SessionLog.open(cp, session_id)


async def test_an_old_session_in_the_store_is_refused(
    cp: Store, session_id: str
) -> None:
    """It is not migrated, because stored entries never change."""
    await cp.append(session_id, [{"type": "session", "id": session_id}])

    with pytest.raises(CorruptThread, match="import it again"):
        await SessionLog.open(cp, session_id)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"id": "a"}, "no type"),
        ({"type": "x"}, "no id"),
        ({"type": "x", "id": 1}, "no id"),
        ({"type": "x", "id": "first"}, "a second entry"),
        ({"type": "message", "id": "a"}, "a message entry without"),
    ],
)
async def test_a_message_that_is_not_an_entry_is_corrupt(
    cp: Store, session_id: str, entry: dict[str, Any], reason: str
) -> None:
    """The error has the position of the message and the reason."""
    header: dict[str, Any] = {"type": "session", "id": session_id, "version": 3}
    await cp.append(session_id, [header, {"type": "x", "id": "first"}, entry])

    with pytest.raises(CorruptThread, match=f"message 2: {reason}"):
        await SessionLog.open(cp, session_id)


# Appending


async def test_each_append_follows_the_leaf(cp: Store, session_id: str) -> None:
    """Entries of every type have the fields of the format."""
    log = await SessionLog.open(cp, session_id)
    first = await log.append_message(user("one"))
    await log.append_model_change("lab", "large")
    await log.append_thinking_level("low")
    await log.append_compaction("sum", first, tokens_before=7, details={"files": []})
    await log.append_custom("note", {"n": 1})
    await log.append_custom("bare")
    await log.append_custom_message("hint", "short", display=False, details=[1])
    await log.append_state(plan=["a"], spent=None)
    await log.label(first, "start")
    await log.label(first, None)
    await log.set_name("  Trip ")
    await log.append_entry({"type": "weather", "sky": {"clouds": 3}})

    parents = [entry["parentId"] for entry in log.entries]
    assert parents == [None, *(entry["id"] for entry in log.entries[:-1])]
    base = {"id", "parentId", "timestamp"}
    own = [{k: v for k, v in e.items() if k not in base} for e in log.entries]
    assert own == [
        {"type": "message", "message": user("one")},
        {"type": "model_change", "provider": "lab", "modelId": "large"},
        {"type": "thinking_level_change", "thinkingLevel": "low"},
        {
            "type": "compaction",
            "summary": "sum",
            "firstKeptEntryId": first,
            "tokensBefore": 7,
            "details": {"files": []},
        },
        {"type": "custom", "customType": "note", "data": {"n": 1}},
        {"type": "custom", "customType": "bare"},
        {
            "type": "custom_message",
            "customType": "hint",
            "content": "short",
            "display": False,
            "details": [1],
        },
        {
            "type": "custom",
            "customType": "cpkit.state",
            "data": {"plan": ["a"], "spent": None},
        },
        {"type": "label", "targetId": first, "label": "start"},
        {"type": "label", "targetId": first},
        {"type": "session_info", "name": "Trip"},
        {"type": "weather", "sky": {"clouds": 3}},
    ]
    assert (log.name, log.labels) == ("Trip", {})

    again = await SessionLog.open(cp, session_id)
    assert again.entries == log.entries


async def test_state_takes_any_name(cp: Store, session_id: str) -> None:
    """A key may have the name of a parameter."""
    log = await SessionLog.open(cp, session_id)
    await log.append_state(**{"self": 1, "a b": 2})
    assert log.context().state == {"self": 1, "a b": 2}


@pytest.mark.parametrize(
    "entry",
    [
        {"sky": "blue"},
        {"type": "message"},
        {"type": "session"},
        {"type": "x", "id": "mine"},
        {"type": "x", "parentId": None},
    ],
)
async def test_an_entry_that_would_break_the_log_is_refused(
    cp: Store, session_id: str, entry: dict[str, Any]
) -> None:
    """Only the log sets ids, parents and the header."""
    log = await SessionLog.open(cp, session_id)

    with pytest.raises(ValueError, match="cannot append this entry"):
        await log.append_entry(entry)

    assert log.version == 0


async def test_an_unknown_entry_is_refused(cp: Store, session_id: str) -> None:
    """Every method that takes an entry id raises UnknownEntry."""
    log = await SessionLog.open(cp, session_id)
    first = await log.append_message(user("one"))
    second = await log.append_message(user("two"))
    await log.move_to(first)

    with pytest.raises(UnknownEntry):
        log.entry("nothing")

    with pytest.raises(UnknownEntry):
        log.context("nothing")

    with pytest.raises(UnknownEntry):
        await log.move_to("nothing")

    with pytest.raises(UnknownEntry):
        await log.label("nothing", "x")

    with pytest.raises(UnknownEntry, match="active branch"):
        await log.append_compaction("sum", second)

    assert log.version == 4


async def test_a_value_that_is_not_json_is_refused(cp: Store, session_id: str) -> None:
    """Nothing is written, and the error has the path."""
    log = await SessionLog.open(cp, session_id)

    with pytest.raises(SerializationError) as caught:
        await log.append_state(budget=float("inf"))

    assert caught.value.path == (0, "data", "budget")
    not_a_dict: Any = ["hello"]

    with pytest.raises(SerializationError):
        await log.append_message(not_a_dict)

    assert (log.version, log.entries) == (0, [])


async def test_messages_and_contexts_are_copies(cp: Store, session_id: str) -> None:
    """Changes that a caller makes to them do not change the log."""
    log = await SessionLog.open(cp, session_id)
    message = assistant("one")
    await log.append_message(message)
    message["content"][0]["text"] = "changed"
    context = log.context()
    context.messages[0]["content"][0]["text"] = "changed"
    assert texts(log.context().messages) == ["one"]


async def test_tasks_that_share_a_log_take_turns(cp: Store, session_id: str) -> None:
    """Each append follows the one before it, without a conflict."""
    log = await SessionLog.open(cp, session_id)
    ids = await asyncio.gather(*(log.append_message(user(str(n))) for n in range(50)))
    assert [entry["id"] for entry in log.branch()] == ids
    assert (await SessionLog.open(cp, session_id)).entries == log.entries


async def test_a_cancelled_append_is_completed(session_id: str) -> None:
    """The store and the log have the entry, and the next one follows it."""
    async with MemoryCheckpointer[Any]() as store:
        spy = RangeSpy(store)
        log = await SessionLog.open(spy, session_id)
        await log.append_message(user("one"))
        spy.gate.clear()
        spy.waiting.clear()
        task = asyncio.create_task(log.append_message(user("two")))
        await spy.waiting.wait()
        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task

        spy.gate.set()
        await log.append_message(user("three"))
        assert texts(log.context().messages) == ["one", "two", "three"]
        assert (await SessionLog.open(store, session_id)).entries == log.entries


# Trimmed


async def test_a_trimmed_session_goes_on(session_id: str) -> None:
    """Its oldest entry is a root; an open log goes on, and so does a new one."""
    async with open_checkpointer("memory://") as cp:
        log = await SessionLog.open(cp, session_id)
        ids = [await log.append_message(user(f"{n}")) for n in range(6)]
        await log.move_to(ids[1])
        side = await log.append_message(user("side"))
        assert await cp.trim(session_id, 4) == 4

        later = await log.append_message(user("later"))
        assert texts(log.context().messages) == ["0", "1", "side", "later"]

        opened = await SessionLog.open(cp, session_id)
        assert opened.version == log.version == 10
        assert [one["id"] for one in opened.branch(ids[5])] == ids[3:]
        assert opened.tree()[0].entry["id"] == ids[3]
        assert side in {one["id"] for one in opened.entries}
        assert opened.orphans
        assert [one.version for one in opened.versions()] == [5, 6, 7, 8, 9, 10]
        assert texts(opened.at(6).messages) == ["3", "4"]
        assert opened.at(4).messages == []

        more = await opened.append_message(user("more"))
        assert [one["id"] for one in await log.refresh()] == [more]
        assert (await SessionLog.open(cp, session_id)).leaf_id == more
        assert log.entry(later) == opened.entry(later)


async def test_an_open_log_goes_on_after_a_trim_elsewhere(session_id: str) -> None:
    """It lost lines before it read them: it has what is left, as a new one has."""
    async with open_checkpointer("memory://") as cp:
        log, other = [await SessionLog.open(cp, session_id) for _ in range(2)]
        await log.append_message(user("old"))
        await other.refresh()
        ids = [await other.append_message(user(f"{n}")) for n in range(4)]
        await cp.trim(session_id, 4)

        with pytest.raises(VersionConflict):
            await log.append_message(user("early"))

        assert [one["id"] for one in await log.refresh()] == ids[2:]
        assert log.entries == (await SessionLog.open(cp, session_id)).entries
        assert texts(log.context().messages) == ["2", "3"]
        assert [one.version for one in log.versions()] == [5, 6]

        await log.append_message(user("later"))
        assert texts(log.context().messages) == ["2", "3", "later"]
        await other.refresh()
        assert texts(other.context().messages) == ["old", *"0123", "later"]


async def test_an_open_log_refuses_other_messages_after_a_trim(session_id: str) -> None:
    """The lines that it has not read are not entries."""
    async with open_checkpointer("memory://") as cp:
        log = await SessionLog.open(cp, session_id)
        await log.append_message(user("old"))
        await cp.append(session_id, [{"role": "user"}] * 3)
        await cp.trim(session_id, 3)

        for _ in range(2):
            with pytest.raises((NotASession, CorruptThread)):
                await log.refresh()

        assert texts(log.context().messages) == ["old"]


async def test_a_session_of_which_nothing_is_left_begins_again(session_id: str) -> None:
    """Its version goes on."""
    async with open_checkpointer("memory://") as cp:
        log = await SessionLog.open(cp, session_id)
        await log.append_message(user("old"))
        await cp.trim(session_id, 2)
        opened = await SessionLog.open(cp, session_id)
        await opened.append_message(user("new"))
        again = await SessionLog.open(cp, session_id)
        assert texts(again.context().messages) == ["new"]
        assert again.version == 3


async def test_a_trimmed_thread_of_plain_messages_is_refused_too(
    session_id: str,
) -> None:
    """It is refused, as it was before."""
    async with open_checkpointer("memory://") as cp:
        await cp.append(session_id, [{"role": "user"}] * 3)
        await cp.trim(session_id, 1)

        with pytest.raises(NotASession):
            await SessionLog.open(cp, session_id)
