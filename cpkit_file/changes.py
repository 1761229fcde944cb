"""The operations that change a thread, each one trip to a worker thread.

Writes to one thread come in groups: a group is written under one lock with one sync,
and an operation that is refused adds no line, so its neighbours are not touched by its
refusal. Claims and deletions lock more than their thread's log and come alone.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import suppress

from cpkit.driver.writes import Append, Erase, Resolve, StoredCall
from cpkit.errors import CheckpointerError, UnknownCall, VersionConflict
from cpkit_file import lines
from cpkit_file.claims import release
from cpkit_file.faults import copy_of, unavailable
from cpkit_file.folder import Folder
from cpkit_file.queue import Outcomes, ThreadWrite
from cpkit_file.writing import Draft, replace, replacing, torn_path

__all__ = ["carry_out", "erase"]

# Logs that are written before the first of them is synced: the others' syncs then find
# much of their work done, and the threads wait less for each other's turn in Python.
# With more, their locks and descriptors would be held for long.
_AT_ONCE = 16


def carry_out(folder: Folder, groups: list[list[ThreadWrite]], wait: bool) -> Outcomes:
    """Write groups, each to its log; ``None`` for one that somebody else has locked.

    A group has an outcome, or its error, for each write. Unless ``wait``, which is for
    one group alone: nobody waits for a log while holding others.
    """
    outcomes: Outcomes = []

    for start in range(0, len(groups), _AT_ONCE):
        some = groups[start : start + _AT_ONCE]
        carried = [_carried_out(folder, group, wait) for group in some]

        try:
            written = [next(group) for group in carried]
            outcomes += map(next, carried, written)
        finally:
            for group in carried:
                group.close()

    return outcomes


def _carried_out(
    folder: Folder, writes: list[ThreadWrite], wait: bool
) -> Generator[list[object] | None, None, None]:
    """Yield a group's outcomes when it is written, and again when it is synced."""
    outcomes: list[object] | None

    try:
        with Draft(folder, writes[0].thread_id, wait=wait) as draft:
            outcomes = [_apply_one(draft, write) for write in writes]
            draft.write()
            yield outcomes
            draft.sync()
    except BlockingIOError:
        outcomes = None
    except OSError as exc:
        outcomes = [unavailable(folder.name, exc) for _ in writes]
    except CheckpointerError as exc:
        outcomes = [copy_of(exc) for _ in writes]

    yield outcomes


def _apply_one(draft: Draft, write: ThreadWrite) -> object:
    try:
        if isinstance(write, Append):
            return _append(draft, write)

        if isinstance(write, Resolve):
            return _resolve(draft, write)

        draft.add(lines.merged(write, draft.advance()))
    except CheckpointerError as refusal:
        return refusal

    return None


def _append(draft: Draft, write: Append) -> int:
    version = draft.version

    if write.expected_version not in (None, version):
        raise VersionConflict(write.thread_id, write.expected_version, version)

    if write.bodies:
        draft.add(lines.added(write, draft.advance(len(write.bodies))))

    return draft.version


def _resolve(draft: Draft, write: Resolve) -> StoredCall:
    call = draft.find(write.call_id)

    if call is None:
        raise UnknownCall(write.thread_id, write.call_id)

    if call.status != "issued":
        return call

    # An outcome of an erased call is no change of the thread.
    at = draft.at if call.erased else draft.advance()
    result = None if call.erased else write.result
    call = call._replace(status=write.status, result=result, resolved_at=draft.now)
    draft.add(lines.resolved(call, result, at))
    draft.resolved[write.call_id] = call
    return call


def erase(folder: Folder, write: Erase) -> None:
    """Delete a thread: put a log in its place that has only its calls, erased.

    With ``forget_keys`` not even those. The links of forgotten calls are void from the
    moment of the replacement, and removed after it.
    """
    with replacing(folder, write.thread_id) as log:
        if log is None:
            return

        with suppress(FileNotFoundError):
            os.unlink(torn_path(log))

        if not log.end or (log.at is None and not write.forget_keys):
            return

        calls = log.index.catch_up(log).bare()
        replace(log, write.thread_id, [] if write.forget_keys else calls)

    if write.forget_keys:
        try:
            release(folder, {call.idempotency_key for call in calls})
        except OSError as exc:
            raise unavailable(folder.name, exc, maybe_applied=True) from exc
