"""A real PgBouncer in front of a Postgres server of the tests.

Debian has it as a package (``apt-get install pgbouncer``), which ``.ci/run`` installs.
Where it is missing, the tests that need it are skipped; in CI that is a failure.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from urllib.parse import urlsplit

import pytest

from tests.servers.process import (
    PATIENCE,
    ServerProcess,
    free_port,
    give,
    unprivileged,
)

__all__ = ["PgBouncer"]

CONFIG = """
[databases]
* = host={host} port={server_port}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users
pool_mode = {mode}
server_login_retry = 1
default_pool_size = {size}
max_client_conn = 1000
ignore_startup_parameters = {ignored}
"""


class PgBouncer(ServerProcess):
    """A private PgBouncer on a free port of 127.0.0.1, open while its context is.

    It shares ``size`` server connections among its clients, by ``mode``: in
    ``transaction`` mode each transaction may get another one. It refuses settings of
    a client, except those ``ignored``.
    """

    def __init__(
        self,
        server_url: str,
        *,
        mode: str = "transaction",
        size: int = 4,
        ignored: str = "",
    ) -> None:
        server = urlsplit(server_url)
        self._binary = _binary()
        super().__init__("cpkit-pgbouncer-", unprivileged())
        self._name = server.username or "postgres"
        self._database = server.path.lstrip("/") or "postgres"
        self.port = free_port()
        self._fields = {
            "host": server.hostname or "127.0.0.1",
            "server_port": server.port or 5432,
            "port": self.port,
            "mode": mode,
            "size": size,
            "ignored": ignored,
        }

    @property
    def url(self) -> str:
        return f"postgresql://{self._name}@127.0.0.1:{self.port}/{self._database}"

    def start(self) -> None:
        config, users = self._folder / "ini", self._folder / "users"
        config.write_text(CONFIG.format(folder=self._folder, **self._fields))
        users.write_text(f'"{self._name}" ""\n')
        give(config, self.user)
        give(users, self.user)
        deadline = time.monotonic() + PATIENCE

        if not self._run_server([self._binary, str(config)], self._listens, deadline):
            raise RuntimeError(f"PgBouncer does not start:\n{self.log}")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def _binary() -> str:
    # Debian installs it where only root's PATH looks.
    found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

    if found is not None:
        return found

    # Which fails in CI: see pytest_runtest_makereport in tests/conftest.py.
    pytest.skip("needs PgBouncer: apt-get install pgbouncer")
