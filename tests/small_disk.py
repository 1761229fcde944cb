"""A small file system that a test can fill."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["small_disk"]


@contextmanager
def small_disk(place: Path, kibibytes: int) -> Iterator[Path]:
    """Mount a file system of this size; skip the test if the user may not mount one."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(place)],
        capture_output=True,
    )

    if mounted.returncode != 0:
        pytest.skip("this user may not mount a file system")

    yield place
    subprocess.run(["umount", str(place)], check=True)
