"""What a handle leaves behind: tasks, threads, open files, sockets, connections."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from pathlib import Path

from conformance.failure import Failure
from conformance.harness import Harness

__all__ = ["Leftovers"]

PATIENCE = 3.0
"""Seconds until a server has noticed that a connection was closed."""

_OPEN_FILES = Path("/proc/self/fd")


class Leftovers:
    """Compares what is open now with what was open at the start."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._before: Counter[str] = Counter()

    async def start(self) -> None:
        self._before = await self._open()

    async def check(self) -> None:
        """Raise `Failure` if more is open than at the start, and stays open."""
        until = time.monotonic() + PATIENCE

        while left := await self._open() - self._before:
            if time.monotonic() > until:
                found = ", ".join(f"{count} {kind}" for kind, count in left.items())
                raise Failure("nothing of a closed handle to be left", found)

            await asyncio.sleep(0.02)

    async def _open(self) -> Counter[str]:
        found = Counter(await asyncio.to_thread(_files_and_sockets))
        # The threads of asyncio.to_thread are the event loop's, which closes them.
        found += Counter(
            f"thread {thread.name}"
            for thread in threading.enumerate()
            if not thread.name.startswith("asyncio_")
        )
        found["tasks"] = len(asyncio.all_tasks())
        found["connections at the server"] = await self._harness.connections() or 0
        return found


def _files_and_sockets() -> list[str]:
    """Return what this process has open, where the system can tell."""
    found = []

    for number in os.listdir(_OPEN_FILES) if _OPEN_FILES.exists() else []:
        try:
            target = os.readlink(_OPEN_FILES / number)
        except FileNotFoundError:
            continue  # the descriptor of the listing itself

        kind, colon, _ = target.partition(":")
        found.append(f"{kind} open" if colon else f"open file {target}")

    return found
