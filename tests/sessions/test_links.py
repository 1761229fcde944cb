"""How entries are linked: parents in any order, missing parents and cycles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkit import open_checkpointer
from cpkit.sessions import SessionLog, TreeNode
from tests.sessions.conftest import Store
from tests.sessions.samples import as_file
from tests.sessions.talk import texts, user

Entry = dict[str, Any]


def said(entry_id: str, parent_id: object) -> Entry:
    """Return a message entry that says its own id."""
    return {
        "type": "message",
        "id": entry_id,
        "parentId": parent_id,
        "message": user(entry_id),
    }


async def opened(cp: Store, session_id: str, *entries: Entry) -> SessionLog:
    """Store a session of these entries and open it."""
    header: Entry = {"type": "session", "id": session_id, "version": 3}
    await cp.append(session_id, [header, *entries])
    return await SessionLog.open(cp, session_id)


async def test_an_entry_stays_when_its_parent_stands_later(
    cp: Store, session_id: str
) -> None:
    """The branch of the last entry goes on to the entry that follows it."""
    log = await opened(cp, session_id, said("a", None), said("c", "b"), said("b", "a"))
    assert texts(log.context().messages) == ["a", "b", "c"]
    assert log.at(log.version) == log.context()
    assert (log.leaf_id, log.leaves(), log.orphans) == ("c", ["c"], [])

    await log.append_message(user("d"))
    assert log.entries[-1]["parentId"] == "c"
    again = await SessionLog.open(cp, session_id)
    assert texts(again.context().messages) == ["a", "b", "c", "d"]


async def test_a_parent_that_stands_later_keeps_its_place_in_the_branch(
    cp: Store, session_id: str
) -> None:
    """The branch has every entry once, in the order of parents."""
    log = await opened(
        cp,
        session_id,
        said("a", None),
        said("c", "b"),
        said("b", "a"),
        said("d", "c"),
    )
    assert texts(log.context().messages) == ["a", "b", "c", "d"]
    assert log.leaf_id == "d"
    assert log.orphans == []


async def test_a_parent_that_arrives_later_is_linked(
    cp: Store, session_id: str
) -> None:
    """After a refresh, the links equal those of a log that is opened now."""
    log = await opened(cp, session_id, said("a", None), said("c", "b"))
    assert log.orphans == ["c"]
    assert texts(log.context().messages) == ["a", "c"]

    await cp.append(session_id, [said("x", None), said("b", "x")])
    await log.refresh()
    assert log.orphans == []
    assert texts(log.context().messages) == ["x", "b", "c"]
    again = await SessionLog.open(cp, session_id)
    assert again.context() == log.context()


async def test_a_file_out_of_order_is_imported_completely(
    cp: Store, tmp_path: Path
) -> None:
    """The context has every entry, and the export has the file's order."""
    lines = [said("a", None), said("c", "b"), said("b", "a")]
    header: Entry = {"type": "session", "id": "s-1", "version": 3}
    path = as_file(tmp_path, [header, *lines])
    log = await SessionLog.import_jsonl(cp, path)
    assert texts(log.context().messages) == ["a", "b", "c"]
    await log.export_jsonl(tmp_path / "out.jsonl")
    exported = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in exported] == [header, *lines]


async def test_an_orphan_continues_the_entry_before_it(
    cp: Store, session_id: str
) -> None:
    """A lost line does not hide the branch before it, and is reported."""
    entries = [
        said("a", None),
        said("c", "lost"),
        said("d", "d"),
        said("e", ["?"]),
    ]
    log = await opened(cp, session_id, *entries)
    assert texts(log.context().messages) == ["a", "c", "d", "e"]
    assert log.orphans == ["c", "d", "e"]
    assert log.entries == entries


async def test_an_orphan_keeps_followers_that_stand_before_it(
    cp: Store, session_id: str
) -> None:
    """It continues the entry before the first of them, never its own follower."""
    log = await opened(
        cp, session_id, said("a", None), said("c", "b"), said("b", "lost")
    )
    assert texts(log.context().messages) == ["a", "b", "c"]
    assert log.orphans == ["b"]


async def test_a_cycle_is_cut_at_its_first_entry(cp: Store, session_id: str) -> None:
    """That entry is an orphan; the others keep their parents."""
    log = await opened(
        cp,
        session_id,
        said("a", None),
        said("b", "d"),
        said("c", "b"),
        said("d", "c"),
        said("e", "d"),
    )
    assert texts(log.context().messages) == ["a", "b", "c", "d", "e"]
    assert log.orphans == ["b"]


async def test_a_cycle_at_the_start_begins_the_session(
    cp: Store, session_id: str
) -> None:
    """Without an entry before it, the orphan follows none."""
    log = await opened(cp, session_id, said("a", "b"), said("b", "a"))
    assert texts(log.context().messages) == ["a", "b"]
    assert log.orphans == ["a"]
    assert [root.entry["id"] for root in log.tree()] == ["a"]


@pytest.mark.parametrize("parent", ["next", "lost"])
async def test_a_long_log_out_of_order_is_linked(
    cp: Store, session_id: str, parent: str
) -> None:
    """20,000 entries, each before its parent, or each without one."""
    count = 20_000
    entries = [
        said(str(n), str(n + 1) if parent == "next" else "lost") for n in range(count)
    ]
    log = await opened(cp, session_id, *entries)
    assert len(log.branch()) == count
    assert len(log.orphans) == (1 if parent == "next" else count)


ids = st.sampled_from([f"e{n}" for n in range(8)])
parents = st.none() | ids | st.sampled_from(["lost", "gone"])


@given(links=st.dictionaries(ids, parents, min_size=1), cut=st.integers(0, 8))
async def test_no_entry_leaves_the_tree(links: dict[str, str | None], cut: int) -> None:
    """The tree has every entry once, with any parents and any batches."""
    entries = [said(entry_id, parent) for entry_id, parent in links.items()]
    header: Entry = {"type": "session", "id": "s", "version": 3}

    async with open_checkpointer("memory://") as cp:
        await cp.append("s", [header, *entries[:cut]])
        log = await SessionLog.open(cp, "s")
        await cp.append("s", entries[cut:])
        await log.refresh()
        again = await SessionLog.open(cp, "s")
        fork = await log.fork("fork")

    found = walked(log.tree())
    assert sorted(found) == sorted(links)
    assert found == walked(again.tree())
    assert log.leaf_id in log.leaves()
    assert log.at(log.version) == log.context() == fork.context()

    for entry_id, parent in found.items():
        if entry_id not in log.orphans:
            assert parent == links[entry_id]

    for orphan in log.orphans:
        assert links[orphan] is not None


@given(data=st.data())
async def test_the_order_of_the_lines_changes_no_branch(data: st.DataObject) -> None:
    """A complete log in any order of lines gives the same branches."""
    links: dict[str, str | None] = {}

    for number in range(data.draw(st.integers(1, 8))):
        links[f"e{number}"] = data.draw(st.sampled_from([None, *links]))

    entries = [said(entry_id, parent) for entry_id, parent in links.items()]

    async with open_checkpointer("memory://") as cp:
        log = await opened(cp, "in order", *entries)
        shuffled = await opened(cp, "shuffled", *data.draw(st.permutations(entries)))

    assert shuffled.orphans == []
    assert walked(shuffled.tree()) == links

    for entry_id in links:
        assert shuffled.branch(entry_id) == log.branch(entry_id)


def walked(roots: list[TreeNode]) -> dict[str, str | None]:
    """Return the parent of each entry in a tree; no entry stands twice."""
    found: dict[str, str | None] = {}
    todo: list[tuple[TreeNode, str | None]] = [(root, None) for root in roots]

    while todo:
        node, parent = todo.pop()
        entry_id = node.entry["id"]
        assert entry_id not in found
        found[entry_id] = parent
        todo += [(child, entry_id) for child in node.children]

    return found
