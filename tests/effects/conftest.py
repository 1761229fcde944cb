"""Fixtures that run each test on every store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest

from cpkit import open_checkpointer
from tests.effects.shop import Store
from tests.stores import LAYERED, fresh_url


@pytest.fixture(params=LAYERED)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new store; other processes can open it, except memory."""
    return fresh_url(request.param, tmp_path)


@pytest.fixture
async def cp(url: str) -> AsyncIterator[Store]:
    """An open handle of the store."""
    async with open_checkpointer(url) as opened:
        yield opened


@pytest.fixture
def thread() -> str:
    """The id of a new thread."""
    return f"thread-{uuid4().hex}"
