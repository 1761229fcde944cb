"""The approvals example: killed, approved from outside, finished by a worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.docs.pages import blocks_of
from tests.stores import SHARED, fresh_url

FILE = Path(__file__).parents[2] / "examples" / "approvals.py"


def test_a_worker_finishes_what_a_killed_agent_asked_for(tmp_path: Path) -> None:
    """On each store that processes share, the bank's books show one payment."""
    urls = [fresh_url(kind, tmp_path) for kind in SHARED]
    done = subprocess.run(
        [sys.executable, str(FILE), *urls],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    finished = [line for line in done.stdout.splitlines() if "one payment" in line]
    assert sorted(line.partition(":")[0] for line in finished) == sorted(
        url.partition(":")[0] for url in urls
    )


def test_the_page_shows_the_example() -> None:
    """The page has the text of the file that the other test runs."""
    assert FILE.read_text(encoding="utf-8") in blocks_of("approvals.md")
