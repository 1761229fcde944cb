"""Group commit: writes that queue during one commit share the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, TypeAlias

from cpkit.driver.lifecycle import Lifecycle
from cpkit.driver.store import Batching
from cpkit.driver.writes import (
    Append,
    Claim,
    Merge,
    Outcome,
    Restore,
    StoreFailure,
    Write,
    is_not_sent,
    stored_size,
)

__all__ = ["Committed", "GiveUp", "GroupCommit"]

# Seconds beyond the time limit in which a commit can still answer for a write.
_GRACE = 1.0

# Below this many writes, two commits side by side were measured to be slower than one.
_MIN_WRITES_FOR_LANES = 48

Committed: TypeAlias = Outcome | Exception
"""What a commit returns for one write."""

GiveUp: TypeAlias = Callable[[StoreFailure], None]
"""Called if a commit does not end: the callers get the failure, and it may go on."""


class _Queued:
    """A write, and the caller that waits for its outcome.

    ``answer`` is done when the outcome is known, or cancelled with the caller.
    ``in_commit`` is true while a commit has the write. If its caller is cancelled then,
    or the commit takes too long, the write is *abandoned*: ``decision`` is a future
    that is done when the commit ends.
    """

    __slots__ = ("answer", "decision", "in_commit", "write")

    def __init__(
        self, write: Write, answer: asyncio.Future[Outcome | Exception]
    ) -> None:
        self.write = write
        self.answer = answer
        self.in_commit = False
        self.decision: asyncio.Future[None] | None = None

    def concerns(self, thread_id: str | None, keys: Collection[str]) -> bool:
        """Tell whether an operation on this thread, or on a key, waits for the write.

        An operation that names neither waits for every write.
        """
        if thread_id == self.write.thread_id or (thread_id is None and not keys):
            return True

        if isinstance(self.write, Claim):
            return self.write.call.idempotency_key in keys

        # Resolve, Erase and Restore can change any key, so they concern every key.
        return bool(keys) and not isinstance(self.write, Append | Merge)


class _Queue:
    """Writes that wait for a commit, the lanes, and how many writes commit now."""

    __slots__ = ("in_flight", "lanes", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[_Queued] = deque()
        self.lanes: set[asyncio.Task[Any]] = set()
        self.in_flight = 0


class GroupCommit:
    """Hands writes to ``commit`` in batches, as `Batching` says.

    Each *lane* is a task that commits one batch after another. A caller that is
    cancelled while its write is queued takes the write back. A caller that is cancelled
    later only stops waiting: its write is abandoned, and `wait_until_decided` lets
    later operations wait for the outcome, for at most ``timeout`` seconds.

    A caller waits for at most ``timeout`` and a second, for the commits before its own
    too; ``None`` means without limit.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        commit: Callable[
            [list[Write], GiveUp], Coroutine[Any, Any, Sequence[Committed]]
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
        if self._abandoned:
            late = await self.wait_until_decided(write.thread_id, _named_keys(write))

            if late is not None:
                return late

        queued = _Queued(write, asyncio.get_running_loop().create_future())
        self._limit(queued)

        if self._batching.groups(write):
            self._enter(queued, self._apart.get(write.thread_id, self._grouped))
        else:
            self._enter(queued, _Queue())

        try:
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
        self, thread_id: str | None, keys: Collection[str]
    ) -> StoreFailure | None:
        """Wait until abandoned writes of the thread or of the keys are decided.

        Without both: until all of them are. Returns a failure if that takes too long.
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

        if not queue.lanes or self._batching.lanes > 1:
            self._start_lanes(queue)

    def _start_lanes(self, queue: _Queue) -> None:
        """Start as many tasks as the queue asks for and the store allows."""
        crowded = len(queue.waiting) + queue.in_flight >= _MIN_WRITES_FOR_LANES
        allowed = self._batching.lanes if crowded else 1

        while queue.waiting and len(queue.lanes) < allowed:
            lane = self._lifecycle.spawn(self._drain(queue))
            queue.lanes.add(lane)
            lane.add_done_callback(partial(self._lane_ended, queue))

    def _lane_ended(self, queue: _Queue, lane: asyncio.Task[Any]) -> None:
        queue.lanes.discard(lane)
        # An event loop that shuts down cancels lanes while tasks may still write.
        self._start_lanes(queue)

        if self._apart and not queue.lanes:
            apart = self._apart.items()
            self._apart = {name: one for name, one in apart if one is not queue}

    async def _drain(self, queue: _Queue) -> None:
        lane = asyncio.current_task()

        # A lane that gave up a commit has been replaced.
        while lane in queue.lanes and (batch := self._take_batch(queue)):
            queue.in_flight += len(batch)

            try:
                await self._commit_batch(queue, batch)
            finally:
                queue.in_flight -= len(batch)

            # Callers just answered can join the next batch, or reuse this lane.
            await asyncio.sleep(0)

    async def _commit_batch(self, queue: _Queue, batch: list[_Queued]) -> None:
        """Commit the writes and answer their callers."""
        outcomes: Sequence[Committed] | None = None
        lane = asyncio.current_task()
        assert lane is not None
        give_up = partial(self._give_up, queue, lane, batch)

        try:
            outcomes = await self._commit([queued.write for queued in batch], give_up)
        except Exception as exc:
            outcomes = [exc] * len(batch)
        finally:
            self._answer(batch, outcomes)

    def _give_up(
        self,
        queue: _Queue,
        lane: asyncio.Task[Any],
        batch: list[_Queued],
        failure: StoreFailure,
    ) -> None:
        """Answer the callers of a commit that does not end, and replace its lane."""
        for queued in batch:
            self._abandon(queued)

            if not queued.answer.done():
                queued.answer.set_result(failure)

        self._lifecycle.abandon(lane)
        self._lane_ended(queue, lane)

    def _take_batch(self, queue: _Queue) -> list[_Queued]:
        """Take the next batch off a queue: this lane's share of what waits."""
        batch: list[_Queued] = []
        waiting = queue.waiting
        # If nothing is in flight, all lanes start now and share the queue. Otherwise
        # this lane takes all of it.
        lanes = 1 if queue.in_flight else len(queue.lanes)
        most = min(self._batching.max_writes, -(-len(waiting) // lanes))
        size = 0

        while waiting and len(batch) < most and size < self._batching.max_bytes:
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
        # If only some writes were not sent, those are repeated separately.
        repeats = len(batch) > 1 and not all(map(is_not_sent, found))

        for queued, outcome in zip(batch, found, strict=True):
            queued.in_commit = False

            if queued.decision is not None:
                self._abandoned.remove(queued)
                queued.decision.set_result(None)
            elif queued.answer.done():
                pass  # cancelled in this turn: `run` sees that no commit has the write
            elif outcomes is None:  # the event loop shuts down
                queued.answer.cancel()
            elif repeats and is_not_sent(outcome):
                apart = self._apart.setdefault(queued.write.thread_id, _Queue())
                self._enter(queued, apart)
            else:
                queued.answer.set_result(outcome)


def _named_keys(write: Write) -> Collection[str]:
    """Return the idempotency keys that a write names."""
    if isinstance(write, Claim):
        return (write.call.idempotency_key,)

    if isinstance(write, Restore):
        return {call.idempotency_key for call in write.calls}

    return ()
