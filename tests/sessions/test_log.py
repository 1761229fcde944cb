"""Further promises of a session log."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cpkit import (
    BackendUnavailable,
    CorruptThread,
    MemoryCheckpointer,
    SchemaMismatch,
    SerializationError,
    VersionConflict,
    open_checkpointer,
)
from cpkit.messages import Message, UserMessage
from cpkit.sessions import SessionLog, UnknownEntry
from tests.sessions.conftest import Store
from tests.sessions.spy import RangeSpy, Spy
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

    with pytest.raises(CorruptThread, match="no session header"):
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
        assert [call[0] for call in spy.calls] == ["read", "append"]
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


# Reading


async def test_the_tree_has_every_entry(cp: Store, session_id: str) -> None:
    """Children are in the order of the log."""
    log = await SessionLog.open(cp, session_id)
    a = await log.append_message(user("a"))
    b = await log.append_message(user("b"))
    to_a = await log.move_to(a)
    c = await log.append_message(user("c"))
    to_start = await log.move_to(None)
    d = await log.append_message(user("d"))
    marked = await log.label(b, "b!")

    first, second = log.tree()
    assert first.entry["id"] == a
    assert [child.entry["id"] for child in first.children] == [b, to_a]
    assert first.children[0].label == "b!"
    assert first.children[1].children[0].entry["id"] == c
    assert second.entry["id"] == to_start
    assert log.leaves() == [b, c, marked]
    assert [entry["id"] for entry in log.branch()] == [to_start, d, marked]
    assert [entry["id"] for entry in log.branch(c)] == [a, to_a, c]


async def test_a_long_session_needs_no_recursion(cp: Store, session_id: str) -> None:
    """A tree deeper than Python's stack is built, shown and freed."""
    header: dict[str, Any] = {"type": "session", "id": session_id, "version": 3}
    entries: list[dict[str, Any]] = [
        {"type": "x", "id": str(n), "parentId": str(n - 1) if n else None}
        for n in range(20_000)
    ]
    await cp.append(session_id, [header, *entries])
    log = await SessionLog.open(cp, session_id)
    (root,) = log.tree()
    assert "'0'" in repr(root)
    assert len(log.branch()) == 20_000


async def test_every_version_can_be_shown(cp: Store, session_id: str) -> None:
    """The state is the one at that version."""
    log = await SessionLog.open(cp, session_id)
    await log.append_state(plan=["look", "book"], spent=0)
    middle = await log.append_state(spent=2)
    await log.append_message(user("one"))
    await log.label(middle, "cheap")
    await log.move_to(middle)
    await log.append_state(plan=["walk"])

    versions = log.versions()
    assert [point.version for point in versions] == [2, 3, 4, 5, 6, 7]
    assert [point.entry_id for point in versions] == [e["id"] for e in log.entries]
    assert [point.label for point in versions] == [None, "cheap", *[None] * 4]
    assert all(point.time is not None for point in versions)
    states = [log.at(point.version).state for point in versions]
    assert states == [
        {"plan": ["look", "book"], "spent": 0},
        *[{"plan": ["look", "book"], "spent": 2}] * 4,
        {"plan": ["walk"], "spent": 2},
    ]
    assert log.at(1).state == {}
    assert log.at(log.version) == log.context()

    for version in (0, 8, -1):
        with pytest.raises(ValueError, match="versions 1 to 7"):
            log.at(version)


# Forking


async def test_a_fork_is_a_separate_session(url: str, session_id: str) -> None:
    """It has the branch with its labels and name; neither changes the other."""
    async with open_checkpointer(url) as cp:
        log = await SessionLog.open(cp, session_id, cwd="/work")
        first = await log.append_message(user("one"))
        second = await log.append_message(assistant("two", model="small"))
        await log.append_state(spent=1)
        await log.move_to(first)
        await log.label(first, "start")
        await log.label(second, "answer")
        await log.set_name("Trip")
        await log.append_message(user("elsewhere"))

        fork = await log.fork(session_id + "-fork", second)
        assert fork.header["parentSession"] == session_id
        assert fork.header["cwd"] == "/work"
        assert fork.context() == log.context(second)
        assert fork.entries[:2] == log.branch(second)
        assert (fork.labels, fork.name) == (log.labels, "Trip")

        await fork.append_message(user("in the fork"))
        assert await log.refresh() == []
        again = await SessionLog.open(cp, session_id + "-fork")
        assert texts(again.context().messages) == ["one", "two", "in the fork"]

        with pytest.raises(VersionConflict):
            await log.fork(session_id + "-fork")


async def test_a_removed_label_stays_removed_in_a_fork(
    cp: Store, session_id: str
) -> None:
    """This holds if another branch removed the label."""
    log = await SessionLog.open(cp, session_id)
    first = await log.append_message(user("one"))
    await log.label(first, "start")
    old = await log.append_message(user("two"))
    await log.move_to(first)
    await log.label(first, None)
    fork = await log.fork(session_id + "-fork", old)
    assert fork.labels == log.labels == {}
    assert texts(fork.context().messages) == ["one", "two"]


async def test_a_fork_can_move_to_another_folder(cp: Store, session_id: str) -> None:
    """An empty session can be forked too."""
    log = await SessionLog.open(cp, session_id, cwd="/work")
    fork = await log.fork(session_id + "-fork", cwd="/other")
    assert (fork.header["cwd"], fork.version, fork.entries) == ("/other", 1, [])
    again = await SessionLog.open(cp, session_id + "-fork")
    assert again.header == fork.header


async def _messages(log: SessionLog) -> list[Any]:
    await log.refresh()
    return log.context().messages
