"""Sessions of the OpenAI Agents SDK in a SQLite file, as its ``SQLiteSession`` writes.

They become what `cpkit.integrations.openai_agents.Session` reads under the same id.
Tables are recognized by their columns, not by their names. The SDK is not needed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpkit.errors import CheckpointerError
from cpkit.integrations.openai_thread import session_thread
from cpkit.tools.importing.source import BadSource, Found, Left, Thread, parsed
from cpkit.tools.importing.sqlite import is_session_table, read_snapshot, tables_of

__all__ = ["read_openai_agents"]


def read_openai_agents(path: Path) -> Iterator[Found]:
    """Yield the sessions of each table of messages, by id."""
    with read_snapshot(path) as connection:
        tables = [
            name
            for name, columns in tables_of(connection).items()
            if is_session_table(columns)
        ]

        if not tables:
            raise BadSource(f"{path}: no table of messages of the OpenAI Agents SDK")

        for table in tables:
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
            item, missing = parsed(text)
        except (ValueError, TypeError):
            # The SDK skips rows that it cannot parse, too.
            yield Left(f"{name}, row {row}", "not JSON")
            continue

        yield from (Left(f"{name}, row {row}", reason) for reason in missing)
        records.append({"item": item, "by": f"row {row}"})

    try:
        yield Thread(name, session_thread(session_id), records)
    except CheckpointerError as exc:
        yield Left(name, str(exc), is_thread=True)
