"""Stores that processes can share, created empty for each test."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from cpkit.cli.stores import Store
from tests.cli.command import call, in_store
from tests.stores import fresh_url, quick_on


@pytest.fixture(params=quick_on("sqlite"))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each kind of store in turn."""
    return fresh_url(request.param, tmp_path)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A SQLite store, for tests that pass on any store."""
    return fresh_url("sqlite", tmp_path)


@pytest.fixture
def damaged_url(sqlite_url: str, tmp_path: Path) -> str:
    """A SQLite store of three threads with a call each; that of one is damaged."""

    async def fill(cp: Store) -> None:
        for thread in ("a", "broken", "c"):
            await call(cp, thread, thread, f"key of {thread}")

    in_store(sqlite_url, fill)

    with closing(sqlite3.connect(tmp_path / "store.db")) as raw, raw:
        raw.execute("UPDATE cpkit_calls SET args = '{' WHERE thread_id = 'broken'")

    return sqlite_url
