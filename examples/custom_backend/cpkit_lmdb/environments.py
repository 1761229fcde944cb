"""One LMDB environment per folder and process, shared by all its handles.

LMDB keeps its locks per process: opening a folder twice in one process breaks them
(lmdb.h, mdb_env_open, "Do not have open an LMDB database twice in the same process").
Its tables are opened with it, because two threads that open some at once can wait for
each other for ever (lmdb.h, mdb_dbi_open, "must not be called from multiple concurrent
transactions in the same process").
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import lmdb

__all__ = ["Opened", "acquire", "release"]


class Opened(NamedTuple):
    """An environment, the tables in it, and how many handles use them."""

    environment: lmdb.Environment
    tables: dict[str, Any]
    users: int = 0


_lock = threading.Lock()
_open: dict[str, Opened] = {}


def acquire(folder: str, map_size: int, tables: Iterable[str]) -> Opened:
    """Return the folder's environment, opened if this process has not yet."""
    folder = os.path.realpath(folder)

    with _lock:
        opened = _open.get(folder) or _opened(folder, map_size, tables)
        _open[folder] = opened._replace(users=opened.users + 1)
        return opened


def release(folder: str) -> None:
    """Give the environment back; the last one to do so closes it."""
    folder = os.path.realpath(folder)

    with _lock:
        opened = _open.pop(folder)

        if opened.users > 1:
            _open[folder] = opened._replace(users=opened.users - 1)
        else:
            opened.environment.close()


def _opened(folder: str, map_size: int, tables: Iterable[str]) -> Opened:
    os.makedirs(folder, mode=0o700, exist_ok=True)
    environment = lmdb.open(folder, map_size=map_size, max_dbs=8, mode=0o600)

    try:
        return Opened(
            environment, {name: environment.open_db(name.encode()) for name in tables}
        )
    except BaseException:
        environment.close()
        raise
