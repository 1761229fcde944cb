"""The approvals example: killed, approved from outside, finished by a worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks_of
from tests.stores import SHARED, fresh_url

FILE = Path(__file__).parents[2] / "examples" / "approvals.py"


@pytest.mark.long
@pytest.mark.parametrize("kind", SHARED)
def test_a_worker_finishes_what_a_killed_agent_asked_for(
    kind: str, tmp_path: Path
) -> None:
    """On a store that processes share, the bank's books show one payment."""
    url = fresh_url(kind, tmp_path)
    _check_one_payment(url)


@pytest.mark.long
def test_the_example_runs_again_on_the_same_store(tmp_path: Path) -> None:
    """What an earlier run stored does not change the next one."""
    url = f"sqlite:///{tmp_path}/agent.db"
    _check_one_payment(url)
    _check_one_payment(url)


def _check_one_payment(url: str) -> None:
    done = subprocess.run(
        [sys.executable, str(FILE), url],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [finished] = [line for line in done.stdout.splitlines() if "one payment" in line]
    assert finished.partition(":")[0] == url.partition(":")[0]


def test_the_page_shows_the_example() -> None:
    """The page has the text of the file that the other test runs."""
    assert FILE.read_text(encoding="utf-8") in blocks_of("approvals.md")
