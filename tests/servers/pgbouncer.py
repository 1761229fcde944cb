"""A real PgBouncer in front of a Postgres server of the tests.

Debian has it as a package (``apt-get install pgbouncer``), which ``.ci/run`` installs.
Where it is missing, the tests that need it are skipped; in CI that is a failure.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import pytest

from conformance.slowdown import slowdown
from tests.servers.postgres import (
    free_port,
    give,
    private_folder,
    switched_to,
    unprivileged,
)

__all__ = ["PgBouncer"]

PATIENCE = 10.0 * slowdown()
"""Seconds for PgBouncer to listen; it takes some milliseconds."""

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
logfile = {folder}/log
"""


class PgBouncer:
    """A private PgBouncer on a free port of 127.0.0.1, open while its context is.

    It shares ``size`` server connections among its clients, by ``mode``: in
    ``transaction`` mode each transaction may get another one.
    """

    def __init__(
        self, server_url: str, *, mode: str = "transaction", size: int = 4
    ) -> None:
        server = urlsplit(server_url)
        self._user = server.username or "postgres"
        self._database = server.path.lstrip("/") or "postgres"
        self.port = free_port()
        self._fields = {
            "host": server.hostname or "127.0.0.1",
            "server_port": server.port or 5432,
            "port": self.port,
            "mode": mode,
            "size": size,
        }
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://{self._user}@127.0.0.1:{self.port}/{self._database}"

    def __enter__(self) -> Self:
        binary = _binary()
        user = unprivileged()
        self._folder = private_folder("cpkit-pgbouncer-", user)
        atexit.register(self.close)
        config = self._folder / "ini"
        users = self._folder / "users"
        config.write_text(CONFIG.format(folder=self._folder, **self._fields))
        users.write_text(f'"{self._user}" ""\n')
        give(config, user)
        give(users, user)
        self._process = subprocess.Popen(
            [binary, "--quiet", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **switched_to(user),
        )
        self._wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop it and remove its files; idempotent."""
        atexit.unregister(self.close)

        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _wait(self) -> None:
        assert self._process is not None
        assert self._folder is not None
        deadline = time.monotonic() + PATIENCE

        while self._process.poll() is None and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return

            time.sleep(0.005)

        log = self._folder / "log"
        text = log.read_text() if log.exists() else "it wrote no log"
        self.close()
        raise RuntimeError(f"PgBouncer does not start:\n{text}")


def _binary() -> str:
    # Debian installs it where only root's PATH looks.
    found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

    if found is not None:
        return found

    # Which fails in CI: see pytest_runtest_makereport in tests/conftest.py.
    pytest.skip("needs PgBouncer: apt-get install pgbouncer")
