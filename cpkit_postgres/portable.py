"""``?dialect=portable``: for engines that speak Postgres, and are not Postgres.

The statements are those of the normal dialect. These things differ:

- Every transaction is SERIALIZABLE. What the engine rolls back (40001) is run again for
  ``connect_timeout``; where the engine does not know (40003), the write may be applied.
- ``LOCK TABLE`` is not used, because SERIALIZABLE does its work.
- The columns have no ``COLLATE "C"``. The database must order text by bytes.
- A watch only polls: no LISTEN, no NOTIFY, no advisory lock.
- Opening checks the order of text, and that two transactions which exclude each other
  cannot both commit. An engine that fails is refused. A SERIALIZABLE that is only a
  snapshot fails, so its engine would count one attempt of a key twice after a deletion.
  The second check needs a table, so the tables of a new store stay after a refusal.
  Opening does not drop them, because another process may be opening the store.

The schema is the same otherwise, with a negative version. The other dialect refuses the
store, because normal transactions are not checked against SERIALIZABLE ones.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from uuid import uuid4

from cpkit.driver import StoreFailure
from cpkit_postgres.connections import Connection, Connections, Fetch
from cpkit_postgres.errors import CLIENT_ERRORS, IS_ROLLED_BACK, failure, sqlstate

_ORDER = "SELECT 'B' < 'a' AND 'a' < 'é' AND 'é' < '😀' AND 'a' < 'a ' AND 'a ' < 'aB'"

# Each check of an engine has two rows, with the places 1 and 2.
_PROBE_TABLE = """
CREATE TABLE {schema}.isolation_probe (
    run text NOT NULL,
    place integer NOT NULL,
    value integer NOT NULL,
    PRIMARY KEY (run, place)
);
"""
_ADD = "INSERT INTO {schema}.isolation_probe VALUES ($1, 1, 0), ($1, 2, 0)"
_SUM = "SELECT sum(value) FROM {schema}.isolation_probe WHERE run = $1"
_SET = "UPDATE {schema}.isolation_probe SET value = 1 WHERE run = $1 AND place = $2"
_REMOVE = "DELETE FROM {schema}.isolation_probe WHERE run = $1"

# Seconds for both transactions. An engine with locks may make them wait for each other.
_TIMEOUT = 5.0


def schema(script: str) -> str:
    """Return the script that creates the schema, for this dialect."""
    script = script.replace(' COLLATE "C"', "")
    return script.replace("VALUES (1)", "VALUES (-1)") + _PROBE_TABLE


def check_connections(connections: Connections) -> None:
    """Raise ``StoreFailure`` if `check_engine` could not run its two transactions."""
    if not connections.can_reserve:
        raise StoreFailure(
            "rejected",
            "dialect=portable needs two connections and no pooler=transaction",
        )


async def check_order(fetch: Fetch) -> None:
    """Raise ``StoreFailure`` for a database that does not order text by bytes."""
    ((ordered,),) = await fetch(_ORDER)

    if not ordered:
        raise StoreFailure(
            "rejected",
            "the database does not order text by bytes: create one WITH LC_COLLATE 'C' "
            "TEMPLATE template0",
        )


async def check_engine(connections: Connections) -> None:
    """Raise ``StoreFailure`` for an engine on which a promise would not hold."""
    await check_order(connections.fetch)
    run = uuid4().hex
    await connections.fetch(_ADD, run)

    try:
        async with connections.reserved() as one, connections.reserved() as two:
            assert one is not None, "see `check_connections`"
            assert two is not None
            barrier = asyncio.Barrier(2)
            found = await asyncio.gather(
                _skew(connections, one, barrier, run, 1),
                _skew(connections, two, barrier, run, 2),
                return_exceptions=True,
            )
    finally:
        with suppress(StoreFailure):
            await connections.fetch(_REMOVE, run)

    for answer in found:
        if isinstance(answer, BaseException):
            raise answer

    if all(found):
        raise StoreFailure(
            "rejected",
            "two transactions that exclude each other were both committed: the "
            "engine's SERIALIZABLE does not hold",
        )


async def _skew(
    connections: Connections,
    connection: Connection,
    barrier: asyncio.Barrier,
    run: str,
    place: int,
) -> bool:
    """Set one row if both are 0; return whether it was committed.

    The other transaction reads at the same time and sets the other row. If the two ran
    one after the other, the second would not set its row.
    """
    text = connections.text

    try:
        async with asyncio.timeout(_TIMEOUT):
            await connection.execute("BEGIN")
            total = await connection.fetchval(text(_SUM), run)
            await barrier.wait()

            if total == 0:
                await connection.execute(text(_SET), run, place)

            await connection.execute("COMMIT")
            return bool(total == 0)
    except asyncio.BrokenBarrierError:
        return False
    except CLIENT_ERRORS as exc:
        await barrier.abort()

        if sqlstate(exc) in IS_ROLLED_BACK:
            return False

        raise failure(exc, connections.name, "not sent") from exc
