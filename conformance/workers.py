"""Other processes that use the store: started, let go together, and killed.

A worker is ``python -m conformance.worker``. It reads its job as one line of JSON,
says ``opening`` and, when the store is open, ``ready``, waits for ``go``, and then
prints what it did, a line an operation, each before the next one begins.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from conformance.failure import Failure
from conformance.harness import Harness, address

__all__ = ["Worker", "workers"]


class Worker:
    """One process, from its start to its end."""

    def __init__(self, harness: Harness, job: dict[str, Any]) -> None:
        there = harness.elsewhere()
        assert there is not None, "the clause needs 'processes'"
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "conformance.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        # Not in the arguments, which other users can see: a URL may hold a password.
        self._say({"path": sys.path, "harness": address(there), **job})

    async def reaches(self, stage: str) -> None:
        """Wait until the worker is ``opening`` the store, or is ``ready``."""
        said = await self.line()

        if said != stage:
            raise Failure("another process to open the store", self.errors())

    def go(self) -> None:
        """Let the worker begin."""
        self._say("go")

    async def line(self) -> Any:
        """Return the next thing that the worker said, ``None`` at its end."""
        assert self._process.stdout is not None
        text = await asyncio.to_thread(self._process.stdout.readline)
        # A line without its end is one that the worker was killed over.
        return json.loads(text) if text.endswith(b"\n") else None

    async def lines(self) -> list[Any]:
        """Return all that the worker says until its end."""
        found = []

        while (said := await self.line()) is not None:
            found.append(said)

        return found

    async def finished(self) -> list[Any]:
        """Return what the worker said; it must have ended well."""
        said = await self.lines()
        code = await asyncio.to_thread(self._process.wait)

        if code != 0:
            raise Failure("another process to use the store", self.errors())

        return said

    def kill(self) -> None:
        """Kill the worker with SIGKILL."""
        self._process.kill()

    def errors(self) -> str:
        """Return the end of what the worker wrote to its standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-4000:]

    def close(self) -> None:
        """Kill the worker where it still runs, and let go of everything."""
        self._process.kill()
        self._process.wait()
        self._errors.close()

        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None

            try:
                pipe.close()
            except BrokenPipeError:
                continue  # it was killed before it had read its last order

    def _say(self, value: Any) -> None:
        assert self._process.stdin is not None

        try:
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # it has died; what it said and its status tell the story


@asynccontextmanager
async def workers(
    harness: Harness, jobs: list[dict[str, Any]]
) -> AsyncIterator[list[Worker]]:
    """Start a process for each job, let them begin together; kill what is left."""
    started: list[Worker] = []

    try:
        for job in jobs:
            started.append(Worker(harness, job))  # noqa: PERF401  # to close each one

        for stage in ("opening", "ready"):
            for worker in started:
                await worker.reaches(stage)

        for worker in started:
            worker.go()

        yield started
    finally:
        for worker in started:
            worker.close()
