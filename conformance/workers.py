"""Other processes that use the store: the suite starts and kills them.

A worker runs `conformance.worker`. It reads its job as one line of JSON and prints
``opening``, then ``ready`` when the store is open, or why it was refused. After it has
read ``go`` it prints one line for each operation, before the next operation starts.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from conformance.failure import Failure
from conformance.fork_server import start_worker
from conformance.harness import Harness, address
from conformance.parent import place_of_parent

__all__ = ["Worker", "workers"]


class Worker:
    """One worker process."""

    def __init__(self, harness: Harness, job: dict[str, Any]) -> None:
        # A clause about a store of one process starts others that are to be refused.
        target = harness.elsewhere() or harness
        # Not as arguments, which other users can see: a URL may contain a password.
        start = {"place": place_of_parent(), "harness": address(target), **job}
        self._errors = tempfile.TemporaryFile()
        its_input, our_end = os.pipe()
        self._input = open(our_end, "wb")
        our_end, its_output = os.pipe()
        self._output = open(our_end, "rb")

        try:
            errors = self._errors.fileno()
            self._process = start_worker(its_input, its_output, errors)
        finally:
            os.close(its_input)
            os.close(its_output)

        self._send(start)

    async def reaches(self, stage: str) -> None:
        """Read the next line; fail unless it is the stage ``opening`` or ``ready``."""
        printed = await self.line()

        if printed != stage:
            # A worker that was refused says so before it has printed a traceback.
            seen = json.dumps(printed) if printed else self.errors()
            raise Failure("another process that opens the store", seen)

    def go(self) -> None:
        """Start the worker's operations."""
        self._send("go")

    async def line(self) -> Any:
        """Return the next printed value, or ``None`` when the worker has ended."""
        text = await asyncio.to_thread(self._output.readline)
        # A line without a newline is truncated: the worker was killed.
        return json.loads(text) if text.endswith(b"\n") else None

    async def lines(self) -> list[Any]:
        """Return every value that the worker prints until it ends."""
        found = []

        while (value := await self.line()) is not None:
            found.append(value)

        return found

    async def finished(self) -> list[Any]:
        """Return every printed value; a worker that crashed is a `Failure`."""
        printed = await self.lines()
        code = await asyncio.to_thread(self._process.wait)

        if code != 0:
            raise Failure("another process to use the store", self.errors())

        return printed

    async def ask(self, request: Any) -> Any:
        """Send a request to a mirror, and return its answer."""
        self._send(request)
        answer = await self.line()

        if answer is None:
            raise Failure("another process to use the store", self.errors())

        return answer

    def kill(self) -> None:
        """Kill the worker with SIGKILL."""
        self._process.kill()

    def stop(self) -> None:
        """Stop the worker with SIGSTOP; it keeps what it holds."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a worker that was stopped."""
        os.kill(self._process.pid, signal.SIGCONT)

    def errors(self) -> str:
        """Return the end of what the worker wrote to its standard error."""
        # Not by seeking: a worker that still runs writes at the same offset.
        descriptor = self._errors.fileno()
        start = max(0, os.fstat(descriptor).st_size - 4000)
        return os.pread(descriptor, 4000, start).decode(errors="replace")

    def close(self) -> None:
        """Kill the worker if it still runs, and close its pipes."""
        with suppress(Failure):  # its fork server died: it ends when its pipes close
            self._process.kill()
            self._process.wait()

        self._errors.close()

        for pipe in (self._input, self._output):
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # the worker was killed before it read everything

    def _send(self, value: Any) -> None:
        try:
            self._input.write(json.dumps(value).encode() + b"\n")
            self._input.flush()
        except BrokenPipeError:
            return  # the worker has ended; its output and exit code show why


@asynccontextmanager
async def workers(
    harness: Harness, jobs: list[dict[str, Any]], *, together: bool = True
) -> AsyncIterator[list[Worker]]:
    """Start a process for each job; kill them on exit.

    They begin ``together``, or each when the caller says `Worker.go`.
    """
    started: list[Worker] = []

    try:
        for job in jobs:
            started.append(Worker(harness, job))  # noqa: PERF401  # if a start fails, those before it are closed

        for stage in ("opening", "ready"):
            for worker in started:
                await worker.reaches(stage)

        for worker in started if together else ():
            worker.go()

        yield started
    finally:
        for worker in started:
            worker.close()
