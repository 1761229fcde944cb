"""The plans of the store's queries, and the pages that they read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import asyncpg

from cpkit_postgres.queries import filled

__all__ = ["blocks", "explained", "nodes"]


async def explained(
    connection: asyncpg.Connection,
    schema: str,
    query: str,
    arguments: str,
    mode: str = "auto",
) -> dict[str, Any]:
    """Run a query, undo it, and return its plan.

    ``mode`` is Postgres's ``plan_cache_mode``.
    """
    await connection.execute(f"PREPARE explained AS {filled(query, schema)}")
    undone = connection.transaction()
    await undone.start()

    try:
        await connection.execute(f"SET LOCAL plan_cache_mode = {mode}")
        text = await connection.fetchval(
            "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) "
            f"EXECUTE explained ({arguments})"
        )
    finally:
        await undone.rollback()
        await connection.execute("DEALLOCATE explained")

    plan: dict[str, Any] = json.loads(text)[0]["Plan"]
    return plan


def blocks(plan: dict[str, Any]) -> int:
    """Return how many pages the costliest part of the query touched."""
    found = [
        int(node["Shared Hit Blocks"] + node["Shared Read Blocks"])
        for node in nodes(plan)
    ]
    return max(found)


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the nodes of a plan."""
    yield plan

    for below in plan.get("Plans", []):
        yield from nodes(below)
