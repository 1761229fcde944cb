"""Stores on servers whose data is in a folder, for power losses."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from conformance import Harness, URLHarness
from conformance.slowdown import slowdown
from tests.servers.postgres import PostgresServer
from tests.servers.process import ServerProcess, free_port, give_all, unprivileged
from tests.servers.redis import RedisServer

__all__ = ["PostgresInFolder", "RedisInFolder", "ServerInFolder", "on_a_free_port"]


def on_a_free_port(url: str) -> str:
    """Return the URL of a server without a password, on another port."""
    place = urlsplit(url)
    user = f"{place.username}@" if place.username else ""
    return place._replace(netloc=f"{user}127.0.0.1:{free_port()}").geturl()


@dataclass(repr=False)
class ServerInFolder(URLHarness):
    """A store on a server of its own, whose data is in a folder.

    `kill` removes what the server has outside the folder: its log, and shared memory,
    which SIGKILL would leave behind.
    """

    folder: str
    settings: dict[str, str]

    options = Harness.options | {"timeout"}

    async def start(self) -> None:
        self._server = self._made(Path(self.folder, "data"), urlsplit(self.url).port)
        await asyncio.to_thread(self._server.start)

    async def kill(self) -> None:
        await asyncio.to_thread(self._server.close)

    def _made(self, data: Path, port: int | None) -> ServerProcess:
        raise NotImplementedError


class PostgresInFolder(ServerInFolder):
    """Buffers and segments are small, so that few writes fill them."""

    def _made(self, data: Path, port: int | None) -> PostgresServer:
        small = {
            # Not mapped files in the folder, which the recorder could not follow.
            "dynamic_shared_memory_type": "posix",
            "shared_buffers": "1MB",
            "max_connections": "30",
            "min_wal_size": "2MB",
            "max_wal_size": "2MB",
            "checkpoint_timeout": "30s",
            "bgwriter_delay": "10ms",
        }
        give_all(data.parent, unprivileged())
        # After a power loss it may be empty: an operator removes it.
        (data / "postmaster.pid").unlink(missing_ok=True)
        return PostgresServer(
            data=data,
            port=port,
            settings={**small, **self.settings},
            wal_segment=1,
            retry=slowdown(),
        )


class RedisInFolder(ServerInFolder):
    """The append-only file has no checksums, so its bytes must be in their order."""

    appends_in_order = True

    def _made(self, data: Path, port: int | None) -> RedisServer:
        options: dict[str, Any] = self.settings
        return RedisServer(data=data, port=port, **options)
