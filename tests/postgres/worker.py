"""Another process that uses a store: it obeys one command a line, in JSON.

Run as ``python -m tests.postgres.worker``; `Worker` is its handle in the test.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from cpkit import open_checkpointer


class Worker:
    """A worker process; `close` ends it whatever it is doing."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.postgres.worker"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, command: str, *args: Any) -> None:
        """Start a command; `answer` waits for what it gives."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *args]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Return what the next line says."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


async def ready() -> bool:
    """Say that the process has started."""
    return True


async def append_one(url: str) -> int:
    """Open the store, append one message, and return the version."""
    async with open_checkpointer(url) as cp:
        return await cp.append("shared", [{"by": os.getpid()}])


async def append_many(url: str, thread_id: str, name: str, count: int) -> list[int]:
    """Append messages by four tasks at a time; return the versions."""
    async with open_checkpointer(url) as cp:

        async def some(part: int) -> list[int]:
            return [
                await cp.append(thread_id, [{"by": name, "part": part, "i": i}])
                for i in range(count)
            ]

        parts = await asyncio.gather(*(some(part) for part in range(4)))
        return [version for part in parts for version in part]


COMMANDS: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
    command.__name__: command for command in (ready, append_one, append_many)
}


def main() -> None:
    for line in sys.stdin:
        command, *args = json.loads(line)

        try:
            answer = asyncio.run(COMMANDS[command](*args))
        except Exception as exc:
            answer = {"error": repr(exc)}

        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
