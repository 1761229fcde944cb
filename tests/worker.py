"""What another process does with a store of any kind; see `tests.processes`.

The modules of the stores add their own commands.
"""

from __future__ import annotations

import os
from tempfile import TemporaryDirectory
from typing import Any

from cpkit import ToolCall, open_checkpointer
from tests.processes import UNPRIVILEGED, report, serve

__all__ = ["COMMANDS", "append_one", "drop_rights"]


async def append_one(url: str) -> int:
    """Open the store, append one message, and return the version."""
    async with open_checkpointer(url) as cp:
        return await cp.append("shared", [{"by": os.getpid()}])


async def mixed(url: str, name: str, count: int) -> dict[str, Any]:
    """Append, merge and claim in turn; return versions and the claimed keys."""
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


async def trim_for_ever(url: str, name: str, left: int) -> None:
    """Append two messages and trim the thread to the last ones, and report both."""
    store: Any = open_checkpointer(url)

    async with store as cp:
        for i in range(1_000_000):
            body: Any = [{"by": name, "i": i, "half": half} for half in (0, 1)]
            version = await cp.append("t", body)
            report(["append", version])
            await cp.trim("t", max(0, version - left))
            report(["trim", max(0, version - left)])


async def drop_rights(place: str) -> None:
    """Give up root's rights, so that permissions count for this process.

    ``place`` is a URL with ``{}`` for a folder, where a store is used before: so
    everything is imported while this process may still read it.
    """
    with TemporaryDirectory() as folder:
        await append_one(place.format(folder))

    if os.getuid() == 0:
        os.setgid(UNPRIVILEGED)
        os.setuid(UNPRIVILEGED)


COMMANDS = (append_one, mixed, write_for_ever, trim_for_ever)

if __name__ == "__main__":
    serve(*COMMANDS)
