"""What a SIGKILL costs at each cadence: no more than is stated, and the last alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from cpkit import open_checkpointer
from tests.cadence.agent import CADENCES
from tests.sessions.talk import texts

ROOT = Path(__file__).parents[2]
ROUNDS = max(1, round(3 * float(os.environ.get("CPKIT_ROUNDS") or 1)))


@contextmanager
def agent(url: str, thread_id: str, cadence: str) -> Iterator[subprocess.Popen[str]]:
    """Run the agent, and leave no process behind."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cadence.agent", url, thread_id, cadence],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )

    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def killed(url: str, thread_id: str, cadence: str, lines: int) -> list[str]:
    """Kill the agent after so many lines; return every line that it got out."""
    with agent(url, thread_id, cadence) as process:
        assert process.stdout is not None
        told = [line.strip() for line in islice(process.stdout, lines)]
        process.send_signal(signal.SIGKILL)
        # What it told before the signal came to it.
        told += [line.strip() for line in process.stdout if line.endswith("\n")]
        return told


async def stored(url: str, thread_id: str) -> list[dict[str, Any]]:
    async with open_checkpointer(url) as cp:
        data = await cp.load(thread_id)
        return [] if data is None else data.messages


@pytest.mark.parametrize("cadence", [name for name in CADENCES if name != "seconds"])
@pytest.mark.parametrize("number", range(ROUNDS))
async def test_a_crash_costs_no_more_than_is_stated(
    tmp_path: Path, cadence: str, number: int
) -> None:
    """What is left is the beginning of what was acknowledged, and long enough."""
    url = f"sqlite:///{tmp_path}/agent.db?durability=normal"
    told = killed(url, "t", cadence, random.Random(number).randint(1, 60))
    said = [line for line in told if line.startswith("said")]
    there = await stored(url, "t")

    # In the order in which it was said, without a gap.
    turns = [text for text in texts(there) if text.startswith("turn")]
    assert turns == [f"turn {n}" for n in range(len(turns))]
    roles = [f"said {message['role']}" for message in there]
    assert roles[: len(said)] == said[: len(roles)]

    assert len(there) >= len(said) - (CADENCES[cadence].messages - 1)
    assert len(there) >= least(cadence, told)


def least(cadence: str, told: list[str]) -> int:
    """Return how many messages must be there, whatever came after them."""
    if cadence == "message":
        return sum(line.startswith("said") for line in told)

    before: list[str] = []

    if cadence == "tool call" and "claimed" in told:
        before = told[: len(told) - told[::-1].index("claimed")]

    if cadence == "turn":
        # A turn has four messages, and ends with the last.
        return sum(line.startswith("said") for line in told) // 4 * 4

    return sum(line.startswith("said") for line in before)


async def test_the_clock_writes_without_being_asked(tmp_path: Path) -> None:
    """While the agent goes on, what it said some time ago is in the store."""
    url = f"sqlite:///{tmp_path}/agent.db?durability=normal"

    with agent(url, "t", "seconds") as process:
        assert process.stdout is not None
        there: list[dict[str, Any]] = []

        while not there:
            assert process.stdout.readline()
            there = await stored(url, "t")

        process.send_signal(signal.SIGKILL)

    assert texts(there)[0] == "turn 0"
