"""The airline, which is not ours: its books say what really happened.

It does what it is told, as often as it is told, and knows nothing of the agent's
store. All that it offers is to be asked by the key that came with a request.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cpkit import JsonValue

__all__ = ["Books", "Entry"]

# The key is not unique, on purpose: nothing here would stop a second booking.
_BOOKS = """
CREATE TABLE IF NOT EXISTS books (
    number INTEGER PRIMARY KEY,
    at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
    key TEXT NOT NULL,
    tool TEXT NOT NULL,
    args TEXT NOT NULL,
    answer TEXT NOT NULL
)
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One request as the airline carried it out, or refused it."""

    key: str
    tool: str
    args: dict[str, JsonValue]
    answer: str


class Books:
    """An append-only table in a SQLite file, synced before an entry is answered."""

    def __init__(self, path: Path) -> None:
        self.path = path

        with self._open() as db:
            db.execute(_BOOKS)

    def write(self, entry: Entry) -> None:
        """Carry out a request. Asked twice, it happens twice."""
        with self._open() as db:
            db.execute(
                "INSERT INTO books (key, tool, args, answer) VALUES (?, ?, ?, ?)",
                (entry.key, entry.tool, json.dumps(entry.args), entry.answer),
            )

    def answer_to(self, key: str) -> str | None:
        """Return the answer to the request that came with the key, if one did."""
        with self._open() as db:
            found = db.execute(
                "SELECT answer FROM books WHERE key = ? ORDER BY number LIMIT 1", (key,)
            ).fetchone()

        return found[0] if found else None

    def entries(self) -> list[Entry]:
        """Return everything that was ever done, in order."""
        with self._open() as db:
            rows = db.execute(
                "SELECT key, tool, args, answer FROM books ORDER BY number"
            ).fetchall()

        return [Entry(key, tool, json.loads(args), a) for key, tool, args, a in rows]

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction, from whatever thread."""
        with closing(sqlite3.connect(self.path, timeout=30)) as db, db:
            db.execute("PRAGMA synchronous = FULL")
            yield db
