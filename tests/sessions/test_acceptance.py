"""The five purposes of a session, on every store and over a restart."""

from __future__ import annotations

from typing import Any

from cpkit import open_checkpointer
from cpkit.sessions import Model, SessionLog
from tests.sessions.talk import assistant, texts, user


async def test_no_operation_changes_stored_messages(url: str, session_id: str) -> None:
    """Every operation of a session only appends to its thread."""
    async with open_checkpointer(url) as cp:
        log = await SessionLog.open(cp, session_id, cwd="/work")
        seen: list[dict[str, Any]] = []

        first = await log.append_message(user("one"))
        second = await log.append_message(assistant("two"))

        for change in (
            log.append_message(user("three")),
            log.append_model_change("lab", "large"),
            log.append_thinking_level("high"),
            log.append_state(plan=["look"]),
            log.append_custom("note", {"n": 1}),
            log.append_custom_message("hint", "be brief"),
            log.label(first, "start"),
            log.set_name("A session"),
            log.append_compaction("so far", second, tokens_before=10),
            log.move_to(first),
            log.move_to(second, "tried three"),
            log.append_message(user("four")),
        ):
            await change
            data = await cp.load(session_id)
            assert data is not None
            assert data.messages[: len(seen)] == seen
            assert len(data.messages) == log.version
            seen = list(data.messages)

        assert seen[1:] == log.entries


async def test_a_reopened_session_continues_at_its_leaf(
    url: str, session_id: str
) -> None:
    """After a restart the leaf is the same, also on a branch."""
    async with open_checkpointer(url) as cp:
        log = await SessionLog.open(cp, session_id)
        await log.append_message(user("fly"))
        fork = await log.append_message(assistant("where to?"))
        await log.append_message(user("Rome"))
        await log.move_to(fork)
        await log.append_message(user("Oslo"))
        moved = await log.move_to(fork)

    async with open_checkpointer(url) as cp:
        again = await SessionLog.open(cp, session_id)
        assert again.leaf_id == moved
        assert texts(again.context().messages) == ["fly", "where to?"]

        await again.append_message(user("Bonn"))
        assert texts(again.context().messages) == ["fly", "where to?", "Bonn"]
        assert again.header == log.header


async def test_a_model_change_sets_the_default_model(url: str, session_id: str) -> None:
    """It survives a restart, and adds no message to the context."""
    async with open_checkpointer(url) as cp:
        log = await SessionLog.open(cp, session_id)
        await log.append_message(user("hello"))
        await log.append_message(assistant("hi", model="small"))
        await log.append_model_change("lab", "large")
        await log.append_thinking_level("high")

    async with open_checkpointer(url) as cp:
        context = (await SessionLog.open(cp, session_id)).context()
        assert context.model == Model("lab", "large")
        assert context.thinking_level == "high"
        assert texts(context.messages) == ["hello", "hi"]


async def test_an_inactive_branch_stays_readable(url: str, session_id: str) -> None:
    """A fork from an earlier entry does not change the old branch."""
    async with open_checkpointer(url) as cp:
        log = await SessionLog.open(cp, session_id)
        await log.append_message(user("fly"))
        fork = await log.append_message(assistant("where to?"))
        await log.append_message(user("Rome"))
        old = await log.append_message(assistant("booked Rome"))
        before = log.context(old)
        await log.move_to(fork, "Rome was too hot")
        new = await log.append_message(user("Oslo"))

    async with open_checkpointer(url) as cp:
        again = await SessionLog.open(cp, session_id)
        assert again.leaves() == [old, new]
        assert again.context(old) == before
        assert texts(again.context().messages) == [
            "fly",
            "where to?",
            "Rome was too hot",
            "Oslo",
        ]


async def test_a_compaction_changes_only_the_context(url: str, session_id: str) -> None:
    """A summary replaces earlier messages; every entry stays in the log."""
    async with open_checkpointer(url) as cp:
        log = await SessionLog.open(cp, session_id)
        ids = [await log.append_message(user(str(n))) for n in range(5)]
        entries = log.entries
        await log.append_compaction("0 to 2", ids[3], tokens_before=900)
        await log.append_message(user("5"))

    async with open_checkpointer(url) as cp:
        again = await SessionLog.open(cp, session_id)
        assert texts(again.context().messages) == ["0 to 2", "3", "4", "5"]
        assert again.entries[:5] == entries
        assert texts(again.context(ids[4]).messages) == ["0", "1", "2", "3", "4"]

        await again.move_to(ids[4])
        await again.append_message(user("another 5"))
        assert texts(again.context().messages) == ["0", "1", "2", "3", "4", "another 5"]
