"""Another process of a test: it runs commands, one line of JSON each.

A module with commands ends in ``serve(...)``; a test starts it with `Worker`.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["FORKS", "UNPRIVILEGED", "Worker", "Workers", "report", "serve", "started"]

UNPRIVILEGED = 65534
"""The user and group without rights."""


# A fork of a process that has imported all starts in a tenth of the time.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "cpkit.effects",
        "cpkit.worker",
        "cpkit_file",
        "cpkit_postgres",
        "cpkit_redis",
        "cpkit_sqlite",
        "tests.worker",
    ]
)


class Worker:
    """A process that serves the commands of a module; `close` kills it."""

    def __init__(self, module: str) -> None:
        stdin, self._commands = FORKS.Pipe(duplex=False)
        self._lines, stdout = FORKS.Pipe(duplex=False)
        self._reader = open(self._lines.fileno(), closefd=False)

        with stdin, stdout:
            self.process = FORKS.Process(target=_main, args=(module, stdin, stdout))
            self.process.start()

    def tell(self, command: str, *args: Any) -> None:
        """Start a command; `answer` waits for its result."""
        line = json.dumps([command, *args]) + "\n"
        os.write(self._commands.fileno(), line.encode())

    def answer(self) -> Any:
        """Return the next line that the process writes."""
        return json.loads(self._reader.readline())

    def ask(self, command: str, *args: Any) -> Any:
        """Run a command and return its result."""
        self.tell(command, *args)
        return self.answer()

    def kill(self) -> list[Any]:
        """Kill the process with SIGKILL, and return the lines that it wrote before."""
        self.process.kill()
        printed = self._reader.read()
        self.process.join()
        return [json.loads(line) for line in printed.splitlines() if line]

    def close(self) -> None:
        self.process.kill()
        self.process.join()

        for pipe in (self._reader, self._lines, self._commands):
            pipe.close()


def _main(module: str, stdin: Connection, stdout: Connection) -> None:
    """Run the module as a program with this standard input and output."""
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    sys.stdin = open(0)
    runpy.run_module(module, run_name="__main__")


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
