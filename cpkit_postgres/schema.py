"""The schema: created at open if it is missing, and what its server promises."""

from __future__ import annotations

import asyncio
from importlib.resources import files
from typing import NamedTuple

from cpkit.driver import StoreFailure, StoreInfo
from cpkit.errors import SchemaMismatch
from cpkit.records import Durability, Survives
from cpkit_postgres.connections import Connections, Record
from cpkit_postgres.errors import EXISTS, FORBIDDEN, MISSING, sqlstate

SCHEMA_VERSION = 1

# Tables of the schema $1. UNLOGGED ones, and those with rows that this role cannot see.
_SETTINGS = """
WITH tables AS (
    SELECT * FROM pg_class WHERE relnamespace = to_regnamespace(quote_ident($1))
        AND relname IN ('threads', 'messages', 'extra', 'calls', 'schema_version')
)
SELECT pg_backend_pid() AS pid,
    (SELECT string_agg(relname, ', ') FROM tables WHERE row_security_active(oid)),
    (SELECT max(version) FROM {schema}.schema_version
     HAVING min(version) = max(version)) AS version,
    current_setting('synchronous_commit'), current_setting('fsync'),
    current_setting('full_page_writes'),
    (SELECT string_agg(relname, ', ') FROM tables WHERE relpersistence = 'u')
"""
_PID = "SELECT pg_backend_pid() AS pid"
_HAS_SCHEMA = "SELECT FROM pg_namespace WHERE nspname = $1"
_SIZE = """
SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class
WHERE relnamespace = to_regnamespace(quote_ident($1)) AND relkind = 'r'
"""

# What a commit survives with a setting that is off; the first one counts.
_WEAKER = [
    ("synchronous_commit", Survives.NONE, "a crash can take the last commits"),
    ("fsync", Survives.PROCESS, "a power loss can take everything"),
    ("full_page_writes", Survives.PROCESS, "a power loss can tear pages"),
]


class Settings(NamedTuple):
    """The server's settings that the store's promises rest on."""

    synchronous_commit: str
    fsync: str
    full_page_writes: str
    unlogged: str | None = None
    pooler: str | None = None

    def durability(self) -> Durability:
        """What a commit survives (postgresql.org/docs/current/runtime-config-wal)."""
        settings = {name: value for name, value in self._asdict().items() if value}

        if self.unlogged:
            cure = "ALTER TABLE … SET LOGGED for each of them"
            advice = f"a crash of the server empties UNLOGGED tables: {cure}"
            return Durability(Survives.NONE, settings, (advice,))

        for name, survives, fault in _WEAKER:
            if settings[name] == "off":
                advice = f"{fault}: ALTER SYSTEM SET {name} = on"
                return Durability(survives, settings, (advice,))

        return Durability(Survives.MACHINE, settings)


async def open_schema(connections: Connections) -> Settings:
    """Check the schema, and create it if it is missing.

    Of processes that create it at the same time one succeeds. The others wait for its
    transaction, fail because something exists, and look again.
    """
    row = await _settings(connections)

    if row is None:
        await connections.look(_PID)
        await _create(connections)
        row = await _settings(connections)

    # Without a row these tables are not cpkit's.
    _, hidden, version, *settings = row or [None] * 3

    if hidden:
        cure = "ALTER ROLE … BYPASSRLS, or use the owner of the tables"
        fault = f"row-level security hides rows of {hidden} from this role"
        raise StoreFailure("rejected", f"{fault}: {cure}")

    if version != SCHEMA_VERSION:
        raise SchemaMismatch(connections.name, version, SCHEMA_VERSION)

    pooler = connections.pooler if connections.pooler == "transaction" else None
    return Settings._make([*settings, pooler])


async def inspect(connections: Connections) -> StoreInfo | None:
    """Tell whether the store exists, without creating it, and close the connections."""
    try:
        if not (row := await _settings(connections)):
            return StoreInfo(False)

        ((size,),) = await connections.fetch(_SIZE, connections.schema)
        return StoreInfo(True, row["version"], size)
    except StoreFailure:
        return None
    finally:
        await connections.close()


async def _settings(connections: Connections) -> Record | None:
    """Return the version and the server's settings; ``None`` if there is no store."""
    try:
        return await connections.look(_SETTINGS, connections.schema)
    except StoreFailure as exc:
        if sqlstate(exc.__cause__) in MISSING:
            return None

        raise


async def _create(connections: Connections) -> None:
    """Create the schema in one transaction, unless another process is faster."""
    script = files("cpkit_postgres").joinpath("schema.sql")
    statements = (await asyncio.to_thread(script.read_text)).split(";\n")

    try:
        async with connections.transaction() as fetch:
            # IF NOT EXISTS requires the right to create schemas even if it exists.
            if not await fetch(_HAS_SCHEMA, connections.schema):
                await fetch("CREATE SCHEMA {schema}")

            for statement in filter(None, statements):
                await fetch(statement)
    except StoreFailure as exc:
        code = sqlstate(exc.__cause__)

        if code == FORBIDDEN:
            advice = "open the store once as a role that may, or have it GRANT CREATE"
            fault = f"this role may not create the schema ({exc.reason}): {advice}"
            raise StoreFailure("rejected", fault) from exc

        if code not in EXISTS:
            raise
