"""A measurement in a separate process: ``python -m benchmarks.child JOB``.

The job is JSON: the contender, its place, and what to do. The answer is a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.place import Place
from benchmarks.roster import entry
from cpkit.tools.benchmark import Contender
from cpkit.tools.benchmark.messages import messages

__all__ = ["run"]

Job = dict[str, Any]


def written() -> int:
    """Return the bytes that this process has handed to the file system so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def resident() -> int:
    """Return the bytes of memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """Return the most bytes of memory that this process ever had."""
    # Not getrusage: ru_maxrss starts with the parent's memory at the fork.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


async def run(job: Job) -> Job:
    """Do the job, and return the answer."""
    contender = entry(job["driver"], job["name"]).make(Place(**job["place"]))
    doing = {"fill": _fill, "append": _append, "load": _load, "crowd": _crowd}

    async with contender:
        answer = await doing[job["do"]](contender, job)

    if job["do"] == "append":
        answer["written"] = await asyncio.to_thread(written)

    return answer


async def _fill(contender: Contender, job: Job) -> Job:
    await contender.fill(job["thread"], contender.native(messages(0, job["size"])))
    return {}


async def _append(contender: Contender, job: Job) -> Job:
    """Append to a thread that is filled with ``size`` messages first."""
    thread, size = contender.thread("cost"), job["size"]
    await contender.fill(thread, contender.native(messages(0, size)))

    for message in contender.native(messages(size, job["count"])):
        await contender.append(thread, message)

    found = await contender.load(thread)
    assert len(found) == size + job["count"]
    return {}


async def _load(contender: Contender, job: Job) -> Job:
    """Load a thread once; answer the peak of memory minus the memory before."""
    await contender.load(job["warm"])
    before = await asyncio.to_thread(resident)
    found = await contender.load(job["thread"])
    assert len(found) == job["size"]
    return {"growth": await asyncio.to_thread(peak) - before}


async def _crowd(contender: Contender, job: Job) -> Job:
    """Append from several tasks, each to its own thread, when the parent says so."""
    threads = [contender.thread("crowd") for _ in range(job["tasks"])]
    native = contender.native(messages(0, job["count"] + 1))

    for thread in threads:
        await contender.fill(thread, native[:1])

    def wait_for_start() -> None:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()

    await asyncio.to_thread(wait_for_start)
    start = time.monotonic()  # the same clock in all processes of a machine
    end = start + job["seconds"]

    async def work(thread: str) -> int:
        for number, message in enumerate(native[1:], 1):
            await contender.append(thread, message)

            if time.monotonic() > end:
                return number

        return len(native) - 1

    done = await asyncio.gather(*map(work, threads))
    ended = time.monotonic()

    for thread, count in zip(threads, done, strict=True):
        assert len(await contender.load(thread)) == count + 1

    return {"start": start, "end": ended, "done": sum(done)}


def main() -> None:
    """Do the job that the argument names."""
    answer = asyncio.run(run(json.loads(sys.argv[1])))
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
