"""``?partitions=``: created, opened again, copied into, and read one at a time."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import asyncpg
import pytest

from cpkit import InvalidURL, SchemaMismatch, ToolCall, open_checkpointer
from cpkit.tools.copying import copy_store
from tests.postgres.conftest import MakeStore
from tests.postgres.plans import blocks, explained, nodes
from tests.postgres.test_format import ROWS_1, rows, write_one_of_each
from tests.postgres.test_plans import QUERIES, SMALL, fill_huge, fill_small
from tests.servers.postgres import shared_postgres

COUNT = "SELECT count(*) FROM pg_inherits WHERE inhparent = '{}.{}'::regclass"


async def partitions(raw: asyncpg.Connection, schema: str) -> list[int]:
    """Return how many partitions each table has."""
    tables = ("threads", "messages", "extra", "calls")
    return [await raw.fetchval(COUNT.format(schema, table)) for table in tables]


@pytest.mark.parametrize("dialect", ["postgres", "portable"])
@pytest.mark.parametrize("count", [1, 64])
async def test_a_new_store(
    count: int, dialect: str, store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """Messages and extra are in so many partitions, and the rows are as ever."""
    async with store(partitions=count, dialect=dialect) as cp:
        await write_one_of_each(cp)

    assert await partitions(raw, schema) == [0, count, count, 0]
    assert await rows(raw, schema) == ROWS_1.read_text().splitlines()


async def test_threads_spread(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """Every partition gets threads, and a thread is in one."""
    async with store(partitions=4) as cp:
        await asyncio.gather(*(cp.append(f"t{n}", [{}, {}]) for n in range(100)))

    used = await raw.fetch(
        f"SELECT thread_number, count(DISTINCT tableoid), min(tableoid) AS part "
        f"FROM {schema}.messages GROUP BY 1"
    )
    assert [row[1] for row in used] == [1] * 100
    assert len({row["part"] for row in used}) == 4


async def test_opened_again(store: MakeStore) -> None:
    """The option may be left out; another number is refused, and changes nothing."""
    async with store(partitions=4) as cp:
        await cp.append("t", [{}])

    for options in ({}, {"partitions": 4}):
        async with store(**options) as cp:
            assert await cp.append("t", [{}], expected_version=None) > 1

    with pytest.raises(SchemaMismatch, match="4 partitions, not 8.*cpkit copy"):
        async with store(partitions=8):
            pass

    async with store() as cp:
        assert len(await cp.read("t")) == 3


async def test_a_whole_store_stays_whole(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """Opening never moves rows: the error names the command that does."""
    async with store() as cp:
        await cp.append("t", [{}])

    with pytest.raises(SchemaMismatch, match="no partitions, not 64.*cpkit copy"):
        async with store(partitions=64):
            pass

    assert await partitions(raw, schema) == [0, 0, 0, 0]

    async with store() as cp:
        assert await cp.append("t", [{}]) == 2


async def test_copied_into_partitions(
    store: MakeStore, raw: asyncpg.Connection, schema: str
) -> None:
    """A copy holds the same threads, times included, and their keys."""
    parted = f"{schema}_parted"

    try:
        async with store() as source, store(schema=parted, partitions=8) as copy:
            await write_one_of_each(source)
            assert (await copy_store(source, copy)).is_complete

            for info in await source.list_threads(erased=True):
                thread = info.thread_id
                assert await copy.dump_thread(thread) == await source.dump_thread(
                    thread
                )

            assert await copy.list_threads() == await source.list_threads()
            assert await copy.find_call("key 2") == await source.find_call("key 2")

        assert await partitions(raw, parted) == [0, 8, 8, 0]
    finally:
        await raw.execute(f"DROP SCHEMA IF EXISTS {parted} CASCADE")


async def test_processes_that_create_at_once(store: MakeStore) -> None:
    """One creates the partitions; those that ask for another number are refused."""

    async def use(count: int) -> int:
        async with store(partitions=count, connect_timeout=30) as cp:
            await cp.append("t", [{}])
            return count

    found = await asyncio.gather(
        *(use(4 + n % 2) for n in range(8)), return_exceptions=True
    )
    opened = {one for one in found if isinstance(one, int)}
    assert len(opened) == 1
    refused = [one for one in found if not isinstance(one, int)]
    assert len(refused) == 4
    assert all(isinstance(one, SchemaMismatch) for one in refused)


async def test_a_key_is_unique_over_all_partitions(store: MakeStore) -> None:
    """Of claims in many threads, which are in different partitions, one succeeds."""
    async with store(partitions=16) as cp:
        claims = (
            cp.record_issued(f"t{n}", ToolCall("c", "pay", {}, "key"))
            for n in range(40)
        )
        assert (await asyncio.gather(*claims)).count(None) == 1


@pytest.mark.parametrize("value", ["0", "-1", "65", "x"])
def test_a_number_that_is_refused(value: str) -> None:
    """The URL is refused before anything is opened."""
    with pytest.raises(InvalidURL, match="partitions"):
        open_checkpointer(shared_postgres(partitions=value))


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize(("threads", "size"), [(1, 100_000), (1000, 100)])
async def test_a_query_reads_one_partition(
    threads: int,
    size: int,
    analyzed: bool,
    mode: str,
    store: MakeStore,
    schema: str,
    raw: asyncpg.Connection,
) -> None:
    """No other partition is touched, and none is scanned, whatever the statistics."""
    async with store(partitions=8) as cp:
        await fill_small(cp)

    await fill_huge(raw, schema, threads, size, analyzed=analyzed)

    for name, (query, arguments) in QUERIES.items():
        plan = await explained(raw, schema, query, arguments, mode)
        ran = [node for node in nodes(plan) if node.get("Actual Loops")]
        parts = {_partition(node) for node in ran} - {None}
        assert len(parts) <= 1, name
        scanned = {
            node["Relation Name"]
            for node in ran
            if node["Node Type"] == "Seq Scan"
            and node["Actual Rows"] + node.get("Rows Removed by Filter", 0) > SMALL
        }
        # As in an unpartitioned store. A partition of a few pages is rightly scanned.
        assert scanned <= {"threads"}, name
        assert blocks(plan) <= 300, name


def _partition(node: dict[str, Any]) -> str | None:
    """Return the number of the partition that a node scans."""
    if node["Node Type"] == "ModifyTable":
        return None

    found = re.search(r"_(\d+)$", node.get("Relation Name", ""))
    return found and found[1]
