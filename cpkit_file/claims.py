"""Which call holds a key: decided by links that only one process can create.

Attempt 3 at a key is the symbolic link ``claims/<shard>/<hash of the key>.3``, and
what it says is in which thread's log the call stands. The link is made and on disk
before the call's line is written to that log; the line is what counts. So a claim is

1. lock the key's shard (the directory itself is what is locked),
2. find the last attempt that has a line, and stop if it is issued or completed,
3. lock the thread's log, and stop if the call is on record there,
4. make the next link, sync the directory,
5. write the ``issued`` line, sync the log: now the claim is made.

A process that dies before the last step is through leaves a link without a line. It
is *void*: looked up and passed over, as if it were not there, and taken by whoever
claims next, who holds the shard's lock and so knows that no claim is under way there.

The links of a key are numbered from 1 to its last attempt without a hole, because the
next is made right after the last attempt that has a line, and links are removed only
from the top and only where they are void. That is what makes the last one quick to
find. There may be void ones above it.

Locks are taken in one order, the shard's before a log's, and of logs one at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from cpkit.driver.writes import Claim, StoredCall
from cpkit.errors import CorruptThread
from cpkit_file import lines
from cpkit_file.folder import Folder
from cpkit_file.lines import At
from cpkit_file.log import reading
from cpkit_file.names import LOG_NAME, claim_stem, shard_of
from cpkit_file.writing import Draft

__all__ = ["claim", "last_attempt", "release"]


def claim(folder: Folder, write: Claim) -> StoredCall | None:
    """Put the call on record, or return the record that stands in its way."""
    call = write.call
    key = _Key(folder, call.idempotency_key)

    with key.locked() as shard:
        last = key.last_attempt()

        if last is not None and last.status != "failed":
            # Asked after the key: a call that is not on record now was not then, so
            # either answer is true of one moment.
            return _known(folder, write.thread_id, call.call_id) or last

        with Draft(folder, write.thread_id) as draft:
            known = draft.find(call.call_id)

            if known is None:
                attempt = 1 if last is None else last.attempt + 1
                key.link(attempt, draft.log.name)

                if folder.lasting:
                    os.fsync(shard)

                draft.add(_issued(write, attempt, draft.advance()))

            draft.write()
            draft.sync()

    return known


def last_attempt(folder: Folder, key: str) -> StoredCall | None:
    """Return the key's newest call, which holds the key unless it failed.

    Needs no lock: a link above those that were seen is of a claim that began later.
    """
    return _Key(folder, key).last_attempt()


def release(folder: Folder, keys: Iterable[str]) -> None:
    """Remove links whose calls are gone from their logs; they are void already."""
    for name in keys:
        key = _Key(folder, name)

        with key.locked():
            for attempt in range(key.top(), 0, -1):
                if key.at(attempt) is not None:
                    break

                os.unlink(key.links + str(attempt))


class _Key:
    """The links of one key; ``links`` is their path up to the attempt's number."""

    def __init__(self, folder: Folder, key: str) -> None:
        self._folder = folder
        self._key = key
        stem = claim_stem(key)
        self._shard = f"{folder.claims}/{shard_of(stem)}"
        self.links = f"{self._shard}/{stem}."

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Keep other claims out; yields the shard's descriptor."""
        self._folder.make(self._shard)

        with self._folder.openings.exclusive_directory(self._shard) as fd:
            yield fd

    def link(self, attempt: int, log: str) -> None:
        """Make a link, in the place of a void one where there is one."""
        path = self.links + str(attempt)
        target = f"../../threads/{log}"

        try:
            os.symlink(target, path)
        except FileExistsError:
            os.unlink(path)
            os.symlink(target, path)

    def last_attempt(self) -> StoredCall | None:
        for attempt in range(self.top(), 0, -1):
            call = self.at(attempt)

            if call is not None:
                return call

        return None

    def top(self) -> int:
        """Return a number that has a link, and the next has none; 0 for no links."""
        low, high = 0, 1

        while os.path.lexists(self.links + str(high)):
            low, high = high, 2 * high

        while high - low > 1:
            middle = (low + high) // 2

            if os.path.lexists(self.links + str(middle)):
                low = middle
            else:
                high = middle

        return low

    def at(self, attempt: int) -> StoredCall | None:
        """Return the call that a link leads to; ``None`` where the link is void."""
        path = self.links + str(attempt)

        try:
            name = os.path.basename(os.readlink(path))
        except FileNotFoundError:  # released since it was counted
            return None

        if not LOG_NAME.fullmatch(name):
            raise CorruptThread("?", path, "the link leads to no thread's log")

        with reading(self._folder, name) as log:
            if log is None:
                return None

            return log.index.catch_up(log).by_attempt(log, self._key, attempt)


def _known(folder: Folder, thread_id: str, call_id: str) -> StoredCall | None:
    with reading(folder, folder.log_name(thread_id)) as log:
        return None if log is None else log.index.catch_up(log).by_id(log, call_id)


def _issued(write: Claim, attempt: int, at: At) -> bytes:
    call = write.call
    return lines.issued(
        StoredCall(
            write.thread_id,
            call.call_id,
            call.tool_name,
            write.args,
            call.idempotency_key,
            "issued",
            attempt,
            at.updated_at,
            None,
            None,
            False,
        ),
        write.args,
        at,
    )
