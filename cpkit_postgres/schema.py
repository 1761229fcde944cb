"""The schema: created at open if it is missing, and what its server promises."""

from __future__ import annotations

import asyncio
from importlib.resources import files

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
    (SELECT string_agg(relname, ', ') FROM tables
     WHERE row_security_active(oid)) AS hidden,
    (SELECT max(version) FROM {schema}.schema_version
     HAVING min(version) = max(version)) AS version,
    current_setting('synchronous_commit') AS synchronous_commit,
    current_setting('fsync') AS fsync,
    current_setting('full_page_writes') AS full_page_writes,
    (SELECT string_agg(relname, ', ') FROM tables
     WHERE relpersistence = 'u') AS unlogged
"""
_IS_MISSING = """
SELECT pg_backend_pid() AS pid, to_regnamespace(quote_ident($1)) IS NULL AS is_missing
"""
_SIZE = """
SELECT sum(pg_total_relation_size(oid))::bigint,
    (SELECT format('%s of %s, which autovacuum frees for new rows', sum(n_dead_tup),
        sum(n_live_tup + n_dead_tup)) FROM pg_stat_user_tables WHERE schemaname = $1
     HAVING sum(n_dead_tup) * 10 > sum(n_live_tup + n_dead_tup))
FROM pg_class WHERE relnamespace = to_regnamespace(quote_ident($1)) AND relkind = 'r'
"""

# What a commit survives with a setting that is off; the first one counts.
_WEAKER = [
    ("synchronous_commit", Survives.NONE, "a crash can take the last commits"),
    ("fsync", Survives.PROCESS, "a power loss can take everything"),
    ("full_page_writes", Survives.PROCESS, "a power loss can tear pages"),
]


def durability(settings: dict[str, str]) -> Durability:
    """What a commit survives (postgresql.org/docs/current/runtime-config-wal)."""
    if "unlogged" in settings:
        cure = "ALTER TABLE … SET LOGGED for each of them"
        advice = f"a crash of the server empties UNLOGGED tables: {cure}"
        return Durability(Survives.NONE, settings, (advice,))

    for name, survives, fault in _WEAKER:
        if settings[name] == "off":
            advice = f"{fault}: ALTER SYSTEM SET {name} = on"
            return Durability(survives, settings, (advice,))

    return Durability(Survives.MACHINE, settings)


async def open_schema(connections: Connections) -> Durability:
    """Check the schema, create it if it is missing, and return what it survives.

    Of processes that create it at the same time one succeeds. The others wait for its
    transaction, fail because something exists, and look again.
    """
    row = await _settings(connections)

    if row is None:
        await _create(connections)
        row = await _settings(connections)

    if row and row["hidden"]:
        cure = "ALTER ROLE … BYPASSRLS, or use the owner of the tables"
        fault = f"row-level security hides rows of {row['hidden']} from this role"
        raise StoreFailure("rejected", f"{fault}: {cure}")

    # Without a row these tables are not cpkit's.
    if row is None or row["version"] != SCHEMA_VERSION:
        found = row and row["version"]
        raise SchemaMismatch(connections.name, found, SCHEMA_VERSION)

    names = [*(name for name, _, _ in _WEAKER), "unlogged"]
    settings = {name: row[name] for name in names if row[name]}

    if connections.pooler == "transaction":
        settings["pooler"] = connections.pooler

    return durability(settings)


async def inspect(connections: Connections) -> StoreInfo | None:
    """Tell whether the store exists, without creating it, and close the connections."""
    try:
        if not (row := await _settings(connections)):
            return StoreInfo(False)

        ((size, rows),) = await connections.fetch(_SIZE, connections.schema)
        dead = {"dead rows": rows} if rows else {}
        return StoreInfo(True, row["version"], size, dead=dead)
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
    statements = (await asyncio.to_thread(script.read_text)).split(";\n")[:-1]
    row = await connections.look(_IS_MISSING, connections.schema)

    # IF NOT EXISTS requires the right to create schemas even if it exists.
    if row["is_missing"]:
        statements.insert(0, "CREATE SCHEMA {schema}")

    try:
        async with connections.transaction() as fetch:
            for statement in statements:
                await fetch(statement)
    except StoreFailure as exc:
        code = sqlstate(exc.__cause__)

        if code == FORBIDDEN:
            advice = "open the store once as a role that may, or have it GRANT CREATE"
            fault = f"this role may not create the schema ({exc.reason}): {advice}"
            raise StoreFailure("rejected", fault) from exc

        if code not in EXISTS:
            raise
