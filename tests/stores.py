"""Empty stores of each kind, for tests that run on all of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

from cpkit import open_checkpointer
from tests.servers.postgres import shared_postgres
from tests.servers.redis import shared_redis
from tests.sweeps import sweep

__all__ = ["KINDS", "LAYERED", "SHARED", "fresh_url", "memory", "quick_on"]

SHARED = ["sqlite", "file", "postgres", "redis"]
"""The kinds that several processes can open."""

KINDS = ["memory", *SHARED]

# Above the handle no code depends on the store, so a layer is tested on the simplest
# stores and on one server.
LAYERED = sweep(["memory", "sqlite", "postgres"], ("memory", "sqlite"))
"""Stores for tests of a layer; ``make test-long`` runs those that are servers."""


def quick_on(*kinds: str) -> list[Any]:
    """Return stores for tests of a layer with several processes, as parameters.

    ``make test-long`` runs those not in ``kinds``.
    """
    return sweep(["sqlite", "postgres"], kinds)


def fresh_url(kind: str, folder: Path, name: str = "store") -> str:
    """Return the URL of an empty store; stores in one folder need different names.

    The driver is imported here, because an import may not run on an event loop.
    """
    unique = f"{name}_{uuid4().hex[:12]}"

    match kind:
        case "memory":
            url = f"memory://{unique}"
        case "sqlite":
            url = f"sqlite:///{folder}/{name}.db"
        case "file":
            url = f"file://{folder}/{name}"
        case "postgres":
            url = shared_postgres(schema=unique, pool_size="3")
        case _:
            url = shared_redis(prefix=unique)

    open_checkpointer(url)
    return url


def memory() -> str | None:
    """Return a folder in memory with enough room, if there is one.

    A new store of files has 256 registers, which take a disk long.
    """
    place = "/dev/shm"
    has_room = os.path.isdir(place) and shutil.disk_usage(place).free > 1 << 30
    return place if has_room else None
