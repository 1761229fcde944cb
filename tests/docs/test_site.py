"""The site builds, and the code on its pages runs unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, blocks_of, printed_by

ROOT = DOCS.parent

# Pages whose code has a test elsewhere, with more assertions.
ELSEWHERE = {
    "effects.md": "tests/effects/test_docs.py",
    "import.md": "tests/importing/test_cli.py",
    "integrations/cubepi.md": "tests/integrations/test_cubepi.py",
    "integrations/langgraph.md": "tests/integrations/test_langgraph_docs.py",
    "integrations/openai-agents.md": "tests/integrations/test_pages.py",
    "integrations/pydantic-ai.md": "tests/integrations/test_pages.py",
    "sessions.md": "tests/sessions/test_docs.py",
    "write-a-backend.md": "tests/docs/test_write_a_backend.py",
}


PAGES = [str(page.relative_to(DOCS)) for page in sorted(DOCS.rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name in PAGES
    if name not in ELSEWHERE
    for number, block in enumerate(blocks_of(name))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_each_block_is_a_program_that_runs(block: str, tmp_path: Path) -> None:
    """In an empty folder, without a warning or a failed assertion."""
    printed_by(block, tmp_path)


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_a_page_that_is_tested_elsewhere_has_that_test(page: str, test: str) -> None:
    """The named test file mentions the page."""
    assert Path(page).stem in (ROOT / test).read_text(encoding="utf-8")
    assert page in PAGES


def test_the_site_builds(tmp_path: Path) -> None:
    """A dead link, or a name that the reference does not find, fails the build."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"),
            "-d",
            tmp_path,
        ],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    contract = (tmp_path / "reference" / "contract" / "index.html").read_text("utf-8")
    assert "expected_version" in contract
