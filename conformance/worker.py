"""The process that `conformance.workers` starts: one client of the store.

It may be killed at any moment. So it prints and flushes one line for each operation, as
soon as the operation is acknowledged and before the next one starts.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from random import Random
from typing import Any

from conformance.harness import rebuild
from conformance.history.client import use_keys, use_threads
from conformance.history.meeting import meet_at_keys, meet_at_threads
from conformance.history.moments import write_moments
from conformance.history.op import Op
from conformance.history.recorder import Recorder
from conformance.parent import lines_from_parent

__all__ = ["main"]

USES: dict[str, Any] = {
    "threads": use_threads,
    "keys": use_keys,
    "meet at threads": meet_at_threads,
    "meet at keys": meet_at_keys,
    "moments": write_moments,
}


def emit(value: Any) -> None:
    """Print one line of JSON and flush it."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the job that is read from standard input."""
    lines = lines_from_parent()
    job = json.loads(next(lines))
    # As they are in the process that started this one; the store is not imported yet.
    sys.path[:] = job["path"]
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    asyncio.run(work(job, lines))


async def work(job: dict[str, Any], lines: Iterator[str]) -> None:
    def sink(op: Op) -> None:
        emit(op.to_json())

    harness = rebuild(job["harness"])
    emit("opening")

    async with harness.open() as cp:
        emit("ready")
        next(lines)  # "go"
        random = Random(job["seed"])
        clients = [
            USES[job["does"]](
                Recorder(cp, name, sink),  # type: ignore[arg-type]  # a store may lack optional methods
                Random(random.random()),
                **job["with"],
            )
            for name in job["clients"]
        ]
        await asyncio.gather(*clients)
