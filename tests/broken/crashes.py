"""Stores on disk that acknowledge too early, or leave a lock behind when killed."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pickle
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Self
from uuid import uuid4

from conformance.harness import Harness, find
from cpkit import (
    BackendUnavailable,
    CallRecord,
    CheckpointData,
    JsonValue,
    ThreadDump,
    ThreadInfo,
    ToolCall,
    VersionConflict,
)
from tests.broken.reference import Reference
from tests.broken.store import breaks


@dataclass
class DiskHarness(Harness):
    """Opens a `Disk`, or a subclass, in a folder."""

    kind: str
    folder: str

    def open(self, **options: Any) -> Disk:
        opened: Disk = find(self.kind)(self.folder, **options)
        return opened

    async def in_folder(self, folder: str) -> Harness:
        return DiskHarness(self.kind, folder)


class Disk(Reference):
    """The reference on disk: a log of writes that every handle replays.

    It is correct, and has only what the broken classes below need. Each write is one
    line, written under a file lock that the kernel releases when the process dies.
    """

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(None, **options)
        self._folder = Path(folder)
        self._log = self._folder / "log"
        self._read = 0

    async def _begin(self) -> None:
        self._check_usable()  # `_turn` yields, before it has the lock

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        async with self._turn():
            return await super().load(thread_id)

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        async with self._turn() as log:
            version = await super().append(thread_id, messages, **options)
            extra = options.get("extra")
            self._write(log, ["append", thread_id, list(messages), extra])
            return version

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        async with self._turn() as log:
            await super().save_extra(thread_id, extra)
            self._write(log, ["save_extra", thread_id, dict(extra)])

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        async with self._turn() as log:
            record = await super().record_issued(thread_id, call)

            if record is None:
                issued = self._store.calls[thread_id, call.call_id].issued_at
                self._write(log, ["record_issued", thread_id, asdict(call), issued])

            return record

    async def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool = True,
    ) -> CallRecord:
        async with self._turn() as log:
            record = await super().record_result(
                thread_id, call_id, result, success=success
            )
            self._write(log, ["record_result", thread_id, call_id, result, success])
            return record

    async def find_call(self, idempotency_key: str) -> CallRecord | None:
        async with self._turn():
            return await super().find_call(idempotency_key)

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[Any]:
        async with self._turn():
            return await super().read(thread_id, start, stop)

    async def load_range(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> CheckpointData[Any] | None:
        async with self._turn():
            return await super().load_range(thread_id, start, stop)

    async def delete_thread(
        self, thread_id: str, *, forget_keys: bool = False, **options: Any
    ) -> None:
        async with self._turn() as log:
            await super().delete_thread(thread_id, forget_keys=forget_keys, **options)
            self._write(log, ["delete_thread", thread_id, forget_keys])

    async def trim(self, thread_id: str, before: int, **options: Any) -> int:
        async with self._turn() as log:
            removed = await super().trim(thread_id, before, **options)
            self._write(log, ["trim", thread_id, before])
            return removed

    async def erase_calls(
        self, thread_id: str, before: datetime, **options: Any
    ) -> int:
        async with self._turn() as log:
            erased = await super().erase_calls(thread_id, before, **options)
            self._write(log, ["erase_calls", thread_id, before.isoformat()])
            return erased

    async def restore_thread(self, dump: ThreadDump) -> None:
        async with self._turn() as log:
            await super().restore_thread(dump)
            pickled = pickle.dumps(dump).hex()
            self._write(log, ["restore_thread", dump.thread_id, pickled])

    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        async with self._turn():
            return await super().list_calls(thread_id)

    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        async with self._turn():
            return await super().list_threads(**options)

    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        async with self._turn():
            return await super().dump_thread(thread_id)

    @asynccontextmanager
    async def _watch(
        self, thread_ids: frozenset[str]
    ) -> AsyncIterator[AsyncIterator[str]]:
        await self.load("any")
        replaying = asyncio.create_task(self._replay_often())

        try:
            async with super()._watch(thread_ids) as changes:
                yield changes
        finally:
            replaying.cancel()

    async def _replay_often(self) -> None:
        while self._is_open:
            await asyncio.sleep(0.02)
            await self.load("any")

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[BinaryIO]:
        """Lock the log, and replay what other handles wrote."""
        await asyncio.sleep(0)

        # Never awaits while it holds the lock, except for an operation of the base.
        with self._log.open("ab+") as log:
            await self._lock(log)
            log.seek(self._read)

            for line in log:
                if not line.endswith(b"\n"):
                    log.truncate(self._read)  # truncated: never acknowledged
                    break

                now, *values = json.loads(line)
                self._store.replayed = now
                await self._replay(*values)
                self._read += len(line)

            self._store.replayed = None
            self._store.replayed = self._store.now()  # the write and its line have one

            try:
                yield log
            finally:
                self._store.replayed = None

    async def _lock(self, log: BinaryIO) -> None:
        """Lock the log, for whose lock it waits two seconds at most."""
        for _ in range(400):
            with suppress(BlockingIOError):
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return

            await asyncio.sleep(0.005)

        raise BackendUnavailable("broken", "the log is locked")

    async def _replay(self, kind: str, thread_id: str, *args: Any) -> None:
        if kind == "append":
            await super().append(thread_id, args[0], extra=args[1])
        elif kind == "save_extra":
            await super().save_extra(thread_id, *args)
        elif kind == "record_issued":
            call, issued = ToolCall(**args[0]), args[1]
            await super().record_issued(thread_id, call)
            stored = self._store.calls[thread_id, call.call_id]
            self._store.calls[thread_id, call.call_id] = stored._replace(
                issued_at=issued
            )
        elif kind == "delete_thread":
            await super().delete_thread(thread_id, forget_keys=args[0])
        elif kind == "trim":
            await super().trim(thread_id, *args)
        elif kind == "erase_calls":
            await super().erase_calls(thread_id, datetime.fromisoformat(args[0]))
        elif kind == "restore_thread":
            await super().restore_thread(pickle.loads(bytes.fromhex(args[0])))
        else:
            call_id, result, success = args
            await super().record_result(thread_id, call_id, result, success=success)

    def _write(self, log: BinaryIO, values: list[Any]) -> None:
        line = json.dumps([self._store.now(), *values]).encode() + b"\n"
        log.write(line)
        log.flush()
        self._read += len(line)


class AppliesLate(Disk):
    """A correct store that applies an append of a killed process after the kill.

    A server does the same with a request that it had received before the client died.
    """

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        name = f"{os.getpid()}-{uuid4().hex}"
        request = self._folder / f"unsent-{name}"
        request.write_text(json.dumps([thread_id, list(messages), options]))
        request = request.rename(self._folder / f"request-{name}")
        await asyncio.sleep(0.002)
        request.unlink()
        return await super().append(thread_id, messages, **options)

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)
        await self._apply_one_request()
        return loaded

    async def _apply_one_request(self) -> None:
        for request in self._folder.glob("request-*"):
            if not _is_running(int(request.name.split("-")[1])):
                thread_id, messages, options = json.loads(request.read_text())
                request.unlink()

                with suppress(VersionConflict):
                    await super().append(thread_id, messages, **options)

                return


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False

    return True


@breaks(
    "kill.writes-survive",
    "kill.claims-survive",
    "kill.exit-loses-nothing",
    "linearizable.threads-in-processes",
    "linearizable.keys-in-processes",
    harness=DiskHarness,
)
class AcknowledgesEarly(Disk):
    """Acknowledges each line, but writes them in batches of thirty."""

    _buffer: bytes = b""

    def _write(self, log: BinaryIO, values: list[Any]) -> None:
        self._buffer += json.dumps([self._store.now(), *values]).encode() + b"\n"

        if self._buffer.count(b"\n") == 30:
            log.write(self._buffer)
            log.flush()
            self._read += len(self._buffer)
            self._buffer = b""


@breaks("kill.every-write-is-whole", harness=DiskHarness, hangs=True)
class LeavesItsLock(Disk):
    """Locks with a directory that stays when its creator is killed."""

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[BinaryIO]:
        lock = self._folder / "lock"

        while True:
            with suppress(FileExistsError):
                os.mkdir(lock)
                break

            await asyncio.sleep(0.0005)

        async with super()._turn() as log:
            await asyncio.sleep(0.001)
            yield log

        os.rmdir(lock)


@breaks("kill.earlier-stays", harness=DiskHarness)
class TruncatesOnOpen(Disk):
    """Truncates the store whenever a handle opens it."""

    async def __aenter__(self) -> Self:
        self._log.write_bytes(b"")
        return await super().__aenter__()


@breaks("kill.while-opening", harness=DiskHarness, hangs=True)
class WaitsForADeadCreator(Disk):
    """Marks creation with a directory that stays when its creator is killed."""

    async def __aenter__(self) -> Self:
        while True:
            with suppress(FileExistsError):
                os.mkdir(self._folder / "creating")
                break

            await asyncio.sleep(0.005)

        await asyncio.sleep(0.1)
        os.rmdir(self._folder / "creating")
        return await super().__aenter__()


@breaks("concurrent.opens-at-once", harness=DiskHarness, raises="BackendUnavailable")
class RefusesDuringCreation(Disk):
    """Refuses to open while another process is creating the store."""

    async def __aenter__(self) -> Self:
        try:
            os.mkdir(self._folder / "creating")
        except FileExistsError:
            raise BackendUnavailable("broken", "is being created") from None

        await asyncio.sleep(0.1)
        os.rmdir(self._folder / "creating")
        return await super().__aenter__()
