"""SIGKILL at any moment of a trim: it is done or not done, on every store."""

from __future__ import annotations

import asyncio
import faulthandler
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cpkit import open_checkpointer
from tests.processes import started
from tests.stores import SHARED, fresh_url

KILLS = int(os.environ.get("CPKIT_TRIM_KILLS", "20"))
"""Kills of each store; ``CPKIT_TRIM_KILLS=500`` is 2,000 in all."""

LEFT = 5


@pytest.mark.long
@pytest.mark.timeout(120 + 20 * KILLS)
@pytest.mark.parametrize("kind", SHARED)
async def test_killed_trims_lose_nothing_newer(kind: str, tmp_path: Path) -> None:
    """Two processes append, trim and erase calls; each is killed again and again.

    What was acknowledged is there, what was trimmed stays away, and every call of
    which a result was acknowledged holds its key.
    """
    faulthandler.cancel_dump_traceback_later()  # it ends a test of 15 minutes
    url, first, chance = fresh_url(kind, tmp_path), 0, Random()
    opened: Any = open_checkpointer(url)

    with started("tests.retention.years") as start:
        async with opened as cp:
            both = start(2)

            for number in range(KILLS):
                name = f"w{number}"
                worker = both.pop(0)
                both += start(1)  # it starts while the other one works
                worker.tell("trim_and_erase", url, name, LEFT)
                said = [worker.answer() for _ in range(3)]
                await asyncio.sleep(chance.random() * 0.02)  # at any moment
                said += worker.kill()
                worker.close()
                data = await cp.load("t")
                assert data.version == data.first + len(data.messages)
                assert [one["n"] for one in data.messages] == [
                    *range(data.first, data.version)
                ]
                last = dict(said)
                assert last["append"] <= data.version <= last["append"] + 1
                assert first <= data.first
                assert last.get("trim", 0) <= data.first <= data.version - LEFT
                first = data.first

                for key in [at for kind, at in said if kind == "paid"]:
                    found = await cp.find_completed(key)
                    assert found is not None
                    assert found.erased or found.result == key

                if erased := last.get("erased"):
                    assert (await cp.find_completed(erased)).erased
