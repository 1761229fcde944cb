"""Stores for tests of retention."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stores import LAYERED, fresh_url


@pytest.fixture(params=LAYERED)
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of each store in turn."""
    return fresh_url(request.param, tmp_path)
