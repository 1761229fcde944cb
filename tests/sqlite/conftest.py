"""Fixtures: a path, a plain connection to the file, and worker processes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounts import small_disk
from tests.processes import Workers, started


@pytest.fixture
def path(tmp_path: Path) -> str:
    """The path of a file that does not exist yet."""
    return str(tmp_path / "agent.db")


@pytest.fixture
def raw(path: str) -> Iterator[sqlite3.Connection]:
    """A plain connection to the file, in autocommit mode."""
    db = sqlite3.connect(path, isolation_level=None)
    yield db
    db.close()


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Start worker processes, which end with the test."""
    with started("tests.sqlite.worker") as start:
        yield start


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system that can be filled."""
    with small_disk(tmp_path / "small", 512) as place:
        yield place
