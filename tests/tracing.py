"""The system calls of a process, recorded by strace."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

__all__ = ["needs_strace", "traced"]

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")


def traced(calls: str, *command: str, longest: int = 32) -> list[str]:
    """Run a command; return a line for each of these system calls, in order.

    A line shows the first ``longest`` bytes of what is written. The test is skipped
    where the system does not allow tracing.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        done = subprocess.run(
            [
                *("strace", "-f", "-s", str(longest), "-o", str(trace)),
                *("-e", f"trace={calls}"),
                *command,
            ],
            capture_output=True,
            text=True,
            check=False,
        )

        if done.returncode and "ptrace" in done.stderr:
            pytest.skip("this system does not allow tracing")

        assert done.returncode == 0, done.stderr
        return trace.read_text(errors="replace").splitlines()
