"""Which call holds a key: decided by links that only one process can create.

The attempts at a key are symbolic links ``claims/<shard>/<hash of the key>.<slot>``,
numbered from 1 without a hole and sorted by attempt. A link's target is the log in
which the call stands, and the attempt's number: ``../../threads/<log>#<attempt>``. The
link is on disk before the call's line is written to that log; the line is what counts.
So a claim is

1. lock the key's shard (the lock is the directory's),
2. find the newest attempt that has a line, and stop if it is issued or completed,
3. lock the thread's log, and stop if the call is on record there,
4. make the link after that attempt's, sync the directory,
5. write the ``issued`` line, sync the log: now the claim is made.

A process that dies before the last step ends leaves a link without a line. It is
*void*: readers skip it. All links after the newest attempt's are void. The next claim
or restore of the key removes them, for it has locked the shard, so that no other claim
is under way. A void link that stayed would become valid, at the wrong place, if its
thread got that attempt later.

A restored thread may have attempts that belong between others. Its links are inserted
before its log gets its name: links move up one by one from the last on, so that at
each moment all are there, sorted, and no slot between them is empty.

Locks are taken in one order: shards sorted, then one log, then the folder of the logs.
"""

from __future__ import annotations

import os
import re
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from cpkit.driver import (
    Claim,
    Conflict,
    Erase,
    KeyHeld,
    Restore,
    StoredCall,
    StoreFailure,
    erased_call,
    issued_call,
    key_is_held,
    sync_folder,
)
from cpkit.errors import CorruptThread
from cpkit_file import lines
from cpkit_file.lines import At
from cpkit_file.log import Folder, reading
from cpkit_file.schema import LOG_NAME, claim_stem, failure, lock_held, locked_file
from cpkit_file.writing import DRAFT, TORN, LogWriter, locked, replace

_TARGET = re.compile(rf"\.\./\.\./threads/({LOG_NAME.pattern})#([0-9]+)")


def claim(folder: Folder, write: Claim) -> StoredCall | None:
    """Put the call on record, or return the record that stands in its way."""
    call = write.call
    key = _Key(folder, call.idempotency_key)

    with _lock_shards([key]) as (shard,):
        # Sync a failed attempt before the next one is recorded.
        slot, newest = key.newest(synced=True)

        if newest is not None and newest.status != "failed":
            # Looked up after the key: a call that is missing now was missing then. So
            # both answers are true of that moment.
            with reading(folder, folder.remember(write.thread_id)) as log:
                return log.calls().by_id(log.line, call.call_id) or newest

        with locked(folder, write.thread_id) as log:
            writer = LogWriter(log, write.thread_id)
            known = writer.find(call.call_id)

            if known is None:
                issued = issued_call(write, newest, writer.now)
                key.remove_after(slot)
                key.link(slot + 1, key.target(log.name, issued.attempt))
                os.fsync(shard)
                writer.put(issued)

            writer.write()
            writer.sync()

    return known


def newest_attempt(folder: Folder, key: str) -> StoredCall | None:
    """Return the key's newest call, which holds the key unless it failed."""
    return _Key(folder, key).newest()[1]


def erase(folder: Folder, write: Erase) -> None:
    """Delete a thread: put a log in its place that has only its calls, erased.

    With ``forget_keys`` the calls are removed too. Their links are void from the moment
    of the replacement, and removed after it. Until then the keys are locked, because
    the number of a new attempt may depend on a forgotten call.
    """
    thread_id, forget = write
    keys: dict[str, _Key] = {}

    with ExitStack() as stack:
        if forget:
            with reading(folder, folder.remember(thread_id)) as log:
                names = {c.idempotency_key for c in log.calls().without_content()}

            keys = {name: _Key(folder, name) for name in names}
            stack.enter_context(_lock_shards(keys.values()))

        # A missing log is created to lock it: another process may be writing the draft
        # of a restore.
        with locked(folder, thread_id) as log:
            # A crash can leave these files, with messages.
            for left in (TORN, DRAFT):
                with suppress(FileNotFoundError):
                    os.unlink(log.file.path + left)

            if not log.end or (log.at is None and not forget):
                return

            calls = log.calls().without_content()

            if forget and any(call.idempotency_key not in keys for call in calls):
                # Another process claimed a key after the keys were read. The handle
                # repeats the deletion.
                raise lock_held(log.file.path)

            kept = lines.recorded([] if forget else map(erased_call, calls))
            replace(log, thread_id, ((line, None) for line in kept))

        try:
            for key in keys.values():
                # Where another process holds a lock, or another log is damaged, the
                # links stay; they are void. The deletion must not be repeated, because
                # the thread may have new calls.
                with suppress(StoreFailure, CorruptThread):
                    key.remove_after(key.newest()[0])
        except OSError as exc:
            raise failure(exc, unknown=True) from exc


def restore(folder: Folder, write: Restore) -> Conflict | KeyHeld | None:
    """Create a thread as it was dumped; its log appears whole, after its links."""
    by_key: dict[str, list[StoredCall]] = {}

    for call in write.calls:
        by_key.setdefault(call.idempotency_key, []).append(call)

    keys = [(_Key(folder, name), calls) for name, calls in by_key.items()]

    with ExitStack() as stack:
        shards = stack.enter_context(_lock_shards(key for key, _ in keys))
        # Looked up before the thread's log is locked, because links may lead there.
        plan = [(key, key.newest()[0], calls) for key, calls in keys]
        holders = [key.holder_against(slot, calls) for key, slot, calls in plan]
        log = stack.enter_context(locked(folder, write.thread_id))

        if log.at is not None or log.calls().without_content():
            return Conflict(log.version)

        if holder := next(filter(None, holders), None):
            return KeyHeld(holder.idempotency_key, holder.thread_id)

        for key, slot, calls in plan:
            key.insert(slot, log.name, calls)

        for shard in shards:
            os.fsync(shard)

        replace(log, write.thread_id, _restored(write))

    return None


def _restored(write: Restore) -> Iterator[tuple[bytes, At | None]]:
    """Yield the lines of a restored thread."""
    at: At | None = None

    if write.created_at is not None and write.updated_at is not None:
        yield lines.created(write.created_at), None
        at = At(0, write.updated_at)

        for body in write.bodies:
            at = at._replace(version=at.version + 1)
            yield lines.added([body], ()), at

        if write.items or not (write.bodies or write.calls):
            yield lines.added([], write.items), at

    yield from ((line, at) for line in lines.recorded(write.calls))


@contextmanager
def _lock_shards(keys: Iterable[_Key]) -> Iterator[list[int]]:
    """Lock these keys against other claims; yield the descriptors of their shards."""
    with ExitStack() as stack:
        shards = sorted({key.shard for key in keys})
        locks = (locked_file(one, os.O_RDONLY | os.O_DIRECTORY) for one in shards)
        yield [stack.enter_context(lock).fd for lock in locks]


class _Key:
    """The links of one key."""

    def __init__(self, folder: Folder, key: str) -> None:
        self._folder = folder
        self._key = key
        stem = claim_stem(key)
        self.shard = f"{folder.claims}/{stem[0]}"
        self._links = f"{self.shard}/{stem}."

    def target(self, log: str, attempt: int) -> str:
        return f"../../threads/{log}#{attempt}"

    def newest(self, *, synced: bool = False) -> tuple[int, StoredCall | None]:
        """Return the slot and the call of the newest attempt, or 0 and ``None``.

        With ``synced`` the call is on disk, whatever the durability. It needs no lock:
        where links changed while they were read, it reads them again. `insert` moves
        links up from the last on, so that a reader sees another last slot.
        """
        while True:
            top = self._top()
            seen: dict[int, str | None] = {top + 1: None}
            found = None

            for slot in range(top, 0, -1):
                seen[slot] = self._read(slot)

                if found := self._call(slot, seen[slot], synced):
                    break

            if all(self._read(one) == target for one, target in seen.items()):
                if found:
                    return slot, found

                os.stat(self.shard)  # raises if the whole folder is missing
                return 0, None

    def link(self, slot: int, target: str) -> None:
        """Make a link, in the place of another one where the slot is taken."""
        path = self._links + str(slot)

        try:
            os.symlink(target, path)
        except FileExistsError:
            draft = self._links + "tmp"

            with suppress(FileNotFoundError):
                os.unlink(draft)

            os.symlink(target, draft)
            os.rename(draft, path)

    def holder_against(
        self, slot: int, calls: Sequence[StoredCall]
    ) -> StoredCall | None:
        """Return the call on record that stands in the way of restored ones.

        ``slot`` is the newest attempt's. What is returned is on disk.
        """
        found = (self._call(one, self._read(one), True) for one in range(1, slot + 1))
        others = [call for call in found if call is not None]
        return others[-1] if any(key_is_held(call, others) for call in calls) else None

    def insert(self, slot: int, log: str, calls: Sequence[StoredCall]) -> None:
        """Add the links of restored calls to those up to a slot, sorted by attempt."""
        links = [target for target in map(self._read, range(1, slot + 1)) if target]
        mine = {self.target(log, call.attempt) for call in calls}
        changes: list[tuple[int, str]] = []
        self.remove_after(slot)

        # Insert one target at a time, and move links up from the last on: a process
        # that ends between two links must leave no empty slot, because `_top` would not
        # see the links after it.
        for target in sorted(mine.difference(links), key=_attempt_of):
            wanted = sorted([*links, target], key=_attempt_of)
            changes += (
                (number, wanted[number - 1])
                for number in range(len(wanted), 0, -1)
                if wanted[number - 1 : number] != links[number - 1 : number]
            )
            links = wanted

        for index, change in enumerate(changes):
            if index:  # a power loss must not keep the later of two links alone
                sync_folder(self.shard)

            self.link(*change)

    def remove_after(self, slot: int) -> None:
        """Remove the void links after the newest attempt's slot; the key is locked."""
        for number in range(self._top(), slot, -1):
            os.unlink(self._links + str(number))

    def _top(self) -> int:
        """Return the last slot that has a link, or 0; no slot before it is empty.

        Doubles until a slot is empty, and then bisects.
        """
        stop = 1

        while self._read(stop) is not None:
            stop *= 2

        slots = range(stop // 2 + 1, stop)
        return stop // 2 + bisect(slots, False, key=lambda one: self._read(one) is None)

    def _read(self, slot: int) -> str | None:
        try:
            return os.readlink(self._links + str(slot))
        except FileNotFoundError:
            return None

    def _call(self, slot: int, target: str | None, synced: bool) -> StoredCall | None:
        """Return the call that a link leads to; ``None`` where the link is void."""
        if target is None:
            return None

        found = _TARGET.fullmatch(target)

        if found is None:
            path = self._links + str(slot)
            raise CorruptThread("?", path, f"the link {target!r} names no attempt")

        with reading(self._folder, found[1]) as log:
            log.sync(always=synced)
            return log.calls().by_attempt(log.line, self._key, int(found[2]))


def _attempt_of(target: str) -> int:
    return int(target.rpartition("#")[2])
