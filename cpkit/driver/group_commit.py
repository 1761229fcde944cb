"""Group commit: writes that queue during one commit share the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from cpkit.driver.lifecycle import Lifecycle
from cpkit.driver.store import Store
from cpkit.driver.store_calls import StoreCalls
from cpkit.driver.writes import (
    Append,
    Conflict,
    KeyHeld,
    Merge,
    Outcome,
    StoredCall,
    StoreFailure,
    Trim,
    Write,
)
from cpkit.errors import CheckpointerError, KeyTaken, VersionConflict

__all__ = ["GroupCommit", "Observer", "Outcomes"]

# Bytes in one commit. A larger write is committed alone.
_MAX_BYTES = 4 * 1024 * 1024

# By a KeyboardInterrupt of a notebook, for instance: the event loop may go on.
_INTERRUPTED = StoreFailure("unknown", "the commit was interrupted")

Outcomes: TypeAlias = Sequence[Outcome | Exception]
Observer: TypeAlias = Callable[[Sequence[Write], Outcomes], None]
"""Called after each commit with its writes and their outcomes."""


@dataclass(eq=False, slots=True)
class _Queued:
    """A write, and the caller that waits for its outcome.

    If the caller is cancelled while a commit has the write, the write is *abandoned*:
    ``answer`` is then what later operations wait for.
    """

    write: Write
    answer: asyncio.Future[Outcome | Exception]
    began: float
    is_over: bool = False
    is_alone: bool = False
    """Its batch was rejected, and this write may be the reason."""


@dataclass(eq=False, slots=True)
class _Queue:
    """Writes that wait, and the task that commits them while there are any."""

    thread_id: str | None
    waiting: list[_Queued] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class GroupCommit:
    """Commits writes in batches, one batch after another.

    There is one queue, or one for each thread if the store locks threads. A caller that
    is cancelled while its write is queued takes the write back. A caller that is
    cancelled later only stops waiting, and `wait_for_abandoned` lets later operations
    wait for the outcome.

    A write waits in the queue for at most the ``timeout`` of the calls, and for the
    commit that is under way then.
    """

    def __init__(self, lifecycle: Lifecycle, store: Store, calls: StoreCalls) -> None:
        self.abandoned: list[_Queued] = []
        self.observers: list[Observer] = []
        self._lifecycle = lifecycle
        self._calls = calls
        self._store = store
        self._queue = None if store.locks_threads else _Queue(None)
        self._queues: dict[str, _Queue] = {}

    async def run(self, write: Write) -> Any:
        """Return the outcome of a write that was applied, or raise the error."""
        if (queue := self._queue) is None:
            if self.abandoned:  # one queue would order all writes
                await self.wait_for_abandoned(write.thread_id, _changes_keys(write))

            if (queue := self._queues.get(write.thread_id)) is None:
                queue = self._queues[write.thread_id] = _Queue(write.thread_id)

        loop = asyncio.get_running_loop()
        began = 0.0 if self._calls.timeout is None else loop.time()
        queued = _Queued(write, loop.create_future(), began)
        queue.waiting.append(queued)
        self._lifecycle.in_flight += 1

        # An event loop that shuts down can end a task before its first step.
        if queue.task is None or queue.task.done():
            queue.task = self._lifecycle.spawn(self._drain(queue))

        try:
            outcome = await queued.answer
        except asyncio.CancelledError:
            if queued in queue.waiting:
                queue.waiting.remove(queued)
            elif not queued.is_over:
                queued.answer = loop.create_future()
                self.abandoned.append(queued)

            raise
        finally:
            self._lifecycle.ended()

        if outcome is None or type(outcome) is int or type(outcome) is StoredCall:
            return outcome

        if isinstance(outcome, Conflict):
            expected = getattr(write, "expected_version", 0)  # a restore expects 0
            raise VersionConflict(write.thread_id, expected, outcome.version)

        if isinstance(outcome, KeyHeld):
            raise KeyTaken(*outcome)

        if not isinstance(outcome, Exception):
            outcome = TypeError(f"commit returned {outcome!r:.100} for a write")

        raise self._calls.error(outcome, is_write=True)

    async def wait_for_abandoned(self, thread_id: str | None, keys: bool) -> None:
        """Wait until the abandoned writes of the thread, or of keys, are decided.

        An operation that names neither looks at all threads, and waits for every write.
        The limit of time of their commit ends the wait.
        """
        waits_for_all = thread_id is None and not keys
        self._lifecycle.in_flight += 1

        try:
            while waiting := [
                queued.answer
                for queued in self.abandoned
                if waits_for_all
                or queued.write.thread_id == thread_id
                or (keys and _changes_keys(queued.write))
            ]:
                await asyncio.wait(waiting)
        finally:
            self._lifecycle.ended()

    async def _drain(self, queue: _Queue) -> None:
        """Commit batches until the queue is empty."""
        task = queue.task
        waiting = queue.waiting
        self._lifecycle.in_flight += 1

        try:
            while waiting:
                batch = self._take(waiting) if waiting[1:] else waiting[:]
                del waiting[: len(batch)]
                writes = [queued.write for queued in batch]
                outcomes: Outcomes
                is_refused = False

                try:
                    on_stuck = partial(self._fail, queue, batch)
                    commit = self._store.commit
                    outcomes = await self._calls.call(on_stuck, commit, writes)

                    if not outcomes or len(outcomes) != len(batch):
                        raise TypeError(
                            f"commit must return one outcome for each of {len(batch)} "
                            f"writes, not {outcomes!r:.100}"
                        )
                except Exception as exc:
                    outcomes = [exc] * len(batch)
                    is_refused = self._is_refused(exc)
                except BaseException:
                    self._answer(batch, [_INTERRUPTED] * len(batch))
                    raise

                if is_refused and batch[1:]:
                    for queued in batch:
                        queued.is_alone = True

                    waiting[:0] = batch
                else:
                    self._answer(batch, outcomes)

                    for observe in self.observers:
                        observe(writes, outcomes)

                if batch[1:]:
                    # Callers that were just answered can join the next batch.
                    await asyncio.sleep(0)

                if waiting and self._calls.timeout is not None:
                    self._expire(waiting, self._calls.timeout)
        finally:
            if queue.task is task:
                self._end(queue)

    def _take(self, waiting: list[_Queued]) -> list[_Queued]:
        """Return the next batch of a queue."""
        batch = waiting[: 1 if waiting[0].is_alone else self._store.max_writes]
        size = 0

        for i, queued in enumerate(batch):
            size += queued.write.size

            if size > _MAX_BYTES and i:
                return batch[:i]

        return batch

    def _is_refused(self, failure: Exception) -> bool:
        """Tell whether nothing of a batch was written, maybe because of one write."""
        if isinstance(failure, StoreFailure):
            # One claim of a thread may have waited for the lock of its key. A store
            # that has one lock for all would only let each write wait again.
            return failure.fate == "rejected" or (
                failure.fate == "not sent" and self._store.locks_threads
            )

        return isinstance(failure, CheckpointerError)

    def _answer(self, batch: list[_Queued], outcomes: Outcomes) -> None:
        """Answer each caller, or those that wait for an abandoned write; only once."""
        for queued, outcome in zip(batch, outcomes, strict=True):
            if not queued.is_over:
                queued.is_over = True

                # It is done if the caller was cancelled in this turn of the loop.
                if not queued.answer.done():
                    queued.answer.set_result(outcome)

        if self.abandoned:
            self.abandoned = [one for one in self.abandoned if not one.is_over]

    def _expire(self, waiting: list[_Queued], timeout: float) -> None:
        """Answer the callers that have waited for too long."""
        oldest = asyncio.get_running_loop().time() - timeout
        reason = f"no commit began for it within {timeout:g} s"

        while waiting and waiting[0].began <= oldest:
            self._answer([waiting.pop(0)], [StoreFailure("not sent", reason)])

    def _fail(self, queue: _Queue, batch: list[_Queued], failure: Exception) -> None:
        """Answer the callers whose commit does not end; those behind them fail too."""
        self._answer(batch, [failure] * len(batch))
        self._end(queue)

    def _end(self, queue: _Queue) -> None:
        """Note that the queue has no task any more."""
        queue.task = None
        self._lifecycle.ended()

        if queue.waiting:
            # An event loop that shuts down cancelled the task, or the store is stuck.
            # Others may still write, or have to be told.
            queue.task = self._lifecycle.spawn(self._drain(queue))
        elif queue.thread_id is not None:
            del self._queues[queue.thread_id]


def _changes_keys(write: Write) -> bool:
    return not isinstance(write, Append | Merge | Trim)
