"""The page over a store in this process, asked by a client without a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from cpkit import open_checkpointer
from cpkit.ui import app
from tests.stores import fresh_url

Client = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@asynccontextmanager
async def client_of(
    cp: Any, person: str = "anna", **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of the page, logged in as the person."""

    def authorize(request: Request) -> str:
        return person

    page = app(cp, authorize=authorize, secret=b"shared", **options)
    transport = httpx.ASGITransport(app=page)

    async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
        yield client


@pytest.fixture
def client() -> Client:
    return client_of


@pytest.fixture
async def cp() -> AsyncIterator[Any]:
    """An empty store in memory."""
    async with open_checkpointer("memory://", message_type=Any) as cp:
        yield cp


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[Any]:
    """An empty store in a file."""
    url = fresh_url("sqlite", tmp_path)

    async with open_checkpointer(url, message_type=Any) as cp:
        yield cp
