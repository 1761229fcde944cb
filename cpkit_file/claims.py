"""Which call holds a key: decided by links that only one process can create.

Attempt 3 at a key is the symbolic link ``claims/<shard>/<hash of the key>.3``, and
what it says is in which thread's log the call stands. The link is made and on disk
before the call's line is written to that log; the line is what counts. So a claim is

1. lock the key's shard (the directory itself is what is locked),
2. find the last attempt that has a line, and stop if it is issued or completed,
3. make the next link, sync the directory,
4. lock the thread's log, write the ``issued`` line, sync it: now the claim is made.

A process that dies before the fourth step is through leaves a link without a line. It
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
from contextlib import contextmanager, suppress

from cpkit.errors import CorruptThread
from cpkit.writes import Claim, StoredCall
from cpkit_file import lines
from cpkit_file.descriptors import exclusive_directory
from cpkit_file.folder import Folder
from cpkit_file.log import reading
from cpkit_file.names import LOG_NAME, claim_stem, shard_of
from cpkit_file.writing import Draft

__all__ = ["claim", "last_attempt", "release"]


def claim(folder: Folder, write: Claim) -> StoredCall | None:
    """Put the call on record, or return the record that stands in its way."""
    call = write.call
    key = call.idempotency_key

    with _locked(folder, key) as shard:
        last = last_attempt(folder, key)

        # After the key, because a call that is not on record now was not then, so
        # both answers are true of the moment at which the key was looked up.
        known = _known(folder, write.thread_id, call.call_id)

        if known is not None:
            return known

        if last is not None and last.status != "failed":
            return last

        attempt = 1 if last is None else last.attempt + 1
        _link(folder, key, attempt, folder.log_name(write.thread_id))

        if folder.lasting:
            os.fsync(shard)

        with Draft(folder, write.thread_id) as draft:
            # Once more: a claim of another key, which is in another shard, may have
            # put this call id on record since. The link is void then.
            known = draft.find(call.call_id)

            if known is None:
                at = draft.advance()
                issued = StoredCall(
                    write.thread_id,
                    call.call_id,
                    call.tool_name,
                    write.args,
                    key,
                    "issued",
                    attempt,
                    at.updated_at,
                    None,
                    None,
                    False,
                )
                draft.add(lines.issued(issued, write.args, at))

            draft.commit()

    return known


def last_attempt(folder: Folder, key: str) -> StoredCall | None:
    """Return the key's newest call, which holds the key unless it failed.

    Needs no lock: a link above those that were seen is of a claim that began later.
    """
    for attempt in range(_top(folder, key), 0, -1):
        call = _at(folder, key, attempt)

        if call is not None:
            return call

    return None


def release(folder: Folder, keys: Iterable[str]) -> None:
    """Remove links whose calls are gone from their log; they are void already."""
    for key in keys:
        with _locked(folder, key):
            for attempt in range(_top(folder, key), 0, -1):
                if _at(folder, key, attempt) is not None:
                    break

                os.unlink(_path(folder, key, attempt))


@contextmanager
def _locked(folder: Folder, key: str) -> Iterator[int]:
    directory = os.path.join(folder.claims, shard_of(claim_stem(key)))
    folder.make(directory)

    with exclusive_directory(directory) as fd:
        yield fd


def _path(folder: Folder, key: str, attempt: int) -> str:
    stem = claim_stem(key)
    return os.path.join(folder.claims, shard_of(stem), f"{stem}.{attempt}")


def _link(folder: Folder, key: str, attempt: int, log: str) -> None:
    path = _path(folder, key, attempt)

    with suppress(FileNotFoundError):
        os.unlink(path)  # a void one

    os.symlink(f"../../threads/{log}", path)


def _top(folder: Folder, key: str) -> int:
    """Return a number that has a link, and the next has none; 0 where there is none."""
    low, high = 0, 1

    while os.path.lexists(_path(folder, key, high)):
        low, high = high, 2 * high

    while high - low > 1:
        middle = (low + high) // 2

        if os.path.lexists(_path(folder, key, middle)):
            low = middle
        else:
            high = middle

    return low


def _at(folder: Folder, key: str, attempt: int) -> StoredCall | None:
    """Return the call that a link leads to; ``None`` where the link is void."""
    path = _path(folder, key, attempt)

    try:
        name = os.path.basename(os.readlink(path))
    except FileNotFoundError:  # released since it was counted
        return None

    if not LOG_NAME.fullmatch(name):
        raise CorruptThread("?", path, "the link leads to no thread's log")

    with reading(folder, name) as log:
        if log is None:
            return None

        return log.index.catch_up(log).by_attempt(log, key, attempt)


def _known(folder: Folder, thread_id: str, call_id: str) -> StoredCall | None:
    with reading(folder, folder.log_name(thread_id)) as log:
        return None if log is None else log.index.catch_up(log).by_id(log, call_id)
