"""What a child process of the suite has from the process that started it.

It has the same folder and environment, and ends when its parent has died. The parent
keeps the child's standard input open until the child is to end. The kernel closes it
when the parent is killed.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["lines_from_parent", "place_of_parent", "take_place"]


def place_of_parent() -> dict[str, Any]:
    """Return where a child is to work: where this process does."""
    return {
        "path": sys.path,
        "folder": os.getcwd(),
        "environment": {**os.environ},
    }


def take_place(place: dict[str, Any]) -> None:
    """Work where the parent does; the store must not be imported yet."""
    sys.path[:] = place["path"]
    os.chdir(place["folder"])
    os.environ.clear()
    os.environ.update(place["environment"])
    time.tzset()


def lines_from_parent() -> Iterator[str]:
    """Yield the lines of standard input, and end this process where the input ends.

    A thread reads, so that this process ends in the middle of other work too.
    """
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    # A daemon, because it waits for the parent when this process is done.
    threading.Thread(target=_read, args=(lines,), daemon=True).start()

    while True:
        yield lines.get()


def _read(lines: queue.SimpleQueue[str]) -> None:
    rest = b""

    # Not by sys.stdin: a thread that waits in it aborts the exit of the interpreter.
    while found := os.read(0, 1 << 16):
        *whole, rest = (rest + found).split(b"\n")

        for line in whole:
            lines.put(line.decode())

    os._exit(1)
