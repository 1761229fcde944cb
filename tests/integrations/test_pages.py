"""The code on the pages of the integrations runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "integrations"

PRINTED = {
    "openai-agents": ["I was shown 1 items.\n", "I was shown 3 items.\n"],
    "cubepi": ["charging 1000\nshown 3\n", "shown 7\n"],
    "pydantic-ai": ["Hello again.\n2 messages\n", "Hello again.\n4 messages\n"],
}


@pytest.mark.parametrize("page", PRINTED)
def test_the_program_runs_twice(tmp_path: Path, page: str) -> None:
    """The second run goes on where the first one ended."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    program = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    script = tmp_path / "program.py"
    script.write_text(program, encoding="utf-8")
    command = [sys.executable, "-W", "error", str(script)]

    for printed in PRINTED[page]:
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=50
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout == printed


@pytest.mark.parametrize("page", PRINTED)
def test_no_block_is_without_a_test(page: str) -> None:
    """The program, and on CubePi's page the resuming, which its own test runs."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert text.count("```python\n") == (2 if page == "cubepi" else 1)
