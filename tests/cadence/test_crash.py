"""A SIGKILL loses only the last messages, and no more than the cadence states."""

from __future__ import annotations

import os
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from cpkit import open_checkpointer
from tests.cadence.agent import CADENCES
from tests.processes import Forked
from tests.sessions.talk import texts
from tests.sweeps import sweep

ROUNDS = max(1, round(3 * float(os.environ.get("CPKIT_ROUNDS") or 1)))


def killed(url: str, thread_id: str, cadence: str, lines: int) -> list[str]:
    """Kill the agent after this many lines; return every line that it printed."""
    with Forked("tests.cadence.agent", url, thread_id, cadence) as process:
        printed = [line.strip() for line in islice(process.stdout, lines)]
        process.kill()
        # The lines that it printed before the signal reached it.
        printed += [line.strip() for line in process.stdout if line.endswith("\n")]
        return printed


async def stored(url: str, thread_id: str) -> list[dict[str, Any]]:
    async with open_checkpointer(url) as cp:
        data = await cp.load(thread_id)
        return [] if data is None else data.messages


@pytest.mark.parametrize("cadence", [name for name in CADENCES if name != "seconds"])
@pytest.mark.parametrize("number", sweep(range(ROUNDS), [0]))
async def test_a_crash_loses_no_more_than_is_stated(
    tmp_path: Path, cadence: str, number: int
) -> None:
    """The stored messages are the first ones acknowledged, and enough of them."""
    url = f"sqlite:///{tmp_path}/agent.db?durability=normal"
    printed = killed(url, "t", cadence, random.Random(number).randint(1, 60))
    said = [line for line in printed if line.startswith("said")]
    found = await stored(url, "t")

    # In the order in which the agent appended them, without a gap.
    turns = [text for text in texts(found) if text.startswith("turn")]
    assert turns == [f"turn {n}" for n in range(len(turns))]
    roles = [f"said {message['role']}" for message in found]
    assert roles[: len(said)] == said[: len(roles)]

    assert len(found) >= len(said) - (CADENCES[cadence].messages - 1)
    assert len(found) >= least(cadence, printed)


def least(cadence: str, printed: list[str]) -> int:
    """Return how many messages must be stored, whatever the agent printed later."""
    if cadence == "message":
        return sum(line.startswith("said") for line in printed)

    before: list[str] = []

    if cadence == "tool call" and "claimed" in printed:
        before = printed[: len(printed) - printed[::-1].index("claimed")]

    if cadence == "turn":
        # A turn has four messages, and the last one ends it.
        return sum(line.startswith("said") for line in printed) // 4 * 4

    return sum(line.startswith("said") for line in before)


async def test_the_timer_writes_without_another_call(tmp_path: Path) -> None:
    """Earlier messages reach the store while the agent goes on."""
    url = f"sqlite:///{tmp_path}/agent.db?durability=normal"

    with Forked("tests.cadence.agent", url, "t", "seconds") as process:
        found: list[dict[str, Any]] = []

        while not found:
            assert process.stdout.readline()
            found = await stored(url, "t")

        process.kill()

    assert texts(found)[0] == "turn 0"
