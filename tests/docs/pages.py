"""The code blocks of the documentation, and how a test runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

__all__ = ["DOCS", "blocks_of", "printed_by"]

DOCS = Path(__file__).parents[2] / "docs"


def blocks_of(page: str) -> list[str]:
    """Return the Python blocks of a page, which is named relative to ``docs``."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def printed_by(block: str, folder: Path) -> str:
    """Run a block in a separate process; return what it printed.

    A warning is an error. The block runs in ``folder``, so a later run finds its files.
    """
    script = folder / "block.py"
    script.write_text(block, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
