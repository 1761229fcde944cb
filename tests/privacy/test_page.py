"""The first program of docs/privacy.md prints what the page says."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pages import blocks_of, printed_by


def test_the_page_runs(tmp_path: Path) -> None:
    """A message is encrypted and read, and its thread is erased."""
    assert printed_by(blocks_of("privacy.md")[0], tmp_path).splitlines() == [
        "[{'role': 'user', 'content': 'my secret'}]",
        "False",
        "['user-7/chat'] 1",
    ]
