"""Stores for the tests of adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stores import KINDS, SHARED, fresh_url


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of each store in turn. A reopened store keeps its data."""
    return fresh_url(request.param, tmp_path)


@pytest.fixture(params=SHARED)
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of each store that several processes can open."""
    return fresh_url(request.param, tmp_path)
