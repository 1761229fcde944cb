"""Workers and the deciding process are killed at random; the books stay right."""

from __future__ import annotations

import asyncio
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cpkit import open_checkpointer
from cpkit.effects import EffectLedger
from cpkit.runs.threads import RUNS
from cpkit.worker import submit
from tests.effects.payer import lines, main
from tests.effects.shop import until
from tests.processes import FORKS
from tests.stores import SHARED, fresh_url


@pytest.fixture(params=SHARED)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new store of each kind that processes share."""
    return fresh_url(request.param, tmp_path)


def start(role: str, url: str, folder: Path) -> BaseProcess:
    process = FORKS.Process(target=main, args=(role, url, folder))
    process.start()
    return process


async def run_with_kills(
    url: str, folder: Path, workers: int, keys: int, kills: int, patience: float
) -> None:
    """Run all orders, kill processes meanwhile, and check the books."""
    threads = [f"order-{n}" for n in range(keys)]
    random = Random(f"{keys} {kills}")

    async with open_checkpointer(url) as cp:
        for thread in threads:
            await submit(cp, thread)

        async def ended() -> bool:
            found = [await cp.load(thread) for thread in threads]
            return all(data is not None and data.messages for data in found)

        roles = ["work"] * workers + ["decide"]
        running = [start(role, url, folder) for role in roles]

        async def kill() -> None:
            # Counts events and not time, so that slow machines get as many kills.
            for _ in range(kills):
                seen = len(lines(folder / "books")) + len(lines(folder / "approved"))

                async def more(seen: int = seen) -> bool:
                    books, approved = (
                        lines(folder / "books"),
                        lines(folder / "approved"),
                    )
                    return len(books) + len(approved) > seen or await ended()

                await until(more, patience)
                await asyncio.sleep(random.uniform(0, 0.05))
                number = random.randrange(len(roles))
                running[number].kill()
                await asyncio.to_thread(running[number].join)
                running[number] = start(roles[number], url, folder)

        try:
            await kill()
            await until(ended, patience)
            await until(lambda: nothing_open(cp), patience)
        finally:
            for process in running:
                process.kill()
                await asyncio.to_thread(process.join)

        await check_books(cp, folder, threads)


async def nothing_open(cp: Any) -> bool:
    """Return whether no run is open: every decided request was acted upon."""
    return not await cp.list_threads(prefix=f"{RUNS}:")


async def check_books(cp: object, folder: Path, threads: list[str]) -> None:
    """Each effect once, none unapproved, and each request has its outcome."""
    books = Counter(lines(folder / "books"))
    approved, denied = lines(folder / "approved"), lines(folder / "denied")
    ledger = EffectLedger(cp)  # type: ignore[arg-type]
    assert set(books.values()) <= {1}
    assert set(books) == set(approved)
    assert not set(books) & set(denied)
    assert len(books) + len(set(denied)) == len(threads)

    for thread in threads:
        key = ledger.key(thread, "pay", {"order": thread})
        request = await ledger.request(key)
        assert request is not None
        assert (request.verdict == "approved") == (key in books) == (key not in denied)
        assert await ledger.find(key) is not None or key in denied


async def test_each_order_is_paid_once_despite_kills(tmp_path: Path) -> None:
    """Two workers and a deciding process, killed twice in all."""
    url = fresh_url("sqlite", tmp_path)
    await run_with_kills(url, tmp_path, workers=2, keys=8, kills=2, patience=40)


@pytest.mark.long
@pytest.mark.timeout(1_200)
async def test_many_orders_are_paid_once_despite_many_kills(
    url: str, tmp_path: Path
) -> None:
    """Four workers and 80 orders, with a kill for every second order."""
    await run_with_kills(url, tmp_path, workers=4, keys=80, kills=40, patience=600)
