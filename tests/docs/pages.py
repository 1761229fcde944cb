"""The code blocks of the documentation, and how a test runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from runpy import run_path

__all__ = ["DOCS", "blocks_of", "printed_by", "printed_by_process"]

DOCS = Path(__file__).parents[2] / "docs"


def blocks_of(page: str) -> list[str]:
    """Return the Python blocks of a page, which is named relative to ``docs``."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def printed_by(block: str, folder: Path) -> str:
    """Run a block as the main program; return what it printed.

    A warning is an error. The block runs in ``folder``, so a later run finds its files;
    it runs in this process, which has imported cpkit already.
    """
    script = _written(block, folder)

    with chdir(folder), redirect_stdout(StringIO()) as printed:
        run_path(str(script), run_name="__main__")

    return printed.getvalue()


def printed_by_process(block: str, folder: Path) -> str:
    """Do the same in a separate process, for frameworks that leave something open."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(_written(block, folder))],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _written(block: str, folder: Path) -> Path:
    script = folder / "block.py"
    script.write_text(block, encoding="utf-8")
    return script
