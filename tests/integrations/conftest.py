"""Stores for the tests of adapters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cpkit import MemoryCheckpointer
from tests.stores import LAYERED, fresh_url, quick_on


@pytest.fixture(params=LAYERED)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of each store in turn. A reopened store keeps its data."""
    return fresh_url(request.param, tmp_path)


@pytest.fixture(params=quick_on("sqlite"))
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of each store that several processes can open."""
    return fresh_url(request.param, tmp_path)


@pytest.fixture
async def cp() -> AsyncIterator[MemoryCheckpointer[Any]]:
    """A store in memory, for tests that do not depend on the store."""
    async with MemoryCheckpointer[Any]() as opened:
        yield opened
