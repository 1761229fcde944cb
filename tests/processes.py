"""Another process of a test.

`Forked` runs a program. A `Worker` runs commands, one line of JSON each: a module with
commands ends in ``serve(...)``.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from fcntl import ioctl
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import PIPE
from termios import FIONREAD
from typing import Any, Self

__all__ = [
    "FORKS",
    "ROOT",
    "UNPRIVILEGED",
    "Forked",
    "Worker",
    "Workers",
    "interrupted_output",
    "report",
    "serve",
    "started",
]

# A fork of a process that has imported all starts in a tenth of the time.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["cpkit.cli.decide", "cpkit.cli.threads", "cpkit.sessions", "cpkit.ui.serve"]
    + ["cpkit.worker", "cpkit_file", "cpkit_postgres", "cpkit_redis", "cpkit_sqlite"]
)

ROOT = Path(__file__).parents[1]

UNPRIVILEGED = 65534
"""The user and group without rights."""


class Forked:
    """A process like ``python -m MODULE WORD…``, with warnings as errors.

    It has cpkit imported at its start. ``module`` may also be the file of a script.
    """

    def __init__(
        self,
        module: str | Path,
        *words: str,
        stdout: int = PIPE,
        stderr: int = PIPE,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        reader, writer = os.pipe()
        self.stdin = open(writer, "w")
        streams = [Connection(reader)]
        outputs = []

        for given in (stdout, stderr):
            reader, writer = os.pipe()
            outputs.append(open(reader))

            if given != PIPE:  # then ours has nothing to read
                os.dup2(given, writer)

            streams.append(Connection(writer))

        self.stdout, self.stderr = outputs

        # The fork server may have another environment and folder.
        if env is None:
            env = os.environ

        args = (module, words, dict(env), cwd, streams)
        self._process = FORKS.Process(target=_run, args=args)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

        for stream in streams:
            stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def communicate(self) -> tuple[str, str]:
        """Return the rest of both outputs when the process has ended."""
        self.stdin.close()
        said = self.stdout.read(), self.stderr.read()
        self.wait()
        return said

    def close(self) -> None:
        """Kill the process, unless it has ended."""
        self.kill()

        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()

        self.wait()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(
    module: str | Path,
    words: tuple[str, ...],
    env: dict[str, str],
    cwd: Path,
    streams: list[Connection],
) -> None:
    """Be the forked process."""
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()

    sys.stdin, sys.stdout = open(0), open(1, "w")
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")
    sys.argv = [str(module), *words]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    warnings.simplefilter("error")

    if isinstance(module, Path):
        sys.path.insert(0, str(module.parent))
        runpy.run_path(str(module), run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


class Worker:
    """A process that serves the commands of a module; `close` kills it."""

    def __init__(self, module: str) -> None:
        self.process = Forked(module, stderr=2)

    def tell(self, command: str, *args: Any) -> None:
        """Start a command; `answer` waits for its result."""
        self.process.stdin.write(json.dumps([command, *args]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Return the next line that the process writes."""
        return json.loads(self.process.stdout.readline())

    def ask(self, command: str, *args: Any) -> Any:
        """Run a command and return its result."""
        self.tell(command, *args)
        return self.answer()

    def kill(self) -> list[Any]:
        """Kill the process with SIGKILL, and return the lines that it wrote before."""
        self.process.kill()
        printed = self.process.stdout.read()
        self.process.wait()
        return [json.loads(line) for line in printed.splitlines() if line]

    def close(self) -> None:
        self.process.close()


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


FULL = 60_000
"""Bytes in a pipe that is nearly full: it holds 64 KiB."""


def interrupted_output(*words: str) -> bytes:
    """Return the output of a Python that is stopped and continued in a long write.

    The pipe is full then, so that the system call has written a part. Python has no
    buffer, as with ``PYTHONUNBUFFERED``, which most container images set.
    """
    with subprocess.Popen([sys.executable, "-u", *words], stdout=PIPE) as process:
        assert process.stdout is not None
        size = 0

        while size < FULL and process.poll() is None:
            time.sleep(0.01)  # polls: the kernel reports no full pipe
            size = int.from_bytes(
                ioctl(process.stdout, FIONREAD, bytes(4)), sys.byteorder
            )

        for number in (signal.SIGSTOP, signal.SIGCONT):
            process.send_signal(number)
            os.waitpid(process.pid, os.WUNTRACED | os.WCONTINUED)

        return process.stdout.read()


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
