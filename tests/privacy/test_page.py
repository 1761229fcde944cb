"""The programs of docs/privacy.md run."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pages import blocks_of, printed_by


def test_the_page_runs(tmp_path: Path) -> None:
    """A message is encrypted and read; its thread is erased; a service has the keys."""
    shown, service = blocks_of("privacy.md")
    assert printed_by(shown, tmp_path).splitlines() == [
        "[{'role': 'user', 'content': 'my secret'}]",
        "False",
        "['user-7/chat'] 1",
    ]
    assert printed_by(service, tmp_path) == "1\n"
