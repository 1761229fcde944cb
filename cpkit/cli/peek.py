"""Find out whether a store exists, for drivers that have no ``inspect`` yet."""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qsl, urlencode

from cpkit.driver import StoreInfo

__all__ = ["peek"]

# Seconds for a server to answer.
_PATIENCE = 5.0

_PG_SCHEMA = "SELECT 1 FROM pg_tables WHERE schemaname = $1 AND tablename = $2"
_PG_SIZE = """
SELECT sum(pg_total_relation_size(c.oid))::bigint
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relkind = 'r'
"""


async def peek(url: str) -> StoreInfo | None:
    """Return what is known of the store of a valid URL, or ``None``."""
    scheme = url.partition(":")[0].lower()
    base, _, query = url.partition("?")
    options = dict(parse_qsl(query))

    try:
        async with asyncio.timeout(_PATIENCE):
            if scheme in ("postgres", "postgresql"):
                return await _peek_postgres(base, options)
    except Exception:
        return None  # the driver reports the error when it opens the store

    return None


async def _peek_postgres(base: str, options: dict[str, str]) -> StoreInfo | None:
    import asyncpg

    from cpkit.registry import open_checkpointer

    driver = type(open_checkpointer("postgresql://localhost/x"))
    ours = driver.Options.model_fields  # type: ignore[attr-defined]  # a Driver has it
    schema = options.get("schema") or ours["schema"].default
    rest = {name: value for name, value in options.items() if name not in ours}
    dsn = f"{base}?{urlencode(rest)}" if rest else base
    connection = await asyncpg.connect(dsn, statement_cache_size=0)

    try:
        if not await connection.fetchval(_PG_SCHEMA, schema, "schema_version"):
            return StoreInfo(False)

        quoted = '"' + schema.replace('"', '""') + '"'
        version = await connection.fetchval(
            f"SELECT version FROM {quoted}.schema_version"
        )
        taken = await connection.fetchval(_PG_SIZE, schema)
        return StoreInfo(True, version, taken)
    finally:
        await connection.close()
