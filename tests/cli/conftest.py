"""Stores that a command can open from another process, each used as it comes."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from cpkit import open_checkpointer
from tests.servers.postgres import shared_postgres
from tests.servers.redis import shared_redis

KINDS = ["sqlite", "file", "postgres", "redis"]


def store_url(kind: str, folder: Path, name: str = "store") -> str:
    """Return the URL of a fresh store; its driver is imported outside any loop."""
    match kind:
        case "sqlite":
            url = f"sqlite:///{folder}/{name}.db"
        case "file":
            url = f"file://{folder}/{name}"
        case "postgres":
            url = shared_postgres(schema=f"cli_{uuid4().hex[:12]}")
        case _:
            url = shared_redis(prefix=f"cli-{uuid4().hex[:12]}")

    open_checkpointer(url)
    return url


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each kind of store in turn."""
    return store_url(request.param, tmp_path)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A store for what does not depend on the store."""
    return store_url("sqlite", tmp_path)
