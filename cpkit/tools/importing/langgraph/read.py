"""Reading the rows of LangGraph's savers, one thread at a time.

LangGraph's serializer reads the bytes of values. Classes that a value names are
carried along: nothing is imported or called because stored data names it, and pickled
values are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cpkit.registry import redacted
from cpkit.tools.importing.langgraph.thread import (
    CheckpointThread,
    Row,
    Unreadable,
    checkpoint,
    decoded,
)
from cpkit.tools.importing.source import BadSource, Found, Left
from cpkit.tools.importing.sqlite import has_checkpoints, read_snapshot, tables_of

__all__ = ["read_langgraph_postgres", "read_langgraph_sqlite"]

_PLACE = "checkpoint_ns, checkpoint_id"

_CONNECT_TIMEOUT = 10  # seconds, unless the URL has another connect_timeout


def read_langgraph_sqlite(path: Path) -> Iterator[Found]:
    """Yield the threads by id, each with all its checkpoints, oldest first."""
    with read_snapshot(path) as connection:
        tables = tables_of(connection)

        if not has_checkpoints(tables):
            raise BadSource(f"{path}: no tables of LangGraph's SQLite saver")

        # Old savers have no task_path; a new saver adds the column when it writes.
        task_path = "task_path" if "task_path" in tables["writes"] else "''"
        ids = connection.execute(
            "SELECT DISTINCT thread_id FROM checkpoints ORDER BY thread_id"
        )

        for (thread_id,) in ids.fetchall():
            rows = partial(_sqlite_rows, connection, thread_id, task_path)
            yield _thread(thread_id, rows)


def read_langgraph_postgres(url: str) -> Iterator[Found]:
    """Yield the threads by id, from one snapshot of the database."""
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
        from psycopg.rows import tuple_row
    except ModuleNotFoundError:
        raise BadSource(
            "reading LangGraph's Postgres needs: pip install 'psycopg[binary]'"
        ) from None

    try:
        # Ctrl-C waits for the thread that connects; psycopg's own limit is 130 s.
        options: dict[str, Any] = conninfo_to_dict(url)
        options.setdefault("connect_timeout", _CONNECT_TIMEOUT)

        with psycopg.connect(**options, row_factory=tuple_row) as connection:
            connection.read_only = True
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            ids = connection.execute(
                "SELECT DISTINCT thread_id FROM checkpoints ORDER BY thread_id"
            )

            for (thread_id,) in ids.fetchall():
                yield _thread(thread_id, partial(_postgres_rows, connection, thread_id))
    except psycopg.errors.UndefinedTable:
        raise BadSource(
            f"{redacted(url)}: no tables of LangGraph's Postgres saver; another schema "
            "is named by ?options=-csearch_path%3Dschema"
        ) from None
    except psycopg.Error as exc:
        reason = str(exc).strip().splitlines() or [type(exc).__name__]
        raise BadSource(f"{redacted(url)}: {reason[0]}") from exc


def _thread(thread_id: str, rows: Callable[[], list[Row]]) -> Found:
    name = f"thread {thread_id!r}"

    try:
        return CheckpointThread.of(name, thread_id, rows())
    except Unreadable as exc:
        return Left(name, str(exc), is_thread=True)


def _sqlite_rows(connection: Any, thread_id: str, task_path: str) -> list[Row]:
    found = connection.execute(
        f"SELECT {_PLACE}, parent_checkpoint_id, type, checkpoint, metadata "
        "FROM checkpoints WHERE thread_id = ? ORDER BY checkpoint_id, checkpoint_ns",
        (thread_id,),
    )
    rows = {
        (ns, checkpoint_id): Row(
            ns,
            checkpoint_id,
            parent,
            checkpoint(decoded(kind, body)),
            _metadata(metadata),
        )
        for ns, checkpoint_id, parent, kind, body, metadata in found
    }
    _add_writes(
        rows,
        connection.execute(
            f"SELECT {_PLACE}, task_id, {task_path}, idx, channel, type, value "
            "FROM writes WHERE thread_id = ? ORDER BY task_id, idx",
            (thread_id,),
        ),
    )
    return list(rows.values())


def _metadata(text: str | bytes | None) -> dict[str, Any]:
    try:
        found: Any = json.loads(text or "{}")
    except (TypeError, ValueError, RecursionError) as exc:
        raise Unreadable(f"the metadata is damaged: {exc}") from exc

    if not isinstance(found, dict):
        raise Unreadable("the metadata is damaged: it is not an object")

    return found


def _postgres_rows(connection: Any, thread_id: str) -> list[Row]:
    blobs = {
        (ns, channel, version): (kind, blob)
        for ns, channel, version, kind, blob in connection.execute(
            "SELECT checkpoint_ns, channel, version, type, blob FROM checkpoint_blobs "
            "WHERE thread_id = %s",
            (thread_id,),
        )
    }
    rows = {}

    for ns, checkpoint_id, parent, body, metadata in connection.execute(
        f"SELECT {_PLACE}, parent_checkpoint_id, checkpoint, metadata "
        "FROM checkpoints WHERE thread_id = %s ORDER BY checkpoint_id, checkpoint_ns",
        (thread_id,),
    ):
        # The checkpoint holds small values; blobs hold all others, by version.
        values = dict(checkpoint(body).get("channel_values") or {})

        for channel, version in body["channel_versions"].items():
            kind, blob = blobs.get((ns, channel, str(version)), ("empty", None))

            if kind != "empty":
                values[channel] = decoded(kind, blob)

        body = {**body, "channel_values": values}
        rows[ns, checkpoint_id] = Row(ns, checkpoint_id, parent, body, metadata)

    _add_writes(
        rows,
        connection.execute(
            f"SELECT {_PLACE}, task_id, task_path, idx, channel, type, blob "
            "FROM checkpoint_writes WHERE thread_id = %s ORDER BY task_id, idx",
            (thread_id,),
        ),
    )
    return list(rows.values())


def _add_writes(rows: dict[tuple[str, str], Row], found: Any) -> None:
    for ns, checkpoint_id, task_id, task_path, index, channel, kind, value in found:
        # A write may be stored without its checkpoint, if the run crashed in between.
        if (row := rows.get((ns, checkpoint_id))) is not None:
            if type(index) is not int:
                raise Unreadable("a write is damaged: its index is not a number")

            task = row.writes.setdefault((task_id, task_path), {})
            task[index] = (channel, decoded(kind, value))
