"""Group commit: writes that queue during one commit share the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
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
_CROWD = 48

Committed: TypeAlias = Outcome | Exception | asyncio.Future[Outcome]
"""What a commit returns for one write; a future is answered when it is done."""


class _Queued:
    """A write on its way, and the caller that waits for its outcome."""

    __slots__ = ("answer", "decided", "sent", "write")

    def __init__(
        self, write: Write, answer: asyncio.Future[Outcome | Exception]
    ) -> None:
        self.write = write
        self.answer = answer
        # Whether a commit has the write, and who waits to see how that commit ends.
        self.sent = False
        self.decided: asyncio.Future[None] | None = None

    def concerns(self, thread_id: str | None, key: str | None) -> bool:
        """Tell whether an operation on this thread or key has to wait for the write."""
        if thread_id == self.write.thread_id or (thread_id is None and key is None):
            return True

        if isinstance(self.write, Claim):
            return key == self.write.call.idempotency_key

        # A result, an erasure and a restored thread change keys they do not name.
        return key is not None and not isinstance(self.write, Append | Merge)


class GroupCommit:
    """Hands writes to ``commit`` in batches, as `Batching` says.

    A caller that is cancelled before its write is in a batch takes the write back. One
    that is cancelled later only stops waiting: the write is still decided, and
    `decided` lets later operations wait for that.
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
        # Writes whose callers were cancelled while a commit had them.
        self._abandoned: list[_Queued] = []

    async def run(self, write: Write) -> Outcome | Exception:
        """Return the write's outcome; exceptions are returned, not raised."""
        if self._abandoned:
            key = write.call.idempotency_key if isinstance(write, Claim) else None
            await self.decided(write.thread_id, key)

        queued = _Queued(write, asyncio.get_running_loop().create_future())

        if isinstance(write, self._batching.kinds):
            self._queue.append(queued)
            self._start_lanes()
        else:
            self._commit_alone(queued)

        try:
            return await queued.answer
        except asyncio.CancelledError:
            if queued.sent:
                queued.decided = asyncio.get_running_loop().create_future()
                self._abandoned.append(queued)

            raise

    @property
    def has_abandoned(self) -> bool:
        """Whether a cancelled write is not decided yet."""
        return bool(self._abandoned)

    async def decided(self, thread_id: str | None, key: str | None) -> None:
        """Wait until cancelled writes of the thread or of the key are decided.

        Without both: until all of them are.
        """
        while waiting := [
            queued.decided
            for queued in self._abandoned
            if queued.decided is not None and queued.concerns(thread_id, key)
        ]:
            await asyncio.wait(waiting)

    def _commit_alone(self, queued: _Queued) -> None:
        """Start a commit of one write; it ends even where its caller is cancelled."""
        queued.sent = True
        commit = self._lifecycle.spawn(self._commit([queued.write]))
        commit.add_done_callback(
            lambda done: self._answer(
                [queued], None if done.cancelled() else done.result()
            )
        )

    def _start_lanes(self) -> None:
        """Start as many tasks as the queue asks for and the store allows."""
        crowded = len(self._queue) + self._in_flight >= _CROWD
        allowed = self._batching.lanes if crowded else 1

        while self._queue and self._lanes < allowed:
            self._lanes += 1
            self._lifecycle.spawn(self._drain()).add_done_callback(self._lane_ended)

    def _lane_ended(self, lane: asyncio.Task[None]) -> None:
        self._lanes -= 1

        if not lane.cancelled():
            lane.result()

        # Only a loop that shuts down cancels a lane. What is queued then comes from
        # tasks that still write on their way out.
        self._start_lanes()

    async def _drain(self) -> None:
        while batch := self._take_batch():
            self._in_flight += len(batch)
            outcomes: Sequence[Committed] | None = None

            try:
                outcomes = await self._commit([queued.write for queued in batch])
                assert len(outcomes) == len(batch), "an outcome for each write"
            finally:
                self._in_flight -= len(batch)
                self._answer(batch, outcomes)

            # Callers just answered can join the next batch.
            if len(batch) > 1:
                await asyncio.sleep(0)

    def _take_batch(self) -> list[_Queued]:
        """Take the next batch off the queue: this lane's share of what waits."""
        batch: list[_Queued] = []
        # The first of several lanes leaves the others their share.
        lanes = 1 if self._in_flight else self._lanes
        most = min(self._batching.max_writes, -(-len(self._queue) // lanes))
        size = 0

        while self._queue and len(batch) < most and size < self._batching.max_bytes:
            queued = self._queue.popleft()

            if not queued.answer.done():
                queued.sent = True
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

    def _answer(
        self, batch: list[_Queued], outcomes: Sequence[Committed] | None
    ) -> None:
        for i, queued in enumerate(batch):
            outcome = None if outcomes is None else outcomes[i]

            if isinstance(outcome, asyncio.Future):
                self._lifecycle.spawn(self._answer_later(queued, outcome))
                continue

            queued.sent = False

            if queued.decided is not None:
                self._abandoned.remove(queued)
                queued.decided.set_result(None)
            elif queued.answer.done():
                pass  # the caller was cancelled just now, and has not noticed yet
            elif outcomes is None:  # the event loop shuts down
                queued.answer.cancel()
            else:
                queued.answer.set_result(outcome)
