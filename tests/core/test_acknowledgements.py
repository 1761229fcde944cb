"""By strace: an append is acknowledged after its write is synced."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tracing import needs_strace, traced

# Phases of tasks and threads: a lone writer, then writers that may share a sync.
PHASES = ((1, 1), (32, 32), (32, 1))
APPENDS = 3

SCRIPT = f"""
import asyncio, os, sys
from cpkit import open_checkpointer

async def main():
    marks = os.open(os.devnull, os.O_WRONLY)

    async with open_checkpointer(sys.argv[1]) as cp:
        for phase, (tasks, threads) in enumerate({PHASES}):
            async def work(task):
                for n in range({APPENDS}):
                    token = f"<{{phase}} {{task}} {{n}}>"
                    thread = f"thread {{phase}} {{task % threads}}"
                    await cp.append(thread, [{{"token": token}}])
                    os.write(marks, f"acknowledged {{token}}".encode())

            await asyncio.gather(*map(work, range(tasks)))

asyncio.run(main())
"""

# strace splits a call into two lines when another thread makes a call meanwhile.
CALL = re.compile(r"(\d+) +(write|pwrite64|fsync|fdatasync)\((\d+)(.*)")
RESUMED = re.compile(r"(\d+) +<\.\.\. (write|pwrite64|fsync|fdatasync) resumed>")
TOKEN = re.compile(r"<\d+ \d+ \d+>")


@dataclass
class Step:
    """A system call: its descriptor, and the lines where it starts and ends."""

    name: str
    fd: str
    text: str
    began: int
    ended: int


def steps_of(url: str) -> list[Step]:
    """Run the script, and return its writes and syncs, in order."""
    lines = traced(
        "write,pwrite64,fsync,fdatasync",
        *(sys.executable, "-c", SCRIPT, url),
        longest=8192,
    )
    steps: list[Step] = []
    unfinished: dict[str, Step] = {}

    for number, line in enumerate(lines):
        if call := CALL.match(line):
            steps.append(Step(call[2], call[3], call[4], number, number))

            if line.endswith("<unfinished ...>"):
                unfinished[call[1]] = steps[-1]
        elif resumed := RESUMED.match(line):
            unfinished.pop(resumed[1]).ended = number

    return steps


@needs_strace
@pytest.mark.parametrize("driver", ["sqlite", "file"])
def test_every_acknowledgement_comes_after_its_sync(
    driver: str, tmp_path: Path
) -> None:
    """For one task, for 32 tasks on 32 threads, and for 32 tasks on one thread."""
    url = f"sqlite:///{tmp_path}/a.db" if driver == "sqlite" else f"file:{tmp_path}/a"
    steps = steps_of(url)
    written: dict[str, Step] = {}
    acknowledged: dict[str, Step] = {}

    for step in steps:
        for token in TOKEN.findall(step.text):
            place = acknowledged if "acknowledged" in step.text else written
            place.setdefault(token, step)

    syncs = [step for step in steps if "sync" in step.name]
    assert len(acknowledged) == APPENDS * sum(tasks for tasks, _ in PHASES)

    for token, answer in acknowledged.items():
        write = written[token]
        assert any(
            sync.fd == write.fd
            and sync.began > write.ended
            and sync.ended < answer.began
            for sync in syncs
        ), f"{token} was acknowledged before it was synced"

    # A lone append has one sync; many tasks have fewer syncs than appends.
    first, last = acknowledged["<0 0 1>"], acknowledged["<0 0 2>"]
    assert sum(first.ended < sync.began < last.began for sync in syncs) == 1
    crowd = [step for token, step in acknowledged.items() if token.startswith("<2")]
    begun, ended = min(step.began for step in crowd), max(step.ended for step in crowd)
    assert sum(begun < sync.began < ended for sync in syncs) < len(crowd) / 4
