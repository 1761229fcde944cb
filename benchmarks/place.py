"""The place of the stores: a temporary folder, and private servers."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer

__all__ = ["POSTGRES_SETTINGS", "Place", "private_place"]

# Large enough that no checkpoint runs during the rounds of only one contender. fsync
# and synchronous_commit stay on.
POSTGRES_SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
}

# Redis must not rewrite the log while its growth is measured.
REDIS_SETTINGS = {"auto-aof-rewrite-percentage": "0"}


@dataclass(frozen=True)
class Place:
    """A folder, and the URLs of the servers that were started."""

    folder: str
    postgres: str = ""
    redis: str = ""
    redis_always: str = ""

    def file(self, name: str) -> str:
        """Return a path in the folder."""
        return str(Path(self.folder) / name)


@contextmanager
def private_place(drivers: Collection[str], within: str | None) -> Iterator[Place]:
    """Start the servers of the drivers; stop them and remove all data at exit."""
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="cpkit-bench-", dir=within)
        )
        urls = {}

        if "postgres" in drivers:
            postgres = PostgresServer(settings=POSTGRES_SETTINGS)
            urls["postgres"] = stack.enter_context(postgres).url

        for driver, policy in (("redis", "everysec"), ("redis-always", "always")):
            if driver in drivers:
                redis = RedisServer(appendfsync=policy, settings=REDIS_SETTINGS)
                urls[driver.replace("-", "_")] = stack.enter_context(redis).url

        yield Place(folder, **urls)
