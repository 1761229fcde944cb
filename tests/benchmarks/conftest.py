"""Floors and stores in one place, on real servers."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from benchmarks.place import Place
from benchmarks.roster import CPKIT, FLOOR, entry
from cpkit import open_checkpointer
from cpkit.tools.benchmark import Contender
from tests.servers.postgres import shared_postgres
from tests.servers.redis import shared_redis


@pytest.fixture
def place(tmp_path: Path, driver: str) -> Place:
    """The test's folder, and the server that the driver needs."""
    # The import of a driver reads files, which may not happen on an event loop.
    open_checkpointer(f"sqlite:///{tmp_path}/unused.db")

    if driver == "postgres":
        return Place(str(tmp_path), postgres=shared_postgres())

    if driver == "redis":
        return Place(str(tmp_path), redis=shared_redis())

    return Place(str(tmp_path))


@pytest.fixture
async def pair(place: Place, driver: str) -> AsyncIterator[tuple[Contender, Contender]]:
    """The driver's floor and cpkit's store, both open."""
    async with AsyncExitStack() as stack:
        floor, ours = [
            await stack.enter_async_context(entry(driver, name).make(place))
            for name in (FLOOR, CPKIT)
        ]
        yield floor, ours


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """Exempt all that lives from garbage collection again: a measurement ends that.

    Else every later collection of this process traverses all modules and tests.
    """
    yield
    gc.freeze()
