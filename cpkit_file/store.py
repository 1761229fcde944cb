"""Agent state in a folder of readable logs, for any number of processes on one machine.

``docs/drivers.md`` is the manual.

URL forms
    ``file:///absolute/folder``, ``file:/absolute/folder`` and ``file:relative/folder``.
    Options: ``durability`` (``full`` or ``normal``), ``timeout`` in seconds, and those
    of every driver.

Durability
    ``full``, the default: a write is answered when it, and the name of its file, are on
    disk (``fdatasync``, ``fsync`` of the folder). So it survives a power loss, and what
    a read shows does too. ``normal``: appends, extra, claims and results are not
    synced. They survive a kill of the process. A power loss can take any of the last
    ones, and with a claim the knowledge that its effect may have run.

What is atomic
    Each operation is one line at the end of its thread's log, and one trip to a worker
    thread. Writes to one thread that queue during a sync share the next one. A load
    reads the log up to where it ended at one moment. `cpkit_file.claims` describes how
    a key is claimed.

Several processes
    ``flock`` orders their writes. An operation that waits for a lock for longer than
    ``timeout`` raises ``BackendUnavailable``, and nothing was written.
"""

from __future__ import annotations

import asyncio
import operator
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import chain, islice
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
    from_micros,
    listen_in_thread,
    span,
)
from cpkit.errors import CorruptThread, InvalidURL
from cpkit.records import Durability, Survives, ThreadInfo
from cpkit.registry import url_path
from cpkit_file import claims, lines, schema, writing
from cpkit_file.lines import ADD, AT, CALL, TAB
from cpkit_file.log import Calls, Folder, Log, reading, thread_id_of
from cpkit_file.schema import (
    LOG_NAME,
    failure,
    locked_names,
    log_name,
    opened,
    words_of,
)

__all__ = ["FileCheckpointer", "FileStore"]

MessageT = TypeVar("MessageT")
T = TypeVar("T")

# The work of a write that the handle does not group with others.
_ALONE: dict[type[Write], Callable[[Folder, Any], Outcome]] = {
    Claim: claims.claim,
    Erase: claims.erase,
    Restore: claims.restore,
}
_WORKERS = 16
# Worker threads for one batch. Syncs of different files share the file system's
# commits. More threads were measured to wait for Python.
_WORKERS_PER_BATCH = 4
# Bytes of a log's end in a marker. A checksum of the whole log is among them.
_TAIL = 64
# Milliseconds: how often watchfiles asks the operating system for changes, and how long
# it collects changes that follow each other without a pause.
_STEP = 5
_COLLECT = 10


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
        path = _absolute(path)
        self.name = f"file://{path}"
        self._folder = Folder(path, durable=self._options.durability == "full")
        self._workers = ThreadPoolExecutor(_WORKERS, "cpkit-file")
        # Work in a thread cannot be cancelled, so it does not wait for a log's lock:
        # the handle repeats it.
        self.timeouts = Timeouts(retry=self._options.timeout)

    @classmethod
    def from_url(cls, url: str, options: FileOptions) -> FileStore:
        return cls(_path(url), options)

    @staticmethod
    async def inspect(url: str, options: DriverOptions) -> StoreInfo | None:
        return await asyncio.to_thread(schema.inspect, _path(url))

    async def open(self) -> None:
        await self._run(lambda folder: schema.prepare(folder.path, self.name))

    async def close(self) -> None:
        # In another thread: it waits for operations whose callers were cancelled. The
        # event loop's executor may be full of the program's jobs.
        closer = ThreadPoolExecutor(1, "cpkit-file-close")
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(closer, self._workers.shutdown)
        closer.shutdown()

    def durability(self) -> Durability:
        if self._folder.durable:
            return Durability(Survives.MACHINE, {"sync": "fdatasync"})

        advice = "a power loss can take the last writes: remove durability=normal"
        return Durability(Survives.PROCESS, {"sync": "none"}, (advice,))

    # Writes

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        if alone := _ALONE.get(type(batch[0])):
            return [await self._run(alone, batch[0])]

        threads: dict[str, list[Write]] = {}

        for write in batch:
            threads.setdefault(write.thread_id, []).append(write)

        groups = list(threads.values())

        if len(groups) == 1:
            return (await self._run(writing.commit, groups))[0]

        share = -(-len(groups) // _WORKERS_PER_BATCH)
        shares = [groups[i : i + share] for i in range(0, len(groups), share)]
        found = await asyncio.gather(
            *(self._run(writing.commit, some) for some in shares)
        )
        outcomes = dict(zip(threads, chain(*found), strict=True))
        return [outcomes[write.thread_id].pop(0) for write in batch]

    # Reads

    async def snapshot(self, thread_id: str, decode: Decode) -> Snapshot | None:
        return await self._run(_snapshot, thread_id, decode)

    async def messages(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> list[Any]:
        return await self._run(_messages, thread_id, start, stop, decode)

    async def holder(self, key: str) -> StoredCall | None:
        return await self._run(claims.newest_attempt, key)

    # Optional abilities

    async def calls(self, thread_id: str) -> list[StoredCall]:
        return await self._run(_calls, thread_id)

    async def threads(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[ThreadInfo]:
        return await self._run(_threads, prefix, after, limit, erased)

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        return await self._run(_markers, thread_ids)

    async def listen(self, heard: Heard) -> None:
        if find_spec("watchfiles") is not None:
            try:
                await listen_in_thread(partial(_follow, self._folder), heard)
            except OSError as exc:
                raise failure(exc) from exc

    async def dump(self, thread_id: str) -> StoredDump | None:
        return await self._run(_dump, thread_id)

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        """Run ``work`` in a worker thread; it continues if the caller is cancelled."""
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


_in_worker = aiofiles.os.wrap(operator.call)


def _path(url: str) -> str:
    path = url_path(url)

    if not path.strip("/"):
        raise InvalidURL("write file:///absolute/folder or file:relative/folder")

    return _absolute(path)


def _absolute(path: str) -> str:
    """Resolve a path now: the process may change its working directory later."""
    if "\0" in path:
        raise InvalidURL("a path cannot contain a NUL character")

    try:
        return os.path.abspath(path)
    except FileNotFoundError as exc:
        reason = "the working directory was deleted: write an absolute path"
        raise InvalidURL(f"{path!r}: {reason}") from exc


# In a worker thread


def _replay(
    log: Log, decode: Decode, first: int = 0, end: int | None = None
) -> tuple[list[Any], dict[bytes, bytes], Calls]:
    """Decode messages in one pass over the log; collect extra and calls on the way.

    Extra and calls are complete only if all messages of the thread are asked for.
    """
    assert log.at is not None
    stop = log.at.version if end is None else end
    extra: dict[bytes, bytes] = {}
    calls = Calls(log.index.thread_id)
    start, version = log.start_of(first) if first else (0, 0)

    def bodies() -> Iterator[bytes]:
        for offset, block in log.blocks(start):
            begin = 0

            while after := block.find(b"\n", begin) + 1:
                cut = block.rfind(AT, begin, after)

                if block[cut - 2] == TAB:
                    several, items = lines.texts(block[begin:after])
                    extra.update(items)
                    yield from several
                elif block.startswith(ADD, begin):
                    yield block[begin + len(ADD) : cut]
                elif block.startswith(CALL, begin):
                    calls.learn(offset + begin, block[begin:after])

                begin = after

    last = None if stop == log.at.version else stop - version
    found = decode(islice(bodies(), first - version, last), first)

    if len(found) != stop - first:
        reason = f"{len(found)} messages are in the log, not {stop - first}"
        raise log.corrupt(log.end - 1, reason)

    return found, extra, calls


def _snapshot(folder: Folder, thread_id: str, decode: Decode) -> Snapshot | None:
    with reading(folder, folder.remember(thread_id)) as log:
        if log.at is None:
            return None

        found, extra, calls = _replay(log, decode)
        return Snapshot(found, list(extra.items()), calls.pending(log.line))


def _messages(
    folder: Folder, thread_id: str, start: int, stop: int | None, decode: Decode
) -> list[Any]:
    with reading(folder, folder.remember(thread_id)) as log:
        first, end = span(start, stop, log.version)
        return _replay(log, decode, first, end)[0] if first < end else []


def _calls(folder: Folder, thread_id: str) -> list[StoredCall]:
    with reading(folder, folder.remember(thread_id)) as log:
        return log.calls().all(log.line)


def _dump(folder: Folder, thread_id: str) -> StoredDump | None:
    with reading(folder, folder.remember(thread_id)) as log:
        if log.at is None:
            found = log.calls().all(log.line)
            return StoredDump([], [], found, None, None) if found else None

        bodies, extra, calls = _replay(log, lambda rows, _: list(rows))
        times = log.created_at(), log.at.updated_at
        return StoredDump(bodies, list(extra.items()), calls.all(log.line), *times)


def _names(folder: Folder) -> tuple[dict[str, str], dict[str, Exception]]:
    """Return the names of the logs by thread id, and errors by name.

    The errors are of logs whose id is unknown: they are damaged, cannot be read, or
    another process is at their first write.
    """
    found: dict[str, str] = {}
    unknown: dict[str, Exception] = {}

    with locked_names(folder.threads, shared=True):
        names = os.listdir(folder.threads)

    for name in filter(LOG_NAME.fullmatch, names):
        thread_id = folder.ids.get(name)

        if thread_id is None:
            try:
                thread_id = thread_id_of(folder, name)
            except (CorruptThread, StoreFailure, OSError) as exc:
                unknown[name] = exc

        if thread_id is not None:
            found[thread_id] = folder.remember(thread_id)

    return found, unknown


def _threads(
    folder: Folder, prefix: str, after: str | None, limit: int, erased: bool
) -> list[ThreadInfo]:
    """Return a page of threads, from the first and last intact lines of their logs.

    Raises the error of a log with an unknown id if it may belong to the list, so that
    a copy or an export does not leave it out.
    """
    names, unknown = _names(folder)

    for name, error in unknown.items():
        if name.startswith(words_of(prefix)):
            raise error

    wanted = sorted(
        thread_id
        for thread_id in names
        if thread_id.startswith(prefix) and (after is None or thread_id > after)
    )
    infos = (_info(folder, one, names[one], erased) for one in wanted)
    return list(islice((info for info in infos if info is not None), limit))


def _info(folder: Folder, thread_id: str, name: str, erased: bool) -> ThreadInfo | None:
    with reading(folder, name, listing=True) as log:
        is_damaged = log.damage is not None
        times: list[int] = []

        try:
            if log.at is not None:
                times = [log.created_at(), log.at.updated_at]
            elif erased and not is_damaged:
                for call in log.calls().without_content():
                    times += [call.issued_at, call.resolved_at or call.issued_at]
        except CorruptThread:
            is_damaged = True

        if is_damaged and not times:
            # The list must have the thread. These are the best times that are known.
            modified_at = os.fstat(log.file.fd).st_mtime_ns // 1000
            times = [modified_at if log.at is None else log.at.updated_at]

        if not times:
            return None

        created_at, updated_at = map(from_micros, (min(times), max(times)))
        return ThreadInfo(thread_id, log.version, created_at, updated_at)


def _markers(
    folder: Folder, thread_ids: Sequence[str] | None
) -> Mapping[str, Hashable]:
    """Return the size and the last bytes of these threads' logs, or of all.

    A change is one line at the end, or another file. The logs are not locked, so a
    marker may show a line that is not synced yet. A watcher then loads the thread, and
    that waits for the writer.
    """
    if thread_ids is None:
        # Logs with unknown ids are left out. Once they can be read, that is a change.
        names, _ = _names(folder)
    else:
        names = {one: log_name(one) for one in thread_ids}

    found: dict[str, Hashable] = {}

    for thread_id, name in names.items():
        path = f"{folder.threads}/{name}"

        with suppress(FileNotFoundError), opened(path) as fd:
            size = os.fstat(fd).st_size
            found[thread_id] = size, os.pread(fd, _TAIL, max(0, size - _TAIL))

    if len(found) < len(names):
        os.stat(folder.threads)  # raises if the whole folder is missing

    return found


def _follow(folder: Folder, changed: Callable[[], None], stop: threading.Event) -> None:
    """Call ``changed`` after logs changed, until ``stop`` is set."""
    from watchfiles import watch

    found = watch(
        folder.threads,
        watch_filter=None,
        recursive=False,
        step=_STEP,
        debounce=_COLLECT,
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
