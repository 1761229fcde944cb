"""Real file systems, mounted for a test."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["mounted", "small_disk"]


@contextmanager
def mounted(place: Path, *command: str | Path) -> Iterator[Path]:
    """Mount a file system; skip the test if the user may not.

    ``command`` ends with the place where it is mounted; a missing folder is created.
    """
    if not place.exists():
        place.mkdir()

    if subprocess.run([*command, place], capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a file system")

    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@contextmanager
def small_disk(place: Path, kibibytes: int) -> Iterator[Path]:
    """Mount a file system of this size, in memory."""
    with mounted(place, "mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs"):
        yield place
