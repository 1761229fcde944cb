"""A fresh schema on the shared server, and a private server to stop and kill."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest

from cpkit_postgres import PostgresCheckpointer
from tests.processes import Workers, started
from tests.servers.postgres import PostgresServer, shared_postgres

MakeStore = Callable[..., PostgresCheckpointer[Any]]

PASSWORD = "s3:cr@t/ %"


@pytest.fixture
def schema() -> str:
    """The name of a schema that does not exist."""
    return f"test_{uuid4().hex}"


@pytest.fixture
async def raw() -> AsyncIterator[asyncpg.Connection]:
    """A plain connection to the shared server, to inspect and damage rows."""
    connection = await asyncpg.connect(shared_postgres())
    yield connection
    await connection.close()


@pytest.fixture
def url(schema: str) -> str:
    """The URL of a store that does not exist."""
    return shared_postgres(schema=schema, pool_size="3")


@pytest.fixture
def store(schema: str) -> MakeStore:
    """Return unopened handles of that store."""

    def make(where: Any = None, **options: Any) -> PostgresCheckpointer[Any]:
        options.setdefault("schema", schema)

        if where is None:
            # Each new connection takes the server as long as ten statements.
            options.setdefault("pool_size", 3)

        return PostgresCheckpointer(where or shared_postgres(), **options)

    return make


@pytest.fixture
async def clerk(raw: asyncpg.Connection) -> AsyncIterator[str]:
    """The URL of a role without rights."""
    await raw.execute("CREATE ROLE clerk LOGIN PASSWORD 'x'")
    place = urlsplit(shared_postgres())
    yield place._replace(netloc=f"clerk:x@{place.hostname}:{place.port}").geturl()
    await raw.execute("DROP OWNED BY clerk; DROP ROLE clerk")


@pytest.fixture(scope="package")
def private_server() -> Iterator[PostgresServer]:
    """A server of these tests alone: it needs a password and takes 20 connections."""
    server = PostgresServer(password=PASSWORD, settings={"max_connections": "20"})

    with server:
        yield server


@pytest.fixture
def server(private_server: PostgresServer) -> Iterator[PostgresServer]:
    """The private server, running again after the test."""
    yield private_server

    if not private_server.running:
        private_server.start()


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Start worker processes, which end with the test."""
    with started("tests.postgres.worker") as start:
        yield start
