"""The hash key of a store: one that differs is found before a call is made again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cpkit import InvalidURL, ToolCall, open_checkpointer
from cpkit.driver import Claim
from cpkit.driver.sealed import HASH_THREAD
from cpkit.privacy import erase, rewrap
from cpkit.tools.copying import ExportFile, copy_store, export_lines
from cpkit.tools.paging import thread_pages
from tests.privacy.raw import opened, ring
from tests.stores import KINDS, fresh_url
from tests.sweeps import sweep

HASHED = ring(hash_key=b"h" * 32)
CALL = ToolCall("c1", "pay", {"x": 1}, "card 4242")

OTHERS = {"another": ring(hash_key=b"o" * 32), "no": ring()}


async def pay(cp: Any, thread_id: str = "t") -> None:
    assert await cp.record_issued(thread_id, CALL) is None
    await cp.record_result(thread_id, "c1", {"paid": 1})


@pytest.mark.parametrize("kind", sweep(KINDS, ["memory", "sqlite"]))
async def test_a_ring_with_another_hash_key_opens_nothing(
    kind: str, tmp_path: Path
) -> None:
    """The same holds without one: it would pay again. The right one opens it again."""
    url = await asyncio.to_thread(fresh_url, kind, tmp_path)

    async with open_checkpointer(url, keyring=HASHED) as cp:
        await pay(cp)

        for words, other in OTHERS.items():
            with pytest.raises(InvalidURL, match=f"{words} hash_key"):
                async with open_checkpointer(url, keyring=other):
                    pytest.fail("it opened")

        async with open_checkpointer(url, keyring=HASHED) as again:
            assert await again.find_completed("card 4242") is not None


async def test_handles_that_open_a_new_store_at_once_agree(tmp_path: Path) -> None:
    """One of two hash keys wins, and every handle with the other one is refused."""
    rings = [HASHED, OTHERS["another"]] * 3

    async def attempt(keyring: Any) -> bool:
        try:
            async with opened(tmp_path, keyring):
                return True
        except InvalidURL:
            return False

    done = await asyncio.gather(*map(attempt, rings))
    assert done in ([True, False] * 3, [False, True] * 3)


async def test_a_store_with_threads_takes_no_hash_key(tmp_path: Path) -> None:
    """Their keys are on record as they are, and would not be found."""
    async with opened(tmp_path) as cp:
        await pay(cp)
        await cp.delete_thread("t")

    with pytest.raises(InvalidURL, match="threads from before"):
        async with opened(tmp_path, HASHED):
            pytest.fail("it opened")

    async with opened(tmp_path) as cp:
        assert await cp.find_completed("card 4242") is not None


async def test_an_opening_that_died_behind_the_claim_counts(tmp_path: Path) -> None:
    """The next one erases the call."""
    async with opened(tmp_path) as cp:
        mine = HASHED.hashed(HASH_THREAD) or ""
        claim = Claim(HASH_THREAD, "hash_key", mine, b"{}", HASH_THREAD)
        assert await cp.store._store.commit([claim]) == [None]

    async with opened(tmp_path, HASHED) as cp:
        [call] = await cp.list_calls(HASH_THREAD)
        assert (call.erased, call.status) == (True, "completed")

    with pytest.raises(InvalidURL, match="no hash_key"):
        async with opened(tmp_path):
            pytest.fail("it opened")


async def test_the_check_is_in_no_list(tmp_path: Path) -> None:
    """Neither of threads, nor in what tools go through; a tool does not erase it."""
    async with opened(tmp_path, HASHED) as cp:
        assert await cp.list_threads() == []
        assert [page async for page in thread_pages(cp, erased=True)] == []
        assert (await rewrap(cp)).threads == 0
        assert (await erase(cp, "cpkit:", forget_keys=True)).threads == []

    with pytest.raises(InvalidURL, match="no hash_key"):
        async with opened(tmp_path):
            pytest.fail("it opened")


async def test_hashed_keys_are_copied(tmp_path: Path) -> None:
    """A store with any hash key, or without one, finds those of erased calls too."""
    lines = tmp_path / "all.jsonl"

    async with opened(tmp_path, HASHED) as cp:
        await pay(cp, "gone")
        await cp.delete_thread("gone")
        await cp.append("t", [{"n": 1}])
        text = b"".join([line async for line in export_lines(cp, ["gone"])])
        await asyncio.to_thread(lines.write_bytes, text)

        for source in (cp, await asyncio.to_thread(ExportFile, lines)):
            for name, to in {"same": HASHED, **OTHERS, "plain": None}.items():
                url = f"sqlite:///{tmp_path}/{name} {type(source).__name__}.db"

                async with open_checkpointer(url, keyring=to) as copy:
                    assert (await copy_store(source, copy)).is_complete
                    found = await copy.find_completed("card 4242")
                    assert found is not None
                    assert found.erased
                    assert await copy.record_issued("new", CALL) is not None


async def test_hashes_are_not_copied_as_keys(tmp_path: Path) -> None:
    """Without its keyring, a source shows hashes, by which no call would be found."""
    async with opened(tmp_path, HASHED) as cp:
        await pay(cp)
        await cp.delete_thread("t")

    async with (
        open_checkpointer(f"sqlite:///{tmp_path}/a.db") as source,
        open_checkpointer(f"sqlite:///{tmp_path}/b.db") as copy,
    ):
        report = await copy_store(source, copy)
        [failure] = report.failures
        assert (failure.thread_id, "its keyring" in failure.reason) == ("t", True)
