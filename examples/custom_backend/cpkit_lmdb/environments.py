"""One LMDB environment per folder and process, shared by all its handles.

LMDB keeps its locks per process: opening a folder twice in one process breaks them
(lmdb.h, mdb_env_open, "Do not have open an LMDB database twice in the same process").
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import lmdb

from cpkit.driver import create_folder, sync_folder

_lock = threading.Lock()
# By real path: the environment, and how many handles use it.
_open: dict[str, tuple[Environment, int]] = {}

# Environments of the processes that this one was forked from. LMDB has their locks and
# readers under another process id, and refuses to open such a folder while one is kept.
_inherited: list[object] = []


class Environment:
    """The environment of a folder, which is opened again when LMDB gives it up."""

    def __init__(self, folder: str, map_size: int) -> None:
        self._folder = folder
        self._map_size = map_size
        self._changed = threading.Condition()
        self._transactions = 0
        self._is_opening = False
        create_folder(folder, parents=True)
        _create(folder, map_size)
        self._environment = self._opened()

    @contextmanager
    def used(self) -> Iterator[lmdb.Environment]:
        """Yield the environment for one transaction; it is not closed meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_opening)
            environment = self._environment
            self._transactions += 1

        try:
            yield environment
        finally:
            with self._changed:
                self._transactions -= 1
                self._changed.notify_all()

    def reopen(self, broken: lmdb.Environment) -> None:
        """Replace an environment that LMDB does not use any more.

        LMDB gives it up when it could not write the page that makes a commit valid, or
        when the file is larger than the map. The new map is at least as large.
        """
        with self._changed:
            if self._environment is not broken or self._is_opening:
                return

            self._is_opening = True

            try:
                self._changed.wait_for(lambda: not self._transactions)
                broken.close()
                self._environment = self._opened()
            finally:
                self._is_opening = False
                self._changed.notify_all()

    def close(self) -> None:
        self._environment.close()

    def _opened(self) -> lmdb.Environment:
        environment = lmdb.open(self._folder, map_size=self._map_size, mode=0o600)
        # Killed processes keep their places in the table of readers, and old pages too.
        environment.reader_check()
        return environment


def acquire(folder: str, map_size: int) -> Environment:
    """Return the folder's environment; the first caller of the process opens it."""
    folder = os.path.realpath(folder)

    with _lock:
        environment, users = _open.get(folder, (None, 0))
        environment = environment or Environment(folder, map_size)
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


def _forget() -> None:
    """Do not use the environments of the parent in a forked child."""
    global _lock, _open
    _inherited.append(_open)
    _lock, _open = threading.Lock(), {}


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _create(folder: str, map_size: int) -> None:
    """Create LMDB's file where it is missing, as a whole, and sync its name.

    LMDB does not sync its first write nor the name of its file. After a power loss it
    could not open a file that is torn.
    """
    if not os.path.exists(f"{folder}/data.mdb"):
        with tempfile.TemporaryDirectory(dir=folder) as new:
            with lmdb.open(new, map_size=map_size, mode=0o600) as environment:
                environment.sync(True)

            with suppress(FileExistsError):
                os.link(f"{new}/data.mdb", f"{folder}/data.mdb")

    sync_folder(folder)
