"""The code in docs/integrations/langgraph.md runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "integrations"
PAGE = (DOCS / "langgraph.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)

# What each program prints when it is run for the first time, and for the second.
PRINTED = [["You said yes. 2\n", "You said yes. 4\n"], ["", ""]]


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_each_program_runs_twice(tmp_path: Path, number: int) -> None:
    """The second run goes on where the first one ended."""
    script = tmp_path / "program.py"
    script.write_text(BLOCKS[number], encoding="utf-8")

    for printed in PRINTED[number]:
        done = subprocess.run(
            [sys.executable, "-W", "error", str(script)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=50,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout == printed
