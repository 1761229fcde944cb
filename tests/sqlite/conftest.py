"""Fixtures: a path, a plain connection to the file, and worker processes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sqlite.worker import Worker


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
def workers() -> Iterator[Callable[[int], list[Worker]]]:
    """Start worker processes, which end with the test."""
    started: list[Worker] = []

    def start(count: int) -> list[Worker]:
        started.extend(Worker() for _ in range(count))
        return started[-count:]

    yield start

    for worker in started:
        worker.close()
