"""A pytest plugin: LangGraph's `InMemoryStore` becomes cpkit's store of items.

`test_langgraph_own_tests` runs the tests of LangGraph's own package with it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langgraph.store import memory

from cpkit.integrations.langgraph_store import MemoryStore
from cpkit.sync import SyncCheckpointer


class Substitute(MemoryStore):
    """A store of items in memory. It has no vectors, whatever the index."""

    def __init__(self, *, index: Any = None) -> None:
        store = SyncCheckpointer[Any]("memory://")

        # From a thread without an event loop; it is open until the process ends.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(store.__enter__).result()

        super().__init__(store)


def pytest_configure() -> None:
    setattr(memory, "InMemoryStore", Substitute)  # noqa: B010
