"""Agent state in a folder of readable logs, for any number of processes on one machine.

URL forms
    ``file:///absolute/folder``, ``file:/absolute/folder`` and ``file:relative/folder``.
    Options: ``timeout``, in seconds, and those of every driver.

Durability
    What a write adds is on disk before the answer, with its file's name: it survives a
    power loss. After a sync that failed, the handle does not use that file any more.

What is atomic
    Each operation is one line at the end of its thread's log; a deletion or a trim is
    the rename of a new log. A read takes no lock: it shows the log as it was at one
    moment. A claim writes a second file, see `cpkit_file.keys`.

Several processes
    ``flock`` orders their writes. A write that waits for a lock for longer than
    ``timeout`` raises ``BackendUnavailable``, and nothing was written.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from itertools import islice
from random import random
from typing import Any, ClassVar, TypeVar

import aiofiles.os
from pydantic import Field

from cpkit.driver import (
    Decode,
    DriverOptions,
    FileSystem,
    Findings,
    FullHandle,
    Heard,
    Outcome,
    Snapshot,
    StoredCall,
    StoredDump,
    StoreFailure,
    StoreInfo,
    Write,
    from_micros,
    listen_in_thread,
    warn_once,
)
from cpkit.errors import InvalidURL
from cpkit.records import Durability, Survives, ThreadInfo
from cpkit.registry import url_path
from cpkit_file import schema
from cpkit_file.copies import check_copy, examine
from cpkit_file.keys import newest_attempt
from cpkit_file.log import Folder, Log
from cpkit_file.schema import LOG_NAME, log_name, words_of
from cpkit_file.workers import Workers
from cpkit_file.writing import commit

__all__ = ["FileCheckpointer", "FileStore"]

MessageT = TypeVar("MessageT")
T = TypeVar("T")

_DEAF = (
    "the system does not report changes, so a watch polls; if inotify is exhausted, "
    "raise the sysctls fs.inotify.max_user_instances and fs.inotify.max_user_watches"
)


class FileOptions(DriverOptions):
    """``timeout``: seconds to wait for another process's lock."""

    timeout: float = Field(default=30.0, gt=0, le=86_400)


class FileStore:
    """A store in a folder; a missing folder is created for its owner alone."""

    Options: ClassVar[type[DriverOptions]] = FileOptions
    client_options: ClassVar[frozenset[str]] = frozenset()
    max_writes = 256
    timeout = None
    locks_threads = True
    erases = trims = erases_calls = True
    survives_by_default = Survives.MACHINE

    def __init__(self, path: str, options: FileOptions | None = None) -> None:
        self._timeout = (options or FileOptions()).timeout
        # Resolved now: the process may change its working directory later.
        self._folder = Folder(os.path.abspath(path))
        # More writers were measured to wait for Python. The syncs of four share commits
        # of the file system.
        self._writers, self._readers = Workers(4), Workers(12)
        self._system = FileSystem()
        self.name = f"file://{self._folder.path}"

    @classmethod
    def from_url(cls, url: str, options: FileOptions) -> FileStore:
        path = url_path(url)

        if not path.strip("/"):
            raise InvalidURL("write file:///absolute/folder or file:relative/folder")

        return cls(path, options)

    @staticmethod
    async def inspect(url: str, options: DriverOptions) -> StoreInfo | None:
        return await aiofiles.os.wrap(schema.inspect)(url_path(url))

    @staticmethod
    async def examine(url: str, options: DriverOptions, whole: bool) -> Findings:
        return await aiofiles.os.wrap(examine)(Folder(url_path(url)), whole)

    async def open(self) -> None:
        self._writers.loop = self._readers.loop = asyncio.get_running_loop()
        run, folder = self._writers.run, self._folder
        self._system = await run(schema.prepare, folder.path, self.name)
        await run(check_copy, folder)

    async def close(self) -> None:
        # It waits for operations whose callers were cancelled; not in the event loop's
        # executor, which may be full of the program's jobs.
        with ThreadPoolExecutor(1, "cpkit-file-close") as closer:
            for workers in (self._writers, self._readers):
                await aiofiles.os.wrap(workers.end)(executor=closer)

    def durability(self) -> Durability:
        system = self._system
        settings = {"sync": "fdatasync", "file_system": system.type}
        return Durability(system.survives, settings, system.advice)

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        until = 0.0

        while True:
            try:
                return await self._writers.run(commit, self._folder, batch)
            except StoreFailure as exc:
                now = self._writers.loop.time()
                until = until or now + self._timeout

                if exc.fate != "not sent" or now >= until:
                    raise

            await asyncio.sleep(0.02 * random())  # another process has a lock

    async def snapshot(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> Snapshot | None:
        return await self._read(_snapshot, thread_id, start, stop, decode)

    async def holder(self, key: str) -> StoredCall | None:
        return await self._read(newest_attempt, key)

    async def calls(self, thread_id: str) -> list[StoredCall]:
        return await self._read(_calls, thread_id)

    async def threads(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[ThreadInfo]:
        return await self._read(_threads, prefix, after, limit, erased)

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        return await self._read(_markers, thread_ids)

    async def dump(self, thread_id: str) -> StoredDump | None:
        return await self._read(_dump, thread_id)

    async def listen(self, heard: Heard) -> None:
        if find_spec("watchfiles") is not None:
            try:
                await listen_in_thread(partial(_follow, self._folder), heard)
            except (OSError, RuntimeError) as exc:  # watchfiles raises its own too
                warn_once(f"{self.name}: {_DEAF} ({exc})")
                raise StoreFailure("rejected", f"{_DEAF} ({exc})") from exc

    def _read(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return self._readers.run(work, self._folder, *args)


class FileCheckpointer(FullHandle[MessageT]):
    """A handle of a store in the folder ``path``; options as in the URL."""

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


# Reads, in a worker thread


def _snapshot(
    folder: Folder, thread_id: str, start: int, stop: int | None, decode: Decode
) -> Snapshot | None:
    with Log(folder, folder.log(thread_id), thread_id) as log:
        version, state = log.state(start, stop, pending=True)

    if not state.updated_at:
        return None

    messages = decode(state.bodies, state.first)
    return Snapshot(messages, state.items, state.calls, version, state.first)


def _calls(folder: Folder, thread_id: str) -> list[StoredCall]:
    with Log(folder, folder.log(thread_id), thread_id) as log:
        return log.state(0, 0)[1].calls


def _dump(folder: Folder, thread_id: str) -> StoredDump | None:
    with Log(folder, folder.log(thread_id), thread_id) as log:
        _, state = log.state()

    if state.updated_at or state.calls:
        return StoredDump(*state[1:6], state.first)

    return None


def _ids(folder: Folder, prefix: str) -> dict[str, str]:
    """Return the ids that may have a prefix, and their logs; an id is read once."""
    start, known, aside = words_of(prefix), folder.ids, Folder(folder.path)
    names = [name for name in os.listdir(folder.threads) if name.startswith(start)]

    for name in names:
        if name not in known and LOG_NAME.fullmatch(name):
            with Log(aside, f"{folder.threads}/{name}") as log:
                if head := log.header():
                    known[name] = head["thread"]

    return {known[name]: name for name in names if name in known}


def _threads(
    folder: Folder, prefix: str, after: str | None, limit: int, erased: bool
) -> list[ThreadInfo]:
    names, after = _ids(folder, prefix), after or ""
    wanted = sorted(one for one in names if one.startswith(prefix) and one > after)
    infos = (_info(folder, one, names[one], erased) for one in wanted)
    return list(islice(filter(None, infos), limit))


def _info(folder: Folder, thread_id: str, name: str, erased: bool) -> ThreadInfo | None:
    """Return what a list shows of a thread, which is read if its log has changed."""
    path = f"{folder.threads}/{name}"
    marker, known, is_erased = folder.infos.get(thread_id, (None, None, False))

    if (now := _marker(path)) != marker:
        with Log(Folder(folder.path), path, thread_id) as log:
            version, updated_at = log.find_tail()[-2:]

            if is_erased := not updated_at:  # the first claim, the last claim or result
                calls = log.calls()
                times = [one.issued_at for one in calls]
                times += [one.resolved_at for one in calls if one.resolved_at]
            else:
                # Erased calls may be before the line with the time of creation.
                created_at = log.header().get("created")
                times = [created_at or log.state(0, 0)[1].created_at or 0, updated_at]

        ends = (from_micros(min(times)), from_micros(max(times))) if times else None
        known = ends and ThreadInfo(thread_id, version, *ends)
        folder.infos[thread_id] = now, known, is_erased

    return known if erased or not is_erased else None


def _marker(path: str) -> tuple[int, int, int] | None:
    """Return what differs after each change of a log: it is longer, or another file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        os.stat(os.path.dirname(path))  # raises if the whole folder is missing
        return None

    return status.st_ino, status.st_size, status.st_mtime_ns


def _markers(
    folder: Folder, thread_ids: Sequence[str] | None
) -> Mapping[str, Hashable]:
    if thread_ids is None:
        names = _ids(folder, "")
    else:
        names = {one: log_name(one) for one in thread_ids}

    found = {one: _marker(f"{folder.threads}/{name}") for one, name in names.items()}
    return {one: marker for one, marker in found.items() if marker and marker[1]}


def _follow(folder: Folder, changed: Callable[[], None], stop: threading.Event) -> None:
    """Call ``changed`` after logs changed, until ``stop`` is set."""
    from watchfiles import watch

    found = watch(
        folder.threads,
        watch_filter=None,
        recursive=False,
        step=5,  # milliseconds between two looks
        debounce=10,  # for how long changes are collected
        rust_timeout=50,
        yield_on_timeout=True,
        raise_interrupt=False,
        stop_event=stop,
    )

    for number, changes in enumerate(found):
        os.stat(folder.threads)  # raises if it was moved: the system watches it there

        # The system watches from the first wait on: what changed before was missed.
        if changes or number == 0:
            changed()
