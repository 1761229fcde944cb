"""A place for each stranger's state, on real servers and in a fresh folder."""

from __future__ import annotations

from pathlib import Path

import asyncpg
from cubepi.checkpointer.postgres import alembic_helpers, cubepi_metadata
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

from tests.servers.postgres import shared_postgres
from tests.servers.redis import shared_redis
from tests.strangers.harnesses import Stranger

__all__ = ["placed"]


async def placed(kind: str, folder: Path) -> Stranger:
    """Return the stranger's harness, its store made and empty."""
    if kind == "CubePi, Postgres":
        url = shared_postgres(schema="strangers").partition("?")[0]
        await _create_tables(url)
        return Stranger(kind, [url])

    if kind == "Agents SDK, Redis":
        url = shared_redis(prefix="strangers").partition("?")[0]
        return Stranger(kind, [url, "strangers"])

    if kind == "CubePi, in memory":
        return Stranger(kind, [])

    return Stranger(kind, [str(folder / "stranger.db")])


async def _create_tables(url: str) -> None:
    """Do what CubePi leaves to the application's migrations."""
    connection = await asyncpg.connect(url)

    try:
        if await connection.fetchval("SELECT to_regclass('cubepi_messages')"):
            return

        async with connection.transaction():
            for table in cubepi_metadata.sorted_tables:
                ddl = CreateTable(table).compile(
                    dialect=postgresql.dialect()  # type: ignore[no-untyped-call]
                )
                await connection.execute(str(ddl))

            await connection.execute(alembic_helpers.create_message_partitions_op())
            await connection.execute(alembic_helpers.create_runs_partitions_op())
            await connection.execute(alembic_helpers.write_schema_version_op())
    finally:
        await connection.close()
