"""LISTEN/NOTIFY on one connection of a handle.

Transactions that notify take one lock of the whole server at their commit. So writes
do not notify. The handle that wrote does it later, and only where a process listens,
which shows in ``pg_locks``: a connection that listens shares an advisory lock.

Behind a pooler in transaction mode no connection can listen, and a caller's pool may
have none to spare. A watch polls there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from cpkit.driver import Heard, StoreFailure
from cpkit_postgres import queries
from cpkit_postgres.connections import Connections
from cpkit_postgres.errors import CLIENT_ERRORS, failure

# Seconds between two looks whether the connection still works, and for one look: a
# network may drop packets silently.
_CHECK_EVERY = 10.0
_CHECK_TIMEOUT = 5.0


async def announce(connections: Connections, thread_ids: Sequence[str]) -> bool:
    """Notify the processes that listen; return whether there are any."""
    channel, lock = _address(connections.schema)
    return bool(await connections.fetch(queries.ANNOUNCE, channel, lock, thread_ids))


async def listen(connections: Connections, heard: Heard) -> None:
    """Listen on a connection that serves nothing else."""
    connection = await connections.reserve()
    lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    channel, lock = _address(connections.schema)

    def on_end(*_: Any) -> None:
        if not lost.done():
            lost.set_result(None)

    if connection is None:
        return

    try:
        connection.add_termination_listener(on_end)
        await connection.add_listener(channel, lambda *args: heard(args[-1]))
        await connection.fetch(queries.LISTENING, lock)
        heard(None)

        while not (await asyncio.wait({lost}, timeout=_CHECK_EVERY))[0]:
            await connection.execute("SELECT 1", timeout=_CHECK_TIMEOUT)
    except CLIENT_ERRORS as exc:
        raise failure(exc, "not sent") from exc
    finally:
        connection.terminate()

    raise StoreFailure("not sent", "the connection that listened was lost")


def _address(schema: str) -> tuple[str, int]:
    """Return the channel of a schema's store, and the number of its lock."""
    digest = sha256(b"cpkit watch " + schema.encode()).digest()
    return f"cpkit_{digest[8:20].hex()}", int.from_bytes(digest[:8], signed=True)
