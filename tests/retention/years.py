"""Processes that append to a thread, load it and prune it; see `tests.processes`."""

from __future__ import annotations

import time
from typing import Any

from conformance.operations import LATER
from cpkit import ToolCall, VersionConflict, open_checkpointer
from cpkit.retention import Retention, prune
from tests.processes import report, serve

PAD = "x" * 200


def message(n: int) -> dict[str, Any]:
    """Return the message of a position."""
    return {"n": n, "pad": PAD}


async def ready() -> None:
    """Answer when the process has started."""


async def append_for(url: str, seconds: float) -> int:
    """Append ten messages at a time, and return the version that this reaches."""
    end = time.monotonic() + seconds

    async with open_checkpointer(url) as cp:
        version = await cp.append("t", [])

        while time.monotonic() < end:
            body: Any = [message(version + n) for n in range(10)]
            version = await cp.append("t", body, expected_version=version)

    return version


async def load_for(url: str, seconds: float) -> int:
    """Load the thread and check each message's place; return how often."""
    count, end, last = 0, time.monotonic() + seconds, 0

    async with open_checkpointer(url) as cp:
        while time.monotonic() < end:
            if (data := await cp.load("t")) is not None:
                places = [one["n"] for one in data.messages]
                assert places == [*range(data.first, data.version)]
                assert data.version >= last
                count, last = count + 1, data.version

    return count


async def prune_for(url: str, seconds: float, left: int) -> int:
    """Prune the thread to the last messages, and return how many went."""
    gone, end = 0, time.monotonic() + seconds

    async with open_checkpointer(url) as cp:
        while time.monotonic() < end:
            gone += (await prune(cp, Retention(keep_last=left))).cut_messages

    return gone


async def trim_and_erase(url: str, name: str, left: int) -> None:
    """Append, pay, trim and erase for ever, and report what is acknowledged.

    A server may apply the last append of a killed process after the first load.
    """
    opened: Any = open_checkpointer(url)

    async with opened as cp:
        for n in range(1_000_000):
            version = await cp.append("t", [])
            body = [{"n": version + i} for i in range(1 if version else 2 * left)]

            try:
                version = await cp.append("t", body, expected_version=version)
            except VersionConflict:
                continue

            report(["append", version])
            key = f"{name} {n}"
            await cp.record_issued("t", ToolCall(key, "pay", {}, key))
            await cp.record_result("t", key, key)
            report(["paid", key])
            await cp.trim("t", version - left)
            report(["trim", version - left])

            if await cp.erase_calls("t", LATER):
                report(["erased", key])


if __name__ == "__main__":
    serve(ready, append_for, load_for, prune_for, trim_and_erase)
