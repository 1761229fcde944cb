"""Branches, earlier versions and forks of a session."""

from __future__ import annotations

from typing import Any

import pytest

from cpkit import VersionConflict, open_checkpointer
from cpkit.sessions import SessionLog, UnknownEntry
from tests.sessions.conftest import Store
from tests.sessions.talk import assistant, texts, user

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


async def test_a_branch_or_a_fork_begins_with_a_message(
    cp: Store, session_id: str
) -> None:
    """In one append, so that no crash leaves one without it."""
    log = await SessionLog.open(cp, session_id)
    first = await log.append_message(user("one"))
    old = await log.append_message(user("two"))
    version = log.version
    await log.append_message(user("another"), after=first)
    assert log.version == version + 1
    assert texts(log.context().messages) == ["one", "another"]
    assert log.leaves() == [old, log.leaf_id]

    fork = await log.fork(session_id + "-fork", first, message=user("elsewhere"))
    again = await SessionLog.open(cp, session_id + "-fork")
    assert again.version == fork.version == 3
    assert texts(again.context().messages) == ["one", "elsewhere"]

    with pytest.raises(UnknownEntry):
        await log.append_message(user("nowhere"), after="unknown")

    assert await log.refresh() == []
