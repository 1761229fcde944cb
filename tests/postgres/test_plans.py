"""A small thread beside huge ones: a query reads a few pages, with and without ANALYZE.

Only plans and pages are checked, never a time.
"""

from __future__ import annotations

import itertools
from typing import Any

import asyncpg
import pytest

from cpkit import ToolCall
from cpkit_postgres import queries
from tests.postgres.conftest import MakeStore
from tests.postgres.plans import blocks, explained, nodes

# Each thread has as many messages, keys of extra and pending calls.
HUGE = """
WITH thread AS (
    INSERT INTO {schema}.threads (thread_id, version, created_at, updated_at)
    SELECT 'huge ' || n, {size}, 1, 1
    FROM generate_series(1, {threads}) AS n RETURNING number, thread_id
), messages AS (
    INSERT INTO {schema}.messages
    SELECT number, n, '{"pad":"' || repeat('x', 200) || '"}'
    FROM thread, generate_series(0, {size} - 1) AS n
), extra AS (
    INSERT INTO {schema}.extra SELECT number, '"' || n || '"', '{}'
    FROM thread, generate_series(1, {size} / 5) AS n
)
INSERT INTO {schema}.calls (thread_id, call_id, tool_name, args, idempotency_key,
    status, attempt, issued_at)
SELECT thread_id, n, 'x', '{}', thread_id || ' ' || n, 'issued', 1, 1
FROM thread, generate_series(1, {size} / 5) AS n
"""

SMALL = 100

# Arguments for the small thread; its number is 1.
MANY = "'new,small', ',100', 1, ',', '1,1', 'new,small', '1,1', '{b,b}'"
QUERIES = {
    "load": (queries.READ, "'small', 0, 2147483647, false"),
    "dump": (queries.READ, "'small', 0, 2147483647, true"),
    "read": (queries.READ, "'small', -5, 2147483647, false"),
    "load without messages": (queries.READ_MANY, "'{small,new}'"),
    "calls": (queries.CALLS, "'small'"),
    "holder": (queries.HOLDER, "'key 7'"),
    "attempts": (queries.CALLS_OF_KEYS, "'{key 7,key 8,new}'"),
    "threads": (queries.THREADS, "'small', NULL, 'smalm', 10, true"),
    "append": (queries.APPEND, "'small', NULL, 1, '{}', '\"k\"', '1'"),
    "append to a new thread": (queries.APPEND, "'new', NULL, 1, '{}', NULL, NULL"),
    "append to many": (queries.APPEND_MANY, MANY + ", '{small}', '{\"k\"}', '{1}'"),
    "claim": (queries.CLAIM, "'small', 'new', 'x', '{}', 'new', 1"),
    "replay": (queries.CLAIM, "'small', 'call 7', 'x', '{}', 'key 7', 1"),
    "resolve": (queries.RESOLVE, "'small', 'call 7', 'completed', '{}', 1"),
    "erase": (queries.ERASE, "'small', NULL, false"),
    "forget": (queries.ERASE, "'small', 100, true"),
    "erase calls": (queries.ERASE_ENDED_CALLS, "'small', 7, 100"),
    "trim": (queries.TRIM, "'small', 80, NULL"),
    "trim all": (queries.TRIM, "'small', 9007199254740992, 100"),
    "search": (queries.SEARCH, "'small', 'smalm', '{%needle%}', 10"),
    "markers": (queries.MARKERS, "'{small,new}'"),
}


async def fill_small(cp: Any) -> None:
    """Write the small thread, with the ids that the arguments name."""
    await cp.append("small", [{"pad": "x" * 200}] * SMALL)
    await cp.save_extra("small", {str(n): n for n in range(20)})

    for n in range(20):
        await cp.record_issued("small", ToolCall(f"call {n}", "x", {}, f"key {n}"))


async def fill_huge(
    raw: asyncpg.Connection, schema: str, threads: int, size: int, *, analyzed: bool
) -> None:
    """Add other threads of ``size`` messages, and gather statistics if wanted."""
    huge = HUGE.replace("{threads}", str(threads)).replace("{size}", str(size))
    await raw.execute(huge.replace("{schema}", schema))

    if analyzed:
        tables = ("threads", "messages", "extra", "calls")
        await raw.execute("ANALYZE " + ", ".join(f"{schema}.{t}" for t in tables))


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize(("threads", "size"), [(1, 100_000), (1000, 100)])
async def test_a_small_thread_beside_many_rows(
    threads: int,
    size: int,
    analyzed: bool,
    store: MakeStore,
    schema: str,
    raw: asyncpg.Connection,
) -> None:
    """No query scans a table, and none reads more pages than the small thread has."""
    async with store() as cp:
        await fill_small(cp)

    await fill_huge(raw, schema, threads, size, analyzed=analyzed)

    modes = ("force_custom_plan", "force_generic_plan")

    for name, mode in itertools.product(QUERIES, modes):
        plan = await explained(raw, schema, *QUERIES[name], mode)
        scanned = {
            node["Relation Name"]
            for node in nodes(plan)
            if node["Node Type"] == "Seq Scan" and node["Actual Loops"]
        }

        # The planner rightly scans a table of threads that is a few pages long.
        assert scanned <= {"threads"}, (name, mode)
        assert blocks(plan) <= 300, (name, mode)  # deleting 100 messages takes 250


@pytest.mark.parametrize("name", ["claim", "replay", "resolve"])
async def test_a_plan_for_an_empty_store_fits_a_large_one(
    name: str, store: MakeStore, schema: str, raw: asyncpg.Connection
) -> None:
    """A connection keeps its first plans until ANALYZE: they find a call by its id."""
    async with store():
        pass

    query, arguments = QUERIES[name]
    plan = await explained(raw, schema, query, arguments, "force_generic_plan")
    used = {node.get("Index Name") for node in nodes(plan)}
    assert "calls_pkey" in used
    assert "calls_pending" not in used
