"""The process that `recording` traces: a few clients of one store.

It reports each step with one system call, as soon as the step is acknowledged or
failed. So the trace shows which writes and syncs came before. Standard output is a
socket: a report is a ``sendto``, and faults in ``write`` do not touch it.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import os
import resource
import socket
import sys
import time
from contextlib import AsyncExitStack, suppress
from typing import Any

from conformance.parent import lines_from_parent, take_place

__all__ = ["NOT_OPEN", "STARTED", "main"]

OPENINGS = 3
"""How often to open again where a fault is to come: it lasts for one call."""

NOT_OPEN = -1
"""Reported in place of a client's number where a fault kept the store from opening."""

STARTED = -2
"""Reported in place of a client's number when the server of the store has started."""


_PR_SET_PTRACER = 0x59616D61
"""Of linux/prctl.h."""


class Clock:
    """The clock of the system, as if it had been set ``ahead`` by some seconds."""

    ahead = 0
    real = staticmethod(time.time_ns)

    def time_ns(self) -> int:
        return self.real() + self.ahead * 1_000_000_000

    def time(self) -> float:
        return self.time_ns() / 1e9


_CLOCK = Clock()


def main() -> None:
    """Run the job that is read from standard input."""
    lines = lines_from_parent()
    _allow_tracer()
    os.write(1, b"\n")  # it may be traced from here on
    job = json.loads(next(lines))
    take_place(job["place"])
    # Bytecode that an import writes is not the store's.
    sys.dont_write_bytecode = True

    if job["jumps"]:
        # Before the store is imported, which may keep a reference to a function.
        time.time, time.time_ns = _CLOCK.time, _CLOCK.time_ns

    with socket.socket(fileno=os.dup(1)) as output:
        asyncio.run(work(job, output))


async def work(job: dict[str, Any], output: socket.socket) -> None:
    # Imported here, because the job sets sys.path first.
    from conformance.harness import rebuild
    from conformance.powerloss.script import Client, Step, again, clients, perform
    from cpkit import BackendUnavailable

    jumps = itertools.cycle(job["jumps"] or [0])

    def report(*values: Any) -> None:
        output.send(f"{json.dumps(values)}\n".encode())

    def failed(exc: Exception) -> tuple[str, bool, str]:
        maybe = not isinstance(exc, BackendUnavailable) or exc.maybe_applied
        return type(exc).__name__, maybe, str(exc)[:200]

    async def use(cp: Any, number: int, client: Client) -> bool:
        """Do the client's steps, and return whether all were acknowledged."""
        for done, step in enumerate(client.steps, 1):
            _CLOCK.ahead += next(jumps)

            try:
                await perform(cp, step)
                at = await updated_at(cp, step.thread) if job["jumps"] else ""
            except Exception as exc:
                report(number, done, *failed(exc))

                if job["shares"]:
                    raise  # the other clients would wait for this one

                if job["spares"]:
                    await go_on(cp, number, done, step)

                return False

            report(number, done, "", True, at)

        return True

    async def go_on(cp: Any, number: int, done: int, step: Step) -> None:
        """Write to the thread whose write has failed, with the same handle."""
        try:
            await perform(cp, again(step))
        except Exception as exc:
            report(number, done, *failed(exc), True)
        else:
            report(number, done, "", True, "", True)

    async def updated_at(cp: Any, thread: str) -> str:
        listed = await cp.list_threads(prefix=thread, limit=1)
        return listed[0].updated_at.isoformat() if listed else ""

    async def opened(stack: AsyncExitStack) -> Any:
        """Open a handle; a fault may make the first tries fail."""
        for _ in range(OPENINGS if job["spares"] else 0):
            with suppress(BackendUnavailable):
                return await stack.enter_async_context(harness.open())

        return await stack.enter_async_context(harness.open())

    async def write(session: list[int]) -> bool:
        """Let clients work at once, on two handles; return whether the store opened."""
        async with AsyncExitStack() as stack:
            try:
                one, two = await opened(stack), await opened(stack)
            except BackendUnavailable as exc:
                if not job["spares"]:
                    raise

                report(NOT_OPEN, 0, *failed(exc))
                return False

            if job["room"]:
                _limit_files(job["folder"], job["room"])

            some = [(number, numbered[number]) for number in session]
            await asyncio.gather(*(use(two if n == 0 else one, n, c) for n, c in some))
            resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))

            # After a fault the same handle goes on. The tracer makes one call fail in
            # each thread of this process.
            for number in job["spares"]:
                if await use(one, number, numbered[number]):
                    break

        return True

    harness = rebuild(job["harness"])
    told = ("names", "count", "seed", "abilities", "shares", "lone", "large")
    found = clients(*(job[name] for name in told))
    numbered = dict(enumerate(found, job["first"]))

    async with AsyncExitStack() as stack:
        if job["served"]:
            # It is a child of this process, so that the tracer follows it.
            stack.push_async_callback(harness.kill)
            await harness.start()
            report(STARTED, 0)

        # Each session opens the store again.
        for session in job["sessions"]:
            if not await write(session):
                return


def _allow_tracer() -> None:
    """Let any process of this user trace this one, where Linux's Yama forbids it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)


def _limit_files(folder: str, room: int) -> None:
    """Let a write fail that makes a file larger than the largest one by ``room``."""
    largest = 0

    for at, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                largest = max(largest, os.lstat(os.path.join(at, name)).st_size)

    resource.setrlimit(resource.RLIMIT_FSIZE, (largest + room, -1))


if __name__ == "__main__":
    main()
