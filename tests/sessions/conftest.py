"""Stores for the tests of sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest

from cpkit import Checkpointer, JsonValue, open_checkpointer
from tests.stores import LAYERED, fresh_url, quick_on

Store = Checkpointer[dict[str, JsonValue]]


@pytest.fixture(params=LAYERED)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of each store in turn. A reopened store keeps its data."""
    return fresh_url(request.param, tmp_path)


@pytest.fixture(params=quick_on("sqlite"))
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of each store that several processes can open."""
    return fresh_url(request.param, tmp_path)


@pytest.fixture
async def cp() -> AsyncIterator[Store]:
    """A store in memory, for tests that do not depend on the store."""
    async with open_checkpointer("memory://") as opened:
        yield opened


@pytest.fixture
def session_id() -> str:
    """An id that is not used in any store."""
    return uuid4().hex
