"""Agent state in LMDB: a memory-mapped b-tree, embedded, for many processes.

URL form
    ``lmdb:///absolute/folder`` or ``lmdb:folder``. Option: ``map_size``, the most bytes
    that the store may grow to.

Durability, and what is atomic
    LMDB syncs each commit: an acknowledged write survives a power loss. Each batch and
    each read is one transaction. LMDB has one writer at a time, in all processes
    together, and readers see the last commit.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import ClassVar, TypeVar

import lmdb
from pydantic import PositiveInt

from cpkit import Durability, InvalidURL, Survives
from cpkit.driver import (
    DriverOptions,
    KeyValueStore,
    Limits,
    StoreFailure,
    StoreInfo,
    View,
    create_folder,
    sync_folder,
)
from cpkit.registry import url_path

__all__ = ["LMDBStore"]

T = TypeVar("T")


class LMDBOptions(DriverOptions):
    """``map_size``: address space, not disk space; the file grows as it fills."""

    map_size: PositiveInt = 2**34


class LMDBStore(KeyValueStore):
    """A folder with an LMDB environment."""

    Options: ClassVar[type[DriverOptions]] = LMDBOptions
    limits = Limits(max_value=2**32 - 1)
    timeout = 10.0  # LMDB itself waits for ever for a writer that is stopped

    def __init__(self, folder: str, map_size: int) -> None:
        self.name = f"lmdb:{folder}"
        self._folder = folder
        self._map_size = map_size

    @classmethod
    def from_url(cls, url: str, options: LMDBOptions) -> LMDBStore:
        if not (folder := url_path(url)).strip("/"):
            raise InvalidURL("write lmdb:folder or lmdb:///absolute/folder")

        # The handles of one name share the engine, which LMDB needs (lmdb.h,
        # mdb_env_open): so the name has the absolute path.
        return cls(os.path.abspath(folder), options.map_size)

    @staticmethod
    async def inspect(url: str, options: LMDBOptions) -> StoreInfo:
        folder = url_path(url)
        exists = await asyncio.to_thread(os.path.exists, f"{folder}/data.mdb")
        return StoreInfo(exists, path=folder)

    def open_engine(self) -> None:
        try:
            create_folder(self._folder, parents=True)
            _create(self._folder)
            self._lmdb = lmdb.open(self._folder, map_size=self._map_size, mode=0o600)
            # Killed processes keep their places in the table of readers.
            self._lmdb.reader_check()
        except (lmdb.Error, OSError) as exc:
            raise StoreFailure("rejected", str(exc)) from exc

    def close_engine(self) -> None:
        self._lmdb.close()

    def durability(self) -> Durability:
        return Durability(Survives.MACHINE, {"sync": "before each commit returns"})

    def transact(self, work: Callable[[View], T], write: bool) -> T:
        try:
            # An exception aborts the transaction; leaving the block commits it.
            with self._lmdb.begin(write=write) as tx:
                view = View(tx.get, partial(_rows, tx))
                result = work(view)

                for key, value in view.changes.items():
                    _ = tx.delete(key) if value is None else tx.put(key, value)

            return result
        except (lmdb.PanicError, lmdb.MapResizedError):
            # An earlier commit could not be written, or another process with a larger
            # map grew the file beyond this one; this transaction did not begin.
            self.close_engine()
            self.open_engine()
            return self.transact(work, write)
        except lmdb.MapFullError as exc:
            raise StoreFailure("rejected", f"{exc}; raise map_size") from exc
        except lmdb.Error as exc:
            # A commit that did not return can still have reached the file.
            raise StoreFailure("unknown" if write else "rejected", str(exc)) from exc


def _create(folder: str) -> None:
    """Create LMDB's file as a whole, and sync its name."""
    # LMDB syncs neither its first write nor the name, and cannot open a torn file.
    if not os.path.exists(f"{folder}/data.mdb"):
        with tempfile.TemporaryDirectory(dir=folder) as new:
            with lmdb.open(new, mode=0o600) as environment:
                environment.sync(True)

            with suppress(FileExistsError):
                os.link(f"{new}/data.mdb", f"{folder}/data.mdb")

    sync_folder(folder)


def _rows(tx: lmdb.Transaction[bytes], first: bytes) -> Iterable[tuple[bytes, bytes]]:
    """Return the keys from this one on, with their values."""
    cursor = tx.cursor()
    return cursor.iternext() if cursor.set_range(first) else ()
