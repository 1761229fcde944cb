"""Group commit: writes that queue during one commit share the next one."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from itertools import takewhile
from operator import attrgetter
from typing import Any, TypeAlias

from cpkit.driver.lifecycle import Lifecycle
from cpkit.driver.store import Batching
from cpkit.driver.writes import (
    Append,
    Claim,
    Erase,
    Merge,
    Outcome,
    Resolve,
    Restore,
    StoreFailure,
    Write,
    stored_size,
)

__all__ = ["Committed", "GiveUp", "GroupCommit", "RepeatApart"]

# Seconds beyond the time limit in which a commit can still answer for a write.
_GRACE = 1.0

# Fewer writes were measured to be slower in two commits than in one.
_MIN_WRITES_TO_HALVE = 48


class RepeatApart(StoreFailure):
    """A write did not run, and is repeated beside the writes to other threads.

    With ``alone`` it is repeated in a commit of its own.
    """

    def __init__(self, reason: str, *, alone: bool = False) -> None:
        super().__init__("not sent", reason)
        self.alone = alone


Committed: TypeAlias = Outcome | Exception
"""What a commit returns for one write."""

GiveUp: TypeAlias = Callable[[StoreFailure], None]
"""Called if a commit does not end: the callers get the failure, and it may go on."""


class _Queued:
    """A write, and the caller that waits for its outcome.

    ``began`` is the loop's time when the caller asked. ``answer`` is done when the
    outcome is known, or cancelled with the caller. ``in_commit`` is true while a commit
    has the write. If its caller is cancelled then, or the commit takes too long, the
    write is *abandoned*: ``decision`` is a future that is done when the commit ends.
    ``alone`` is true if it shares no commit.
    """

    __slots__ = ("alone", "answer", "began", "decision", "in_commit", "write")

    def __init__(
        self, write: Write, began: float, answer: asyncio.Future[Outcome | Exception]
    ) -> None:
        self.write = write
        self.began = began
        self.answer = answer
        self.alone = False
        self.in_commit = False
        self.decision: asyncio.Future[None] | None = None

    def concerns(self, thread_id: str | None, keys: Collection[str] | None) -> bool:
        """Tell whether an operation on this thread, or on a key, waits for the write.

        ``None`` for the keys: any. An operation that names neither thread nor keys
        waits for every write.
        """
        if thread_id == self.write.thread_id or (thread_id is None and not keys):
            return True

        if isinstance(self.write, Append | Merge):
            return False

        if isinstance(self.write, Claim):
            return keys is None or self.write.call.idempotency_key in keys

        # Resolve, Erase and Restore can change any key, so they concern every key.
        return keys is None or bool(keys)


class _Queue:
    """Writes that wait for a commit, and the task that commits them."""

    __slots__ = ("task", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[_Queued] = deque()
        self.task: asyncio.Task[None] | None = None


class GroupCommit:
    """Hands writes to ``commit`` in batches, as `Batching` says.

    A queue has one task, which commits one batch after another. A caller that is
    cancelled while its write is queued takes the write back. A caller that is cancelled
    later only stops waiting: its write is abandoned, and `wait_until_decided` lets
    later operations wait for the outcome, for at most ``timeout`` seconds.

    A caller waits for at most ``timeout`` and a second, for abandoned writes and for
    the commits before its own too; ``None`` means without limit.

    The third argument of ``commit`` is ``None`` for a batch of the common queue. Else
    it has for each write the loop's time when the caller asked.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        commit: Callable[
            [list[Write], GiveUp, Sequence[float] | None],
            Coroutine[Any, Any, Sequence[Committed]],
        ],
        batching: Batching,
        timeout: float | None,
    ) -> None:
        self._lifecycle = lifecycle
        self._commit = commit
        self._batching = batching
        self._timeout = timeout
        self._grouped = _Queue()
        # By thread id: queues of writes that are repeated separately.
        self._apart: dict[str, _Queue] = {}
        self._abandoned: list[_Queued] = []
        # When the caller of a write stops waiting; in the order of these times.
        self._deadlines: dict[_Queued, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, write: Write) -> Outcome | Exception:
        """Return the write's outcome; exceptions are returned, not raised."""
        loop = asyncio.get_running_loop()
        queued = _Queued(write, loop.time(), loop.create_future())
        self._limit(queued)

        try:
            if self._abandoned:
                late = await self.wait_until_decided(write.thread_id, _keys_of(write))

                if late is not None:
                    return late

            if self._batching.groups(write):
                self._enter(queued, self._apart.get(write.thread_id, self._grouped))
            else:
                self._enter(queued, _Queue())

            return await queued.answer
        except asyncio.CancelledError:
            if queued.in_commit:
                self._abandon(queued)

            raise
        finally:
            self._deadlines.pop(queued, None)

    @property
    def has_abandoned(self) -> bool:
        """Whether an abandoned write is not decided yet."""
        return bool(self._abandoned)

    async def wait_until_decided(
        self, thread_id: str | None, keys: Collection[str] | None
    ) -> StoreFailure | None:
        """Wait until abandoned writes of the thread or of the keys are decided.

        `_Queued.concerns` says which. Returns a failure if that takes too long.
        ``close`` waits for the caller, whose operation has begun.
        """
        clock = asyncio.get_running_loop().time
        began = clock()

        while waiting := [
            queued.decision
            for queued in self._abandoned
            if queued.decision is not None and queued.concerns(thread_id, keys)
        ]:
            left = None

            if self._timeout is not None:
                left = began + self._timeout - clock()

                if left <= 0:
                    return StoreFailure("not sent", "an earlier write is not decided")

            await self._lifecycle.run(asyncio.wait(waiting, timeout=left))

        return None

    def close(self) -> None:
        """Cancel the timer. No caller waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _limit(self, queued: _Queued) -> None:
        """Let the caller wait for at most the time limit and a second."""
        if self._timeout is None:
            return

        loop = queued.answer.get_loop()
        until = loop.time() + self._timeout + min(_GRACE, self._timeout)
        self._deadlines[queued] = until

        # A timer that is set is never later: all callers have the same time.
        if self._timer is None:
            self._timer = loop.call_at(until, self._answer_late, loop)

    def _answer_late(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer the callers whose time is over; set the timer for the next one."""
        now = loop.time()
        late = takewhile(lambda item: item[1] <= now, self._deadlines.items())
        reason = f"no answer within {self._timeout:g} s"

        for queued, _ in list(late):
            del self._deadlines[queued]

            if queued.answer.done():
                continue

            if queued.in_commit:
                self._abandon(queued)
                queued.answer.set_result(StoreFailure("unknown", reason))
            else:
                queued.answer.set_result(StoreFailure("not sent", reason))

        next_at = next(iter(self._deadlines.values()), None)
        self._timer = (
            None if next_at is None else loop.call_at(next_at, self._answer_late, loop)
        )

    def _abandon(self, queued: _Queued) -> None:
        if queued.decision is None:
            queued.decision = asyncio.get_running_loop().create_future()
            self._abandoned.append(queued)

    def _enter(self, queued: _Queued, queue: _Queue) -> None:
        queue.waiting.append(queued)

        if queue.task is None:
            self._start(queue)

    def _enter_apart(self, queued: _Queued) -> None:
        """Queue a write again, before those of its thread that came after it."""
        queue = self._apart.setdefault(queued.write.thread_id, _Queue())
        insort(queue.waiting, queued, key=attrgetter("began"))

        if queue.task is None:
            self._start(queue)

    def _start(self, queue: _Queue, *, takes_all: bool = False) -> None:
        """Start a task that commits what waits in a queue."""
        queue.task = self._lifecycle.spawn(self._drain(queue, takes_all))
        queue.task.add_done_callback(partial(self._ended, queue))

    def _ended(self, queue: _Queue, task: asyncio.Task[None]) -> None:
        if queue.task is not task:  # another one has replaced it
            return

        queue.task = None

        # An event loop that shuts down cancels the task while others may still write.
        if queue.waiting:
            self._start(queue)
        elif self._apart:
            apart = self._apart.items()
            self._apart = {name: one for name, one in apart if one is not queue}

    async def _drain(self, queue: _Queue, takes_all: bool) -> None:
        """Commit batches until nothing waits; with ``takes_all`` the first is whole."""
        task = asyncio.current_task()

        while queue.task is task and (batch := self._take_batch(queue, takes_all)):
            takes_all = False
            await self._commit_batch(queue, batch)
            # Callers just answered can join the next batch, or reuse this task.
            await asyncio.sleep(0)

    async def _commit_batch(self, queue: _Queue, batch: list[_Queued]) -> None:
        """Commit the writes and answer their callers."""
        outcomes: Sequence[Committed] | None = None
        task: asyncio.Task[Any] | None = asyncio.current_task()
        assert task is not None
        give_up = partial(self._give_up, queue, task, batch)

        try:
            outcomes = await self._commit(
                [queued.write for queued in batch],
                give_up,
                None if queue is self._grouped else [one.began for one in batch],
            )
        except Exception as exc:
            outcomes = [exc] * len(batch)
        finally:
            is_crowd = self._is_crowd(len(batch) + len(queue.waiting))

            if is_crowd and queue.waiting and queue.task is task:
                # Before the callers go on, so that the store works in the meantime.
                self._start(queue, takes_all=True)

            self._answer(batch, outcomes)

    def _give_up(
        self,
        queue: _Queue,
        task: asyncio.Task[Any],
        batch: list[_Queued],
        failure: StoreFailure,
    ) -> None:
        """Answer the callers of a commit that does not end, and replace its task."""
        for queued in batch:
            self._abandon(queued)

            if not queued.answer.done():
                queued.answer.set_result(failure)

        self._lifecycle.abandon(task)
        self._ended(queue, task)

    def _is_crowd(self, writes: int) -> bool:
        """Tell whether so many writes are committed in two halves."""
        return self._batching.halves and writes >= _MIN_WRITES_TO_HALVE

    def _take_batch(self, queue: _Queue, takes_all: bool) -> list[_Queued]:
        """Take the next batch off a queue: half of a crowd if the store asks for it."""
        batch: list[_Queued] = []
        waiting = queue.waiting
        most = self._batching.max_writes
        size = 0

        if self._is_crowd(len(waiting)) and not takes_all:
            most = min(most, -(-len(waiting) // 2))

        while waiting and len(batch) < most and size < self._batching.max_bytes:
            if batch and (batch[0].alone or waiting[0].alone):
                break

            queued = waiting.popleft()

            if queued.answer.done():
                continue  # the caller was cancelled, or its time is over

            queued.in_commit = True
            batch.append(queued)

            if waiting:
                size += stored_size(queued.write)

        return batch

    def _answer(
        self, batch: list[_Queued], outcomes: Sequence[Committed] | None
    ) -> None:
        found = [None] * len(batch) if outcomes is None else outcomes

        for queued, outcome in zip(batch, found, strict=True):
            queued.in_commit = False

            if queued.decision is not None:
                self._abandoned.remove(queued)
                queued.decision.set_result(None)
            elif queued.answer.done():
                pass  # cancelled in this turn: `run` sees that no commit has the write
            elif outcomes is None:  # the event loop shuts down
                queued.answer.cancel()
            elif isinstance(outcome, RepeatApart):
                queued.alone = outcome.alone
                self._enter_apart(queued)
            else:
                queued.answer.set_result(outcome)


def _keys_of(write: Write) -> Collection[str] | None:
    """Return the idempotency keys that a write looks at or changes; ``None``: any."""
    match write:
        case Claim():
            return (write.call.idempotency_key,)
        case Restore():
            return {call.idempotency_key for call in write.calls}
        case Resolve() | Erase(forget_keys=True):
            return None

    return ()
