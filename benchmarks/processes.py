"""Measurements in separate processes: syncs, bytes, peak memory, crowds, imports."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg
from redis import Redis

from benchmarks.place import Place
from cpkit.tools.benchmark import Contender

__all__ = ["Cost", "append_cost", "crowd_rate", "import_times", "load_memory"]

PATIENCE = 600
PROCESSES = 4
TASKS = 16

# The length of the thread whose appends are counted, as in the goals.
COST_SIZE = 1000
COST_ROUNDS = 3

IMPORTS = {
    "pydantic": "import pydantic",
    "pydantic, as cpkit uses it": (
        "from pydantic import BaseModel, PositiveInt, TypeAdapter, ValidationError"
    ),
    "cpkit": "import cpkit",
}


@dataclass
class Cost:
    """The cost of one append; a part that was not counted is None, see ``why``."""

    fsyncs: float | None = None
    bytes: float | None = None
    counted: str = ""
    why: list[str] = field(default_factory=list)


def spawned(
    contender: Contender, place: Place, job: dict[str, Any], *before: str
) -> dict[str, Any]:
    """Run a job in a separate process, under the command ``before``."""
    done = subprocess.run(
        [*before, *_command(contender, place, job)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )

    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])

    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def append_cost(contender: Contender, place: Place, count: int) -> Cost:
    """Return the cost of an append: a run with appends minus a run without.

    Bytes are those that the process writes to the file system, or the growth of the
    server's log. strace counts the fsyncs, or Postgres itself does. Other work of a
    server (a checkpoint, a vacuum) can only add to a run, so each number is the
    smallest of three runs.
    """
    cost = Cost()
    without: dict[str, int] = {}
    within: dict[str, int] = {}

    for _ in range(COST_ROUNDS):
        without = _least(without, _counted(contender, place, 0, cost))
        within = _least(within, _counted(contender, place, count, cost))

    if "fsyncs" in without:
        cost.fsyncs = (within["fsyncs"] - without["fsyncs"]) / count

    cost.bytes = (within["bytes"] - without["bytes"]) / count
    return cost


def _least(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: min(found, one.get(name, found)) for name, found in other.items()}


def _counted(
    contender: Contender, place: Place, count: int, cost: Cost
) -> dict[str, int]:
    job = {"do": "append", "size": COST_SIZE, "count": count}

    if contender.driver == "postgres":
        cost.counted = "bytes of WAL, pg_stat_wal.wal_sync"
        before = _postgres(place.postgres)
        spawned(contender, place, job)
        after = _postgres(place.postgres)
        return {name: after[name] - before[name] for name in before.keys() & after}

    if contender.driver.startswith("redis"):
        cost.counted = "growth of the append-only file"
        url = place.redis if contender.driver == "redis" else place.redis_always

        with Redis.from_url(url) as client:
            before_size = _aof_size(client)
            found = _traced_server(client, lambda: spawned(contender, place, job), cost)
            return {"bytes": _aof_size(client) - before_size, **found}

    cost.counted = "wchar of /proc/self/io, strace"

    if shutil.which("strace") is None:
        cost.why = ["fsyncs not counted: strace is not installed"]
        return {"bytes": spawned(contender, place, job)["written"]}

    with tempfile.NamedTemporaryFile() as table:
        trace = ["strace", "-f", "-c", "-e", "trace=fsync,fdatasync", "-o", table.name]
        answer = spawned(contender, place, job, *trace)
        return {"bytes": answer["written"], "fsyncs": _syncs(table.name)}


def load_memory(contender: Contender, place: Place, size: int) -> int:
    """Return the bytes by which loading a thread raises the peak memory of a process.

    That is the peak of resident memory (VmHWM) minus the memory before the load.
    """
    threads = {name: contender.thread(name) for name in ("warm", "memory")}

    for name, messages in (("warm", 10), ("memory", size)):
        job = {"do": "fill", "thread": threads[name], "size": messages}
        spawned(contender, place, job)

    job = {
        "do": "load",
        "warm": threads["warm"],
        "thread": threads["memory"],
        "size": size,
    }
    growth: int = spawned(contender, place, job)["growth"]
    return growth


def crowd_rate(contender: Contender, place: Place, seconds: float) -> float:
    """Return the appends a second of four processes with 16 tasks each."""
    job = {"do": "crowd", "tasks": TASKS, "count": 2000, "seconds": seconds}
    children = [
        subprocess.Popen(
            _command(contender, place, job),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(PROCESSES)
    ]

    try:
        for child in children:
            assert child.stdout is not None

            if child.stdout.readline() != "ready\n":
                raise RuntimeError(_last_line(child))

        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()

        answers = []

        for child in children:
            out, err = child.communicate(timeout=PATIENCE)

            if child.returncode:
                raise RuntimeError(err.strip().rpartition("\n")[2])

            answers.append(json.loads(out))
    finally:
        for child in children:
            child.kill()
            child.communicate()

    ends, starts = ([one[key] for one in answers] for key in ("end", "start"))
    took: float = max(ends) - min(starts)
    appended: int = sum(one["done"] for one in answers)
    return appended / took


def import_times(rounds: int) -> dict[str, float]:
    """Return the median of the seconds that each import takes in a fresh process."""
    took: dict[str, list[float]] = {name: [] for name in IMPORTS}

    for number in range(-1, rounds):
        for name, statement in IMPORTS.items():
            script = (
                "from time import perf_counter as clock\nstart = clock()\n"
                f"{statement}\nprint(clock() - start)"
            )
            printed = subprocess.check_output([sys.executable, "-c", script], text=True)

            if number >= 0:
                took[name].append(float(printed))

    return {name: median(times) for name, times in took.items()}


def _command(contender: Contender, place: Place, job: dict[str, Any]) -> list[str]:
    whole = {
        "driver": contender.driver,
        "name": contender.name,
        "place": asdict(place),
        **job,
    }
    return [sys.executable, "-m", "benchmarks.child", json.dumps(whole)]


def _last_line(child: subprocess.Popen[str]) -> str:
    _, err = child.communicate(timeout=PATIENCE)
    return err.strip().rpartition("\n")[2]


def _syncs(table: str) -> int:
    """Return the number of sync calls in a table of ``strace -c``."""
    row = r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+) .*\b(?:fsync|fdatasync)$"
    return sum(map(int, re.findall(row, Path(table).read_text(), re.MULTILINE)))


def _postgres(url: str) -> dict[str, int]:
    """Return the bytes that the server has logged so far, and its syncs.

    A backend process reports its syncs when it ends; the one of the child has ended.
    """

    async def ask() -> dict[str, int]:
        connection = await asyncpg.connect(url)

        try:
            found = {
                "bytes": int(
                    await connection.fetchval(
                        "SELECT pg_current_wal_lsn() - '0/0'::pg_lsn"
                    )
                )
            }

            # From 18 on the column is in pg_stat_io, by kind of backend.
            if connection.get_server_version().major in range(14, 18):
                found["fsyncs"] = await connection.fetchval(
                    "SELECT wal_sync FROM pg_stat_wal"
                )

            return found
        finally:
            await connection.close()

    return asyncio.run(ask())


def _aof_size(client: Any) -> int:
    return int(client.info("persistence")["aof_current_size"])


def _traced_server(
    client: Any, work: Callable[[], object], cost: Cost
) -> dict[str, int]:
    """Do the work while strace counts the server's syncs, where that is possible."""
    if client.config_get("appendfsync")["appendfsync"] != "always":
        cost.why = ["the server syncs once a second"]
        work()
        return {}

    if shutil.which("strace") is None or os.geteuid() != 0:
        cost.why = ["counting syncs needs strace and permission to trace the server"]
        work()
        return {}

    pid = str(client.info("server")["process_id"])

    with tempfile.NamedTemporaryFile() as table:
        tracer = subprocess.Popen(
            ["strace", "-f", "-c", "-e", "trace=fsync,fdatasync", "-o", table.name]
            + ["-p", pid],
            stderr=subprocess.PIPE,
            text=True,
        )

        try:
            assert tracer.stderr is not None
            tracer.stderr.readline()  # "Process … attached"
            work()
        finally:
            tracer.terminate()
            tracer.communicate(timeout=PATIENCE)

        return {"fsyncs": _syncs(table.name)}
