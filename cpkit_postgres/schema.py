"""The schema: created at open if it is missing, and what its server promises."""

from __future__ import annotations

import asyncio
from importlib.resources import files
from typing import NamedTuple

from cpkit.driver import StoreFailure, StoreInfo
from cpkit.errors import SchemaMismatch
from cpkit.records import Durability, Survives
from cpkit_postgres.connections import Connections
from cpkit_postgres.errors import EXISTS, FORBIDDEN, MISSING, sqlstate

SCHEMA_VERSION = 1

# Names a column of each table, so that it fails where a table is not cpkit's.
_SETTINGS = """
SELECT version,
    coalesce(current_setting('synchronous_commit', true), 'unknown'),
    coalesce(current_setting('fsync', true), 'unknown'),
    coalesce(current_setting('full_page_writes', true), 'unknown'),
    (SELECT count(t.first) + count(m.thread_number) + count(e.key)
        + count(c.idempotency_key)
     FROM {schema}.threads AS t, {schema}.messages AS m, {schema}.extra AS e,
        {schema}.calls AS c
     WHERE false)
FROM {schema}.schema_version
"""
_ENCODING = "SELECT current_setting('server_encoding')"
_HAS_SCHEMA = "SELECT FROM pg_namespace WHERE nspname = $1"
_HAS_TABLE = "SELECT FROM pg_tables WHERE schemaname = $1 AND tablename = $2"
_VERSION = "SELECT version FROM {schema}.schema_version"
_SIZE = """
SELECT sum(pg_total_relation_size(c.oid))::bigint
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relkind = 'r'
"""


class Settings(NamedTuple):
    """The server's settings that the store's promises rest on."""

    synchronous_commit: str
    fsync: str
    full_page_writes: str

    @property
    def durability(self) -> Durability:
        """What a commit survives (postgresql.org/docs/current/runtime-config-wal)."""
        if self.synchronous_commit == "off":
            survives = Survives.NONE
            advice = (
                "a crash of the server can take the last commits: "
                "ALTER DATABASE … SET synchronous_commit = on"
            )
        elif self.fsync == "off":
            survives = Survives.PROCESS
            advice = "a power loss can take everything: turn fsync on"
        elif self.full_page_writes == "off":
            survives = Survives.PROCESS
            advice = "a power loss can tear pages: turn full_page_writes on"
        else:
            return Durability(Survives.MACHINE, self._asdict())

        return Durability(survives, self._asdict(), (advice,))


async def open_schema(connections: Connections) -> Settings:
    """Check the schema, and create it if it is missing.

    Processes that open it at the same time all try to create it. One transaction
    succeeds. The others wait for it, fail because something exists, and read the
    settings again.
    """
    settings = await _settings(connections)

    if settings is None:
        await _create(connections)
        settings = await _settings(connections)

    if settings is None:
        raise SchemaMismatch(
            connections.name, "tables of the same name, not cpkit's", SCHEMA_VERSION
        )

    return settings


async def inspect(connections: Connections) -> StoreInfo:
    """Tell whether the store exists; create nothing."""
    schema = connections.schema

    if not await connections.fetch(_HAS_TABLE, schema, "schema_version"):
        return StoreInfo(False)

    version = await connections.fetch(_VERSION)
    size = await connections.fetch(_SIZE, schema)
    return StoreInfo(True, version[0][0] if version else None, size[0][0])


async def _settings(connections: Connections) -> Settings | None:
    """Return the settings, ``None`` if a table is missing."""
    try:
        rows = await connections.fetch(_SETTINGS)
    except StoreFailure as exc:
        if sqlstate(exc.__cause__) in MISSING:
            return None

        raise

    version, *settings, _ = rows[0] if len(rows) == 1 else [None] * 5

    if version != SCHEMA_VERSION:
        raise SchemaMismatch(connections.name, version, SCHEMA_VERSION)

    return Settings(*settings)


async def _create(connections: Connections) -> None:
    """Create the schema in one transaction, unless another process is faster."""
    script = files("cpkit_postgres").joinpath("schema.sql")
    statements = (await asyncio.to_thread(script.read_text)).split(";\n")
    schema = connections.schema

    try:
        async with connections.transaction() as fetch:
            ((encoding,),) = await fetch(_ENCODING)

            if encoding != "UTF8":
                raise StoreFailure(
                    "rejected",
                    f"the database's encoding is {encoding}, which cannot hold every "
                    "text: create one WITH ENCODING 'UTF8' TEMPLATE template0",
                )

            # IF NOT EXISTS requires the right to create schemas even if it exists.
            if not await fetch(_HAS_SCHEMA, schema):
                await fetch("CREATE SCHEMA {schema}")

            for statement in filter(None, statements):
                await fetch(statement)
    except StoreFailure as exc:
        code = sqlstate(exc.__cause__)

        if code == FORBIDDEN:
            raise StoreFailure(
                "rejected",
                f"schema {schema!r} is missing and this role may not create it "
                f"({exc.__cause__}): open the store once as a role that may, or have "
                "it GRANT CREATE",
            ) from exc

        if code not in EXISTS:
            raise
