"""The tutorial's program is started twice, beside workers, with kills and stops."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cpkit import open_checkpointer
from cpkit.effects import EffectLedger
from cpkit.runs.threads import RUNS
from cpkit.worker import submit
from tests.effects.booker import main
from tests.effects.payer import lines
from tests.effects.shop import until
from tests.processes import FORKS
from tests.stores import SHARED, fresh_url

# CPKIT_ROUNDS=60 starts it 500 times on each store, in an hour.
ROUNDS = max(1, round(8 * float(os.environ.get("CPKIT_ROUNDS") or 1)))


@pytest.fixture(params=SHARED)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new store of each kind that processes share."""
    return fresh_url(request.param, tmp_path)


async def start(how: str, url: str, folder: Path, thread: str) -> BaseProcess:
    process = FORKS.Process(target=main, args=(how, url, folder, thread))
    await asyncio.to_thread(process.start)
    return process


async def start_twice(
    random: Random, url: str, folder: Path, thread: str, cp: Any
) -> None:
    """Start the program twice at a random offset; disturb one of the two."""
    how = [random.choice(["lease", "plain"]) for _ in range(2)]
    first = await start(how[0], url, folder, thread)
    await asyncio.sleep(random.uniform(0, 2))
    second = await start(how[1], url, folder, thread)
    await asyncio.sleep(random.uniform(0, 1.5))
    victim = random.choice([first, second])
    disturbance = random.choice([None, "kill", "stop", "interrupt"])

    if victim.is_alive():
        assert victim.pid is not None

        with suppress(ProcessLookupError):  # it has just ended
            if disturbance == "kill":
                victim.kill()
            elif disturbance == "interrupt":
                os.kill(victim.pid, signal.SIGINT)
            elif disturbance == "stop":
                os.kill(victim.pid, signal.SIGSTOP)
                await asyncio.sleep(random.uniform(0, 1))
                os.kill(victim.pid, signal.SIGCONT)

    await asyncio.gather(*(asyncio.to_thread(one.join) for one in (first, second)))

    # If both have ended before the booking, workers finish it.
    data = await cp.load(thread)

    if data is None or not data.messages:
        await submit(cp, thread)


async def decide(cp: Any) -> None:
    """Approve all that is asked for."""
    ledger = EffectLedger(cp)

    while True:
        for request in await ledger.requests():
            await ledger.approve(request.key, by="a person")

        await asyncio.sleep(0.2)


async def book_all(url: str, folder: Path, rounds: int) -> None:
    """Book a flight in each round; in the end each is booked once."""
    random = Random(rounds)
    threads = [f"flight-{n}" + random.choice(["", "!"]) for n in range(rounds)]

    async with open_checkpointer(url) as cp:
        workers = [await start("worker", url, folder, "") for _ in range(2)]
        deciding = asyncio.create_task(decide(cp))
        slots = asyncio.Semaphore(3)

        async def one(thread: str) -> None:
            async with slots:
                await start_twice(Random(thread), url, folder, thread, cp)

        async def ended() -> bool:
            found = [await cp.load(thread) for thread in threads]
            is_open = await cp.list_threads(prefix=f"{RUNS}:")
            return all(one and one.messages for one in found) and not is_open

        try:
            await asyncio.gather(*map(one, threads))
            await until(ended, 120)
        finally:
            deciding.cancel()

            for worker in workers:
                worker.kill()
                await asyncio.to_thread(worker.join)

    booked = Counter(lines(folder / "airline"))
    assert booked == dict.fromkeys(threads, 1)


@pytest.mark.timeout(300)
async def test_two_starts_book_once(tmp_path: Path) -> None:
    """A few rounds."""
    await book_all(fresh_url("sqlite", tmp_path), tmp_path, 2)


@pytest.mark.long
@pytest.mark.timeout(840)
async def test_two_starts_book_once_in_every_round(url: str, tmp_path: Path) -> None:
    """On each store, with every kind of disturbance."""
    await book_all(url, tmp_path, ROUNDS)
