"""Fresh servers and folders for the stores."""

from __future__ import annotations

from pathlib import Path

from tests.servers.postgres import shared_postgres
from tests.servers.redis import shared_redis
from tests.strangers.harnesses import Stranger

__all__ = ["placed"]


async def placed(kind: str, folder: Path) -> Stranger:
    """Return the harness of a store that is created and empty."""
    if kind == "cubeloop, Postgres":
        url = shared_postgres(schema="strangers").partition("?")[0]
        # Imported here, because it imports SQLAlchemy, as the store does.
        from tests.servers.cubeloop import create_tables

        await create_tables(url)
        return Stranger(kind, [url])

    if kind == "Agents SDK, Redis":
        url = shared_redis(prefix="strangers").partition("?")[0]
        return Stranger(kind, [url, "strangers"])

    if kind == "cubeloop, in memory":
        return Stranger(kind, [])

    return Stranger(kind, [str(folder / "stranger.db")])
