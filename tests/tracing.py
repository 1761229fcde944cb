"""What a process asks of the kernel, as strace sees it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

__all__ = ["needs_strace", "traced"]

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")


def traced(calls: str, *command: str, longest: int = 32) -> list[str]:
    """Run a command to its end; return a line for each call of these, in order.

    Of what is written ``longest`` bytes are shown. Skips the test where the system
    allows no tracing.
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
            timeout=50,
            check=False,
        )

        if done.returncode and "ptrace" in done.stderr:
            pytest.skip("this system does not allow tracing")

        assert done.returncode == 0, done.stderr
        return trace.read_text(errors="replace").splitlines()
