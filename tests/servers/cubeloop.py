"""cubeloop's tables, which it leaves to the application to make."""

from __future__ import annotations

import asyncpg
from cubeloop.checkpointer.postgres import alembic_helpers, cubeloop_metadata
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

__all__ = ["create_tables"]


async def create_tables(url: str) -> None:
    """Do what cubeloop leaves to the application's migrations."""
    connection = await asyncpg.connect(url)

    try:
        tables = cubeloop_metadata.sorted_tables

        if await connection.fetchval("SELECT to_regclass($1)", tables[0].name):
            return

        async with connection.transaction():
            for table in tables:
                ddl = CreateTable(table).compile(
                    dialect=postgresql.dialect()  # type: ignore[no-untyped-call]
                )
                await connection.execute(str(ddl))

            await connection.execute(alembic_helpers.create_message_partitions_op())
            await connection.execute(alembic_helpers.create_runs_partitions_op())
            await connection.execute(alembic_helpers.write_schema_version_op())
    finally:
        await connection.close()
