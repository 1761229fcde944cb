"""A policy deletes and cuts what it says, and leaves what is in use."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cpkit import ToolCall, open_checkpointer, retention
from cpkit.retention import Retention, prune

NOTHING = timedelta(0)


def turns(number: int, **fields: Any) -> list[dict[str, Any]]:
    """Return so many turns of two messages."""
    turn = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "ok"}]
    return [{**one, **fields} for one in turn * number]


@pytest.mark.parametrize("dry_run", [True, False])
async def test_the_last_messages_stay(any_url: str, dry_run: bool) -> None:
    """Older ones go, between turns; calls, keys and extra stay."""
    async with open_checkpointer(any_url) as cp:
        await cp.append("a", turns(10), extra={"k": 1})
        await cp.append("short", turns(2))
        await cp.append("cpkit:own", turns(10))
        await cp.record_issued("a", ToolCall("c", "pay", {}, "paid"))
        await cp.record_result("a", "c", "done")
        report = await prune(cp, Retention(keep_last=5), dry_run=dry_run)
        assert (report.cut_threads, report.cut_messages) == (1, 14)
        assert (report.threads, report.messages) == (0, 0)
        data = await cp.load("a")
        assert data is not None
        assert data.version == 20
        assert data.extra == {"k": 1}
        assert await cp.find_completed("paid") is not None

        if dry_run:
            assert report.bytes == 14 // 2 * (30 + 35)
            assert len(data.messages) == 20
        else:
            assert report.bytes is None
            assert (data.first, data.messages) == (14, turns(3))
            assert not await prune(cp, Retention(keep_last=5))


async def test_messages_go_by_their_own_time() -> None:
    """Those without a time go with the next older one; without any, none does."""
    now = datetime.now(UTC)
    old, new = (str(now - timedelta(days=days)) for days in (40, 1))

    async with open_checkpointer("memory://") as cp:
        await cp.append(
            "a", [*turns(2, timestamp=old), *turns(2), *turns(1, timestamp=new)]
        )
        await cp.append("b", [*turns(2), *turns(1, timestamp=old), *turns(1)])
        await cp.append("c", turns(5))
        policy = Retention(messages_older_than=timedelta(days=30))
        report = await prune(cp, policy)
        firsts = {name: (await cp.load(name)).first for name in "abc"}  # type: ignore[union-attr]
        assert firsts == {"a": 4, "b": 6, "c": 0}
        assert report.cut_messages == 10


async def test_what_was_cut_before_is_not_counted_again() -> None:
    """A message may have half an emoji, which no UTF-8 encodes."""
    async with open_checkpointer("memory://") as cp:
        await cp.append("a", [*turns(2), {"role": "user", "content": "\ud83d"}])
        await cp.trim("a", 4)
        policy = Retention(older_than=NOTHING)
        planned = await prune(cp, policy, dry_run=True)
        assert (planned.threads, planned.messages) == (1, 1)
        assert planned.bytes
        assert (await prune(cp, policy)).messages == 1


async def test_a_policy_is_limited_by_a_prefix() -> None:
    """Another tenant's threads stay."""
    async with open_checkpointer("memory://") as cp:
        for name in ("a:1", "b:1"):
            await cp.append(name, turns(5))

        await prune(cp, Retention(prefix="a:", older_than=NOTHING))
        assert [one.thread_id for one in await cp.list_threads()] == ["b:1"]


def asks(name: str) -> dict[str, Any]:
    call = {"id": name, "type": "function", "function": {"name": "f", "arguments": ""}}
    return {"role": "assistant", "tool_calls": [call]}


def answers(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": "ok"}


def trimmed_after(cp: Any, write: Any) -> Any:
    """Return the store's trim, before which another writer acts."""
    trim = cp.trim

    async def write_and_trim(*args: Any, **options: Any) -> int:
        await write()
        return int(await trim(*args, **options))

    return write_and_trim


@pytest.mark.parametrize(
    ("new", "is_cut"),
    [
        (turns(1), True),
        ([answers("kept"), asks("new"), answers("new")], True),
        ([*turns(1), answers("old")], False),
    ],
    ids=["a turn", "the result of a call that stays", "of one that would go"],
)
async def test_a_thread_that_grows_meanwhile_is_cut(
    any_url: str, new: list[Any], is_cut: bool
) -> None:
    """The trim is tried again, unless it would cut a result from its call."""
    async with open_checkpointer(any_url) as opened:
        cp: Any = opened
        stored = [turns(1)[0], asks("old"), *turns(4), turns(1)[0], asks("kept")]
        await cp.append("a", stored)
        is_first = [True]

        async def append() -> None:
            if is_first:
                is_first.pop()
                await cp.append("a", new)

        cp.trim = trimmed_after(cp, append)
        report = await prune(cp, Retention(keep_last=2))
        data = await cp.load("a")
        assert data.version == len(stored) + len(new)
        assert data.messages == [*stored, *new][10 * is_cut :]
        assert (report.cut_messages, report.touched) == (
            (10, []) if is_cut else (0, ["a"])
        )


async def test_a_thread_that_is_deleted_meanwhile_stays_as_it_is() -> None:
    """What is written under its id then is not what was looked at."""
    async with open_checkpointer("memory://") as opened:
        cp: Any = opened
        await cp.append("a", turns(5))

        async def write_again() -> None:
            await cp.delete_thread("a")
            await cp.append("a", turns(2))

        cp.trim = trimmed_after(cp, write_again)
        assert (await prune(cp, Retention(keep_last=2))).touched == ["a"]
        assert len((await cp.load("a")).messages) == 4


async def test_a_writer_that_never_pauses_ends_a_prune(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread is named, and the next prune tries again."""
    monkeypatch.setattr(retention, "_PATIENCE", 0.05)

    async with open_checkpointer("memory://") as opened:
        cp: Any = opened
        await cp.append("a", turns(5))

        async def append() -> None:
            await cp.append("a", turns(1))

        cp.trim = trimmed_after(cp, append)
        assert (await prune(cp, Retention(keep_last=2))).touched == ["a"]


async def test_a_thread_that_changes_before_its_deletion_stays() -> None:
    """A change of extra does not change the version, and counts too."""
    async with open_checkpointer("memory://") as opened:
        cp: Any = opened
        await cp.append("a", turns(1))
        await cp.append("b", turns(1))
        lists = cp.list_calls

        async def write_and_list(thread_id: str) -> Any:
            if thread_id == "a":
                await cp.save_extra("a", {"k": 1})

            return await lists(thread_id)

        cp.list_calls = write_and_list
        report = await prune(cp, Retention(older_than=NOTHING))
        assert (report.threads, report.touched) == (1, ["a"])
        assert [one.thread_id for one in await cp.list_threads()] == ["a"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "nothing may go"),
        ({"keep_last": 0}, "from 1 on, not 0"),
        ({"keep_last": True}, "from 1 on, not True"),
        ({"older_than": timedelta(-1)}, "from 0 to 1000 years"),
        ({"messages_older_than": 30}, "is a timedelta, not 30"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(
    options: dict[str, Any], said: str
) -> None:
    """Nothing goes by accident."""
    with pytest.raises((TypeError, ValueError), match=said):
        Retention(**options)
