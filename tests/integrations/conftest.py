"""Stores for the tests of adapters, each used as it comes."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from cpkit import open_checkpointer
from tests.servers.postgres import shared_postgres
from tests.servers.redis import shared_redis

SHARED = ["sqlite", "file", "postgresql", "redis"]


def store_url(name: str, folder: Path) -> str:
    """Return the URL of a store; its driver is imported, which is no loop's work."""
    if name == "postgresql":
        url = shared_postgres(schema=f"integrations_{uuid4().hex[:12]}")
    elif name == "redis":
        url = shared_redis(prefix=f"integrations-{uuid4().hex}")
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
    """The URL of each store in turn, which keeps what it has when it is reopened."""
    return store_url(request.param, tmp_path)


@pytest.fixture(params=SHARED)
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of each store that several processes can open."""
    return store_url(request.param, tmp_path)
