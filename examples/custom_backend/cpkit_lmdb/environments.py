"""One LMDB environment per folder and process, shared by all its handles.

LMDB keeps its locks per process: opening a folder twice in one process breaks them
(lmdb.h, mdb_env_open, "Do not have open an LMDB database twice in the same process").
"""

from __future__ import annotations

import os
import threading

import lmdb

__all__ = ["acquire", "release"]

_lock = threading.Lock()
# By real path: the environment, and how many handles use it.
_open: dict[str, tuple[lmdb.Environment, int]] = {}


def acquire(folder: str, map_size: int) -> lmdb.Environment:
    """Return the folder's environment; the first caller of the process opens it."""
    folder = os.path.realpath(folder)

    with _lock:
        environment, users = _open.get(folder, (None, 0))

        if environment is None:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            environment = lmdb.open(folder, map_size=map_size, mode=0o600)

        _open[folder] = environment, users + 1
        return environment


def release(folder: str) -> None:
    """Give the environment back; the last caller closes it."""
    folder = os.path.realpath(folder)

    with _lock:
        environment, users = _open.pop(folder)

        if users > 1:
            _open[folder] = environment, users - 1
        else:
            environment.close()
