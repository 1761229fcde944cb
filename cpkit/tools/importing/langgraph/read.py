"""Checkpoints of LangGraph, as its SQLite and its Postgres saver write them.

They become what `cpkit.integrations.langgraph.CheckpointSaver` reads under the same
thread id. The bytes of values are read by LangGraph's serializer, and what they say of
classes is carried along and not acted upon: nothing is imported or called by what is
stored, and pickled values are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpkit.registry import redacted
from cpkit.tools.importing.source import BadSource, Found, Left
from cpkit.tools.importing.sqlite import columns, opened

if TYPE_CHECKING:
    from cpkit.integrations.langgraph_import import Row

__all__ = ["is_checkpoints", "read_langgraph_postgres", "read_langgraph_sqlite"]

TABLES = {
    "checkpoints": {"thread_id", "checkpoint_ns", "checkpoint_id", "checkpoint"},
    "writes": {"thread_id", "checkpoint_ns", "checkpoint_id", "task_id", "idx"},
}

PLACE = "checkpoint_ns, checkpoint_id"


def is_checkpoints(tables: dict[str, set[str]]) -> bool:
    """Tell whether a SQLite file with these tables has checkpoints."""
    return all(tables.get(name, set()) >= wanted for name, wanted in TABLES.items())


def read_langgraph_sqlite(path: Path) -> Iterator[Found]:
    """Yield the threads by id, each with all its checkpoints, the oldest first."""
    with opened(path) as connection, _langgraph():
        tables = columns(connection)

        if not is_checkpoints(tables):
            raise BadSource(f"{path}: no tables of LangGraph's SQLite saver")

        # Savers of before there was a path add the column only when they write.
        task_path = "task_path" if "task_path" in tables["writes"] else "''"
        ids = connection.execute(
            "SELECT DISTINCT thread_id FROM checkpoints ORDER BY thread_id"
        )

        for (thread_id,) in ids.fetchall():
            rows = partial(_sqlite_rows, connection, thread_id, task_path)
            yield from _thread(thread_id, rows)


def read_langgraph_postgres(url: str) -> Iterator[Found]:
    """Yield the threads by id, from one snapshot of the database."""
    try:
        import psycopg
        from psycopg.rows import tuple_row
    except ModuleNotFoundError:
        raise BadSource(
            "reading LangGraph's Postgres needs: pip install 'psycopg[binary]'"
        ) from None

    try:
        with _langgraph(), psycopg.connect(url, row_factory=tuple_row) as connection:
            connection.read_only = True
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            ids = connection.execute(
                "SELECT DISTINCT thread_id FROM checkpoints ORDER BY thread_id"
            )

            for (thread_id,) in ids.fetchall():
                rows = partial(_postgres_rows, connection, thread_id)
                yield from _thread(thread_id, rows)
    except psycopg.errors.UndefinedTable:
        raise BadSource(
            f"{redacted(url)}: no tables of LangGraph's Postgres saver; another schema "
            "is named by ?options=-csearch_path%3Dschema"
        ) from None
    except psycopg.Error as exc:
        reason = str(exc).strip().splitlines() or [type(exc).__name__]
        raise BadSource(f"{redacted(url)}: {reason[0]}") from exc


def _thread(thread_id: str, rows: Callable[[], list[Row]]) -> Iterator[Found]:
    from cpkit.integrations.langgraph_import import CheckpointThread, Unreadable

    name = f"thread {thread_id!r}"

    try:
        yield CheckpointThread.of(name, thread_id, rows())
    except Unreadable as exc:
        yield Left(name, str(exc), is_thread=True)


def _sqlite_rows(connection: Any, thread_id: str, task_path: str) -> list[Row]:
    from cpkit.integrations.langgraph_import import Row, decoded

    found = connection.execute(
        f"SELECT {PLACE}, parent_checkpoint_id, type, checkpoint, metadata "
        "FROM checkpoints WHERE thread_id = ? ORDER BY checkpoint_id, checkpoint_ns",
        (thread_id,),
    )
    rows = {
        (ns, checkpoint_id): Row(
            ns, checkpoint_id, parent, decoded(kind, body), json.loads(metadata or "{}")
        )
        for ns, checkpoint_id, parent, kind, body, metadata in found
    }
    _add_writes(
        rows,
        connection.execute(
            f"SELECT {PLACE}, task_id, {task_path}, idx, channel, type, value "
            "FROM writes WHERE thread_id = ? ORDER BY task_id, idx",
            (thread_id,),
        ),
    )
    return list(rows.values())


def _postgres_rows(connection: Any, thread_id: str) -> list[Row]:
    from cpkit.integrations.langgraph_import import Row, decoded

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
        f"SELECT {PLACE}, parent_checkpoint_id, checkpoint, metadata "
        "FROM checkpoints WHERE thread_id = %s ORDER BY checkpoint_id, checkpoint_ns",
        (thread_id,),
    ):
        # Small values stand in the checkpoint, all others in blobs by version.
        values = dict(body.get("channel_values") or {})

        for channel, version in body["channel_versions"].items():
            kind, blob = blobs.get((ns, channel, str(version)), ("empty", None))

            if kind != "empty":
                values[channel] = decoded(kind, blob)

        body = {**body, "channel_values": values}
        rows[ns, checkpoint_id] = Row(ns, checkpoint_id, parent, body, metadata)

    _add_writes(
        rows,
        connection.execute(
            f"SELECT {PLACE}, task_id, task_path, idx, channel, type, blob "
            "FROM checkpoint_writes WHERE thread_id = %s ORDER BY task_id, idx",
            (thread_id,),
        ),
    )
    return list(rows.values())


def _add_writes(rows: dict[tuple[str, str], Row], found: Any) -> None:
    from cpkit.integrations.langgraph_import import decoded

    for ns, checkpoint_id, task_id, task_path, index, channel, kind, value in found:
        # Writes can stand there without their checkpoint, which was never saved.
        if (row := rows.get((ns, checkpoint_id))) is not None:
            task = row.writes.setdefault((task_id, task_path), {})
            task[index] = (channel, decoded(kind, value))


@contextmanager
def _langgraph() -> Iterator[None]:
    try:
        import cpkit.integrations.langgraph_import  # noqa: F401  # whether it can be
    except ModuleNotFoundError as exc:
        raise BadSource(
            f"reading checkpoints needs {exc.name}: pip install 'cpkit[langgraph]'"
        ) from None

    yield
