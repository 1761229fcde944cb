"""Fixtures: the store's folder, one of its logs, and worker processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpkit_file.schema import log_name
from tests.processes import Workers, started
from tests.stores import memory


def open_files(folder: Path) -> list[str]:
    """Return the paths below a folder that this process has open."""
    found = []

    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue  # the listing's own

    return [name for name in found if name.startswith(f"{folder}/")]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory, if there is one with enough room."""
    with tempfile.TemporaryDirectory(prefix="cpkit-", dir=memory()) as name:
        yield Path(name)


@pytest.fixture
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on a disk: a store in memory warns, and promises less."""
    return tmp_path_factory.mktemp("disk") / "store"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The store's folder, which does not exist yet."""
    return tmp_path / "store"


@pytest.fixture
def log(home: Path) -> Path:
    """The log of the thread ``t``."""
    return home / "threads" / log_name("t")


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Start worker processes, which end with the test."""
    with started("tests.file.worker") as start:
        yield start
