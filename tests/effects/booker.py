"""The tutorial's program for the test that starts it twice.

Each process runs `main`. ``how`` is ``lease`` or ``plain``: without a lease it clears
up with `resume`, as many programs do. With ``worker`` it runs threads until it is
killed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cpkit import VersionConflict, open_checkpointer
from cpkit.effects import Effect, EffectLedger, Landed, NotLanded, ToolRegistry, tool
from cpkit.lease import Lease, thread_lease
from cpkit.worker import Worker
from tests.effects.payer import lines, note

__all__ = ["STALE_AFTER", "main"]

STALE_AFTER = 3.0
"""Seconds; no process is stopped for as long."""

FOLDER = Path()


def find(effect: Effect) -> Landed | NotLanded:
    """Ask the airline what happened."""
    flight = str(effect.args["flight"])
    return Landed("booked") if flight in lines(FOLDER / "airline") else NotLanded()


@tool(verify=find)
def book(flight: str) -> str:
    """Book a flight; a kill may come before and after the booking."""
    time.sleep(0.15)
    note(FOLDER / "airline", flight)
    time.sleep(0.15)
    return "booked"


def ledger_of(cp: Any) -> EffectLedger:
    return EffectLedger(
        cp,
        requires_approval=lambda effect: str(effect.args["flight"]).endswith("!"),
        stale_after=STALE_AFTER,
        timeout=60,
    )


async def converse(cp: Any, thread_id: str) -> None:
    """Book the thread's flight, and append the answer."""
    tools = ToolRegistry(ledger_of(cp), [book])
    data = await cp.load(thread_id)

    if data is None or not data.messages:
        done = await tools.dispatch(thread_id, "book", {"flight": thread_id})
        await cp.append(thread_id, [{"content": done.content}], expected_version=0)


async def agent(cp: Any, lease: Lease) -> None:
    """Recover the thread first, as a worker's agent does."""
    await ledger_of(cp).recover(lease.thread_id, [book], lease=lease)
    await converse(cp, lease.thread_id)


async def run(how: str, url: str, thread_id: str) -> None:
    async with open_checkpointer(url) as cp:
        if how == "worker":
            await Worker(cp, agent, stale_after=STALE_AFTER, poll=0.5).run()
        elif how == "lease":
            async with thread_lease(cp, thread_id, stale_after=STALE_AFTER):
                await ledger_of(cp).resume(thread_id, [book])
                await converse(cp, thread_id)
        else:
            await ledger_of(cp).resume(thread_id, [book])

            try:
                await converse(cp, thread_id)
            except VersionConflict:  # the other start appended the answer
                return


def main(how: str, url: str, folder: Path, thread_id: str) -> None:
    """Run the program, or a worker until the process is killed."""
    global FOLDER
    FOLDER = folder
    logging.disable(logging.WARNING)  # it says often that it waits

    with suppress(KeyboardInterrupt):
        asyncio.run(run(how, url, thread_id))
