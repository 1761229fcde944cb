"""The process that `conformance.workers` starts: one client of the store.

It may be killed at any moment. So it prints and flushes one line for each operation, as
soon as the operation is acknowledged and before the next one starts.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from random import Random
from typing import Any

from conformance.harness import rebuild
from conformance.history.client import use_keys, use_threads
from conformance.history.meeting import meet_at_keys, meet_at_threads
from conformance.history.moments import write_moments
from conformance.history.op import Op
from conformance.history.recorder import Recorder
from conformance.operations import WRITES, Place, Write, prepare, state, writes_of
from conformance.parent import lines_from_parent, take_place
from cpkit import CheckpointerError, ToolCall

__all__ = ["main"]


def emit(value: Any) -> None:
    """Print one line of JSON.

    A process that is stopped and continued in a write to a full pipe has written a
    part. With ``PYTHONUNBUFFERED`` Python's own stream would drop the rest.
    """
    left = f"{json.dumps(value)}\n".encode()

    while left:
        left = left[os.write(1, left) :]


async def every_write(
    recorder: Recorder,
    _: Random,
    token: str,
    last: int | None = None,
    share: float = 0,
) -> None:
    """Prepare a place for each kind of write, do all at once, and die meanwhile.

    The process dies when ``last`` writes are done; or after a ``share`` of the time
    that the same writes take at other places before.
    """
    cp = recorder.cp
    start, took, done = 0.0, 0.0, 0

    async def make(token: str) -> list[tuple[Write, Place]]:
        made = [(one, Place(f"{token}.{n:02}")) for n, one in enumerate(writes_of(cp))]
        await asyncio.gather(*(prepare(cp, place, one) for one, place in made))
        return made

    if share:
        rehearsed = await make(f"{token}.r")
        start = time.perf_counter()
        await asyncio.gather(*(one.do(cp, place) for one, place in rehearsed))
        took = time.perf_counter() - start

    async def do(number: int, one: Write, place: Place) -> None:
        nonlocal done
        await one.do(cp, place)
        emit(number)
        done += 1

        if done == last:
            os.kill(os.getpid(), signal.SIGKILL)

    made = await make(token)

    if share:
        # Ends the process as SIGKILL does, and comes in time on a busy machine too.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, took * share)

    await asyncio.gather(*(do(n, *one) for n, one in enumerate(made)))
    os.kill(os.getpid(), signal.SIGKILL)


USES: dict[str, Any] = {
    "every write": every_write,
    "threads": use_threads,
    "keys": use_keys,
    "meet at threads": meet_at_threads,
    "meet at keys": meet_at_keys,
    "moments": write_moments,
}


def main() -> None:
    """Run the job that is read from standard input."""
    lines = lines_from_parent()
    job = json.loads(next(lines))
    take_place(job["place"])
    asyncio.run(work(job, lines))


async def mirror(cp: Any, lines: Iterator[str]) -> None:
    """Do each write or claim that the parent asks for, or answer with a state."""
    while True:
        asked = json.loads(await asyncio.to_thread(next, lines))
        place = Place(asked["token"])

        if "claim" in asked:
            await cp.record_issued(asked["token"], ToolCall(*asked["claim"]))
            emit("done")
        elif "look" in asked:
            emit(await state(cp, place, asked["look"]))
        else:
            (write,) = (one for one in WRITES if one.name == asked["write"])
            await write.do(cp, place)
            emit("done")


async def work(job: dict[str, Any], lines: Iterator[str]) -> None:
    def sink(op: Op) -> None:
        emit(op.to_json())

    harness = rebuild(job["harness"])
    emit("opening")

    async with AsyncExitStack() as stack:
        try:
            options = job.get("options", {})
            cp = await stack.enter_async_context(harness.open(**options))
        except CheckpointerError as exc:
            emit({"refused": type(exc).__name__, "reason": str(exc)})
            raise

        emit("ready")
        next(lines)  # "go"

        if job["does"] == "mirror":
            await mirror(cp, lines)

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
