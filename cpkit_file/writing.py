"""Writes to a thread's log, in a worker thread.

A writer holds the log's lock from before it looks until what it wrote is on disk.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from cpkit.driver import (
    Append,
    Conflict,
    Merge,
    Outcome,
    Resolve,
    StoredCall,
    StoreFailure,
    Write,
    resolved_call,
    sync_folder,
)
from cpkit.errors import CorruptThread
from cpkit_file import lines
from cpkit_file.lines import NAME_UNSYNCED, SEAL_LENGTH, At
from cpkit_file.log import Folder, Log, Tail
from cpkit_file.schema import (
    failure,
    is_at,
    locked_file,
    locked_names,
    opened,
    sync_content,
    write_all,
)

TORN = ".torn"
"""The ending of the file that keeps torn writes of a log for a person to see."""
DRAFT = ".tmp"
"""The ending of the file that becomes the log when it is complete."""

_logger = logging.getLogger("cpkit_file")

# Logs whose locks and descriptors one worker holds at the same time.
_LOGS_AT_ONCE = 16
# Bytes that durability=normal leaves unsynced at most: they are checked when a log is
# read for the first time.
_MOST_UNSYNCED = 1024 * 1024


def commit(folder: Folder, groups: list[list[Write]]) -> list[list[Outcome]]:
    """Apply each group to its thread's log: write to all of them, then sync all.

    Syncs one after the other are cheaper: the first one writes what the file system
    shares, so that the others have less to write.
    """
    found: list[list[Outcome]] = []

    for start in range(0, len(groups), _LOGS_AT_ONCE):
        with ExitStack() as stack:
            some = groups[start : start + _LOGS_AT_ONCE]
            written = [_write(folder, group, stack) for group in some]
            found += [_synced(*one) for one in written]

    return found


def _write(
    folder: Folder, group: list[Write], stack: ExitStack
) -> tuple[list[Outcome], LogWriter | None]:
    """Write to one log; the stack releases its lock."""
    thread_id = group[0].thread_id

    try:
        writer = LogWriter(stack.enter_context(locked(folder, thread_id)), thread_id)
        outcomes = [_apply(writer, write) for write in group]
        writer.write()
    except (StoreFailure, CorruptThread) as exc:
        return [exc] * len(group), None
    except OSError as exc:
        return [failure(exc)] * len(group), None

    return outcomes, writer


def _synced(outcomes: list[Outcome], writer: LogWriter | None) -> list[Outcome]:
    try:
        if writer is not None:
            writer.sync()
    except (StoreFailure, CorruptThread) as exc:
        return [exc] * len(outcomes)

    return outcomes


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


@contextmanager
def locked(folder: Folder, thread_id: str) -> Iterator[Log]:
    """Lock a thread's log for writing, and set a torn write aside.

    A log that stays empty is removed again.
    """
    name = folder.remember(thread_id)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT

    with locked_file(f"{folder.threads}/{name}", flags) as file:
        log = Log(folder, name, file)

        try:
            if log.torn:
                _set_aside(log)

            yield log
        finally:
            # Not after `replace`: the name belongs to another file then. Errors are
            # ignored, because an empty log does no harm.
            if not log.end:
                with suppress(OSError):
                    status = os.fstat(file.fd)

                    if not status.st_size and is_at(file.path, status):
                        os.unlink(file.path)


class LogWriter:
    """Collects lines for the end of a locked log; writes all of them or none.

    ``at`` is where the thread stands after the lines.
    """

    def __init__(self, log: Log, thread_id: str) -> None:
        self.log = log
        # Later than before, even if the clock is not: `cpkit.worker` compares it.
        before = log.at.updated_at if log.at else 0
        self.now = max(time.time_ns() // 1000, before + 1)
        self._thread_id = thread_id
        self._changed: dict[str, StoredCall] = {}
        self._lines: list[bytes] = []
        self._end, self.at, self._seal = log.tail

    @property
    def version(self) -> int:
        return 0 if self.at is None else self.at.version

    @property
    def _must_sync(self) -> bool:
        return self.log.folder.durable or self._unsynced > _MOST_UNSYNCED

    @property
    def _unsynced(self) -> int:
        return self._end - self.log.index.synced

    def find(self, call_id: str) -> StoredCall | None:
        """Return a call of the thread."""
        known = self._changed.get(call_id)
        return known or self.log.calls().by_id(self.log.line, call_id)

    def change(self, content: bytes, messages: int = 0) -> None:
        """Add the line of an operation that changes the thread."""
        if self.at is None:
            self._add(lines.created(self.now), None)

        self.at = At(self.version + messages, self.now)
        self._add(content, self.at)

    def put(self, call: StoredCall) -> None:
        """Add the line of a claim, or of an outcome."""
        self._changed[call.call_id] = call
        is_claim = call.status == "issued"
        line = lines.issued(call) if is_claim else lines.resolved(call)

        if call.erased:  # its outcome does not change the thread
            self._add(line, self.at)
        else:
            self.change(line)

    def write(self) -> None:
        """Write the lines; `sync` puts them on disk.

        If either fails, the lines are cut off again. Without lines, what the caller was
        told about the thread is put on disk.
        """
        log = self.log

        if not self._lines:
            log.sync()
            return

        if self._must_sync:
            log.sync_name()

        try:
            write_all(log.file.fd, b"".join(self._lines))
        except OSError as exc:
            self._take_back(exc, unknown=False)

    def sync(self) -> None:
        """Put what was written on disk."""
        if not self._lines:
            return

        log = self.log

        if self._must_sync:
            try:
                log.write_again()
                sync_content(log.file.fd)
            except OSError as exc:  # it may be on disk all the same
                self._take_back(exc, unknown=True)

            log.index.synced = self._end

        log.index.tail = Tail(self._end, self.at, self._seal)

    def _add(self, content: bytes, at: At | None) -> None:
        if not self._end:
            header = lines.header(self._thread_id)
            self.log.index = self.log.folder.index(self.log.name, header)
            self._append(header)

        self._append(lines.seal(self._seal, content, at, self._unsynced or None))

    def _append(self, line: bytes) -> None:
        self._lines.append(line)
        self._end += len(line)
        self._seal = line[-SEAL_LENGTH:]

    def _take_back(self, cause: OSError, *, unknown: bool) -> None:
        """Cut off what was written, and raise the failure.

        ``unknown`` says that a sync failed. Earlier bytes may be lost by that, too.
        """
        log = self.log
        log.index.sync_failed |= unknown

        try:
            os.ftruncate(log.file.fd, log.end)
            log.sync(always=unknown)
            sync_content(log.file.fd)
        except OSError:
            unknown = True

        raise failure(cause, unknown=unknown) from cause


def replace(log: Log, thread_id: str, kept: Iterable[tuple[bytes, At | None]]) -> None:
    """Replace the log by one with these lines; without lines, remove it.

    The new file is locked until its name is on disk. So no process writes to a
    replacement that a power loss could undo. If this process dies before, the last line
    tells the others that the name is perhaps not on disk.
    """
    folder = log.folder
    path = log.file.path
    draft = path + DRAFT
    written = [lines.header(thread_id)]

    contents = list(kept)

    for number, (content, at) in enumerate(contents, 1):
        unsynced = NAME_UNSYNCED if number == len(contents) else None
        written.append(lines.seal(written[-1][-SEAL_LENGTH:], content, at, unsynced))

    # A process that died here leaves it. No process writes it without the log's lock.
    with suppress(FileNotFoundError):
        os.unlink(draft)

    flags = os.O_WRONLY | os.O_CREAT

    with locked_file(draft, flags) as file:
        try:
            write_all(file.fd, b"".join(written))
            sync_content(file.fd)

            with locked_names(folder.threads):
                os.rename(draft, path)
        except (OSError, StoreFailure):
            with suppress(OSError):
                os.unlink(draft)

            raise

        try:
            sync_folder(folder.threads)

            if len(written) == 1:
                os.unlink(path)
        except OSError as exc:
            raise failure(exc, unknown=True) from exc

    index = folder.index(log.name, written[0])
    index.synced, index.is_named = sum(map(len, written)), True


def _set_aside(log: Log) -> None:
    """Copy a torn write to another file, and cut it off the log."""
    path = log.file.path + TORN

    with opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as fd:
        before = os.fstat(fd).st_size

        try:
            write_all(fd, log.read(log.end, log.torn) + b"\n")
            sync_content(fd)
        except OSError:  # the disk may be nearly full: leave the space to others
            with suppress(OSError):
                if before:
                    os.ftruncate(fd, before)
                else:
                    os.unlink(path)

            raise

    sync_folder(log.folder.threads)
    os.ftruncate(log.file.fd, log.end)
    sync_content(log.file.fd)
    message = "%s: %d bytes of a write that was never acknowledged are now in %s"
    _logger.warning(message, log.file.path, log.torn, path)
