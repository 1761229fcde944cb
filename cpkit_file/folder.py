"""The folder: created for its owner alone, and of a version that this code knows."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import lru_cache

from cpkit.errors import BackendUnavailable, SchemaMismatch
from cpkit_file.descriptors import fcntl, opened, sync_content, write_all
from cpkit_file.index import LogIndex
from cpkit_file.names import SHARDS, log_name
from cpkit_file.openings import Openings

__all__ = ["FORMAT_VERSION", "Folder"]

FORMAT_VERSION = 1

# Few beside the 1,024 that a process has by default.
_FILES_KEPT_OPEN = 128
# Logs whose calls a handle remembers, at some hundred bytes a call.
_LOGS_REMEMBERED = 512
_NAMES_REMEMBERED = 8192
# Ids for listing threads, at some hundred bytes each.
_IDS_REMEMBERED = 100_000


class Folder:
    """Where a store lies, and what a handle remembers of it.

    ``name`` is how errors call the store. Unless ``lasting``, nothing is synced.
    """

    def __init__(self, path: str, name: str, *, lasting: bool) -> None:
        self.path = path
        self.name = name
        self.lasting = lasting
        self.threads = os.path.join(path, "threads")
        self.claims = os.path.join(path, "claims")
        self.openings = Openings(_FILES_KEPT_OPEN)
        self.index = lru_cache(_LOGS_REMEMBERED)(LogIndex)
        self.log_name = lru_cache(_NAMES_REMEMBERED)(self._log_name)
        # By the log's name, which is a function of the id: never out of date.
        self.ids: dict[str, str] = {}

    def open(self) -> None:
        """Create what is missing; a complete folder is only read.

        Raises ``SchemaMismatch`` for a folder of another version.
        """
        if fcntl is None:
            raise BackendUnavailable(
                self.name, "this platform has no POSIX file locks; use sqlite:///"
            )

        mark = os.path.join(self.path, "cpkit.json")

        if not os.path.exists(mark):
            self._create(mark)

        with opened(mark) as fd:
            text = os.read(fd, 1000)

        try:
            found = json.loads(text)["version"]
        except (ValueError, TypeError, LookupError):
            found = f"in {text!r}"

        if found != FORMAT_VERSION:
            raise SchemaMismatch(self.name, found, FORMAT_VERSION)

        # A copy of the folder may have lost the ones that were empty.
        self.make(self.threads)
        self.make(self.claims)

    def log_path(self, name: str) -> str:
        """Return where the log of a name is."""
        return f"{self.threads}/{name}"

    def remember(self, name: str, thread_id: str) -> None:
        """Keep a log's thread id, which listing threads would have to read."""
        if len(self.ids) >= _IDS_REMEMBERED:
            self.ids.clear()

        self.ids[name] = thread_id

    def sync(self, fd: int) -> None:
        """Return when the file's content will survive a power loss."""
        if self.lasting:
            sync_content(fd)

    def sync_names(self, directory: str) -> None:
        """Return when the names in the directory will survive a power loss."""
        if self.lasting:
            with opened(directory) as fd:
                os.fsync(fd)

    def make(self, directory: str) -> None:
        """Create a directory that is not there, and those above it."""
        if os.path.isdir(directory):
            return

        above = os.path.dirname(directory)
        self.make(above)

        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)

        self.sync_names(above)

    def _log_name(self, thread_id: str) -> str:
        name = log_name(thread_id)
        self.remember(name, thread_id)
        return name

    def _create(self, mark: str) -> None:
        self.make(self.path)

        # Under a lock, because an older cpkit must not overwrite a newer one's mark.
        with self.openings.exclusive_directory(self.path):
            if os.path.exists(mark):
                return

            self.make(self.threads)
            self.make(self.claims)

            for shard in SHARDS:
                with suppress(FileExistsError):
                    os.mkdir(os.path.join(self.claims, shard), 0o700)

            self.sync_names(self.claims)
            draft = f"{mark}.tmp"

            with opened(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
                write_all(fd, b'{"cpkit":"file","version":%d}\n' % FORMAT_VERSION)
                self.sync(fd)

            # Last, so that where the mark is, the rest is.
            os.rename(draft, mark)
            self.sync_names(self.path)
