"""Group commit: writes that queue during one commit share the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeAlias

from cpkit.driver.lifecycle import Lifecycle
from cpkit.driver.store import Batching
from cpkit.driver.writes import (
    Append,
    Claim,
    Merge,
    Outcome,
    Write,
    stored_size,
)

__all__ = ["Committed", "GroupCommit"]

# Below this many writes, two commits side by side were measured to be slower than one.
_MIN_WRITES_FOR_LANES = 48

Committed: TypeAlias = Outcome | Exception | asyncio.Future[Outcome]
"""What a commit returns for one write; a future is answered when it is done."""


class _Queued:
    """A write on its way, and the caller that waits for its outcome.

    ``answer`` is done when the outcome is known, or cancelled with the caller.
    ``in_commit`` is true while a commit has the write. A write that is in a commit when
    its caller is cancelled is *abandoned*: ``decision`` is set, and done when the
    commit ends.
    """

    __slots__ = ("answer", "decision", "in_commit", "write")

    def __init__(
        self, write: Write, answer: asyncio.Future[Outcome | Exception]
    ) -> None:
        self.write = write
        self.answer = answer
        self.in_commit = False
        self.decision: asyncio.Future[None] | None = None

    def concerns(self, thread_id: str | None, key: str | None) -> bool:
        """Tell whether an operation on this thread or key has to wait for the write."""
        if thread_id == self.write.thread_id or (thread_id is None and key is None):
            return True

        if isinstance(self.write, Claim):
            return key == self.write.call.idempotency_key

        # Resolve, Erase and Restore can change any key, so they concern every key.
        return key is not None and not isinstance(self.write, Append | Merge)


class GroupCommit:
    """Hands writes to ``commit`` in batches, as `Batching` says.

    Each *lane* is a task that commits one batch after another. A caller that is
    cancelled while its write is queued takes the write back. A caller that is cancelled
    later only stops waiting: its write is abandoned, and `wait_until_decided` lets
    later operations wait for the outcome.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        commit: Callable[[list[Write]], Coroutine[Any, Any, Sequence[Committed]]],
        batching: Batching,
    ) -> None:
        self._lifecycle = lifecycle
        self._commit = commit
        self._batching = batching
        self._queue: deque[_Queued] = deque()
        self._lanes = 0
        self._in_flight = 0
        self._abandoned: list[_Queued] = []

    async def run(self, write: Write) -> Outcome | Exception:
        """Return the write's outcome; exceptions are returned, not raised."""
        if self._abandoned:
            key = write.call.idempotency_key if isinstance(write, Claim) else None
            await self.wait_until_decided(write.thread_id, key)

        queued = _Queued(write, asyncio.get_running_loop().create_future())

        if isinstance(write, self._batching.kinds):
            self._queue.append(queued)
            self._start_lanes()
        else:
            queued.in_commit = True
            commit = self._lifecycle.spawn(self._commit_batch([queued]))
            commit.add_done_callback(partial(self._commit_ended, queued))

        try:
            return await queued.answer
        except asyncio.CancelledError:
            if queued.in_commit:
                queued.decision = asyncio.get_running_loop().create_future()
                self._abandoned.append(queued)

            raise

    @property
    def has_abandoned(self) -> bool:
        """Whether an abandoned write is not decided yet."""
        return bool(self._abandoned)

    async def wait_until_decided(self, thread_id: str | None, key: str | None) -> None:
        """Wait until abandoned writes of the thread or of the key are decided.

        Without both: until all of them are.
        """
        while waiting := [
            queued.decision
            for queued in self._abandoned
            if queued.decision is not None and queued.concerns(thread_id, key)
        ]:
            await asyncio.wait(waiting)

    def _start_lanes(self) -> None:
        """Start as many tasks as the queue asks for and the store allows."""
        crowded = len(self._queue) + self._in_flight >= _MIN_WRITES_FOR_LANES
        allowed = self._batching.lanes if crowded else 1

        while self._queue and self._lanes < allowed:
            self._lanes += 1
            self._lifecycle.spawn(self._drain()).add_done_callback(self._lane_ended)

    def _lane_ended(self, lane: asyncio.Task[None]) -> None:
        self._lanes -= 1
        # A loop that shuts down cancels lanes, and its tasks may still write meanwhile.
        self._start_lanes()

    async def _drain(self) -> None:
        while batch := self._take_batch():
            self._in_flight += len(batch)

            try:
                await self._commit_batch(batch)
            finally:
                self._in_flight -= len(batch)

            # Callers just answered can join the next batch.
            if len(batch) > 1:
                await asyncio.sleep(0)

    async def _commit_batch(self, batch: list[_Queued]) -> None:
        """Commit the writes and answer their callers."""
        outcomes: Sequence[Committed] | None = None

        try:
            outcomes = await self._commit([queued.write for queued in batch])
        except Exception as exc:
            outcomes = [exc] * len(batch)
        finally:
            self._answer(batch, outcomes)

    def _take_batch(self) -> list[_Queued]:
        """Take the next batch off the queue: this lane's share of what waits."""
        batch: list[_Queued] = []
        # With nothing in flight the lanes share the queue; later each takes all of it.
        lanes = 1 if self._in_flight else self._lanes
        most = min(self._batching.max_writes, -(-len(self._queue) // lanes))
        size = 0

        while self._queue and len(batch) < most and size < self._batching.max_bytes:
            queued = self._queue.popleft()

            if not queued.answer.done():  # done: the caller was cancelled
                queued.in_commit = True
                batch.append(queued)
                size += stored_size(queued.write)

        return batch

    async def _answer_later(
        self, queued: _Queued, outcome: asyncio.Future[Outcome]
    ) -> None:
        found: list[Committed] | None = None

        try:
            found = [await outcome]
        except Exception as exc:
            found = [exc]
        finally:
            self._answer([queued], found)

    def _commit_ended(self, queued: _Queued, commit: asyncio.Task[None]) -> None:
        """Answer a write whose commit was cancelled before it started."""
        if queued.in_commit and commit.cancelled():
            self._answer([queued], None)

    def _answer(
        self, batch: list[_Queued], outcomes: Sequence[Committed] | None
    ) -> None:
        for i, queued in enumerate(batch):
            outcome = None if outcomes is None else outcomes[i]

            if isinstance(outcome, asyncio.Future):
                self._lifecycle.spawn(self._answer_later(queued, outcome))
                continue

            queued.in_commit = False

            if queued.decision is not None:
                self._abandoned.remove(queued)
                queued.decision.set_result(None)
            elif queued.answer.done():
                pass  # cancelled in this turn: `run` sees that no commit has the write
            elif outcomes is None:  # the event loop shuts down
                queued.answer.cancel()
            else:
                queued.answer.set_result(outcome)
