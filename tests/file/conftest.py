"""A folder to write to, a look at its logs, and other processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpkit_file.schema import log_name
from tests.processes import Workers, started


def open_files(folder: Path) -> list[str]:
    """Return what this process has open below a folder."""
    found = []

    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue  # the listing's own

    return [name for name in found if name.startswith(f"{folder}/")]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder that is not there yet."""
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
