"""Another process of a test: it runs commands, one line of JSON each.

A module with commands ends in ``serve(...)``; a test starts it with `Worker`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["UNPRIVILEGED", "Worker", "Workers", "report", "serve", "started"]

UNPRIVILEGED = 65534
"""The user and group without rights."""


class Worker:
    """A process that serves the commands of a module; `close` kills it."""

    def __init__(self, module: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, command: str, *args: Any) -> None:
        """Start a command; `answer` waits for its result."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *args]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Return the next line that the process writes."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, command: str, *args: Any) -> Any:
        """Run a command and return its result."""
        self.tell(command, *args)
        return self.answer()

    def kill(self) -> list[Any]:
        """Kill the process with SIGKILL, and return the lines that it wrote before."""
        assert self.process.stdout is not None
        self.process.kill()
        printed = self.process.stdout.read()
        self.process.wait()
        return [json.loads(line) for line in printed.splitlines() if line]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


Workers = Callable[[int], list[Worker]]


@contextmanager
def started(module: str) -> Iterator[Workers]:
    """Yield a function that starts workers; they end with the block."""
    running: list[Worker] = []

    def start(count: int) -> list[Worker]:
        running.extend(Worker(module) for _ in range(count))
        return running[-count:]

    try:
        yield start
    finally:
        for worker in running:
            worker.close()


def report(value: Any) -> None:
    """Write a line, in one system call: a kill leaves no half line."""
    os.write(1, (json.dumps(value) + "\n").encode())


def serve(*commands: Callable[..., Coroutine[Any, Any, Any]]) -> None:
    """Run the commands that are read from standard input, and report the results."""
    by_name = {command.__name__: command for command in commands}

    for line in sys.stdin:
        name, *args = json.loads(line)

        try:
            report(asyncio.run(by_name[name](*args)))
        except Exception as exc:
            report({"error": repr(exc)})
