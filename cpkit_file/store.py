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

Caveats
    The folder must be on a local file system with POSIX locks and symbolic links: not
    on Windows, not on a network. A line that a crash cut short is moved to
    ``<name>.jsonl.torn`` by the next writer, with a warning in the log ``cpkit_file``.
    A handle keeps up to 128 files open. A file that another process deletes takes its
    room on the disk until this handle uses it again, needs the descriptor or closes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby, islice
from typing import Any, ClassVar, Literal, TypeVar

import aiofiles.os
from pydantic import Field

from cpkit.driver import (
    Append,
    Backoff,
    Batching,
    Claim,
    Conflict,
    Decode,
    DriverOptions,
    Erase,
    FullHandle,
    Limits,
    Merge,
    Outcome,
    Resolve,
    Snapshot,
    StoredCall,
    StoredDump,
    StoreFailure,
    StoreInfo,
    Timeouts,
    Write,
    from_micros,
    resolved_call,
    span,
)
from cpkit.errors import CorruptThread, InvalidURL
from cpkit.records import Durability, Survives, ThreadInfo
from cpkit.registry import url_path
from cpkit_file import claims, lines, schema
from cpkit_file.files import LockHeld, failure, fcntl
from cpkit_file.log import Folder, LogWriter, Replay, locked, reading
from cpkit_file.schema import LOG_NAME

__all__ = ["FileCheckpointer", "FileStore"]

MessageT = TypeVar("MessageT")
T = TypeVar("T")

_WORKERS = 16
# Worker threads for one batch. Syncs of different files share the file system's
# commits. With more, the threads were measured to wait for Python.
_TRIPS = 4
# Logs that are written before the first of them is synced: much of the others' syncs is
# then done already. With more, locks and descriptors would be held for long.
_LOGS_AT_ONCE = 16

# Writes that lock nothing but their thread's log.
_GROUPED = (Append, Merge, Resolve)


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
    batching = Batching(kinds=_GROUPED)
    timeouts = Timeouts()  # a thread's work cannot be cancelled: see `timeout`
    erases = True

    def __init__(self, path: str, options: FileOptions | None = None) -> None:
        self._options = options or FileOptions()
        # Absolute, because a process may change its working directory later.
        path = os.path.abspath(path)
        self.name = f"file://{path}"
        self._folder = Folder(path, durable=self._options.durability == "full")
        self._workers = ThreadPoolExecutor(_WORKERS, "cpkit-file")
        self._backoff = Backoff(first=0.01, longest=0.1)

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

        folder = self._folder
        await self._run(schema.prepare, folder.path, self.name, folder.files)

    async def close(self) -> None:
        # In another thread, because it waits for operations whose callers are gone.
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._workers.shutdown()
        self._folder.files.close()

    def durability(self) -> Durability:
        if self._folder.durable:
            return Durability(Survives.MACHINE, {"sync": "fdatasync"})

        advice = "a power loss can take the last writes: remove durability=normal"
        return Durability(Survives.PROCESS, {"sync": "none"}, (advice,))

    # Writes

    async def commit(
        self, batch: Sequence[Write]
    ) -> Sequence[Outcome | asyncio.Future[Outcome]]:
        outcomes: list[Outcome | asyncio.Future[Outcome]] = []

        # The handle hands over claims, erasures and restored threads one at a time.
        for grouped, writes in groupby(batch, lambda one: isinstance(one, _GROUPED)):
            if grouped:
                outcomes += await self._commit_groups(list(writes))
            else:
                outcomes += [await self._commit_alone(write) for write in writes]

        return outcomes

    async def _commit_alone(self, write: Write) -> Outcome:
        match write:
            case Claim():
                return await self._run(claims.claim, self._folder, write)
            case Erase():
                return await self._run(claims.erase, self._folder, write)
            case _:
                return await self._run(claims.restore, self._folder, write)

    async def _commit_groups(
        self, batch: list[Write]
    ) -> list[Outcome | asyncio.Future[Outcome]]:
        """Write to each thread's log once; share the threads among workers.

        A group whose log is locked by another process gets futures, so that the others
        do not wait for it.
        """
        places: dict[str, list[int]] = {}

        for i, write in enumerate(batch):
            places.setdefault(write.thread_id, []).append(i)

        groups = [[batch[i] for i in some] for some in places.values()]
        share = -(-len(groups) // _TRIPS)
        shares = [groups[i : i + share] for i in range(0, len(groups), share)]
        found = await asyncio.gather(
            *(self._run(_commit_some, self._folder, some) for some in shares)
        )
        outcomes: list[Any] = [None] * len(batch)
        carried = (group for some in found for group in some)

        for group, some, answer in zip(groups, places.values(), carried, strict=True):
            later = isinstance(answer, LockHeld)
            answers: Any = self._commit_later(group) if later else answer

            for i, outcome in zip(some, answers, strict=True):
                outcomes[i] = outcome

        return outcomes

    def _commit_later(self, group: list[Write]) -> list[asyncio.Future[Outcome]]:
        """Start to wait for a log's lock; return a future for each write."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Outcome]] = [loop.create_future() for _ in group]

        def answer(done: asyncio.Task[Any]) -> None:
            for i, future in enumerate(futures):
                if future.done():
                    continue
                if done.cancelled():
                    future.cancel()
                elif (exc := done.exception()) is not None:
                    future.set_exception(exc)
                else:
                    future.set_result(done.result()[i])

        task = loop.create_task(self._run(_commit_one, self._folder, group))
        task.add_done_callback(answer)
        return futures

    # Reads

    async def snapshot(self, thread_id: str, decode: Decode) -> Snapshot | None:
        return await self._run(_snapshot, self._folder, thread_id, decode)

    async def messages(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> list[Any]:
        return await self._run(_messages, self._folder, thread_id, start, stop, decode)

    async def holder(self, key: str) -> StoredCall | None:
        return await self._run(claims.newest_attempt, self._folder, key)

    # Optional abilities

    async def calls(self, thread_id: str) -> list[StoredCall]:
        return await self._run(_calls, self._folder, thread_id)

    async def threads(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[ThreadInfo]:
        return await self._run(_threads, self._folder, prefix, after, limit, erased)

    async def dump(self, thread_id: str) -> StoredDump | None:
        return await self._run(_dump, self._folder, thread_id)

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        """Do work in a worker thread; again while another process holds a lock.

        What a thread has begun goes on even where the caller is cancelled. ``close``
        waits for the threads.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        pauses = self._backoff.pauses()

        while True:
            try:
                found: T = await _in_worker(work, *args, executor=self._workers)
            except LockHeld as held:
                if loop.time() - started >= self._options.timeout:
                    raise StoreFailure(
                        "not sent",
                        f"another process has held the lock of {held.path} for "
                        f"{self._options.timeout:g} s",
                    ) from held
            except OSError as exc:
                raise failure(exc) from exc
            else:
                return found

            await asyncio.sleep(next(pauses))


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


# Writes, in a worker thread


def _commit_some(
    folder: Folder, groups: list[list[Write]]
) -> list[list[Outcome] | LockHeld]:
    """Write groups, each to its log; `LockHeld` for one that another process locked."""
    found: list[list[Outcome] | LockHeld] = []

    for start in range(0, len(groups), _LOGS_AT_ONCE):
        with ExitStack() as stack:
            found += _write_logs(folder, groups[start : start + _LOGS_AT_ONCE], stack)

    return found


def _commit_one(folder: Folder, group: list[Write]) -> list[Outcome]:
    (found,) = _commit_some(folder, [group])

    if isinstance(found, LockHeld):
        raise found

    return found


def _write_logs(
    folder: Folder, groups: list[list[Write]], stack: ExitStack
) -> list[list[Outcome] | LockHeld]:
    """Write all logs, then sync all; the stack releases them."""
    found: list[list[Outcome] | LockHeld] = []
    writers: list[LogWriter | None] = []

    for group in groups:
        thread_id = group[0].thread_id
        writer: LogWriter | None = None
        outcomes: list[Outcome] | LockHeld

        try:
            log = stack.enter_context(locked(folder, thread_id))
            writer = LogWriter(log, thread_id)
            outcomes = [_apply(writer, write) for write in group]
            writer.write()
        except LockHeld as exc:
            outcomes = exc
        except OSError as exc:
            outcomes = [failure(exc)] * len(group)
        except (StoreFailure, CorruptThread) as exc:
            outcomes = [exc] * len(group)
        else:
            writers.append(writer)
            found.append(outcomes)
            continue

        writers.append(None)
        found.append(outcomes)

    for i, writer in enumerate(writers):
        try:
            if writer is not None:
                writer.sync()
        except StoreFailure as exc:
            found[i] = [exc] * len(groups[i])

    return found


def _apply(writer: LogWriter, write: Write) -> Outcome:
    match write:
        case Append():
            if write.expected_version not in (None, writer.version):
                return Conflict(writer.version)

            if write.bodies or write.items:
                line = lines.added(write.bodies, write.items)
                writer.change(line, len(write.bodies))

            return writer.version
        case Merge():
            writer.change(lines.added([], write.items))
        case Resolve():
            try:
                call = writer.find(write.call_id)
            except CorruptThread as exc:
                return exc

            if call is not None and call.status == "issued":
                call = resolved_call(call, write, writer.now)
                writer.put(call)

            return call

    return None


# Reads, in a worker thread


def _snapshot(folder: Folder, thread_id: str, decode: Decode) -> Snapshot | None:
    with reading(folder, folder.remember(thread_id)) as log:
        if log is None or log.at is None:
            return None

        replay = Replay(log)
        messages = replay.decoded(decode, 0, log.at.version)
        pending = replay.calls.pending(log)
        return Snapshot(messages, list(replay.extra.items()), pending)


def _messages(
    folder: Folder, thread_id: str, start: int, stop: int | None, decode: Decode
) -> list[Any]:
    with reading(folder, folder.remember(thread_id)) as log:
        if log is None or log.at is None:
            return []

        first, end = span(start, stop, log.at.version)

        if first == end:
            return []

        replay = Replay(log, *log.start_of(first))
        return replay.decoded(decode, first, end)


def _calls(folder: Folder, thread_id: str) -> list[StoredCall]:
    with reading(folder, folder.remember(thread_id)) as log:
        return [] if log is None else log.calls().all(log)


def _dump(folder: Folder, thread_id: str) -> StoredDump | None:
    with reading(folder, folder.remember(thread_id)) as log:
        if log is None:
            return None

        replay = Replay(log)
        bodies = list(replay.bodies())
        items = list(replay.extra.items())
        calls = replay.calls.all(log)

        if log.at is None:
            return StoredDump([], [], calls, None, None) if calls else None

        replay.check(len(bodies), log.at.version)
        return StoredDump(bodies, items, calls, log.created_at(), log.at.updated_at)


def _threads(
    folder: Folder, prefix: str, after: str | None, limit: int, erased: bool
) -> list[ThreadInfo]:
    """Return a page of threads, from the first and last lines of their logs."""
    names = {
        thread_id: name
        for name in filter(LOG_NAME.fullmatch, os.listdir(folder.threads))
        if (thread_id := _thread_of(folder, name)) is not None
        and thread_id.startswith(prefix)
        and (after is None or thread_id > after)
    }
    infos = (
        _info(folder, thread_id, names[thread_id], erased)
        for thread_id in sorted(names)
    )
    return list(islice((info for info in infos if info is not None), limit))


def _info(folder: Folder, thread_id: str, name: str, erased: bool) -> ThreadInfo | None:
    with reading(folder, name, listing=True) as log:
        if log is None:
            return None

        if log.at is not None:
            version, updated_at = log.at
            created_at = log.created_at()
        else:
            calls = log.calls().without_content() if erased else []

            if not calls:
                return None

            version = 0
            created_at = min(call.issued_at for call in calls)
            updated_at = max(
                max(call.issued_at, call.resolved_at or 0) for call in calls
            )

        times = from_micros(created_at), from_micros(updated_at)
        return ThreadInfo(thread_id, version, *times)


def _thread_of(folder: Folder, name: str) -> str | None:
    """Return whose log a file is; ``None`` where it was never written to."""
    known = folder.ids.get(name)

    if known is not None:
        return known

    with reading(folder, name, listing=True) as log:
        if log is None:
            return None

        folder.remember(log.index.thread_id)
        return log.index.thread_id
