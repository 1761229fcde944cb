"""Stores that processes can share, created empty for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stores import fresh_url, quick_on


@pytest.fixture(params=quick_on("sqlite"))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each kind of store in turn."""
    return fresh_url(request.param, tmp_path)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A SQLite store, for tests that pass on any store."""
    return fresh_url("sqlite", tmp_path)
