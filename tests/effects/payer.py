"""Processes of the test with kills: each runs `main`.

A worker pays once per thread, into the books. A decider approves requests, and denies
some. Both run until they are killed.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from cpkit import open_checkpointer
from cpkit.effects import (
    Effect,
    EffectLedger,
    Landed,
    NotLanded,
    ToolRegistry,
    tool,
)
from cpkit.lease import Lease
from cpkit.runs.threads import HINTS
from cpkit.runs.waiting import Wakeups
from cpkit.worker import Worker

__all__ = ["STALE_AFTER", "lines", "main", "note"]

STALE_AFTER = 1.5

FOLDER = Path()


def note(file: Path, line: str) -> None:
    """Append a line in one system call, so that a kill does not cut it."""
    number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    try:
        os.write(number, f"{line}\n".encode())
    finally:
        os.close(number)


def lines(file: Path) -> list[str]:
    """Return the lines of a file, which may not exist yet."""
    return file.read_text().splitlines() if file.exists() else []


def find(effect: Effect) -> Landed | NotLanded:
    """Look a payment up in the books."""
    found = effect.key in lines(FOLDER / "books")
    return Landed("paid") if found else NotLanded()


@tool(verify=find)
async def pay(effect: Effect, order: str) -> str:
    """Pay an order; a kill may come before and after the payment."""
    await asyncio.sleep(0.02)
    note(FOLDER / "books", effect.key)
    await asyncio.sleep(0.02)
    return "paid"


async def agent(cp: Any, lease: Lease) -> None:
    """Recover the thread, pay its order, and write down how that ended."""
    ledger = EffectLedger(cp, requires_approval=lambda _: True, approval_timeout=0)
    thread_id = lease.thread_id
    await ledger.recover(thread_id, [pay], lease=lease)
    registry = ToolRegistry(ledger, [pay])
    outcome = await registry.dispatch(thread_id, "pay", {"order": thread_id})
    data = await lease.load()

    if data is None or not data.messages:
        message = {"error": outcome.is_error, "content": outcome.content}
        await cp.append(thread_id, [message], expected_version=0)


async def work(url: str) -> None:
    async with open_checkpointer(url) as cp:
        # One thread at a time, so that kills find some that are not done.
        worker = Worker(
            cp,
            agent,
            prefix="order-",
            concurrency=1,
            stale_after=STALE_AFTER,
            poll=0.5,
        )
        await worker.run()


async def decide(url: str) -> None:
    """Decide each request; note it down first, so that no decision goes unseen."""
    async with open_checkpointer(url) as cp, Wakeups(cp, HINTS) as wakeups:
        ledger = EffectLedger(cp)

        while True:
            for request in await ledger.requests():
                if request.thread_id.endswith("7"):
                    note(FOLDER / "denied", request.key)
                    await ledger.deny(request.key, by="a person", reason="too much")
                else:
                    note(FOLDER / "approved", request.key)
                    await ledger.approve(request.key, by="a person")

            await wakeups.wait(0.2, 0.5)


def main(role: str, url: str, folder: Path) -> None:
    """Work or decide until the process is killed."""
    global FOLDER
    FOLDER = folder
    asyncio.run({"work": work, "decide": decide}[role](url))
