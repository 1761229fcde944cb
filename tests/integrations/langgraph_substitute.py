"""A pytest plugin: LangGraph's SQLite savers become cpkit's, over a store in memory.

`test_langgraph_own_tests` runs the tests of LangGraph's own package with it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from cpkit import open_checkpointer
from cpkit.integrations.langgraph import CheckpointSaver
from cpkit.sync import SyncCheckpointer


@contextmanager
def _sync(conn_string: str, **_: Any) -> Iterator[CheckpointSaver]:
    with SyncCheckpointer("sqlite:///:memory:") as cp:
        yield CheckpointSaver(cp)


@asynccontextmanager
async def _async(conn_string: str, **_: Any) -> AsyncIterator[CheckpointSaver]:
    async with open_checkpointer("sqlite:///:memory:") as cp:
        yield CheckpointSaver(cp)


def pytest_configure() -> None:
    setattr(SqliteSaver, "from_conn_string", staticmethod(_sync))  # noqa: B010
    setattr(AsyncSqliteSaver, "from_conn_string", staticmethod(_async))  # noqa: B010
