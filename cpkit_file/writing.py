"""Writes to one thread's log, in a worker thread.

A writer holds the log's lock from before it looks until what it wrote is on disk.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self

from cpkit.driver import (
    Append,
    Claim,
    Conflict,
    Erase,
    EraseCalls,
    KeyHeld,
    Merge,
    Outcome,
    Resolve,
    Restore,
    StoredCall,
    StoreFailure,
    Trim,
    Write,
    erased_call,
    is_erased_by,
    issued_call,
    key_is_held,
    resolved_call,
    sync_folder,
)
from cpkit_file import lines, schema
from cpkit_file.keys import attempts, find_call
from cpkit_file.lines import SEAL, Line
from cpkit_file.log import Folder, Log, Tail
from cpkit_file.schema import DRAFT, TORN

_logger = logging.getLogger("cpkit_file")


def commit(folder: Folder, batch: Sequence[Write]) -> list[Outcome]:
    """Apply writes to one thread, with one write and one sync of its log.

    Raises ``StoreFailure("not sent", …)`` where another writer keeps a lock.
    """
    thread_id = batch[0].thread_id

    with Locked(folder, folder.log(thread_id), thread_id) as log:
        match batch:
            case [Erase() | Trim() | EraseCalls() as write]:
                return [_remove(log, write)]
            case [Restore() as write]:
                return [_restore(log, write)]

        writer = _Writer(log)
        outcomes = [writer.apply(write) for write in batch]

        if writer.added:
            log.append(writer.added)

        return outcomes


class Locked(Log):
    """A log or register that is locked for the time of the block.

    A missing log is created, and removed again if it stays empty. A torn write behind
    the ``tail`` is set aside. A lock that another writer keeps is an error after some
    milliseconds; the store repeats the batch.
    """

    tail = Tail()

    def __enter__(self) -> Self:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        self._registers: dict[str, Locked] = {}

        while True:
            self.fd = os.open(self.path, flags, 0o600)

            try:
                schema.lock(self.fd, self.path)
                status = os.fstat(self.fd)

                if self.owner and os.stat(self.path).st_ino != status.st_ino:
                    raise FileNotFoundError(self.path)

                self.tail = self.find_tail(status)

                if self.tail.end < status.st_size:
                    self._set_aside(status.st_size)

                return self
            except BaseException as exc:
                schema.unlock(self.fd)

                if not isinstance(exc, FileNotFoundError):  # replaced before the lock
                    raise

    def __exit__(self, *exc_info: object) -> None:
        try:
            for path in self._registers:
                self._registers[path].__exit__()

            if self.owner and not (self.tail.end or os.fstat(self.fd).st_size):
                os.unlink(self.path)
        finally:
            schema.unlock(self.fd)

    def register(self, key: str) -> Locked:
        """Lock the register of a key too."""
        if (path := self.folder.register(key)) not in self._registers:
            self._registers[path] = Locked(self.folder, path).__enter__()

        return self._registers[path]

    def append(self, added: Sequence[Line], *, together: bool = True) -> None:
        """Write lines, and put them and the name on disk."""
        inode, end, seal, *_ = self.tail
        left = data = lines.sealed(seal, added, together=together)

        # Before the first line: a log that has lines has its name on disk.
        if self.owner and not end:
            sync_folder(self.folder.threads)

        try:
            while left:
                left = left[os.write(self.fd, left) :]
        except OSError:
            self.sync(partial(os.ftruncate, self.fd), end)
            raise

        self.sync(schema.sync_content, self.fd)
        _, *said = added[-1]
        self.tail = Tail(inode, end + len(data), data[-SEAL:], *said)
        self.index.tail = self.tail

    def sync(self, sync: Callable[[Any], None], what: int | str) -> None:
        """Put the content or the name on disk, or do not use the file any more.

        The kernel may have dropped the bytes, so this handle builds nothing on them.
        """
        try:
            sync(what)
        except OSError as exc:
            self.folder.failed.add(self.path)
            raise StoreFailure("unknown", str(exc)) from exc

    def _set_aside(self, size: int) -> None:
        """Copy a torn write to another file, and cut it off."""
        end, path = self.tail.end, self.path + TORN
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT

        # On a full disk it is only cut off, so that the next write has space.
        with suppress(OSError), open(os.open(path, flags, 0o600), "ab") as file:
            file.write(self.read(end, size - end) + b"\n")

        os.ftruncate(self.fd, end)
        schema.sync_content(self.fd)
        message = "%s: %d bytes of a write that was never acknowledged are now in %s"
        _logger.warning(message, self.path, size - end, path)


class _Writer:
    """Collects lines for the end of a log, and knows the version behind them."""

    def __init__(self, log: Locked) -> None:
        self.added: list[Line] = []
        self._log = log
        self._version, self._updated_at = log.tail.version, log.tail.updated_at
        # Later than before, even if the clock is not: `cpkit.worker` compares it.
        self._now = max(time.time_ns() // 1000, self._updated_at + 1)
        self._changed: dict[str, StoredCall] = {}

    def apply(self, write: Write) -> Outcome:
        match write:
            case Append():
                if write.expected_version not in (None, self._version):
                    return Conflict(self._version)

                if write.bodies or write.items:
                    content = lines.added(write.bodies, write.items)
                    self._add(content, len(write.bodies))

                return self._version
            case Merge():
                self._add(lines.added([], write.items))
                return None
            case Resolve():
                call = self._find(write.thread_id, write.call_id)

                if call is not None and call.status == "issued":
                    call = resolved_call(call, write, self._now)
                    self._changed[call.call_id] = call
                    content = lines.recorded(call, resolves=True)
                    self._add(content, changes=not call.erased)

                return call
            case Claim():
                return self._claim(write)

        raise StoreFailure("rejected", "this write is committed alone")

    def _claim(self, write: Claim) -> StoredCall | None:
        if known := self._find(write.thread_id, write.call_id):
            return known

        register = self._log.register(write.idempotency_key)
        found = attempts(register, write.idempotency_key, self._find)
        newest = next(filter(None, found), None)

        if newest is not None and newest.status != "failed":
            return newest

        call = issued_call(write, newest, self._now)
        register.append([lines.claimed(call)])
        self._changed[call.call_id] = call
        self._add(lines.recorded(call))
        return None

    def _find(self, thread_id: str, call_id: str) -> StoredCall | None:
        """Return a call of this thread or of another one."""
        if thread_id != self._log.owner:
            return find_call(self._log.folder, thread_id, call_id, synced=True)

        return self._changed.get(call_id) or self._log.call(call_id)

    def _add(self, content: bytes, messages: int = 0, *, changes: bool = True) -> None:
        """Add the line of an operation, which ``changes`` the thread."""
        if changes:
            if not self._updated_at:
                self.added.append(lines.header(self._log.owner, self._now))

            self._version += messages
            self._updated_at = self._now

        self.added.append((content, self._version, self._updated_at))


def _remove(log: Locked, write: Erase | Trim | EraseCalls) -> Outcome:
    """Remove a part of a thread: put a log in its place that has the rest."""
    version = log.tail.version

    if write.expected_version not in (None, version):
        return Conflict(version)

    match write:
        case Erase():
            _erase(log, write.forget_keys)
            return None
        case Trim():
            before = min(write.before, version)
            removed = max(0, before - log.state(0, 0)[1].first)

            if removed:
                _replace(log, log.state(before)[1])
        case EraseCalls():
            removed = sum(is_erased_by(call, write) for call in log.calls())

            if removed:
                _, left = log.state()
                calls = [
                    erased_call(call) if is_erased_by(call, write) else call
                    for call in left.calls
                ]
                _replace(log, left._replace(calls=calls))

    return removed


def _erase(log: Locked, forget_keys: bool) -> None:
    """Delete a thread: put a log in its place that has only its calls, erased.

    A log without calls is removed. With ``forget_keys`` every log is, while the keys
    are locked: the number of a new attempt may depend on a forgotten call.
    """
    _clean(log)

    if not log.tail.end or not (log.tail.updated_at or forget_keys):
        # Another process may have removed it, and been killed before it synced that.
        log.sync(sync_folder, log.folder.threads)
        return

    calls = log.calls()

    if calls and not forget_keys:
        erased = [erased_call(call) for call in calls]
        _replace(log, Restore(log.owner, [], [], erased, None, None))
    else:
        for call in calls:
            log.register(call.idempotency_key)

        os.unlink(log.path)
        log.sync(sync_folder, log.folder.threads)


def _restore(log: Locked, write: Restore) -> Conflict | KeyHeld | None:
    """Create a thread as it was dumped; its log appears whole, after its keys."""
    if log.tail.updated_at or log.calls():
        return Conflict(log.tail.version)

    find = partial(find_call, log.folder, synced=True)
    claimed: dict[Locked, list[Line]] = {}

    for call in write.calls:
        register = log.register(key := call.idempotency_key)
        others = [*filter(None, attempts(register, key, find))]

        if key_is_held(call, others):
            return KeyHeld(key, others[0].thread_id)

        claimed.setdefault(register, []).append(lines.claimed(call))

    for register, added in claimed.items():
        register.append(added)

    _replace(log, write)
    return None


def _replace(log: Locked, state: Restore) -> None:
    """Put a log of this state in its place, locked until its name is on disk."""
    version, updated_at = state.first + len(state.bodies), state.updated_at or 0
    added = [lines.header(log.owner, state.created_at, state.first)]
    messages = enumerate(state.bodies, state.first + 1)
    added += [(lines.added([body], ()), n, updated_at) for n, body in messages]

    if updated_at:
        added.append((lines.added([], state.items), version, updated_at))

    added += [(lines.recorded(call), version, updated_at) for call in state.calls]
    _clean(log)
    draft = log.path + DRAFT

    with Locked(log.folder, draft) as file:
        file.append(added, together=False)
        os.rename(draft, log.path)
        log.tail = log.index.tail = file.tail
        log.sync(sync_folder, log.folder.threads)


def _clean(log: Locked) -> None:
    """Remove what a crash can leave beside a log: it holds messages."""
    for ending in (TORN, DRAFT):
        with suppress(FileNotFoundError):
            os.unlink(log.path + ending)
