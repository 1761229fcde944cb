"""Group commit: writes that queue during one commit share the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from cpkit.driver.lifecycle import Lifecycle
from cpkit.driver.store import Store
from cpkit.driver.store_calls import StoreCalls
from cpkit.driver.writes import (
    Append,
    Merge,
    Outcome,
    StoreFailure,
    Write,
    may_have_changed,
)

__all__ = ["GroupCommit", "Observer"]

# Bytes in one commit. A larger write is committed alone.
_MAX_BYTES = 4 * 1024 * 1024

# By a KeyboardInterrupt of a notebook, for instance: the event loop may go on.
_INTERRUPTED = StoreFailure("unknown", "the commit was interrupted")

Observer: TypeAlias = Callable[[Sequence[Write], Sequence[Outcome | Exception]], None]
"""Called after each commit with its writes and their outcomes."""


class _Queued:
    """A write, and the caller that waits for its outcome.

    If the caller is cancelled while a commit has the write, the write is *abandoned*:
    ``decided`` is a future that is done when the commit ends.
    """

    __slots__ = ("answer", "began", "decided", "is_over", "write")

    def __init__(
        self, write: Write, answer: asyncio.Future[Outcome | Exception], began: float
    ) -> None:
        self.write = write
        self.answer = answer
        self.began = began
        self.is_over = False
        self.decided: asyncio.Future[None] | None = None

    def concerns(self, thread_id: str | None, keys: bool) -> bool:
        """Tell whether an operation on this thread, or on keys, waits for the write.

        An operation that names neither looks at all threads, and waits for every write.
        """
        if thread_id == self.write.thread_id or (thread_id is None and not keys):
            return True

        return keys and _changes_keys(self.write)

    def end(self, outcome: Outcome | Exception) -> None:
        """Answer the caller, or those that wait for an abandoned write; only once."""
        if self.is_over:
            return

        self.is_over = True

        if not self.answer.done():
            self.answer.set_result(outcome)
        elif self.decided is not None:
            self.decided.set_result(None)


class _Queue:
    """Writes that wait, and the task that commits them while there are any."""

    __slots__ = ("task", "thread_id", "waiting")

    def __init__(self, thread_id: str | None) -> None:
        self.thread_id = thread_id
        self.waiting: list[_Queued] = []
        self.task: asyncio.Task[None] | None = None


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
        self.on_change: list[Callable[[list[str]], None]] = []
        """Each is called after a commit with the ids of threads that it changed."""
        self._lifecycle = lifecycle
        self._calls = calls
        self._max_writes = store.max_writes
        self._queue = None if store.locks_threads else _Queue(None)
        self._queues: dict[str, _Queue] = {}

    async def run(self, write: Write) -> Outcome | Exception:
        """Return the write's outcome; exceptions are returned, not raised."""
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
            return await queued.answer
        except asyncio.CancelledError:
            if queued in queue.waiting:
                queue.waiting.remove(queued)
            elif not queued.is_over:
                queued.decided = loop.create_future()
                self.abandoned.append(queued)

            raise
        finally:
            self._lifecycle.ended()

    async def wait_for_abandoned(self, thread_id: str | None, keys: bool) -> None:
        """Wait until the abandoned writes of the thread, or of keys, are decided.

        `_Queued.concerns` says which. The limit of time of their commit ends the wait.
        """
        self._lifecycle.in_flight += 1

        try:
            while waiting := [
                queued.decided
                for queued in self.abandoned
                if queued.decided is not None and queued.concerns(thread_id, keys)
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
                await self._commit(queue, batch)

                if batch[1:]:
                    # Callers that were just answered can join the next batch.
                    await asyncio.sleep(0)

                if waiting and self._calls.timeout is not None:
                    self._expire(waiting, self._calls.timeout)
        finally:
            if queue.task is task:
                self._end(queue)

    def _end(self, queue: _Queue) -> None:
        """Note that the queue has no task any more."""
        queue.task = None
        self._lifecycle.ended()

        if queue.waiting:
            # An event loop that shuts down cancelled the task. Others may still write.
            queue.task = self._lifecycle.spawn(self._drain(queue))
        elif queue.thread_id is not None:
            del self._queues[queue.thread_id]

    def _take(self, waiting: list[_Queued]) -> list[_Queued]:
        """Return the next batch of a queue."""
        batch = waiting[: self._max_writes]
        size = 0

        for i, queued in enumerate(batch):
            size += queued.write.size

            if size > _MAX_BYTES and i:
                return batch[:i]

        return batch

    def _expire(self, waiting: list[_Queued], timeout: float) -> None:
        """Answer the callers that have waited for too long."""
        oldest = asyncio.get_running_loop().time() - timeout
        reason = f"no commit began for it within {timeout:g} s"

        while waiting and waiting[0].began <= oldest:
            waiting.pop(0).end(StoreFailure("not sent", reason))

    async def _commit(self, queue: _Queue, batch: list[_Queued]) -> None:
        """Commit the writes and answer their callers."""
        writes = [queued.write for queued in batch]
        on_stuck = partial(self._fail, queue, batch)
        outcomes: Sequence[Outcome | Exception] = [_INTERRUPTED] * len(batch)

        try:
            outcomes = await self._calls.commit(writes, on_stuck)
        except asyncio.CancelledError:  # the event loop shuts down
            for queued in batch:
                queued.answer.cancel()

            raise
        finally:
            for queued, outcome in zip(batch, outcomes, strict=True):
                queued.end(outcome)

            if self.abandoned:
                self.abandoned = [one for one in self.abandoned if not one.is_over]

        for observe in self.observers:
            observe(writes, outcomes)

        if self.on_change:
            changed = [
                write.thread_id
                for write, outcome in zip(writes, outcomes, strict=True)
                if may_have_changed(write, outcome)
            ]

            for tell in self.on_change:
                tell(changed)

    def _fail(self, queue: _Queue, batch: list[_Queued], failure: Exception) -> None:
        """Answer all callers of a queue whose commit does not end."""
        waiting, queue.waiting = queue.waiting, []
        not_sent = StoreFailure("not sent", "an earlier write does not end")

        for queued in batch:
            queued.end(failure)

        for queued in waiting:
            queued.end(not_sent)

        self.abandoned = [one for one in self.abandoned if not one.is_over]
        self._end(queue)


def _changes_keys(write: Write) -> bool:
    return not isinstance(write, Append | Merge)
