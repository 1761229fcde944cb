"""A pytest plugin: the SDK's `InMemorySessionStore` becomes cpkit's store.

`test_frameworks_own_tests` runs the tests of the Claude Agent SDK with it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import claude_agent_sdk

from cpkit.integrations.claude_agent_sdk import ClaudeSessionStore
from cpkit.sync import SyncCheckpointer


class SubstituteStore(ClaudeSessionStore):
    """A session store in memory, with the helper that most of the tests call."""

    def __init__(self) -> None:
        super().__init__(_opened(SyncCheckpointer[Any]("memory://")))

    def get_entries(self, key: Any) -> list[Any]:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, self.load(key)).result() or []


def _opened(store: SyncCheckpointer[Any]) -> SyncCheckpointer[Any]:
    """Open the store from a thread without an event loop, until the process ends."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(store.__enter__).result()

    return store


def pytest_configure() -> None:
    setattr(claude_agent_sdk, "InMemorySessionStore", SubstituteStore)  # noqa: B010
