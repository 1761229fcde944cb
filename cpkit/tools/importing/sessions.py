"""Coding-agent session files: the JSONL of `cpkit.sessions`, of any version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cpkit.driver.ids import check_id
from cpkit.errors import CheckpointerError
from cpkit.sessions.jsonl import read_jsonl
from cpkit.sessions.migrate import migrate
from cpkit.tools.importing.source import Found, Left, Thread
from cpkit.tools.importing.transcripts import TORN

__all__ = ["read_sessions"]


def read_sessions(files: list[Path], *, skip_corrupt: bool) -> Iterator[Found]:
    """Yield one session for each file, as `SessionLog` stores it under its own id.

    With ``skip_corrupt`` lines that are not entries are left out; otherwise a custom
    entry in the place of each says so.
    """
    for path in files:
        try:
            file = read_jsonl(path, "skip" if skip_corrupt else "replace")
            lines = migrate(file.lines)
            session_id = check_id("session id", lines[0]["id"])
        except (CheckpointerError, OSError) as exc:
            yield Left(path.name, _reason(exc), is_thread=True)
            continue

        for line in file.skipped:
            reason = TORN if line.is_torn else "a line that is not an entry"
            yield Left(f"{path.name}, line {line.number}", reason)

        yield Thread(path.name, session_id, lines)


def _reason(exc: Exception) -> str:
    # Without the place in the file: a report counts equal reasons.
    return str(getattr(exc, "reason", None) or exc)
