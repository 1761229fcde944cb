"""The handle: what users hold, over any store.

A `Handle` does everything that is the same for all backends, so that a store cannot get
it wrong: it checks ids, types, values and limits, encodes and decodes, groups writes
into commits, retries what is proven not to have run, limits time, orders what comes
after a cancellation, and turns a store's facts into the contract's errors.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from copy import copy
from functools import partial
from typing import Any, Generic, NoReturn, Self, TypeVar

from cpkit.driver.backoff import Backoff
from cpkit.driver.codec import Codec, check_same_call
from cpkit.driver.group_commit import Committed, GiveUp, GroupCommit, RepeatApart
from cpkit.driver.ids import check_id, span
from cpkit.driver.lifecycle import Lifecycle
from cpkit.driver.markers import Markers, can_scan, read_markers
from cpkit.driver.merging import merge_appends
from cpkit.driver.metrics import Metrics, provided_meter
from cpkit.driver.options import DriverOptions
from cpkit.driver.store import Decode, Limits, Store
from cpkit.driver.tally import Tally
from cpkit.driver.time_limit import TimeLimit
from cpkit.driver.watching import Watching
from cpkit.driver.writes import (
    Conflict,
    Fate,
    KeyHeld,
    StoredCall,
    StoreFailure,
    Write,
    is_not_sent,
)
from cpkit.errors import (
    BackendUnavailable,
    CheckpointerError,
    CorruptThread,
    KeyTaken,
    UnknownCall,
    VersionConflict,
)
from cpkit.records import (
    CallRecord,
    CheckpointData,
    Durability,
    JsonValue,
    ToolCall,
)

__all__ = ["Handle"]

MessageT = TypeVar("MessageT")
T = TypeVar("T")

_ENTER = "write 'async with open_checkpointer(...) as cp:', and use cp inside"


class Handle(Generic[MessageT]):
    """A checkpointer over a store: the six methods, ``read`` and ``watch``.

    `cpkit.driver.handle_over` adds the optional methods that the store supports. The
    handle is an async context manager, entered once. ``message_type`` is as for
    ``open_checkpointer``.
    """

    def __init__(
        self,
        store: Store,
        *,
        message_type: type[MessageT] | Any = dict,
        options: DriverOptions | None = None,
    ) -> None:
        self._store = store
        options = options or DriverOptions()
        self._codec: Codec[MessageT] = Codec(
            message_type,
            max_payload=options.max_payload,
            max_append=options.max_append,
            strict_roundtrip=options.strict_roundtrip,
        )
        self._lifecycle = Lifecycle(store.name)
        self._watching = Watching(
            self._lifecycle,
            store,
            self._read_markers,
            poll=options.poll,
            notify=options.notify,
        )
        self._limit = TimeLimit(store.timeouts.operation)
        self._commits = GroupCommit(
            self._lifecycle,
            self._commit,
            store.batching,
            self._limit.seconds,
        )
        self._backoff = Backoff(first=0.01, longest=0.25)
        self._metrics: list[Metrics] = []
        self._tally: Tally | None = None

    async def __aenter__(self) -> Self:
        self._lifecycle.begin()

        try:
            await self._lifecycle.run_shielded(self._open())
        except BaseException:
            await self.aclose()
            raise

        if (meter := provided_meter()) is not None:
            self._measure(meter)

        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __enter__(self) -> NoReturn:
        raise TypeError(_ENTER)

    # Never called: a with statement looks for this method before it calls __enter__.
    __exit__ = __enter__

    def __await__(self) -> NoReturn:
        raise TypeError(_ENTER)

    async def aclose(self) -> None:
        """Let what is in flight finish and close the store; idempotent.

        It waits for a commit that has begun, and for the store to close, ``timeout``
        and a second each, and for notifications in the background 10 seconds.
        """
        await self._lifecycle.close(self._close)

    @property
    def store(self) -> Store:
        """The store behind the handle, for tools that report about it."""
        return self._store

    @property
    def durability(self) -> Durability:
        """Which failures (crash, power loss) an acknowledged write survives."""
        return self._store.durability()

    @property
    def limits(self) -> Limits:
        """The largest value and the largest append that this handle takes, in bytes."""
        return Limits(self._codec.max_payload, self._codec.max_append)

    def tally(self) -> Tally:
        """Return what this handle did, counted in memory since the first call.

        After the call each operation takes about four microseconds longer.
        """
        if self._tally is None:
            self._tally = Tally()
            self._measure(self._tally)

        return self._tally

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._store.name}>"

    # The six methods

    async def load(self, thread_id: str) -> CheckpointData[MessageT] | None:
        self._lifecycle.check()
        thread_id = check_id("thread_id", thread_id)
        decode = self._decoder(thread_id)
        found = await self._read(
            partial(self._store.snapshot, thread_id, decode), thread_id
        )

        if found is None:
            return None

        return CheckpointData(
            found.messages,
            self._codec.extra(found.items, thread_id),
            self._codec.records(found.pending),
        )

    async def append(
        self,
        thread_id: str,
        messages: Sequence[MessageT],
        *,
        expected_version: int | None = None,
        extra: Mapping[str, JsonValue] | None = None,
    ) -> int:
        self._lifecycle.check()
        write = self._codec.append(thread_id, messages, expected_version, extra)
        version = await self._write(write)
        assert isinstance(version, int)
        return version

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        self._lifecycle.check()
        write = self._codec.merge(thread_id, extra)

        if write.items:
            await self._write(write)

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self._lifecycle.check()
        write = self._codec.claim(thread_id, call)
        stored = await self._write(write)

        if stored is None:
            return None

        assert isinstance(stored, StoredCall)
        record = self._codec.record(stored)

        if stored[:2] == (write.thread_id, write.call.call_id):
            check_same_call(record, write.call)

        return record

    async def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool = True,
    ) -> CallRecord:
        self._lifecycle.check()
        write = self._codec.resolve(thread_id, call_id, result, success)
        stored = await self._write(write)

        if stored is None:
            raise UnknownCall(write.thread_id, write.call_id)

        assert isinstance(stored, StoredCall)
        return self._codec.record(stored)

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        stored = await self._holder(idempotency_key)

        if stored is None or stored.status != "completed":
            return None

        return self._codec.record(stored)

    # What every store supports

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[MessageT]:
        self._lifecycle.check()
        thread_id = check_id("thread_id", thread_id)
        span(start, stop, 0)  # checks the arguments, for a missing thread too
        decode = self._decoder(thread_id)
        return await self._read(
            partial(self._store.messages, thread_id, start, stop, decode), thread_id
        )

    def watch(
        self, *thread_ids: str
    ) -> AbstractAsyncContextManager[AsyncIterator[str]]:
        self._lifecycle.check()
        checked = frozenset(check_id("thread_id", one) for one in thread_ids)

        if not checked and not can_scan(self._store):
            raise TypeError(
                f"{self._store.name} cannot list its threads: name those to watch"
            )

        return self._watching.watch(checked)

    # The way to the store

    def _decoder(self, thread_id: str) -> Decode:
        return lambda bodies, first: self._codec.messages(bodies, thread_id, first)

    async def _holder(self, idempotency_key: str) -> StoredCall | None:
        """Return the key's newest attempt."""
        self._lifecycle.check()
        key = check_id("idempotency_key", idempotency_key)
        return await self._read(partial(self._store.holder, key), key=key)

    async def _open(self) -> None:
        await self._query(self._store.open)
        limits = self._store.limits
        self._codec.max_payload = min(self._codec.max_payload, limits.max_value)
        self._codec.max_append = min(self._codec.max_append, limits.max_append)

    def _measure(self, meter: Any) -> None:
        metrics = Metrics(meter, self._store.name.partition(":")[0])
        metrics.time_operations(self)
        self._metrics.append(metrics)
        self._watching.on_wake.append(metrics.woken)

    async def _close(self) -> None:
        try:
            await self._query(self._store.close)
        finally:
            self._limit.close()
            self._commits.close()

    async def _write(self, write: Write) -> int | StoredCall | None:
        """Commit a write, together with others; raise what its outcome says."""
        outcome = await self._commits.run(write)

        if isinstance(outcome, Exception):
            raise self._error(outcome, is_write=True)

        if isinstance(outcome, Conflict):
            expected = getattr(write, "expected_version", 0)
            raise VersionConflict(write.thread_id, expected, outcome.version)

        if isinstance(outcome, KeyHeld):
            raise KeyTaken(*outcome)

        return outcome

    async def _read(
        self,
        query: Callable[[], Awaitable[T]],
        thread_id: str | None = None,
        key: str | None = None,
    ) -> T:
        """Wait for abandoned writes that the query must see; run it with retries."""
        if not self._commits.has_abandoned:
            return await self._query(query)

        until = None

        if self._limit.seconds is not None:
            until = asyncio.get_running_loop().time() + self._limit.seconds

        keys = () if key is None else (key,)
        late = await self._commits.wait_until_decided(thread_id, keys)

        if late is not None:
            raise self._error(late, is_write=False)

        try:
            async with asyncio.timeout_at(until):
                return await self._query(query)
        except TimeoutError:
            raise self._error(self._late("not sent"), is_write=False) from None

    async def _read_markers(self, thread_ids: Collection[str] | None) -> Markers:
        return await self._query(partial(read_markers, self._store, thread_ids))

    async def _query(self, query: Callable[[], Awaitable[T]]) -> T:
        """Run a query with retries, within the time limit.

        It runs in the caller's task if no time limit is set, or if the store ends a
        cancelled query at once. Otherwise it runs in a task of its own, so that the
        caller gets an error in time even if the query never ends.
        """
        caller = asyncio.current_task()
        cancelled = caller.cancelling() if caller else 0

        if self._limit.seconds is None or self._store.timeouts.cancels_reads:
            work = self._attempt(query, "not sent", lambda failure: None)
            found = await self._lifecycle.run(work)
        else:
            found = await self._query_in_task(query)

        # A store may turn a cancellation into a StoreFailure. A caller that was
        # cancelled still gets its CancelledError.
        if caller is not None and caller.cancelling() > cancelled:
            raise asyncio.CancelledError

        if isinstance(found, Exception):
            raise self._error(found, is_write=False)

        return found

    async def _query_in_task(self, query: Callable[[], Awaitable[T]]) -> T | Exception:
        """Run a query in a task of its own, which may outlive the caller's wait."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T | Exception] = loop.create_future()
        task = self._lifecycle.spawn(self._run_query(query, answer))

        try:
            return await answer
        except asyncio.CancelledError:
            task.cancel()
            raise

    async def _run_query(
        self,
        query: Callable[[], Awaitable[T]],
        answer: asyncio.Future[T | Exception],
    ) -> None:
        task = asyncio.current_task()
        assert task is not None

        def give_up(failure: StoreFailure) -> None:
            self._lifecycle.abandon(task)

            if not answer.done():
                answer.set_result(failure)

        try:
            found = await self._attempt(query, "not sent", give_up)

            if not answer.done():
                answer.set_result(found)
        finally:
            answer.cancel()  # no effect, unless the event loop cancelled this task

    async def _commit(
        self, batch: list[Write], give_up: GiveUp, apart: Sequence[float] | None
    ) -> Sequence[Committed]:
        """Commit a batch, tell watchers, and return an outcome for each write.

        If the batch is apart from writes to other threads, ``apart`` has for each write
        the loop's time when its caller asked.

        If the store refuses one write, the others of its batch must not fail: each
        write that may have been refused for another one is repeated alone.
        """
        commit = partial(self._commit_once, batch, apart is not None)
        # Without a time limit, a wait for a lock ends only with the time to retry.
        since = min(apart) if apart and self._limit.seconds is None else None
        outcomes = await self._attempt(commit, "unknown", give_up, since)

        if isinstance(outcomes, CorruptThread) and len(batch) > 1:  # of one thread
            outcomes = [RepeatApart(str(outcomes), alone=True)] * len(batch)
        elif isinstance(outcomes, Exception):
            # The time of the oldest write is over. The others have time left.
            if since is not None and apart and len(apart) > 1 and is_not_sent(outcomes):
                outcomes = self._repeat_in_time(outcomes, apart)
            else:
                outcomes = [outcomes] * len(batch)

        if len(batch) > 1:
            outcomes = _repeat_refused(outcomes)

        for metrics in self._metrics:
            metrics.committed(batch, outcomes)

        self._watching.changed_by(batch, outcomes)
        return outcomes

    def _repeat_in_time(
        self, failure: StoreFailure, apart: Sequence[float]
    ) -> list[Committed]:
        """Fail the writes whose callers have waited long enough; repeat the others."""
        now = asyncio.get_running_loop().time()
        retry = self._store.timeouts.retry
        return [
            RepeatApart(failure.reason) if now < since + retry else failure
            for since in apart
        ]

    async def _commit_once(
        self, batch: list[Write], is_apart: bool
    ) -> Sequence[Committed]:
        merged = None
        writes: Sequence[Write] = batch

        if len(batch) > 1 and self._store.batching.merges_appends:
            merged = merge_appends(batch, self._store.limits.max_append)
            writes = merged.writes

        outcomes = await self._store.commit(writes)

        if not isinstance(outcomes, Sequence) or len(outcomes) != len(writes):
            raise TypeError(
                f"commit must return one outcome for each of {len(writes)} writes, not "
                f"{outcomes!r:.100}"
            )

        found = outcomes if merged is None else merged.split(batch, outcomes)

        not_sent = [one for one in found if is_not_sent(one)]

        if not not_sent:
            return found

        # `_attempt` repeats a batch of which nothing ran for one reason: the server is
        # starting, for instance. But a lock that one thread waits for must not hold up
        # the writes to others, so a write to a locked thread is repeated apart.
        is_one_reason = len({write.thread_id for write in batch}) > 1 and all(
            one is not_sent[0] for one in not_sent
        )

        if len(not_sent) == len(batch) and (is_apart or is_one_reason):
            raise not_sent[0]

        return [RepeatApart(one.reason) if is_not_sent(one) else one for one in found]

    async def _attempt(
        self,
        work: Callable[[], Awaitable[T]],
        lost: Fate,
        give_up: GiveUp,
        since: float | None = None,
    ) -> T | Exception:
        """Do the work; repeat it while a repeat is safe; limit the time.

        Returns the result, or the exception. ``lost`` is the fate of work whose answer
        was lost: ``"unknown"`` for a write, which is not repeated; ``"not sent"`` for a
        read, because it is always safe to repeat. ``give_up`` is called if the work
        goes on after the time limit cancelled it. The time to retry counts from
        ``since``, or else from the first failure.
        """
        fate: Fate = "not sent"
        pauses: Iterator[float] | None = None
        deadline = self._limit.start(lambda: give_up(self._late(lost)))

        try:
            while True:
                try:
                    fate = lost
                    return await work()
                except StoreFailure as failure:
                    fate = lost if failure.fate == "unknown" else failure.fate

                    # A store may raise a StoreFailure when it is cancelled.
                    if fate != "not sent" or deadline.is_cancelled():
                        return failure

                    now = asyncio.get_running_loop().time()
                    since = now if since is None else since

                    if now >= since + self._store.timeouts.retry:
                        return failure

                pauses = pauses or self._backoff.pauses()
                await asyncio.sleep(next(pauses))
        except asyncio.CancelledError as exc:
            if not deadline.is_timeout():
                raise

            late = self._late(fate)
            late.__cause__ = exc
            return late
        except Exception as exc:
            return exc
        finally:
            self._limit.end(deadline)

    def _late(self, fate: Fate) -> StoreFailure:
        return StoreFailure(fate, f"no answer within {self._limit.seconds:g} s")

    def _error(self, failure: Exception, *, is_write: bool) -> CheckpointerError:
        """Return the contract's error; callers of one batch do not share an object."""
        error: CheckpointerError

        if isinstance(failure, CheckpointerError):
            error = copy(failure)
        elif isinstance(failure, StoreFailure):
            error = BackendUnavailable(
                self._store.name,
                failure.reason,
                maybe_applied=is_write and failure.fate == "unknown",
                rejected=failure.fate == "rejected",
            )
        else:
            error = BackendUnavailable(
                self._store.name,
                f"unexpected {type(failure).__name__}: {failure}",
                maybe_applied=is_write,
            )

        error.__cause__ = failure.__cause__ or failure
        return error


def _repeat_refused(outcomes: Sequence[Committed]) -> Sequence[Committed]:
    """Let each write that was refused with the failure of another be repeated alone."""
    shared = Counter(
        id(one)
        for one in outcomes
        if isinstance(one, StoreFailure) and one.fate == "rejected"
    )
    return [
        RepeatApart(one.reason, alone=True)
        if isinstance(one, StoreFailure) and shared[id(one)] > 1
        else one
        for one in outcomes
    ]
