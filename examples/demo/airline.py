"""The airline, an external system: its books record what really happened.

It carries out every request, also a repeated one, and does not know the agent's store.
It can look up the answer to a request by the request's key.
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

# The key is deliberately not unique: the airline does not prevent a second booking.
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
    """One request, and the airline's answer."""

    key: str
    tool: str
    args: dict[str, JsonValue]
    answer: str


class Books:
    """An append-only table in a SQLite file, synced before each answer."""

    def __init__(self, path: Path) -> None:
        self.path = path

        with self._open() as db:
            db.execute(_BOOKS)

    def write(self, entry: Entry) -> None:
        """Carry out a request. A repeated request is carried out again."""
        with self._open() as db:
            db.execute(
                "INSERT INTO books (key, tool, args, answer) VALUES (?, ?, ?, ?)",
                (entry.key, entry.tool, json.dumps(entry.args), entry.answer),
            )

    def answer_to(self, key: str) -> str | None:
        """Return the answer to the first request with this key, or None."""
        with self._open() as db:
            found = db.execute(
                "SELECT answer FROM books WHERE key = ? ORDER BY number LIMIT 1", (key,)
            ).fetchone()

        return found[0] if found else None

    def entries(self) -> list[Entry]:
        """Return every request that was carried out, in order."""
        with self._open() as db:
            rows = db.execute(
                "SELECT key, tool, args, answer FROM books ORDER BY number"
            ).fetchall()

        return [Entry(key, tool, json.loads(args), a) for key, tool, args, a in rows]

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction, on the calling thread."""
        with closing(sqlite3.connect(self.path, timeout=30)) as db, db:
            db.execute("PRAGMA synchronous = FULL")
            yield db
