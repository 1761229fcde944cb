"""The Claude Agent SDK's session store, in every store."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import claude_agent_sdk
import pytest
from claude_agent_sdk.testing import run_session_store_conformance

from cpkit import (
    BackendUnavailable,
    CorruptThread,
    InvalidId,
    MemoryCheckpointer,
    open_checkpointer,
)
from cpkit.integrations.claude_agent_sdk import ClaudeSessionStore, transcript_thread
from cpkit.sync import SyncCheckpointer
from tests.sessions.spy import Fault, RangeSpy, Spy
from tests.stores import LAYERED, fresh_url

KEY: Any = {"project_key": "project", "session_id": "session"}


def entry(uuid: str | None, **fields: Any) -> Any:
    return {"type": "user", **({} if uuid is None else {"uuid": uuid}), **fields}


@pytest.mark.parametrize("kind", LAYERED)
async def test_the_sdks_conformance_suite_passes(kind: str, tmp_path: Path) -> None:
    """All 14 contracts, each on a store of its own."""
    async with AsyncExitStack() as stack:
        count = iter(range(100))

        async def fresh() -> ClaudeSessionStore:
            folder = tmp_path / str(next(count))
            folder.mkdir()
            cp = open_checkpointer(fresh_url(kind, folder))
            return ClaudeSessionStore(await stack.enter_async_context(cp))

        await run_session_store_conformance(fresh)


async def test_an_entry_is_stored_once(url: str) -> None:
    """Two processes may deliver it, also at the same time, and again in a batch."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        stores = [ClaudeSessionStore(cp) for cp in (one, two)]
        batches = [[entry(f"{n}"), entry(f"{n + 1}")] for n in range(12)]
        await asyncio.gather(
            *(store.append(KEY, batch) for batch in batches for store in stores)
        )
        await stores[0].append(KEY, [entry("x"), entry("x"), entry(None), entry(None)])
        loaded: Any = await stores[1].load(KEY)

    uuids = [one.get("uuid") for one in loaded]
    assert sorted(uuids[:-3]) == sorted(str(n) for n in range(13))
    assert uuids[-3:] == ["x", None, None]


async def test_a_batch_with_a_lost_answer_is_stored_once() -> None:
    """Entries without a uuid too."""
    async with MemoryCheckpointer[Any]() as inner:
        lost: list[list[Fault]] = [["lost after"], ["lost before", "lost after"]]

        for faults in lost:
            await inner.delete_thread(transcript_thread(KEY))
            spy = Spy(inner)
            spy.faults.extend(faults)
            store = ClaudeSessionStore(spy)
            await store.append(KEY, [entry(None, n=1), entry("a")])
            assert await store.load(KEY) == [entry(None, n=1), entry("a")]


async def test_half_a_character_costs_no_batch(url: str) -> None:
    """A tool's output may be cut in the middle of one; the summary has it too."""
    cut: Any = {"role": "user", "content": "cut \ud83d"}
    batch = [entry("a"), entry("b", message=cut, customTitle="\udfff"), entry("c")]

    async with open_checkpointer(url) as cp:
        await ClaudeSessionStore(cp).append(KEY, batch)
        store = ClaudeSessionStore(cp)
        await store.append(KEY, [entry("b"), entry("d")])
        assert await store.load(KEY) == [*batch, entry("d")]
        (summary,) = await store.list_session_summaries("project")
        assert summary["data"]["custom_title"] == "\udfff"


async def test_a_bad_entry_costs_no_neighbour(caplog: pytest.LogCaptureFixture) -> None:
    """What is too large or no JSON is replaced by a text, and logged."""
    good = [entry(f"{n}", message={"role": "user", "content": "x"}) for n in range(9)]
    result = {"type": "tool_result", "tool_use_id": "t", "content": "y" * 5000}
    large = entry(
        "large", message={"role": "user", "content": [result]}, parentUuid="3"
    )
    odd = entry("odd", n=float("nan"), raw=b"x", cwd="/home")
    batch: Any = [*good[:4], large, *good[4:], odd, "no object"]

    async with MemoryCheckpointer[Any](max_payload=4000, max_append=8000) as cp:
        store = ClaudeSessionStore(cp)
        await store.append(KEY, batch)
        await store.append(KEY, batch[:-1])  # as the SDK does after an error
        loaded: Any = await store.load(KEY)
        assert [one.get("uuid") for one in loaded] == [
            *"0123",
            "large",
            *"45678",
            "odd",
            None,
        ]
        content = loaded[4]["message"]["content"][0]
        assert content.pop("content").startswith("[cpkit: not stored: 5002 bytes")
        assert content == {"type": "tool_result", "tool_use_id": "t"}
        assert loaded[4]["parentUuid"] == "3"
        assert loaded[10]["n"] == "[cpkit: not stored: nan is not a JSON number]"
        assert loaded[10]["cwd"] == "/home"
        assert loaded[11] == {"type": "cpkit", "content": "no object"}

    assert caplog.text.count("5002 bytes are more than the store takes") == 1


async def test_a_batch_above_one_append_is_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It takes several; the summary has all entries, and long titles cost nothing."""
    async with MemoryCheckpointer[Any](max_append=50_000) as cp:
        store = ClaudeSessionStore(cp)
        batch = [entry(f"{n}", text="x" * 7000) for n in range(20)]
        batch.append(entry("title", customTitle="t" * 30_000))
        await store.append(KEY, batch)
        await store.append(KEY, [entry("last")])
        assert await store.load(KEY) == [*batch, entry("last")]
        (summary,) = await store.list_session_summaries("project")
        assert len(str(summary)) < 2000

    assert caplog.text == ""


async def test_a_deletion_that_dies_leaves_no_session_without_its_subagents(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The session goes first; a repeated call erases the rest."""

    class Dying(ClaudeSessionStore):
        async def _erase(self, thread_id: str) -> None:
            if "sub" in thread_id:
                raise RuntimeError("died")

            await super()._erase(thread_id)

    store = ClaudeSessionStore(cp)
    await store.append(KEY, [entry("a")])
    await store.append({**KEY, "subpath": "sub"}, [entry("b")])

    with pytest.raises(RuntimeError, match="died"):
        await Dying(cp).delete(KEY)

    assert await store.list_sessions("project") == []
    assert await store.load(KEY) is None
    await store.delete(KEY)
    assert await cp.list_threads() == []


async def test_a_foreign_id_ends_no_list(cp: MemoryCheckpointer[Any]) -> None:
    """Another program has a thread with this prefix."""
    store = ClaudeSessionStore(cp)
    await cp.append("cpkit:claude-agent-sdk:project/other", [{"a": 1}])
    await cp.append("cpkit:claude-agent-sdk:project/a/b/c", [{"a": 1}])
    await store.append(KEY, [entry("a")])
    assert [one["session_id"] for one in await store.list_sessions("project")] == [
        "session"
    ]
    assert len(await store.list_session_summaries("project")) == 1


async def test_summaries_change_with_the_entries(url: str) -> None:
    """Two handles fold one summary, and the SDK lists it."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        stores = [ClaudeSessionStore(cp) for cp in (one, two)]

        for n, title in enumerate(["first", "second", "third"]):
            stamp = f"2026-01-0{n + 1}T00:00:00.000Z"
            await stores[n % 2].append(
                KEY, [entry(f"{n}", timestamp=stamp, customTitle=title)]
            )

        (summary,) = await stores[1].list_session_summaries("project")
        (listed,) = await stores[1].list_sessions("project")

    expected: Any = None

    for n, title in enumerate(["first", "second", "third"]):
        stamp = f"2026-01-0{n + 1}T00:00:00.000Z"
        expected = claude_agent_sdk.fold_session_summary(
            expected, KEY, [entry(f"{n}", timestamp=stamp, customTitle=title)]
        )

    assert summary["data"] == expected["data"]
    assert summary["mtime"] == listed["mtime"]


async def test_costs() -> None:
    """An append reads a transcript once; a summary reads its last entry."""
    async with MemoryCheckpointer[Any]() as inner:
        await ClaudeSessionStore(inner).append(KEY, [entry(f"{n}") for n in range(99)])
        cp = RangeSpy(inner)
        store = ClaudeSessionStore(cp)
        await store.append(KEY, [entry("5"), entry("new")])
        await store.append(KEY, [entry("newer")])
        assert cp.calls == [
            ("load_range", 0, None),
            ("append", 1, 99),
            ("append", 1, 100),
        ]


async def test_keys_never_meet(url: str) -> None:
    """Slashes, percent signs and letter case are ordinary characters."""
    names = ["a", "A", "a/b", "a%2Fb", "a%", "é", "*", "..", "a b"]
    keys: list[Any] = [
        {"project_key": project, "session_id": session}
        for project in names
        for session in names
    ]

    async with open_checkpointer(url) as cp:
        store = ClaudeSessionStore(cp)

        for n, key in enumerate(keys):
            await store.append(key, [entry(f"{n}")])
            await store.append({**key, "subpath": "x/y"}, [entry(f"sub {n}")])

        for n, key in enumerate(keys):
            assert await store.load(key) == [entry(f"{n}")]
            assert await store.list_subkeys(key) == ["x/y"]

        for project in names:
            sessions = await store.list_sessions(project)
            assert sorted(one["session_id"] for one in sessions) == sorted(names)

        await store.delete(keys[0])
        left = [await store.load(key) for key in keys]
        assert left[0] is None
        assert all(left[1:])

        with pytest.raises(InvalidId):
            await store.append({**KEY, "subpath": ""}, [entry("a")])


async def test_a_deleted_transcript_starts_again(url: str) -> None:
    """Another process deleted it: entries of the old one may be stored again."""
    async with open_checkpointer(url) as one, open_checkpointer(url) as two:
        first, second = ClaudeSessionStore(one), ClaudeSessionStore(two)
        await first.append(KEY, [entry("a"), entry("b")])
        await second.delete(KEY)
        await first.append(KEY, [entry("a"), entry("c")])
        assert await second.load(KEY) == [entry("a"), entry("c")]


async def test_entries_of_a_deleted_transcript_are_stored_again(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The SDK delivers a batch again; the transcript was deleted in between."""
    first, second = ClaudeSessionStore(cp), ClaudeSessionStore(cp)
    await first.append(KEY, [entry("a")])
    await first.append(KEY, [entry("b")])
    await second.delete(KEY)
    await first.append(KEY, [entry("a"), entry("b")])
    assert await second.load(KEY) == [entry("a"), entry("b")]


async def test_a_new_transcript_of_the_same_length_keeps_all_entries(
    cp: MemoryCheckpointer[Any],
) -> None:
    """It took an append of a process that knew the deleted one."""
    first, second = ClaudeSessionStore(cp), ClaudeSessionStore(cp)
    await first.append(KEY, [entry("a")])
    await first.append(KEY, [entry("b")])
    await second.delete(KEY)
    await second.append(KEY, [entry("c"), entry("d")])
    await first.append(KEY, [entry("e")])
    await first.append(KEY, [entry("a")])
    assert await second.load(KEY) == [entry(one) for one in "cdea"]


def test_a_sync_checkpointer_serves_any_loop() -> None:
    """The store has an event loop of its own."""
    with SyncCheckpointer("memory://") as cp:
        store = ClaudeSessionStore(cp)
        asyncio.run(store.append(KEY, [entry("a")]))
        assert asyncio.run(store.load(KEY)) == [entry("a")]


async def test_a_foreign_message_is_an_error(cp: MemoryCheckpointer[Any]) -> None:
    """Another program wrote into the thread."""
    await cp.append(transcript_thread(KEY), [{"other": 1}])

    with pytest.raises(CorruptThread):
        await ClaudeSessionStore(cp).load(KEY)


async def test_a_store_that_is_down_is_reported(cp: MemoryCheckpointer[Any]) -> None:
    """The SDK retries the batch; nothing is stored twice then."""
    spy = Spy(cp)
    spy.faults.append("refused")
    store = ClaudeSessionStore(spy)

    with pytest.raises(BackendUnavailable):
        await store.append(KEY, [entry("a")])

    await store.append(KEY, [entry("a")])
    assert await store.load(KEY) == [entry("a")]
