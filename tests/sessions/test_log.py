"""What a session log promises beside the five criteria."""

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
    """Opening writes nothing; the first append writes the header too, in one."""
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


async def test_a_thread_with_extra_alone_is_a_new_session(
    cp: Store, session_id: str
) -> None:
    """What an agent keeps beside the messages is no session yet."""
    await cp.save_extra(session_id, {"budget": 5})
    log = await SessionLog.open(cp, session_id)
    await log.append_message(user("hello"))
    assert log.version == 2


async def test_a_thread_that_is_no_session_is_refused(
    cp: Store, session_id: str
) -> None:
    """Plain messages are not taken for entries."""
    await cp.append(session_id, [user("hello")])

    with pytest.raises(CorruptThread, match="no session header"):
        await SessionLog.open(cp, session_id)


async def test_a_store_of_typed_messages_is_refused(session_id: str) -> None:
    """Entries are JSON objects; the error says how to open the store."""
    async with open_checkpointer("memory://", message_type=Message) as cp:
        await cp.append(session_id, [UserMessage(content="hello")])

        with pytest.raises(TypeError, match="message_type"):
            await SessionLog.open(cp, session_id)


@pytest.mark.parametrize("version", [4, "3", True, None, 0])
async def test_another_version_is_refused(
    cp: Store, session_id: str, version: Any
) -> None:
    """A session of a newer program is not guessed at."""
    await cp.append(
        session_id, [{"type": "session", "id": session_id, "version": version}]
    )

    with pytest.raises(SchemaMismatch):
        await SessionLog.open(cp, session_id)


async def test_an_old_session_in_the_store_is_refused(
    cp: Store, session_id: str
) -> None:
    """History is not rewritten to migrate it."""
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
async def test_a_line_that_is_no_entry_is_corruption(
    cp: Store, session_id: str, entry: dict[str, Any], reason: str
) -> None:
    """The error says which message of the thread it is, and why."""
    header: dict[str, Any] = {"type": "session", "id": session_id, "version": 3}
    await cp.append(session_id, [header, {"type": "x", "id": "first"}, entry])

    with pytest.raises(CorruptThread, match=f"message 2: {reason}"):
        await SessionLog.open(cp, session_id)


# Appending


async def test_each_append_follows_the_leaf(cp: Store, session_id: str) -> None:
    """Entries of every type have the fields that the format gives them."""
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
    """A key may be called like an argument."""
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
    """The log sets what links its entries, and its header."""
    log = await SessionLog.open(cp, session_id)

    with pytest.raises(ValueError, match="cannot append this entry"):
        await log.append_entry(entry)

    assert log.version == 0


async def test_an_unknown_entry_is_refused(cp: Store, session_id: str) -> None:
    """Whatever takes an entry's id says so where there is no such entry."""
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


async def test_what_json_cannot_hold_is_refused(cp: Store, session_id: str) -> None:
    """Nothing is written, and the error has the path."""
    log = await SessionLog.open(cp, session_id)

    with pytest.raises(SerializationError) as caught:
        await log.append_state(budget=float("inf"))

    assert caught.value.path == (0, "data", "budget")
    not_a_dict: Any = ["hello"]

    with pytest.raises(SerializationError):
        await log.append_message(not_a_dict)

    assert (log.version, log.entries) == (0, [])


async def test_the_log_keeps_no_hand_on_what_it_was_given(
    cp: Store, session_id: str
) -> None:
    """What a caller does to its message, or to a context, changes no log."""
    log = await SessionLog.open(cp, session_id)
    message = assistant("one")
    await log.append_message(message)
    message["content"][0]["text"] = "changed"
    context = log.context()
    context.messages[0]["content"][0]["text"] = "changed"
    assert texts(log.context().messages) == ["one"]


async def test_tasks_that_share_a_log_take_turns(cp: Store, session_id: str) -> None:
    """Each append follows the one before it; none is refused."""
    log = await SessionLog.open(cp, session_id)
    ids = await asyncio.gather(*(log.append_message(user(str(n))) for n in range(50)))
    assert [entry["id"] for entry in log.branch()] == ids
    assert (await SessionLog.open(cp, session_id)).entries == log.entries


async def test_a_cancelled_append_leaves_the_log_in_step(session_id: str) -> None:
    """The entry is there, in the store and in the log, and the next one follows it."""
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


async def test_the_loser_writes_nothing_and_can_retry(
    url: str, session_id: str
) -> None:
    """Of two writers one gets VersionConflict, refreshes, and follows the other."""
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


async def test_two_that_begin_a_session_meet(cp: Store, session_id: str) -> None:
    """One writes the header; the other takes it over."""
    one = await SessionLog.open(cp, session_id, cwd="/one")
    two = await SessionLog.open(cp, session_id, cwd="/two")
    await one.append_message(user("one"))

    with pytest.raises(VersionConflict):
        await two.append_message(user("two"))

    await two.refresh()
    assert two.header == one.header
    await two.append_message(user("two"))
    assert texts(two.context().messages) == ["one", "two"]


async def test_a_session_that_was_replaced_is_noticed(
    session_id: str,
) -> None:
    """A log does not go on with a thread that was deleted under it."""
    async with MemoryCheckpointer[Any]() as cp:
        log = await SessionLog.open(cp, session_id)
        await log.append_message(user("one"))
        await cp.delete_thread(session_id)

        with pytest.raises(CorruptThread, match="deleted or replaced"):
            await log.refresh()

        with pytest.raises(VersionConflict):
            await log.append_message(user("two"))


# Answers that get lost


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
async def test_a_lost_answer_does_not_double_an_entry(
    session_id: str, kind: type[Spy], faults: list[Any]
) -> None:
    """Whether the append had landed or not, the entry is there once."""
    async with MemoryCheckpointer[Any]() as store:
        spy = kind(store)
        log = await SessionLog.open(spy, session_id)

        for text in "one", "two":
            spy.faults.extend(faults)
            await log.append_message(user(text))

        assert texts(log.context().messages) == ["one", "two"]
        assert (await SessionLog.open(store, session_id)).entries == log.entries


async def test_another_writers_entry_is_not_taken_for_ours(session_id: str) -> None:
    """After a lost answer the version may be taken by somebody else."""
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
async def test_a_store_that_stays_silent_leaves_it_open(
    session_id: str, landed: bool
) -> None:
    """The error says that the entry may be there, and refresh tells."""
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


async def test_a_refused_append_is_not_made_again(session_id: str) -> None:
    """What is proven not to have run is the caller's to repeat."""
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


async def test_a_check_that_fails_too_leaves_it_open(session_id: str) -> None:
    """The conflict alone does not say whose entry it was."""
    async with MemoryCheckpointer[Any]() as store:
        spy = RangeSpy(store)
        log = await SessionLog.open(spy, session_id)
        spy.faults.append("lost after")
        spy.read_faults.extend(["refused", "refused"])

        with pytest.raises(BackendUnavailable) as caught:
            await log.append_message(user("one"))

        assert caught.value.maybe_applied
        assert texts(await _messages(log)) == ["one"]


# Walking


async def test_the_tree_has_every_entry(cp: Store, session_id: str) -> None:
    """Children come in the order in which they were written."""
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


async def test_a_long_session_is_no_deep_recursion(cp: Store, session_id: str) -> None:
    """A tree far deeper than Python's stack can be built, shown and thrown away."""
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


async def test_every_version_can_be_seen_again(cp: Store, session_id: str) -> None:
    """Going back brings back the plan and the budget as they were."""
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


async def test_a_fork_is_a_session_of_its_own(url: str, session_id: str) -> None:
    """It has the branch with its labels and name, and neither changes the other."""
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


async def test_a_label_that_was_taken_away_stays_away_in_a_fork(
    cp: Store, session_id: str
) -> None:
    """Also where it was taken away on another branch."""
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
    """An empty session can be forked as well."""
    log = await SessionLog.open(cp, session_id, cwd="/work")
    fork = await log.fork(session_id + "-fork", cwd="/other")
    assert (fork.header["cwd"], fork.version, fork.entries) == ("/other", 1, [])
    again = await SessionLog.open(cp, session_id + "-fork")
    assert again.header == fork.header


async def _messages(log: SessionLog) -> list[Any]:
    await log.refresh()
    return log.context().messages
