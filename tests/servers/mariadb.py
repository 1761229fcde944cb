"""A private MariaDB server for tests: what Debian's package mariadb-server brings."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncmy

from conformance import Harness
from tests.servers.harness import ServerHarness
from tests.servers.in_folder import ServerInFolder
from tests.servers.process import (
    PATIENCE,
    ServerProcess,
    free_port,
    give,
    give_all,
    make_certificate,
    switched_to,
    unprivileged,
)

__all__ = ["DATABASE", "MariaDBHarness", "MariaDBServer", "mariadb_binary"]

DATABASE = "agents"
USER, PASSWORD = "cpkit", "pass/w@rd"

SETTINGS = {
    "bind_address": "127.0.0.1",
    "innodb_buffer_pool_size": "32M",
    # Written when a server is made, and 96 MB by default.
    "innodb_log_file_size": "16M",
    "innodb_flush_log_at_trx_commit": "1",
    "performance_schema": "OFF",
    "skip_name_resolve": "ON",
    "max_connections": "300",
}
# Until the first statement no user can be created.
_SETUP = f"""
FLUSH PRIVILEGES;
CREATE DATABASE {DATABASE};
CREATE USER {USER}@'127.0.0.1' IDENTIFIED BY '{PASSWORD}';
GRANT ALL ON *.* TO {USER}@'127.0.0.1' WITH GRANT OPTION;
"""


def mariadb_binary() -> str:
    """Return the path of the server; raise ``FileNotFoundError`` if it is missing."""
    # /usr/sbin is not on the path of every user.
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"

    if shutil.which("mariadb-install-db") and (
        found := shutil.which("mariadbd", path=path)
    ):
        return found

    raise FileNotFoundError("mariadbd and mariadb-install-db")


class MariaDBServer(ServerProcess):
    """A server on a free port of 127.0.0.1, its data in a temporary folder.

    It keeps its port and data over `kill` and `start`. A folder for the ``data`` that
    is given, and its ``port``, are the caller's: the folder stays. With ``tls`` it has
    a certificate, which the authority ``ca`` signed.
    """

    def __init__(
        self,
        *,
        settings: Mapping[str, str] | None = None,
        data: Path | None = None,
        port: int | None = None,
        tls: bool = False,
    ) -> None:
        self._binary = mariadb_binary()
        self.port = port or free_port()
        super().__init__("cpkit-mariadb-", unprivileged())
        self.data = data or self._folder / "data"
        self.settings = {
            **SETTINGS,
            "datadir": str(self.data),
            # MariaDB deletes all temporary tables in this folder when it starts.
            "tmpdir": str(self._folder),
            "port": str(self.port),
            "socket": str(self._folder / "socket"),
            "pid_file": str(self._folder / "pid"),
            **(settings or {}),
        }
        self.ca = self._folder / "ca.crt"

        if tls:
            make_certificate(self._folder, self.user)
            self.settings["ssl_cert"] = str(self._folder / "server.crt")
            self.settings["ssl_key"] = str(self._folder / "server.key")

    @property
    def url(self) -> str:
        return f"mariadb://{self.login}@127.0.0.1:{self.port}/{DATABASE}"

    @property
    def login(self) -> str:
        return f"{USER}:{quote(PASSWORD, safe='')}"

    def start(self, *arguments: str) -> None:
        """Start the server, creating its data if it is new, and wait until it is up."""
        assert self._process is None, "already running"

        if not (self.data / "mysql").exists():
            self.create()

        command = [self._binary, *self._options, *arguments]

        if not self._run_server(command, self._answers, time.monotonic() + PATIENCE):
            raise RuntimeError(f"MariaDB does not start:\n{self.log[-4000:]}")

    def create(self) -> None:
        """Create the data, with a user and a database."""
        setup = self._folder / "setup.sql"
        setup.write_text(_SETUP)
        give(setup, self.user)
        subprocess.run(
            [
                "mariadb-install-db",
                *self._options,
                "--skip-test-db",
                "--auth-root-authentication-method=normal",
                f"--extra-file={setup}",
            ],
            stdout=subprocess.DEVNULL,
            check=True,
            **switched_to(self.user),
        )

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Any]:
        """Connect with the client library."""
        connection = await asyncmy.connect(
            host="127.0.0.1",
            port=self.port,
            user=USER,
            password=PASSWORD,
            database=DATABASE,
            autocommit=True,
        )

        try:
            yield connection
        finally:
            await connection.ensure_closed()

    async def rows(self, query: str) -> Sequence[Any]:
        """Run a statement; return its rows."""
        async with self.connected() as connection, connection.cursor() as cursor:
            await cursor.execute(query)
            rows: Sequence[Any] = await cursor.fetchall()
            return rows

    @property
    def _options(self) -> list[str]:
        settings = [f"--{name}={value}" for name, value in self.settings.items()]
        return ["--no-defaults", *settings]

    def _answers(self) -> bool:
        """Whether the server greets: protocol 10, behind a header of four bytes."""
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port)) as it,
        ):
            it.settimeout(1)
            return it.recv(5)[4:] == b"\n"

        return False


class MariaDBInFolder(ServerInFolder):
    """Files are small, so that few writes fill them."""

    async def start(self) -> None:
        is_new = not Path(self.folder, "data").exists()
        await super().start()

        if is_new:
            # MariaDB does not sync the names of a new table's files.
            async with self.open():
                pass

    def _made(self, data: Path, port: int | None) -> MariaDBServer:
        small = {
            # The recorder cannot follow io_uring.
            "innodb_use_native_aio": "OFF",
            "innodb_log_file_size": "4M",
            "innodb_buffer_pool_size": "8M",
            "aria_pagecache_buffer_size": "1M",
            "max_connections": "30",
        }
        give_all(data.parent, unprivileged())
        return MariaDBServer(data=data, port=port, settings={**small, **self.settings})


class MariaDBHarness(ServerHarness):
    server: MariaDBServer

    maps_in_memory = True

    async def in_folder(self, folder: str) -> Harness:
        url = self.server.url.replace(f":{self.server.port}/", f":{free_port()}/")
        return MariaDBInFolder(url, folder, {})

    async def gather_statistics(self) -> None:
        for table in ("threads", "messages", "extra", "keys", "calls"):
            await self.server.rows(f"ANALYZE TABLE cpkit_{table}")

    async def connections(self) -> int:
        ((count,),) = await self.server.rows(
            "SELECT COUNT(*) FROM information_schema.processlist "
            f"WHERE user = '{USER}' AND id <> CONNECTION_ID()"
        )
        return int(count)

    async def bytes_written(self) -> int:
        ((_, count),) = await self.server.rows(
            "SHOW STATUS LIKE 'Innodb_os_log_written'"
        )
        return int(count)
