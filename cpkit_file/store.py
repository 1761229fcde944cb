"""Agent state in a folder of readable logs, for any number of processes on one machine.

URL forms
    ``file:///absolute/folder``, ``file:/absolute/folder`` and ``file:relative/folder``.
    Options: ``durability`` (``full`` or ``normal``), ``timeout`` in seconds, and those
    of every driver.

Durability
    ``full``, the default: a write is answered when it, and the name of its file, are on
    disk (``fdatasync``, ``fsync`` of the folder). So it survives a power loss, and what
    a read shows does too. ``normal``: appends, extra and results are not synced. They
    survive a kill of the process, and a power loss can take any of the last ones.

What is atomic
    Each operation is one trip to a worker thread, and one line at the end of its
    thread's log, ``threads/<name>.jsonl``, which ``tail -f`` follows. Writes to one
    thread that queue during a sync share the next one. A load reads the log up to where
    it ended at one moment. Between processes ``flock`` decides; `cpkit_file.claims`
    describes how a key is claimed.

Several processes
    A process that is stopped (SIGSTOP, a debugger) inside a write blocks the others'
    operations on the same thread or key. They raise ``BackendUnavailable`` after
    ``timeout``, and nothing was written. Other threads are not affected.

Watching
    With the package watchfiles (``pip install 'cpkit[watch]'``) a watch hears of
    changes from the operating system. Without it, a watch polls.

Caveats
    The folder must be on a local file system with POSIX locks and symbolic links: not
    on Windows, not on a network. A line that a crash cut short is moved to
    ``<name>.jsonl.torn`` by the next writer, with a warning in the log ``cpkit_file``.
    No file stays open between operations.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal, TypeVar

import aiofiles.os
from pydantic import Field

from cpkit.driver import (
    Append,
    Batching,
    Claim,
    Decode,
    DriverOptions,
    Erase,
    FullHandle,
    Heard,
    Limits,
    Merge,
    Outcome,
    Resolve,
    Restore,
    Snapshot,
    StoredCall,
    StoredDump,
    StoreFailure,
    StoreInfo,
    Timeouts,
    Write,
    listen_in_thread,
)
from cpkit.errors import InvalidURL
from cpkit.records import Durability, Survives, ThreadInfo
from cpkit.registry import url_path
from cpkit_file import claims, listen, reading, schema, writing
from cpkit_file.files import failure, fcntl
from cpkit_file.index import Folder

__all__ = ["FileCheckpointer", "FileStore"]

MessageT = TypeVar("MessageT")
T = TypeVar("T")

_WORKERS = 16
# Worker threads for one batch. Syncs of different files share the file system's
# commits. With more, the threads were measured to wait for Python.
_TRIPS = 4


class FileOptions(DriverOptions):
    """``durability``: what an acknowledgement survives, a power loss or a kill.

    ``timeout``: seconds to wait for another process's lock.
    """

    durability: Literal["full", "normal"] = "full"
    timeout: float = Field(default=30.0, gt=0, le=86_400)


class FileStore:
    """A store in a folder; a missing folder is created for its owner alone."""

    Options: ClassVar[type[DriverOptions]] = FileOptions
    client_options: ClassVar[frozenset[str]] = frozenset()
    limits = Limits()
    # Claims, erasures and restored threads lock more than their thread's log.
    batching = Batching(kinds=(Append, Merge, Resolve))
    erases = True

    def __init__(self, path: str, options: FileOptions | None = None) -> None:
        self._options = options or FileOptions()
        # Absolute, because a process may change its working directory later.
        path = os.path.abspath(path)
        self.name = f"file://{path}"
        self._folder = Folder(path, durable=self._options.durability == "full")
        self._workers = ThreadPoolExecutor(_WORKERS, "cpkit-file")
        # What a thread does cannot be cancelled; the handle repeats what met a lock.
        self.timeouts = Timeouts(retry=self._options.timeout)

    @classmethod
    def from_url(cls, url: str, options: FileOptions) -> FileStore:
        return cls(_path(url), options)

    @staticmethod
    async def inspect(url: str, options: DriverOptions) -> StoreInfo | None:
        return await asyncio.to_thread(schema.inspect, _path(url))

    async def open(self) -> None:
        if fcntl is None:
            raise StoreFailure(
                "rejected", "this platform has no POSIX file locks; use sqlite:///"
            )

        await self._run(lambda folder: schema.prepare(folder.path, self.name))

    async def close(self) -> None:
        # In another thread, because it waits for operations whose callers are gone.
        await asyncio.to_thread(self._workers.shutdown)

    def durability(self) -> Durability:
        if self._folder.durable:
            return Durability(Survives.MACHINE, {"sync": "fdatasync"})

        advice = "a power loss can take the last writes: remove durability=normal"
        return Durability(Survives.PROCESS, {"sync": "none"}, (advice,))

    # Writes

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        match batch[0]:  # the handle groups no others
            case Claim():
                return [await self._run(claims.claim, batch[0])]
            case Erase():
                return [await self._run(claims.erase, batch[0])]
            case Restore():
                return [await self._run(claims.restore, batch[0])]

        places: dict[str, list[int]] = {}

        for i, write in enumerate(batch):
            places.setdefault(write.thread_id, []).append(i)

        groups = [[batch[i] for i in some] for some in places.values()]

        if len(groups) == 1:
            return (await self._run(writing.commit, groups))[0]

        share = -(-len(groups) // _TRIPS)
        shares = [groups[i : i + share] for i in range(0, len(groups), share)]
        found = await asyncio.gather(
            *(self._run(writing.commit, some) for some in shares)
        )
        outcomes: list[Outcome] = [None] * len(batch)

        for some, answers in zip(places.values(), chain(*found), strict=True):
            for i, outcome in zip(some, answers, strict=True):
                outcomes[i] = outcome

        return outcomes

    # Reads

    async def snapshot(self, thread_id: str, decode: Decode) -> Snapshot | None:
        return await self._run(reading.snapshot, thread_id, decode)

    async def messages(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> list[Any]:
        return await self._run(reading.messages, thread_id, start, stop, decode)

    async def holder(self, key: str) -> StoredCall | None:
        return await self._run(claims.newest_attempt, key)

    # Optional abilities

    async def calls(self, thread_id: str) -> list[StoredCall]:
        return await self._run(reading.calls, thread_id)

    async def threads(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[ThreadInfo]:
        return await self._run(reading.threads, prefix, after, limit, erased)

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        return await self._run(listen.markers, thread_ids)

    async def listen(self, heard: Heard) -> None:
        if listen.can_follow():
            await listen_in_thread(partial(listen.follow, self._folder), heard)

    async def dump(self, thread_id: str) -> StoredDump | None:
        return await self._run(reading.dump, thread_id)

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        """Work in a worker thread, which goes on where the caller is cancelled."""
        try:
            found: T = await _in_worker(
                work, self._folder, *args, executor=self._workers
            )
        except OSError as exc:
            raise failure(exc) from exc

        return found


class FileCheckpointer(FullHandle[MessageT]):
    """A handle of a store in a folder.

    ``path`` is the folder's; a missing one is created for its owner alone. Options as
    in the URL.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        message_type: type[MessageT] | Any = dict,
        **options: Any,
    ) -> None:
        known = FileOptions(**options)
        store = FileStore(os.fspath(path), known)
        super().__init__(store, message_type=message_type, options=known)


def _call(work: Callable[..., T], *args: Any) -> T:
    return work(*args)


_in_worker = aiofiles.os.wrap(_call)


def _path(url: str) -> str:
    path = url_path(url)

    if not path.strip("/"):
        raise InvalidURL("write file:///absolute/folder or file:relative/folder")

    return os.path.abspath(path)
