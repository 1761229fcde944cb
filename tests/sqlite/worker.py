"""What another process does with a store: the commands of `tests.processes`."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
from collections.abc import Coroutine
from typing import Any

from cpkit import BackendUnavailable, ToolCall, open_checkpointer
from tests.processes import report, serve
from tests.worker import COMMANDS, drop_rights


async def stop_in_a_commit(path: str) -> None:
    """Take the write lock, and stop as SIGSTOP or a debugger stops a process."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    db.execute("UPDATE cpkit_threads SET updated_at = 0")
    report("stopping")
    os.kill(os.getpid(), signal.SIGSTOP)


async def open_unprivileged(url: str) -> str:
    """Open and write with the rights of an ordinary user; return the failure."""
    await drop_rights("sqlite:///{}/first.db")

    try:
        async with open_checkpointer(url) as cp:
            await cp.append("t", [{}])
    except BackendUnavailable as exc:
        return str(exc)

    return "opened and written"


async def read_unprivileged(url: str) -> dict[str, Any]:
    """Read and write with the rights of an ordinary user; return what came of it."""
    await drop_rights("sqlite:///{}/first.db")
    refused = []

    store: Any = open_checkpointer(url)

    async with store as cp:
        data = await cp.load("t")
        found = await cp.find_completed("key")
        listed = await cp.list_threads()
        writes: list[Coroutine[Any, Any, Any]] = [
            cp.append("t", [{}]),
            cp.save_extra("t", {"k": 2}),
            cp.record_issued("t", ToolCall("new", "tool", {}, "new")),
            cp.delete_thread("t"),
        ]

        for write in writes:
            try:
                await write
            except BackendUnavailable as exc:
                refused.append(exc.maybe_applied)

        advice = " ".join(cp.durability.advice)

    return {
        "messages": data and data.messages,
        "found": found and found.result,
        "listed": len(listed),
        "refused": refused,
        "advice": advice,
    }


async def fill_up_to(url: str, limit: int) -> dict[str, Any]:
    """Write under a limit on the size of files, lift it, and write again."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    acknowledged = 0
    failure = "none"

    async with open_checkpointer(url) as cp:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

        try:
            for _ in range(10_000):
                acknowledged = await cp.append("t", [{"pad": "x" * 1000}])
        except BackendUnavailable as exc:
            failure = str(exc)

        data = await cp.load("t")
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        after = await cp.append("t", [{}])

    return {
        "acknowledged": acknowledged,
        "failure": failure,
        "loaded": data.version if data else 0,
        "after": after,
    }


if __name__ == "__main__":
    serve(
        *COMMANDS,
        stop_in_a_commit,
        open_unprivileged,
        read_unprivileged,
        fill_up_to,
    )
