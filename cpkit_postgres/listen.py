"""Watching: markers of threads, and LISTEN/NOTIFY on one connection of a handle.

A marker needs no clock and no column: it has the row's ``xmin``, the transaction that
wrote the thread's row last, and the position of its last message. A late result of a
deleted thread's call writes the row of a thread of the same id too.

Transactions that notify take one lock of the whole server at their commit. So writes
do not notify. The handle that wrote sends a transaction of its own after them, and it
notifies only where a process listens. A connection that listens holds an advisory lock,
in shared mode, which shows in ``pg_locks`` and ends with the connection.

Behind a pooler in transaction mode a connection cannot listen, and a watch polls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from cpkit.driver import Heard, StoreFailure
from cpkit_postgres.connections import Connections
from cpkit_postgres.errors import CLIENT_ERRORS, failure

__all__ = ["announce", "listen", "markers"]

# Seconds between two looks whether the connection still works, and for one look. A
# network that drops packets silently shows in no other way.
_CHECK_EVERY = 10.0
_CHECK_TIMEOUT = 5.0

MARKERS = """
SELECT t.thread_id, t.number, t.xmin::text, (SELECT m.position FROM {last_message})
FROM unnest((SELECT $1::text[])) AS w (thread_id)
JOIN {schema}.threads AS t ON t.thread_id = w.thread_id
UNION ALL
SELECT w.thread_id, -1, calls.number::text, calls.issued::integer
FROM unnest((SELECT $1::text[])) AS w (thread_id), LATERAL (
    SELECT count(*) AS number, count(*) FILTER (WHERE c.status = 'issued') AS issued
    FROM {schema}.calls AS c
    WHERE c.thread_id = w.thread_id AND c.call_id > ''
        AND c.call_id < (SELECT repeat(chr(1114111), 129))
        AND NOT EXISTS (
            SELECT FROM {schema}.threads AS t WHERE t.thread_id = w.thread_id)
) AS calls
WHERE calls.number > 0
"""

ALL_MARKERS = """
SELECT t.thread_id, t.number, t.xmin::text, (SELECT m.position FROM {last_message})
FROM {schema}.threads AS t
UNION ALL
SELECT c.thread_id, -1, count(*)::text,
    (count(*) FILTER (WHERE c.status = 'issued'))::integer
FROM {schema}.calls AS c
WHERE NOT EXISTS (SELECT FROM {schema}.threads AS t WHERE t.thread_id = c.thread_id)
GROUP BY c.thread_id
"""

# Two keys of 32 bits: those of this store, and not of another program's locks.
_LISTENING = "SELECT pg_advisory_lock_shared($1::integer, $2::integer)"

_CHECK = "SELECT pg_is_in_recovery()"

ANNOUNCE = """
SELECT pg_notify($1, thread_id) FROM unnest((SELECT $4::text[])) AS w (thread_id)
WHERE EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 2 AND granted
        AND classid::bigint::bit(32)::integer = $2::integer
        AND objid::bigint::bit(32)::integer = $3::integer
        AND database = (
            SELECT oid FROM pg_database WHERE datname = current_database())
)
"""


async def markers(
    connections: Connections, thread_ids: Sequence[str] | None
) -> Mapping[str, Hashable]:
    """Return the markers of these threads, or of all."""
    if thread_ids is None:
        rows = await connections.fetch(ALL_MARKERS)
    else:
        rows = await connections.fetch(MARKERS, thread_ids)

    return {row[0]: tuple(row[1:]) for row in rows}


async def announce(
    connections: Connections, schema: str, thread_ids: Sequence[str]
) -> bool:
    """Notify the processes that listen; return whether there are any."""
    channel, *lock = _address(schema)
    return bool(await connections.fetch(ANNOUNCE, channel, *lock, thread_ids))


async def listen(connections: Connections, schema: str, heard: Heard) -> None:
    """Listen on a connection that serves nothing else."""
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[None] = loop.create_future()
    channel, *lock = _address(schema)

    def on_notify(*args: Any) -> None:
        heard(args[-1])

    def on_end(*_: Any) -> None:
        if not lost.done():
            lost.set_result(None)

    async with connections.reserved() as connection:
        if connection is None:
            return

        connection.add_termination_listener(on_end)

        try:
            await connection.add_listener(channel, on_notify)
            await connection.fetch(_LISTENING, *lock)
            heard(None)

            while not (await asyncio.wait({lost}, timeout=_CHECK_EVERY))[0]:
                if await connection.fetchval(_CHECK, timeout=_CHECK_TIMEOUT):
                    raise StoreFailure("not sent", "the server became a standby")
        except CLIENT_ERRORS as exc:
            raise failure(exc, connections.name) from exc

    raise StoreFailure("not sent", "the connection that listened was lost")


def _address(schema: str) -> tuple[str, int, int]:
    """Return the channel of a schema's store, and the two keys of its lock."""
    digest = sha256(b"cpkit watch " + schema.encode()).digest()
    first = int.from_bytes(digest[:4], "big", signed=True)
    second = int.from_bytes(digest[4:8], "big", signed=True)
    return f"cpkit_{digest[8:20].hex()}", first, second
