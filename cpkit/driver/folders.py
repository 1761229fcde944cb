"""Folders whose names survive a power loss, for stores in files."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["create_folder", "sync_folder"]


def create_folder(path: str, *, parents: bool = False) -> None:
    """Create a folder for its owner alone, unless it exists, and sync its name.

    The name of a folder that exists is synced too, because the process that created it
    may not have done so yet. A new folder is removed again where the sync fails. With
    ``parents`` the folder above a new one is created or synced in the same way.
    """
    parent = os.path.dirname(os.path.abspath(path))
    is_new = False

    if not os.path.isdir(path):
        if parents:
            create_folder(parent, parents=True)

        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
            is_new = True

    try:
        sync_folder(parent)
    except OSError as exc:
        if is_new:
            with suppress(OSError):
                os.rmdir(path)
        elif isinstance(exc, PermissionError):
            return  # of another user, who created the folder

        raise


def sync_folder(path: str) -> None:
    """Make the names in a folder survive a power loss; Windows has no way to."""
    if os.name == "nt":
        return

    descriptor = os.open(path, os.O_RDONLY)

    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
