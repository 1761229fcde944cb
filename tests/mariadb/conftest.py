"""One MariaDB server for all tests of a worker that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.mariadb import MariaDBServer


@pytest.fixture(scope="session")
def server() -> Iterator[MariaDBServer]:
    try:
        server = MariaDBServer(tls=True)
    except FileNotFoundError as exc:
        pytest.skip(f"needs {exc}")

    with server:
        yield server
