"""What another process does with a store: the commands of `tests.processes`."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
from collections.abc import Coroutine
from tempfile import TemporaryDirectory
from typing import Any

from cpkit import BackendUnavailable, ToolCall, open_checkpointer
from tests.processes import UNPRIVILEGED, report, serve


async def append_one(url: str) -> int:
    """Open the store, append one message, and return the version."""
    async with open_checkpointer(url) as cp:
        return await cp.append("shared", [{"by": os.getpid()}])


async def mixed(url: str, name: str, count: int) -> dict[str, Any]:
    """Append, merge and claim in turn; return versions and the keys that were won."""
    versions, won = [], []

    async with open_checkpointer(url) as cp:
        for i in range(count):
            versions.append(await cp.append("shared", [{"by": name, "i": i}]))
            await cp.save_extra("shared", {f"{name} {i}": i, "last": name})
            call = ToolCall(f"{name} {i}", "tool", {"i": i}, f"key {i}")

            if await cp.record_issued("shared", call) is None:
                won.append(call.idempotency_key)

    return {"versions": versions, "won": won}


async def write_for_ever(url: str, name: str) -> None:
    """Append, merge, claim and resolve, and write a line for each acknowledgement."""
    async with open_checkpointer(url) as cp:
        for i in range(1_000_000):
            body: Any = [{"by": name, "i": i, "half": half} for half in (0, 1)]
            report(["append", await cp.append("t", body)])
            await cp.save_extra("t", {"by": name, "i": i})
            report(["extra", name, i])
            call = ToolCall(f"{name} {i}", "tool", {}, f"key {name} {i}")
            await cp.record_issued("t", call)
            report(["issued", call.call_id])
            await cp.record_result("t", call.call_id, i)
            report(["completed", call.call_id])


async def stop_in_a_commit(path: str) -> None:
    """Take the write lock, and stop as SIGSTOP or a debugger stops a process."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    db.execute("UPDATE cpkit_threads SET updated_at = 0")
    report("stopping")
    os.kill(os.getpid(), signal.SIGSTOP)


async def drop_rights() -> None:
    """Give up root's rights, so that permissions count for this process."""
    # Import everything while this process may still read it.
    with TemporaryDirectory() as folder:
        await append_one(f"sqlite:///{folder}/first.db")

    if os.getuid() == 0:
        os.setgid(UNPRIVILEGED)
        os.setuid(UNPRIVILEGED)


async def open_unprivileged(url: str) -> str:
    """Open and write with the rights of an ordinary user; return the failure."""
    await drop_rights()

    try:
        async with open_checkpointer(url) as cp:
            await cp.append("t", [{}])
    except BackendUnavailable as exc:
        return str(exc)

    return "opened and written"


async def read_unprivileged(url: str) -> dict[str, Any]:
    """Read and write with the rights of an ordinary user; return what came of it."""
    await drop_rights()
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
        append_one,
        mixed,
        write_for_ever,
        stop_in_a_commit,
        open_unprivileged,
        read_unprivileged,
        fill_up_to,
    )
