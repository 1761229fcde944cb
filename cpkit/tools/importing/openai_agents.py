"""Sessions of the OpenAI Agents SDK in a SQLite file, as its ``SQLiteSession`` writes.

They become what `cpkit.integrations.openai_agents.Session` reads under the same id. The
tables are known by their columns, whatever they are called. Needs no SDK.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpkit.driver.jsontext import encode_json, parse_json
from cpkit.errors import CheckpointerError
from cpkit.integrations.openai_thread import session_thread
from cpkit.tools.importing.source import BadSource, Found, Left, Thread
from cpkit.tools.importing.sqlite import columns, opened

__all__ = ["is_sessions", "read_openai_agents"]

MESSAGES = {"id", "session_id", "message_data", "created_at"}


def is_sessions(tables: dict[str, set[str]]) -> bool:
    """Tell whether a file with these tables has sessions."""
    return any(found >= MESSAGES for found in tables.values())


def read_openai_agents(path: Path) -> Iterator[Found]:
    """Yield the sessions of each table of messages, by id."""
    with opened(path) as connection:
        names = [t for t, found in columns(connection).items() if found >= MESSAGES]

        if not names:
            raise BadSource(f"{path}: no table with {', '.join(sorted(MESSAGES))}")

        for table in names:
            quoted = '"' + table.replace('"', '""') + '"'
            ids = connection.execute(
                f"SELECT DISTINCT session_id FROM {quoted} ORDER BY session_id"
            )

            for (session_id,) in ids.fetchall():
                rows = connection.execute(
                    f"SELECT id, message_data FROM {quoted} "
                    "WHERE session_id = ? ORDER BY id",
                    (session_id,),
                )
                yield from _session(session_id, rows)


def _session(session_id: Any, rows: sqlite3.Cursor) -> Iterator[Found]:
    name = f"session {session_id!r}"
    records = []

    for row, text in rows:
        try:
            item = parse_json(text)
            encode_json(item, ())
        except (ValueError, TypeError, CheckpointerError):
            # As the SDK does, which passes over what it cannot parse.
            yield Left(f"{name}, row {row}", "no JSON")
            continue

        records.append({"item": item, "by": f"row {row}"})

    try:
        yield Thread(name, session_thread(session_id), records)
    except CheckpointerError as exc:
        yield Left(name, str(exc), is_thread=True)
