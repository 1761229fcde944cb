"""The schema: created at open where it is missing, and what its server promises."""

from __future__ import annotations

import asyncio
import hashlib
from importlib.resources import files
from typing import NamedTuple, Self

import asyncpg

from cpkit.errors import BackendUnavailable, SchemaMismatch
from cpkit.records import Durability, Survives
from cpkit_postgres.connections import Connection, Connections, Record
from cpkit_postgres.faults import CLIENT_ERRORS, Patience, translated
from cpkit_postgres.statements import quoted

__all__ = ["SCHEMA_VERSION", "Settings", "create", "is_missing"]

SCHEMA_VERSION = 1

_LOCK = "SELECT pg_advisory_xact_lock($1)"
_ENCODING = "SELECT current_setting('server_encoding')"
_HAS_SCHEMA = "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)"
_HAS_TABLES = """
SELECT EXISTS (
    SELECT FROM pg_tables WHERE schemaname = $1 AND tablename = 'schema_version')
"""

# No such table, no such schema.
_MISSING = {"42P01", "3F000"}


class Settings(NamedTuple):
    """The store's version, and the settings that its promises rest on."""

    version: int
    isolation: str
    synchronous_commit: str
    fsync: str
    full_page_writes: str

    @classmethod
    def checked(cls, rows: list[Record], store: str) -> Self:
        """Return what was read; raise where this code could not keep its promises."""
        if len(rows) != 1:
            raise SchemaMismatch(store, "no single version", SCHEMA_VERSION)

        settings = cls(*rows[0])

        if settings.version != SCHEMA_VERSION:
            raise SchemaMismatch(store, settings.version, SCHEMA_VERSION)

        if settings.isolation != "read committed":
            raise BackendUnavailable(
                store,
                f"default_transaction_isolation is {settings.isolation!r}: put "
                "default_transaction_isolation=read+committed in the URL, or change "
                "it with ALTER ROLE",
            )

        return settings

    @property
    def durability(self) -> Durability:
        """What a commit outlives (postgresql.org/docs/current/runtime-config-wal)."""
        settings = {
            "synchronous_commit": self.synchronous_commit,
            "fsync": self.fsync,
            "full_page_writes": self.full_page_writes,
        }

        if self.synchronous_commit == "off":
            advice = (
                "a crash of the server can take the last commits: "
                "ALTER DATABASE … SET synchronous_commit = on"
            )
            return Durability(Survives.NONE, settings, (advice,))

        if self.fsync == "off":
            advice = "a power loss can take everything: turn fsync on"
            return Durability(Survives.PROCESS, settings, (advice,))

        if self.full_page_writes == "off":
            advice = "a power loss can tear pages: turn full_page_writes on"
            return Durability(Survives.PROCESS, settings, (advice,))

        return Durability(Survives.MACHINE, settings)


def is_missing(exc: BaseException | None) -> bool:
    """Tell whether an error says that there is no schema, or no table in it."""
    return isinstance(exc, asyncpg.PostgresError) and exc.sqlstate in _MISSING


async def create(connections: Connections, schema: str) -> None:
    """Create what is missing, in one transaction and one process at a time.

    The lock ends with the transaction, so it works behind a transaction pooler too.
    """
    store = connections.name
    connection = await connections.take(Patience(0))
    whole = False

    try:
        async with connection.transaction(isolation="read_committed"):
            await connection.execute(_LOCK, _number(f"cpkit creates {schema}"))

            if not await connection.fetchval(_HAS_TABLES, schema):
                await _create(connection, schema, store)

        whole = True
    except asyncpg.InsufficientPrivilegeError as exc:
        raise BackendUnavailable(
            store,
            f"schema {schema!r} is not there and this role may not create it ({exc}): "
            "open the store once as a role that may, or have it GRANT CREATE",
        ) from exc
    except (asyncpg.DuplicateObjectError, asyncpg.DuplicateTableError) as exc:
        raise BackendUnavailable(
            store, f"schema {schema!r} holds something else ({exc}): use another one"
        ) from exc
    except CLIENT_ERRORS as exc:
        raise translated(exc, store) from exc
    finally:
        connections.give(connection, whole=whole)


async def _create(connection: Connection, schema: str, store: str) -> None:
    encoding = await connection.fetchval(_ENCODING)

    if encoding != "UTF8":
        raise BackendUnavailable(
            store,
            f"the database's encoding is {encoding}, which cannot hold every text: "
            "create one WITH ENCODING 'UTF8' TEMPLATE template0",
        )

    # IF NOT EXISTS would ask for the right to create schemas even so.
    if not await connection.fetchval(_HAS_SCHEMA, schema):
        await connection.execute(f"CREATE SCHEMA {quoted(schema)}")

    await connection.execute(await asyncio.to_thread(_script, schema))


def _script(schema: str) -> str:
    """Return schema.sql for a schema of that name."""
    name = quoted(schema)
    quote = "$body$"

    while quote in name:
        quote = f"{quote[:-1]}_$"

    script = files("cpkit_postgres").joinpath("schema.sql").read_text()
    return (
        script.replace("$body$", quote)
        .replace("{lock_seed}", str(_number(schema)))
        .replace("{schema}", name)
    )


def _number(text: str) -> int:
    """Return a bigint for a text, the same one everywhere."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
