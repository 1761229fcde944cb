"""No child process of the suite outlives a run that is killed."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance import Harness
from conformance.slowdown import slowdown
from cpkit import Durability, Survives
from tests.broken.reference import Reference

RUN = """
import asyncio, sys
from conformance import certify
from tests.conformance_suite.test_parent import StuckHarness

_, pipe, clause, jobs = sys.argv
asyncio.run(certify(StuckHarness(pipe), clauses=[clause], jobs=int(jobs)))
"""


def is_the_run() -> bool:
    """Tell whether this is the process that the test kills."""
    return RUN in sys.orig_argv


class Stuck(Reference):
    """Appends never end, except in the run itself; their process has a pipe open."""

    durability = Durability(Survives.MACHINE)

    def __init__(self, pipe: str, **options: Any) -> None:
        super().__init__("stuck", **options)
        self._pipe = pipe

    async def append(self, *args: Any, **options: Any) -> int:
        if is_the_run():
            return await super().append(*args, **options)

        os.write(os.open(self._pipe, os.O_WRONLY), b".")
        return await asyncio.Future()


@dataclass
class StuckHarness(Harness):
    pipe: str

    def open(self, **options: Any) -> AbstractAsyncContextManager[Any]:
        return Stuck(self.pipe, **options)

    async def in_folder(self, folder: str) -> Harness:
        return self


@pytest.mark.long
@pytest.mark.parametrize(
    ("clause", "jobs"),
    [
        ("append.returns-version", 2),
        ("linearizable.threads-in-processes", 1),
        ("powerloss.kill-at-every-call", 1),
    ],
    ids=["job", "worker", "writer"],
)
def test_children_end_with_a_run_that_is_killed(
    clause: str, jobs: int, tmp_path: Path
) -> None:
    """A job, a worker and a traced writer end, in the middle of an operation too."""
    if clause.startswith("powerloss") and shutil.which("strace") is None:
        pytest.skip("needs strace")

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    try:
        with subprocess.Popen(
            [sys.executable, "-c", RUN, str(pipe), clause, str(jobs)],
            stderr=subprocess.PIPE,
        ) as run:
            assert select.select([reader], [], [], 20 * slowdown())[0]
            run.kill()
            assert run.stderr is not None
            # It ends when no process has it open: the server of the workers has it too.
            assert run.stderr.read() == b""

        ended = b"."

        # The pipe ends when no process has it open.
        while ended:
            assert select.select([reader], [], [], 20 * slowdown())[0]
            ended = os.read(reader, 100)
    finally:
        os.close(reader)
