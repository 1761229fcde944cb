"""Stores that a command can open from another process, each used as it comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stores import SHARED, fresh_url


@pytest.fixture(params=SHARED)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each kind of store in turn."""
    return fresh_url(request.param, tmp_path)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A store for what does not depend on the store."""
    return fresh_url("sqlite", tmp_path)
