"""Agent state in a folder of readable logs, for any number of processes on one machine.

URL forms
    ``file:///absolute/folder``, ``file:/absolute/folder`` and ``file:relative/folder``.
    Options: ``durability`` (``full`` or ``normal``) and those of every driver.

Durability
    ``full``, the default: a write is answered when it, and the name of its file, are on
    disk (``fdatasync``, ``fsync`` of the folder), so it survives a power loss, and what
    a read shows does too. ``normal``: nothing is synced; a write survives a kill of the
    process, and a power loss can take any of the last ones.

What is atomic
    Each operation is one trip to a worker thread, and one line at the end of its
    thread's log, ``threads/<name>.jsonl``, which ``tail -f`` follows. Writes to one
    thread that queue while a sync is under way share the next one. A load reads the
    log up to where it ended at one moment. Between processes ``flock`` decides; how a
    key is claimed stands in `cpkit_file.claims`.

Caveats
    The folder must be on a local file system with POSIX locks and symbolic links: not
    on Windows, not on a network. Locks are waited for without a limit, so a process
    that is stopped in the middle of a write holds up the others that come to the same
    thread or key. A line that a crash cut short is moved to ``<name>.jsonl.torn`` by
    the next writer, with a warning in the log ``cpkit_file``. A handle keeps up to 128
    files open; one that another process deletes takes its room on the disk until this
    handle comes to it again, needs the descriptor or closes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import aiofiles.os

from cpkit.driver.codec import Codec, check_same_call
from cpkit.driver.ids import check_id, check_page, span
from cpkit.driver.lifetime import Lifetime
from cpkit.driver.writes import Erase
from cpkit.errors import InvalidURL
from cpkit.records import (
    CallRecord,
    CheckpointData,
    Durability,
    JsonValue,
    Survives,
    ThreadInfo,
    ToolCall,
)
from cpkit.registry import DriverOptions, url_path
from cpkit_file import changes, claims, reads
from cpkit_file.faults import unavailable
from cpkit_file.folder import Folder
from cpkit_file.queue import Outcomes, ThreadWrite, WriteQueue
from cpkit_file.workers import Workers

__all__ = ["FileCheckpointer"]

MessageT = TypeVar("MessageT")
T = TypeVar("T")

# Threads start when they are needed; some of them are for trips that write.
_WORKERS = 16


class FileOptions(DriverOptions):
    """``durability``: what an acknowledgement survives, a power loss or a kill."""

    durability: Literal["full", "normal"] = "full"


class FileCheckpointer(Generic[MessageT]):
    """A store in a folder.

    ``path`` is the folder's; a missing one is created for its owner alone. Options as
    in the URL.
    """

    Options: ClassVar[type[DriverOptions]] = FileOptions
    client_options: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        message_type: type[MessageT] | Any = dict,
        **options: Any,
    ) -> None:
        self._options = FileOptions(**options)
        self._codec: Codec[MessageT] = Codec(
            message_type,
            max_payload=self._options.max_payload,
            strict_roundtrip=self._options.strict_roundtrip,
        )
        # Absolute, because a process may change its working directory later.
        path = os.path.abspath(path)
        self._lifetime = Lifetime(f"file://{path}")
        self._folder = Folder(
            path, self._lifetime.name, lasting=self._options.durability == "full"
        )
        self._workers = Workers(_WORKERS, "cpkit-file")
        self._writes = WriteQueue(self._lifetime, self._carry)

    @classmethod
    def from_url(
        cls, url: str, *, message_type: Any, options: FileOptions
    ) -> FileCheckpointer[Any]:
        path = url_path(url)

        if not path.strip("/"):
            raise InvalidURL("write file:///absolute/folder or file:relative/folder")

        return cls(path, message_type=message_type, **options.model_dump())

    async def __aenter__(self) -> Self:
        self._lifetime.begin()

        try:
            await self._trip(Folder.open)
        except BaseException:
            await self.aclose()
            raise

        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let what is in flight finish and end the worker threads; idempotent."""
        await self._lifetime.end(self._release)

    async def _release(self) -> None:
        # Elsewhere, because it waits for the operations whose callers are gone.
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._workers.shutdown()
        self._folder.openings.close()

    @property
    def durability(self) -> Durability:
        if self._options.durability == "normal":
            return Durability(
                Survives.PROCESS,
                {"sync": "none"},
                ("a power loss can take the last writes: remove durability=normal",),
            )

        return Durability(
            Survives.MACHINE,
            {"sync": "fdatasync"},
        )

    def __repr__(self) -> str:
        return f"<FileCheckpointer {self._lifetime.name}>"

    # The six methods

    async def load(self, thread_id: str) -> CheckpointData[MessageT] | None:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        return await self._trip(reads.load, self._codec, thread_id)

    async def append(
        self,
        thread_id: str,
        messages: Sequence[MessageT],
        *,
        expected_version: int | None = None,
    ) -> int:
        self._lifetime.check()
        write = self._codec.append(thread_id, messages, expected_version)
        version: int = await self._writes.run(write)
        return version

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        self._lifetime.check()
        write = self._codec.merge(thread_id, extra)

        if write.items:
            await self._writes.run(write)

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self._lifetime.check()
        write = self._codec.claim(thread_id, call)
        stored = await self._trip(claims.claim, write)

        if stored is None:
            return None

        record = self._codec.record(stored)

        if stored[:2] == (write.thread_id, write.call.call_id):
            check_same_call(record, write.call)

        return record

    async def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool = True,
    ) -> CallRecord:
        self._lifetime.check()
        write = self._codec.resolve(thread_id, call_id, result, success)
        return self._codec.record(await self._writes.run(write))

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        record = await self.find_call(idempotency_key)
        return record if record is not None and record.status == "completed" else None

    # The optional protocols

    async def list_threads(
        self, *, prefix: str = "", after: str | None = None, limit: int = 100
    ) -> list[ThreadInfo]:
        self._lifetime.check()
        prefix, after, limit = check_page(prefix, after, limit)
        return await self._trip(reads.list_threads, prefix, after, limit)

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[MessageT]:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        span(start, stop, 0)  # a wrong argument raises even where there is no thread
        return await self._trip(reads.read_range, self._codec, thread_id, start, stop)

    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        calls = await self._trip(reads.calls_of, thread_id)
        return [self._codec.record(call) for call in calls]

    async def find_call(self, idempotency_key: str) -> CallRecord | None:
        self._lifetime.check()
        key = check_id("idempotency_key", idempotency_key)
        last = await self._trip(claims.last_attempt, key)

        if last is None or last.status == "failed":
            return None

        return self._codec.record(last)

    async def delete_thread(self, thread_id: str, *, forget_keys: bool = False) -> None:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        await self._trip(changes.erase, Erase(thread_id, forget_keys))

    # The trips to the worker threads

    def _carry(
        self,
        done: Callable[[Outcomes | BaseException], None],
        groups: list[list[ThreadWrite]],
        wait: bool,
    ) -> None:
        self._workers.start(done, changes.carry_out, self._folder, groups, wait)

    async def _trip(self, operation: Callable[..., T], *args: Any) -> T:
        """Run an operation in a worker thread.

        A caller that is cancelled merely stops waiting: what a thread has begun goes on
        to its end, and closing waits for the threads.
        """
        result: T = await _in_worker(
            operation, self._folder, *args, executor=self._workers
        )
        return result


def _perform(operation: Callable[..., T], folder: Folder, *args: Any) -> T:
    try:
        return operation(folder, *args)
    except OSError as exc:
        raise unavailable(folder.name, exc) from exc


_in_worker = aiofiles.os.wrap(_perform)
