"""A log opened for one group of writes.

Every write is a whole line, and a group is one ``write`` and one ``fdatasync``. A
process that dies in between leaves whole lines, which are operations that happened
without being acknowledged, and at most one torn line, which is none.

Whoever writes into a log that holds no thread (a new one, or what ``delete_thread``
left) syncs the folder before: who made the file may have died before it did. So the
name of every log that holds an acknowledged line is on disk.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

from cpkit.driver.writes import StoredCall
from cpkit.errors import BackendUnavailable
from cpkit_file import lines
from cpkit_file.descriptors import opened, write_all
from cpkit_file.faults import unavailable
from cpkit_file.folder import Folder
from cpkit_file.lines import At
from cpkit_file.log import Log

__all__ = ["Draft", "replace", "replacing", "torn_path"]

_logger = logging.getLogger("cpkit_file")


class Draft:
    """A locked log, and lines for its end, which get there together or not at all.

    A context manager: the log is created where it is not there, one that stays empty
    is removed again, and a torn line is set aside. ``at`` is where the thread stands
    after the lines, and ``resolved`` has the calls that they resolve; an operation that
    is refused adds none. Unless ``wait``, a log that somebody has raises
    ``BlockingIOError``.
    """

    log: Log

    def __init__(self, folder: Folder, thread_id: str, *, wait: bool = True) -> None:
        self.folder = folder
        self.thread_id = thread_id
        self.at: At | None = None
        self.now = 0
        self.resolved: dict[str, StoredCall] = {}
        self._wait = wait
        self._lines: list[bytes] = []
        self._end = 0

    def __enter__(self) -> Self:
        name = self.folder.log_name(self.thread_id)
        self.log = _locked(self.folder, name, create=True, wait=self._wait)
        self.at = self.log.at
        self.now = time.time_ns() // 1000

        if self.at is not None:
            self.now = max(self.now, self.at.updated_at)

        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        _release(self.log, keep=kind is None)

    @property
    def version(self) -> int:
        return 0 if self.at is None else self.at.version

    def find(self, call_id: str) -> StoredCall | None:
        """Return a call of the thread."""
        if call_id in self.resolved or not self.log.end:
            return self.resolved.get(call_id)

        return self.log.index.catch_up(self.log).by_id(self.log, call_id)

    def advance(self, messages: int = 0) -> At:
        """Return where the thread stands after one more operation that changes it."""
        if self.at is None:
            self._lines.append(lines.born(self.now))

        self.at = At(self.version + messages, self.now)
        return self.at

    def add(self, line: bytes) -> None:
        self._lines.append(line)

    def write(self) -> None:
        """Write the lines, for `sync` to put them on disk.

        Both raise ``BackendUnavailable`` where that fails, with the log as it was
        before; ``maybe_applied`` where even that is not certain.
        """
        log = self.log

        if not self._lines:
            log.settle()
            return

        if log.at is None:
            self.folder.sync_names(self.folder.threads)

        if not log.end:
            header = lines.header(self.thread_id, secrets.token_hex(8))
            log.index = self.folder.index(log.name, header)
            self._lines.insert(0, header)

        data = b"".join(self._lines)
        self._end = log.end + len(data)

        try:
            write_all(log.fd, data)
        except OSError as exc:
            raise _taken_back(log, exc, maybe_applied=False) from exc

    def sync(self) -> None:
        """Put what was written on disk."""
        if not self._lines:
            return

        log = self.log

        try:
            self.folder.sync(log.fd)
        except OSError as exc:  # it may have put it there all the same
            raise _taken_back(log, exc, maybe_applied=True) from exc

        log.index.synced = self._end
        log.index.tail = self._end, self.at
        log.file.index = log.index


@contextmanager
def replacing(folder: Folder, thread_id: str) -> Iterator[Log | None]:
    """Lock a thread's log, for `replace`; ``None`` where there is none."""
    try:
        log = _locked(folder, folder.log_name(thread_id), create=False)
    except FileNotFoundError:
        log = None

    try:
        yield log
    finally:
        if log is not None:
            _release(log, keep=False)


def replace(log: Log, thread_id: str, kept: list[StoredCall]) -> None:
    """Put a log that has only these calls, erased, in the log's place.

    With no calls it is removed. The new file is locked from before anybody can find it
    until its name is on disk, so that nobody builds on a replacement that a power loss
    could undo.
    """
    folder = log.folder
    draft = f"{log.path}.tmp"
    header = lines.header(thread_id, secrets.token_hex(8))
    data = header + b"".join(map(lines.erased, kept))

    # Left by a process that died here; nobody else comes here without the log's lock.
    with suppress(FileNotFoundError):
        os.unlink(draft)

    file = folder.openings.exclusive(draft, create=True)

    try:
        write_all(file.fd, data)
        folder.sync(file.fd)
        os.rename(draft, log.path)
        _finish_replacing(log, keep=bool(kept))
    finally:
        file.close()

    folder.index(log.name, header).synced = len(data)


def _finish_replacing(log: Log, *, keep: bool) -> None:
    try:
        log.folder.sync_names(log.folder.threads)

        if not keep:
            os.unlink(log.path)
    except OSError as exc:
        raise unavailable(log.folder.name, exc, maybe_applied=True) from exc


def torn_path(log: Log) -> str:
    """Return the file in which torn lines of the log are kept for a person to see."""
    return f"{log.path}.torn"


def _locked(folder: Folder, name: str, *, create: bool, wait: bool = True) -> Log:
    file = folder.openings.exclusive(folder.log_path(name), create=create, wait=wait)

    try:
        log = Log(folder, name, file)

        if log.torn:
            _set_aside(log)
    except BaseException:
        file.close()
        raise

    return log


def _release(log: Log, *, keep: bool) -> None:
    file = log.file

    try:
        if file.index is None and not os.fstat(file.fd).st_size:
            os.unlink(file.path)
            keep = False

        file.unlock()
    except BaseException:
        file.close()
        raise

    if keep:
        log.folder.openings.keep(file)
    else:
        os.close(file.fd)


def _taken_back(log: Log, cause: OSError, *, maybe_applied: bool) -> BackendUnavailable:
    try:
        os.ftruncate(log.fd, log.end)
        log.folder.sync(log.fd)
    except OSError:
        maybe_applied = True

    return unavailable(log.folder.name, cause, maybe_applied=maybe_applied)


def _set_aside(log: Log) -> None:
    """Move a torn line out of the log; done twice where a crash comes between."""
    path = torn_path(log)

    with opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as fd:
        write_all(fd, log.read(log.end, log.torn) + b"\n")
        log.folder.sync(fd)

    log.folder.sync_names(log.folder.threads)
    os.ftruncate(log.fd, log.end)
    log.folder.sync(log.fd)
    _logger.warning(
        "%s: %d bytes of a write that was never acknowledged are now in %s",
        log.path,
        log.torn,
        path,
    )
