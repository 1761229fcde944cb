"""A look at a store from outside, which creates nothing.

Opening a store creates it where it is not there, which is right for an agent and wrong
for a command that only reads: a slip in a path must not leave an empty store behind.
The stores that come with cpkit are known here by what is public in their layout; of
another package's store this knows nothing, and it is opened as it comes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode

from cpkit.registry import url_path

__all__ = ["Peek", "peek"]

# Seconds for a server to answer; opening the store says what is wrong with it.
_PATIENCE = 5.0

_PG_SCHEMA = "SELECT 1 FROM pg_tables WHERE schemaname = $1 AND tablename = $2"
_PG_SIZE = """
SELECT sum(pg_total_relation_size(c.oid))::bigint
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relkind = 'r'
"""


@dataclass(frozen=True, slots=True)
class Peek:
    """Whether a store is there, which version it has, and how many bytes it takes.

    ``path`` is its file or folder, where it has one.
    """

    exists: bool
    version: object = None
    size: int | None = None
    path: Path | None = None


async def peek(url: str) -> Peek | None:
    """Look at the store of a valid URL; ``None`` where that cannot be told."""
    scheme = url.partition(":")[0].lower()
    base, _, query = url.partition("?")
    options = dict(parse_qsl(query))

    if scheme == "sqlite":
        return await asyncio.to_thread(_peek_sqlite, url_path(base)[1:])

    if scheme == "file":
        return await asyncio.to_thread(_peek_folder, url_path(base))

    try:
        async with asyncio.timeout(_PATIENCE):
            if scheme in ("postgres", "postgresql"):
                return await _peek_postgres(base, options)

            if scheme in ("redis", "rediss", "redis+unix"):
                return await _peek_redis(base, options)
    except Exception:
        # Whatever it is, it is the driver that says it in the words of the contract.
        return None

    return None


def _peek_sqlite(name: str) -> Peek | None:
    if name == ":memory:":
        return None

    path = Path(name)

    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Peek(False)
    except OSError:
        return None

    uri = f"file:{quote(str(path.absolute()))}?mode=ro"

    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=_PATIENCE)) as db:
            row = db.execute(
                "SELECT name FROM sqlite_master WHERE name = 'cpkit_schema'"
            ).fetchone()

            if row is None:
                return Peek(False, path=path)

            version = db.execute("SELECT version FROM cpkit_schema").fetchone()
    except sqlite3.Error:
        return None  # damaged, locked, not ours to read: opening it says which

    files = [path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))]
    taken = sum(file.stat().st_size for file in files if file.exists())
    return Peek(True, version[0] if version else None, taken, path)


def _peek_folder(name: str) -> Peek | None:
    path = Path(name)

    try:
        text = (path / "cpkit.json").read_text()
    except (FileNotFoundError, NotADirectoryError):
        return Peek(False, path=path if path.exists() else None)
    except OSError:
        return None

    try:
        version = json.loads(text)["version"]
    except (ValueError, TypeError, LookupError):
        return None

    taken = 0

    for folder, _, names in os.walk(path):
        taken += sum(os.lstat(os.path.join(folder, one)).st_size for one in names)

    return Peek(True, version, taken, path)


async def _peek_postgres(base: str, options: dict[str, str]) -> Peek | None:
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
            return Peek(False)

        quoted = '"' + schema.replace('"', '""') + '"'
        version = await connection.fetchval(
            f"SELECT version FROM {quoted}.schema_version"
        )
        taken = await connection.fetchval(_PG_SIZE, schema)
        return Peek(True, version, taken)
    finally:
        await connection.close()


async def _peek_redis(base: str, options: dict[str, str]) -> Peek | None:
    from redis.asyncio import Redis

    from cpkit.registry import open_checkpointer

    driver = type(open_checkpointer("redis://localhost"))
    ours = driver.Options.model_fields  # type: ignore[attr-defined]  # a Driver has it
    prefix = options.get("prefix") or ours["prefix"].default
    rest = {name: value for name, value in options.items() if name not in ours}
    scheme, _, place = base.partition("://")
    scheme = "unix" if scheme.lower() == "redis+unix" else scheme.lower()
    url = f"{scheme}://{place}?{urlencode(rest)}" if rest else f"{scheme}://{place}"

    async with Redis.from_url(url, protocol=2) as client:
        found = await client.get(f"{prefix}:schema")

    if found is None:
        return Peek(False)

    # Bytes, which the client's types leave open.
    return Peek(True, int(found) if found.isdigit() else str(found))
