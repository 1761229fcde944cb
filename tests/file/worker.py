"""Commands that a worker process runs on a store; see `tests.processes`."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from cpkit import BackendUnavailable, ToolCall
from cpkit_file import FileCheckpointer
from tests.processes import report, serve
from tests.worker import COMMANDS, drop_rights

Store = FileCheckpointer[Any]


async def begin_again(path: str) -> int:
    """Delete the thread ``t``, append one message to it, and return the version."""
    async with Store(path) as cp:
        await cp.delete_thread("t", forget_keys=True)
        return await cp.append("t", [{"by": os.getpid()}])


async def contend(path: str, name: str, count: int) -> list[int]:
    """Claim one key and fail the call, repeatedly; return the attempts' numbers."""
    attempts: list[int] = []

    async with Store(path) as cp:
        while len(attempts) < count:
            call_id = f"{name} {len(attempts)} {os.urandom(4).hex()}"

            if await cp.record_issued(name, ToolCall(call_id, "t", {}, "key")) is None:
                record = await cp.record_result(name, call_id, None, success=False)
                attempts.append(record.attempt)

    return attempts


async def append_big_for_ever(path: str) -> None:
    """Append messages so large that a kill often hits the middle of one."""
    async with Store(path) as cp:
        for i in range(1_000_000):
            version = await cp.append("t", [{"i": i, "pad": "x" * 4_000_000}])
            report(version)


async def use_unprivileged(path: str) -> dict[str, str]:
    """Return what operations return or raise without root's rights."""
    await drop_rights("file://{}")

    said = {}

    async with Store(path) as cp:
        uses: dict[str, Coroutine[Any, Any, Any]] = {
            "load": cp.load("t"),
            "calls": cp.list_calls("t"),
            "append": cp.append("t", [{}]),
            "new thread": cp.append("new", [{}]),
            "claim": cp.record_issued("t", ToolCall("d", "tool", {}, "free")),
            "delete": cp.delete_thread("t"),
        }

        for name, use in uses.items():
            try:
                said[name] = repr(await use)
            except BackendUnavailable as exc:
                said[name] = str(exc)

    return said


async def open_unprivileged(path: str) -> str:
    """Return how opening fails without root's rights."""
    try:
        await use_unprivileged(path)
    except BackendUnavailable as exc:
        return str(exc)

    return "opened"


async def fill_up_to(path: str, limit: int) -> dict[str, Any]:
    """Write under a limit of file sizes, remove the limit, and write again."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    acknowledged = 0
    failure: BackendUnavailable | None = None

    async with Store(path) as cp:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

        try:
            for _ in range(10_000):
                acknowledged = await cp.append("t", [{"pad": "x" * 1000}] * 3)
        except BackendUnavailable as exc:
            failure = exc

        data = await cp.load("t")
        size = sum(file.stat().st_size for file in Path(path, "threads").iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        after = await cp.append("t", [{}])

    return {
        "acknowledged": acknowledged,
        "failure": str(failure),
        "maybe_applied": failure and failure.maybe_applied,
        "loaded": data.version if data else 0,
        "size": size,
        "after": after,
    }


if __name__ == "__main__":
    serve(
        *COMMANDS,
        append_big_for_ever,
        begin_again,
        contend,
        fill_up_to,
        open_unprivileged,
        use_unprivileged,
    )
