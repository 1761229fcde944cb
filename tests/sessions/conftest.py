"""Stores for the tests of sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest

from cpkit import Checkpointer, JsonValue, open_checkpointer
from tests.servers.postgres import shared_postgres
from tests.servers.redis import shared_redis

SHARED = ["sqlite", "file", "postgresql", "redis"]

Store = Checkpointer[dict[str, JsonValue]]


def store_url(name: str, folder: Path) -> str:
    """Return the URL of a store, and import its driver outside of an event loop."""
    if name == "postgresql":
        url = shared_postgres(schema="sessions")
    elif name == "redis":
        url = shared_redis(prefix="sessions")
    else:
        paths = {
            "memory": f"memory://{uuid4().hex}",
            "sqlite": f"sqlite:///{folder}/agent.db",
            "file": f"file://{folder}/store",
        }
        url = paths[name]

    open_checkpointer(url)
    return url


@pytest.fixture(params=["memory", *SHARED])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of each store in turn. A reopened store keeps its data."""
    return store_url(request.param, tmp_path)


@pytest.fixture(params=SHARED)
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of each store that several processes can open."""
    return store_url(request.param, tmp_path)


@pytest.fixture
async def cp() -> AsyncIterator[Store]:
    """A store in memory, for tests that do not depend on the store."""
    async with open_checkpointer("memory://") as opened:
        yield opened


@pytest.fixture
def session_id() -> str:
    """An id that is not used in any store."""
    return uuid4().hex
