"""Stores on disk that lose or tear acknowledged writes when the power fails."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pickle
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Self
from zlib import crc32

from conformance import Harness
from cpkit import BackendUnavailable, CallRecord, Durability, Survives, ToolCall
from cpkit.driver import Handle
from cpkit.records import ThreadInfo
from tests.broken.crashes import Disk, DiskHarness
from tests.broken.store import breaks, promising


class Synced(Disk):
    """A log with a checksum in each line, synced before each answer. It is correct."""

    async def __aenter__(self) -> Self:
        try:
            self._log.touch()
            self._sync_names()
        except OSError as exc:
            raise BackendUnavailable("broken", "the disk failed") from exc

        return await super().__aenter__()

    @property
    def durability(self) -> Durability:
        return Durability(Survives.MACHINE)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[BinaryIO]:
        await asyncio.sleep(0)

        with self._log.open("ab+") as log:
            fcntl.flock(log, fcntl.LOCK_EX)

            try:
                await self._read_on(log)
                yield log
            except OSError as exc:
                # The kernel may have dropped what it did not write: write it again.
                os.truncate(self._log, self._read)
                self._forget()
                raise BackendUnavailable("broken", "", maybe_applied=True) from exc

    async def _read_on(self, log: BinaryIO) -> None:
        """Replay what other handles wrote; cut off a line that is torn."""
        log.seek(self._read)

        for line in log:
            if not line.endswith(b"\n") or line[:8] != _checksum(line[9:-1]):
                self._repair(log)
                break

            await self._replay(*json.loads(line[9:]))
            self._read += len(line)

    def _repair(self, log: BinaryIO) -> None:
        log.truncate(self._read)

    def _forget(self) -> None:
        self._store.clear()
        self._read = 0

    def _write(self, log: BinaryIO, values: list[Any]) -> None:
        text = json.dumps(values).encode()
        line = _checksum(text) + b" " + text + b"\n"
        written = 0

        while written < len(line):
            written += os.write(log.fileno(), line[written:])

        self._sync(log)
        self._read += len(line)

    def _sync(self, log: BinaryIO) -> None:
        os.fsync(log.fileno())

    def _sync_names(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY)

        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _checksum(text: bytes) -> bytes:
    return b"%08x" % crc32(text)


@breaks("powerloss.acknowledged-survives", harness=DiskHarness)
class NeverSyncs(Synced):
    """Takes what the kernel has for what the disk has."""

    def _sync(self, log: BinaryIO) -> None:
        log.flush()


@breaks("powerloss.acknowledged-survives", harness=DiskHarness)
class SyncsAfterTheAnswer(Synced):
    """Syncs the log before the next operation, when the last one is answered."""

    _unsynced = False

    async def _read_on(self, log: BinaryIO) -> None:
        if self._unsynced:
            super()._sync(log)

        await super()._read_on(log)

    def _sync(self, log: BinaryIO) -> None:
        self._unsynced = True


@breaks("powerloss.acknowledged-survives", harness=DiskHarness)
class LeavesTheNameUnsynced(Synced):
    """Does not sync the folder in which it creates the log."""

    def _sync_names(self) -> None:
        return


@breaks("powerloss.acknowledged-survives", harness=DiskHarness)
class RenamesUnsynced(Synced):
    """Replaces the log by a rename; syncs the folder, and not the new log."""

    def _sync(self, log: BinaryIO) -> None:
        copy = self._log.with_name(f"copy-{os.getpid()}")
        copy.write_bytes(self._log.read_bytes())
        copy.rename(self._log)
        self._sync_names()


class Segmented(Synced):
    """Begins another file when the last one has four megabytes. It is correct."""

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(folder, **options)
        self._ends: dict[Path, int] = {}

    def _segments(self) -> list[Path]:
        return [self._log, *sorted(self._folder.glob("log-*"))]

    async def _read_on(self, log: BinaryIO) -> None:
        for path in self._segments():
            with path.open("ab+") as segment:
                self._read = self._ends.get(path, 0)
                await super()._read_on(segment)
                self._ends[path] = self._read

    def _write(self, log: BinaryIO, values: list[Any]) -> None:
        segments = self._segments()
        last = segments[-1]

        if last.stat().st_size > 4 * 2**20:
            last = self._folder / f"log-{len(segments):03}"
            last.touch()
            self._sync_segment()

        with last.open("ab") as segment:
            self._read = self._ends.get(last, 0)
            super()._write(segment, values)
            self._ends[last] = self._read

    def _sync_segment(self) -> None:
        self._sync_names()

    def _forget(self) -> None:
        super()._forget()
        self._ends = {}


@breaks("powerloss.megabytes-survive", harness=DiskHarness)
class LeavesANewSegmentUnsynced(Segmented):
    """Does not sync the folder in which it begins another file."""

    def _sync_segment(self) -> None:
        return


@breaks("powerloss.megabytes-survive", harness=DiskHarness)
class SyncsTheFirstSegment(Segmented):
    """Keeps the descriptor that it syncs, and not the one that it writes to."""

    def _sync(self, log: BinaryIO) -> None:
        with self._log.open("ab") as first:
            os.fsync(first.fileno())


@breaks("powerloss.acknowledged-survives", harness=DiskHarness)
def claims_more_than_normal(folder: str, **options: Any) -> Handle[Any]:
    """SQLite with ``synchronous=NORMAL``, which promises to survive a power loss."""
    return promising(f"sqlite:///{folder}/agent.db?durability=normal", **options)


@breaks("powerloss.next-write-works", harness=DiskHarness)
class WritesBehindTheTear(Synced):
    """Reads up to a torn line, and appends behind it."""

    def _repair(self, log: BinaryIO) -> None:
        log.seek(0, os.SEEK_END)


@breaks("powerloss.second-loss", harness=DiskHarness)
class RepairsUnsynced(Synced):
    """Replaces a torn log by a copy of its good part, and does not sync the name."""

    def _repair(self, log: BinaryIO) -> None:
        copy = self._log.with_name("repaired")
        copy.write_bytes(self._log.read_bytes()[: self._read])
        copy.rename(self._log)
        os.dup2(os.open(self._log, os.O_RDWR | os.O_APPEND), log.fileno())


@breaks("powerloss.failed-sync", harness=DiskHarness)
class SyncsAgain(Synced):
    """Repeats a failed sync, which then succeeds and has not written anything."""

    def _sync(self, log: BinaryIO) -> None:
        try:
            super()._sync(log)
        except OSError:
            super()._sync(log)


class _Forgetful(set[str]):
    """A set that keeps nothing."""

    def add(self, path: str) -> None:
        self.clear()


@breaks("powerloss.failed-sync", harness=DiskHarness)
def appends_behind_a_failed_sync(folder: str, **options: Any) -> Handle[Any]:
    """The store of files, which writes on where a sync of the thread's log failed."""
    handle = promising(f"file://{folder}/agent", **options)
    handle.store._folder.failed = _Forgetful()  # type: ignore[attr-defined]
    return handle


@breaks("powerloss.kill-at-every-call", harness=DiskHarness)
class WritesAfterTheAnswer(Synced):
    """Promises to survive a kill, and writes each line with the next one."""

    _unwritten: list[Any] | None = None

    @property
    def durability(self) -> Durability:
        return Durability(Survives.PROCESS)

    def _write(self, log: BinaryIO, values: list[Any]) -> None:
        if self._unwritten is not None:
            super()._write(log, self._unwritten)

        self._unwritten = values


class ForgetsAnError(Synced):
    """Reads the log again after an error, and leaves what was written of a line."""

    _maybe_applied = True

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[BinaryIO]:
        await asyncio.sleep(0)

        with self._log.open("ab+") as log:
            fcntl.flock(log, fcntl.LOCK_EX)

            try:
                await self._read_on(log)
                yield log
            except OSError as exc:
                self._forget()
                raise BackendUnavailable(
                    "broken", "the disk failed", maybe_applied=self._maybe_applied
                ) from exc


@breaks("faults.failed-sync", harness=DiskHarness)
class SaysThatItIsNotWritten(ForgetsAnError):
    """Keeps a line that was not synced, and says that nothing was written."""

    _maybe_applied = False


@breaks("faults.failed-write", harness=DiskHarness)
class RaisesTheSystemsError(Synced):
    """Lets the error of a full disk out as it is."""

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[BinaryIO]:
        try:
            async with super()._turn() as log:
                yield log
        except BackendUnavailable as exc:
            raise exc.__cause__ or exc from None


@breaks("faults.short-write", harness=DiskHarness)
class LeavesHalfALine(ForgetsAnError, WritesBehindTheTear):
    """Appends behind a line that a full disk cut short."""


@breaks("faults.clock-jumps", harness=DiskHarness)
class TrustsTheClock(Synced):
    """Takes the time of the last look for the time of the last change."""

    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        now = datetime.fromtimestamp(time.time(), UTC)
        listed = await super().list_threads(**options)
        return [replace(one, updated_at=now) for one in listed]


class NewFolderHarness(DiskHarness):
    """The store is in a folder that it has to create."""

    async def in_folder(self, folder: str) -> Harness:
        return NewFolderHarness(self.kind, f"{folder}/new")


@breaks("powerloss.acknowledged-survives", harness=NewFolderHarness)
class LeavesItsFolderUnsynced(Synced):
    """Creates the folder of its store, and does not sync the parent's names."""

    async def __aenter__(self) -> Self:
        self._folder.mkdir(exist_ok=True)
        return await super().__aenter__()


@breaks("powerloss.acknowledged-survives", harness=DiskHarness)
class ForgetsRestoredCalls(Synced):
    """Writes the calls of a restored thread into memory only."""

    def _write(self, log: BinaryIO, values: list[Any]) -> None:
        if values[0] == "restore_thread":
            bare = replace(pickle.loads(bytes.fromhex(values[-1])), calls=())
            values = [*values[:-1], pickle.dumps(bare).hex()]

        super()._write(log, values)


class _KeepsResultsApart(Synced):
    """Writes results into a second log, and takes every claim on record as valid."""

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(folder, **options)
        self._results = self._folder / "results"
        self._results_read = 0

    async def __aenter__(self) -> Self:
        self._results.touch()
        return await super().__aenter__()

    async def _read_on(self, log: BinaryIO) -> None:
        await super()._read_on(log)

        with self._results.open("rb") as results:
            results.seek(self._results_read)

            for line in results:
                if not line.endswith(b"\n") or line[:8] != _checksum(line[9:-1]):
                    break

                await self._replay(*json.loads(line[9:]))
                self._results_read += len(line)

    async def _replay(self, kind: str, thread_id: str, *args: Any) -> None:
        if kind != "record_issued":
            await super()._replay(kind, thread_id, *args)
            return

        # The results of earlier attempts come later.
        call = ToolCall(**args[0])
        attempts = self._store.attempts
        earlier = attempts.pop(call.idempotency_key, [])
        await super()._replay(kind, thread_id, *args)
        stored = self._store.calls[thread_id, call.call_id]
        stored = stored._replace(attempt=len(earlier) + 1)
        self._store.calls[thread_id, call.call_id] = stored
        attempts[call.idempotency_key][:0] = earlier

    def _write(self, log: BinaryIO, values: list[Any]) -> None:
        if values[0] != "record_result":
            super()._write(log, values)
            return

        with self._results.open("ab") as results:
            text = json.dumps(values).encode()
            results.write(_checksum(text) + b" " + text + b"\n")
            self._results_read = results.tell()


@breaks("powerloss.one-holder", harness=DiskHarness)
class ClaimsAfterAnUnsyncedFailure(_KeepsResultsApart):
    """Promises to survive a kill. Syncs a claim, and no failure before it."""

    @property
    def durability(self) -> Durability:
        return Durability(Survives.PROCESS)


@breaks("powerloss.one-holder", harness=DiskHarness)
class ClaimsWhileTheFailureIsSynced(_KeepsResultsApart):
    """Collects results for a moment, and syncs them; others see them meanwhile."""

    async def record_result(self, *args: Any, **options: Any) -> CallRecord:
        record = await super().record_result(*args, **options)
        await asyncio.sleep(0.03)

        with self._results.open("ab") as results:
            os.fsync(results.fileno())

        return record
