"""The schema: created at open if it is missing, and what its server promises."""

from __future__ import annotations

import asyncio
import re
from importlib.resources import files
from typing import NamedTuple

from cpkit.driver import StoreFailure, StoreInfo
from cpkit.errors import SchemaMismatch
from cpkit.records import Durability, Survives
from cpkit_postgres import portable
from cpkit_postgres.connections import Connections, Fetch
from cpkit_postgres.errors import EXISTS, FORBIDDEN, MISSING, sqlstate
from cpkit_postgres.options import PostgresOptions

SCHEMA_VERSION = 1

# Names a column of each table, so that it fails where a table is not cpkit's.
_SETTINGS = """
SELECT version, current_setting('default_transaction_isolation'),
    coalesce(current_setting('synchronous_commit', true), 'unknown'),
    coalesce(current_setting('fsync', true), 'unknown'),
    coalesce(current_setting('full_page_writes', true), 'unknown'),
    (SELECT count(t.number) + count(m.thread_number) + count(e.key_hash)
        + count(c.idempotency_key)
     FROM {schema}.threads AS t, {schema}.messages AS m, {schema}.extra AS e,
        {schema}.calls AS c
     WHERE false)
FROM {schema}.schema_version
"""
_DATABASE = """
SELECT current_setting('server_encoding'),
    current_setting('default_transaction_isolation')
"""
_HAS_SCHEMA = "SELECT FROM pg_namespace WHERE nspname = $1"

_HAS_TABLE = "SELECT FROM pg_tables WHERE schemaname = $1 AND tablename = $2"
_VERSION = "SELECT version FROM {schema}.schema_version"
_PARTITIONS = """
SELECT count(*) FROM pg_inherits AS i
JOIN pg_class AS c ON c.oid = i.inhparent
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relname = 'messages'
"""
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


async def open_schema(connections: Connections, options: PostgresOptions) -> Settings:
    """Check the schema, and create it if it is missing.

    Processes that open it at the same time all try to create it. One transaction
    succeeds. The others wait for it, fail because something exists, and read the
    settings again.
    """
    settings = await _settings(connections, options.dialect)

    if settings is None:
        await _create(connections, options)
        settings = await _settings(connections, options.dialect)

    if settings is None:
        raise SchemaMismatch(
            connections.name, "tables of the same name, not cpkit's", SCHEMA_VERSION
        )

    if options.partitions is not None:
        ((found,),) = await connections.fetch(_PARTITIONS, options.schema)

        if found != options.partitions:
            raise SchemaMismatch(
                connections.name,
                f"it has {found or 'no'} partitions, not {options.partitions}: open it "
                "without partitions=, or copy it with 'cpkit copy' into another schema",
                SCHEMA_VERSION,
            )

    return settings


async def inspect(connections: Connections, schema: str) -> StoreInfo:
    """Tell whether the store exists; create nothing."""
    if not await connections.fetch(_HAS_TABLE, schema, "schema_version"):
        return StoreInfo(False)

    version = await connections.fetch(_VERSION)
    size = await connections.fetch(_SIZE, schema)
    return StoreInfo(True, abs(version[0][0]) if version else None, size[0][0])


async def _settings(connections: Connections, dialect: str) -> Settings | None:
    """Return the settings, ``None`` if a table is missing.

    Raises where this code could not keep its promises.
    """
    try:
        rows = await connections.fetch(_SETTINGS)
    except StoreFailure as exc:
        if sqlstate(exc.__cause__) in MISSING:
            return None

        raise

    version, isolation, *settings, _ = rows[0] if len(rows) == 1 else [None] * 6

    sign = -1 if dialect == "portable" else 1

    if version == -sign * SCHEMA_VERSION:
        with_or_not = "with" if dialect == "postgres" else "without"
        version = f"it was made {with_or_not} dialect=portable"

    if version != sign * SCHEMA_VERSION:
        raise SchemaMismatch(connections.name, version, SCHEMA_VERSION)

    _check_isolation(isolation, dialect)
    return Settings(*settings)


def _check_isolation(isolation: str | None, dialect: str) -> None:
    needed = "serializable" if dialect == "portable" else "read committed"

    if isolation != needed:
        raise StoreFailure(
            "rejected",
            f"default_transaction_isolation is {isolation!r}: put "
            f"default_transaction_isolation={needed.replace(' ', '+')} in the URL, or "
            "change it with ALTER ROLE",
        )


async def _check_database(fetch: Fetch, dialect: str) -> None:
    """Raise ``StoreFailure`` for a database that would be refused once it is used."""
    ((encoding, isolation),) = await fetch(_DATABASE)

    if encoding != "UTF8":
        raise StoreFailure(
            "rejected",
            f"the database's encoding is {encoding}, which cannot hold every text: "
            "create one WITH ENCODING 'UTF8' TEMPLATE template0",
        )

    _check_isolation(isolation, dialect)

    if dialect == "portable":
        await portable.check_order(fetch)


def _partitioned(script: str, count: int) -> str:
    """Return the script with the two large tables in partitions by hash of the thread.

    ``threads`` and ``calls`` stay whole: a thread id and an attempt of a key are unique
    over all threads, and a unique index holds within a partition only.
    """

    def parts(table: re.Match[str]) -> str:
        made = [f"{table[1]} PARTITION BY HASH (thread_number);\n"]
        made += [
            f"CREATE TABLE {table[2]}_{n} PARTITION OF {table[2]} "
            f"FOR VALUES WITH (MODULUS {count}, REMAINDER {n});\n"
            for n in range(count)
        ]
        return "".join(made)

    tables = r"(CREATE TABLE (\S+\.(?:messages|extra)) \(.*?\n\));\n"
    return re.sub(tables, parts, script, flags=re.DOTALL)


async def _create(connections: Connections, options: PostgresOptions) -> None:
    """Create the schema in one transaction, unless another process is faster."""
    script = files("cpkit_postgres").joinpath("schema.sql")
    text = await asyncio.to_thread(script.read_text)

    if options.dialect == "portable":
        text = portable.schema(text)

    if options.partitions is not None:
        text = _partitioned(text, options.partitions)

    statements = text.split(";\n")

    try:
        async with connections.transaction() as fetch:
            await _check_database(fetch, options.dialect)

            # IF NOT EXISTS requires the right to create schemas even if it exists.
            if not await fetch(_HAS_SCHEMA, options.schema):
                await fetch("CREATE SCHEMA {schema}")

            for statement in filter(None, statements):
                await fetch(statement)
    except StoreFailure as exc:
        code = sqlstate(exc.__cause__)

        if code == FORBIDDEN:
            raise StoreFailure(
                "rejected",
                f"schema {options.schema!r} is missing and this role may not create it "
                f"({exc.__cause__}): open the store once as a role that may, or have "
                "it GRANT CREATE",
            ) from exc

        if code not in EXISTS:
            raise
