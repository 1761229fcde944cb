"""A pytest plugin: the SDK's `SQLiteSession` becomes cpkit's `Session`.

`test_frameworks_own_tests` runs the tests of the SDK's own package with it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import agents

# Imported before the class is replaced: the SDK treats cpkit's as any other session.
import agents.extensions.memory.encrypt_session
import agents.memory
import agents.memory.openai_responses_compaction_session
import agents.memory.sqlite_session

from cpkit.integrations.openai_agents import Session
from cpkit.sync import SyncCheckpointer

_stores: dict[str, SyncCheckpointer[Any]] = {}


class SubstituteSession(Session):
    """A session in a file beside the one that the SDK's own would have."""

    def __init__(
        self,
        session_id: str,
        db_path: str | Path = ":memory:",
        sessions_table: str = "",
        messages_table: str = "",
        session_settings: Any = None,
    ) -> None:
        path = str(db_path)
        name = path if path != ":memory:" else f":memory:{len(_stores)}"

        if name not in _stores:
            url = "memory://" if path == ":memory:" else f"sqlite:///{path}.cpkit"
            _stores[name] = _opened(SyncCheckpointer[Any](url))

        super().__init__(session_id, _stores[name], session_settings=session_settings)


def _opened(store: SyncCheckpointer[Any]) -> SyncCheckpointer[Any]:
    """Open the store from a thread without an event loop, until the process ends."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(store.__enter__).result()

    return store


def pytest_configure() -> None:
    for module in (agents, agents.memory, agents.memory.sqlite_session):
        setattr(module, "SQLiteSession", SubstituteSession)  # noqa: B010
