"""A worker: calls an agent's function for threads that need a run.

::

    async def agent(cp, lease):
        await ledger.recover(lease.thread_id, tools, lease=lease)
        ...  # the agent's own loop

    await Worker(cp, agent).run()

A thread needs a run if its last run died, or if a person decided an approval request
that no run has acted on. A run lasts for one term of the thread's lease
(`cpkit.lease`). It died if the lease's holder stopped writing heartbeats. It ended well
if the lease's block ended without an exception.

The worker only decides when to call the function. It takes the thread's lease before,
so any number of workers run each thread once at a time. The function may raise
``EffectTimeout`` for an approval that is not decided: the thread waits, and the worker
calls it again after the decision. ``EffectDenied`` ends the run. An ``ExceptionGroup``
of these alone counts as they do. After any other exception the worker calls the
function again later, with growing pauses. Only the store knows which threads need a
run, so a worker may be killed at any moment.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from math import inf
from typing import Any, TypeVar

from cpkit.driver import Handle
from cpkit.driver.backoff import Backoff
from cpkit.driver.metrics import provided_meter
from cpkit.effects.attempts import Attempts
from cpkit.effects.effect import check_callback
from cpkit.effects.errors import EffectDenied, EffectTimeout
from cpkit.effects.records import REQUESTS
from cpkit.effects.requests import ApprovalRequest, Entry, Requests
from cpkit.errors import BackendUnavailable, CorruptThread
from cpkit.lease import Lease, LeaseTimeout, this_process, thread_lease
from cpkit.protocol import Checkpointer, ListsThreads
from cpkit.records import ThreadInfo
from cpkit.terms import LEASES, LeaseState, Terms, stale_after_of, state_of
from cpkit.waiting import StaleDetector, check_interval, check_limit
from cpkit.wakeups import Wakeups

__all__ = ["Agent", "Health", "Worker"]

log = logging.getLogger("cpkit.worker")

Agent = Callable[[Checkpointer[Any], Lease], Awaitable[object]]
"""Runs one thread: the thread of the lease."""

T = TypeVar("T")
R = TypeVar("R")

_PAGE = 500
_AT_A_TIME = 8  # reads in parallel, to hide a server's round trips
_LONGEST_RETRY = 300.0

# The rest after a scan of the leases, as a multiple of the scan's time. A scan can be
# long: the store keeps a lease for each thread that was ever run.
_REST = 9


@dataclass
class Health:
    """What a worker does and has done, for people and for health probes."""

    holder: str
    ran: int = 0
    """Calls of the function that ended, were denied, or wait for a decision."""
    failed: int = 0
    """Runs that failed in another way; the worker repeats them."""
    running: list[str] = field(default_factory=list)
    """The threads whose function is being called."""
    decided: int = 0
    """Decided requests that no run has acted on, at the last look."""
    oldest_undecided: float | None = None
    """Seconds since the oldest undecided request was made, at the last look."""
    oldest_decided: float | None = None
    """Seconds since the oldest decision that no run has acted on, at the last look."""
    looks: int = 0
    store_errors: int = 0
    """Looks in a row that failed because the store was unavailable."""

    @property
    def ok(self) -> bool:
        """Whether the last look at the store succeeded."""
        return self.looks > 0 and self.store_errors == 0

    def as_json(self) -> dict[str, Any]:
        """Return all fields, and ``ok``, as JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        state = "ok" if self.ok else "no store"
        running = ", ".join(map(repr, self.running)) or "nothing"
        return (
            f"{self.holder}: {state}; running {running}; {self.ran} ran, "
            f"{self.failed} failed, {self.decided} decided and not acted on"
        )


class _SeenLease:
    """A lease as last read."""

    def __init__(
        self, updated_at: datetime | None, state: LeaseState, stale_after: float
    ) -> None:
        self.updated_at = updated_at
        self.state = state
        self.stale: StaleDetector | None = None

        self.is_stale = False

        if state.term is not None:
            self.stale = StaleDetector(stale_after_of(state.term, stale_after))


class _Gauges:
    """How long requests have waited, for a program that has a meter provider."""

    def __init__(self, meter: Any, cp: object) -> None:
        name = cp.store.name if isinstance(cp, Handle) else "other"
        self._attributes = {"cpkit.store": name.partition(":")[0]}
        self._undecided = meter.create_gauge(
            "cpkit.requests.undecided.oldest", "s", "Age of the oldest open request"
        )
        self._decided = meter.create_gauge(
            "cpkit.requests.pending.oldest",
            "s",
            "Age of the oldest decision that no run has acted on",
        )

    def record(self, undecided: float | None, decided: float | None) -> None:
        """Record both ages; without such a request, 0."""
        self._undecided.set(undecided or 0.0, self._attributes)
        self._decided.set(decided or 0.0, self._attributes)


class Worker:
    """Calls ``agent(cp, lease)`` for each thread that needs a run.

    ``prefix`` limits it to threads whose ids start with it. ``concurrency`` bounds the
    threads that run at a time. ``stale_after`` is that of the leases it takes. ``poll``
    is the longest time between two looks at the store; `watch` wakes the worker earlier
    for a decision. Listing the leases, to find runs that died, takes at most a tenth of
    the time. A stopped worker gives its runs ``grace`` seconds to end, and then cancels
    them; another worker runs their threads again.

    Without `ListsThreads` a store does not show which runs died; then the worker acts
    on decisions alone.
    """

    def __init__(
        self,
        cp: Checkpointer[Any],
        agent: Agent,
        *,
        prefix: str = "",
        concurrency: int = 4,
        stale_after: float = 15.0,
        poll: float = 2.0,
        grace: float = 30.0,
        holder: str | None = None,
    ) -> None:
        check_callback("agent", agent, "cp", "lease")

        if not inspect.iscoroutinefunction(inspect.unwrap(agent)):
            raise TypeError(
                f"agent must be an async function, not {agent!r:.80}: a blocked event "
                "loop cannot renew the lease"
            )

        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency!r}")

        check_interval("poll", poll)
        check_interval("stale_after", stale_after)
        check_limit("grace", grace)

        self.health = Health(holder or f"worker {this_process()}")
        self._cp = cp
        self._agent = agent
        self._prefix = prefix
        self._concurrency = concurrency
        self._stale_after = stale_after
        self._poll = poll
        self._grace = grace
        self._backoff = Backoff()
        self._requests = Requests(Attempts(cp, self._backoff, stale_after), None)
        meter = provided_meter()
        self._gauges = None if meter is None else _Gauges(meter, cp)
        self._leases: dict[str, _SeenLease] = {}
        # Threads whose run died, from the last scan, that no job has tried since. The
        # value is the lease's state, or None if no runner has the lease.
        self._dead: dict[str, LeaseState | None] = {}
        self._damaged: set[str] = set()
        self._scan_not_before = -inf
        self._jobs: dict[str, asyncio.Task[None]] = {}
        # By thread: the pause after the last failure, and the time of the next try.
        self._retry: dict[str, tuple[float, float]] = {}
        self._job_ended = asyncio.Event()

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Watch the store and run threads, until ``stop`` is set."""
        stop = stop or asyncio.Event()
        stopping = asyncio.create_task(stop.wait())

        try:
            while not stop.is_set():
                try:
                    async with Wakeups(self._cp, REQUESTS) as wakeups:
                        await self._look_and_wait(wakeups, stopping)
                except BackendUnavailable as exc:
                    self.health.store_errors += 1
                    log.warning("the store is away: %s", exc)
                    await asyncio.wait([stopping], timeout=self._poll)
        finally:
            stopping.cancel()
            await self._end_jobs()

    async def run_due(self, *, wait_for_stale: bool = False) -> int:
        """Run the threads that need a run now, and return the number of runs.

        A thread whose runner was killed is due when this worker has seen no heartbeat
        for the ``stale_after`` of its lease. So a new worker finds it only with
        ``wait_for_stale``: then the call ends when each lease that was held at its
        begin was renewed, has ended, or was found to be stale.

        If it is cancelled or the store fails, its runs get ``grace`` seconds to end, as
        those of `run` do.
        """
        before = self.health.ran + self.health.failed
        held: list[_SeenLease] | None = None

        try:
            while True:
                self._scan_not_before = -inf
                await self._look()
                seen = [one for one in self._leases.values() if self._may_be_stale(one)]
                held = seen if held is None else [one for one in held if one in seen]

                if self._jobs:
                    await asyncio.wait(list(self._jobs.values()))
                elif wait_for_stale and held:
                    await asyncio.sleep(self._pause())
                else:
                    return self.health.ran + self.health.failed - before
        finally:
            await self._end_jobs()

    def _may_be_stale(self, seen: _SeenLease) -> bool:
        """Tell whether it is not known yet if the holder of a lease still runs."""
        return (
            seen.stale is not None and not seen.is_stale and self._is_mine(seen.state)
        )

    def _is_mine(self, state: LeaseState) -> bool:
        """Tell whether the lease is of a thread that this worker runs."""
        return state.thread_id is not None and state.thread_id.startswith(self._prefix)

    async def _look_and_wait(
        self, wakeups: Wakeups, stopping: asyncio.Task[Any]
    ) -> None:
        """Look at the store again and again, until ``stopping`` is done."""
        while not stopping.done():
            await self._look()
            pause = self._pause()
            wake = asyncio.create_task(wakeups.wait(pause, pause))
            ended = asyncio.create_task(self._job_ended.wait())

            try:
                await asyncio.wait(
                    [stopping, wake, ended], return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                wake.cancel()
                ended.cancel()
                await asyncio.wait([wake, ended])

            self._job_ended.clear()

    def _pause(self) -> float:
        """Return the time to the next look, at most a quarter of each stale_after."""
        pauses = [
            seen.stale.longest_pause for seen in self._leases.values() if seen.stale
        ]
        return min([self._poll, *pauses])

    async def _end_jobs(self) -> None:
        """Give the runs ``grace`` seconds to end, then cancel them."""
        jobs = list(self._jobs.values())

        if not jobs:
            return

        try:
            await asyncio.wait(jobs, timeout=self._grace)
        finally:
            for job in jobs:
                job.cancel()

            await asyncio.wait(jobs)

    # Look for work

    async def _look(self) -> None:
        """Start a job for each thread that needs a run and may have one."""
        clock = asyncio.get_running_loop().time
        decided = self._measure(await self._open_requests())
        began = clock()

        is_scan = began >= self._scan_not_before

        if is_scan:
            self._dead = await self._scan(decided)
            self._scan_not_before = clock() + _REST * (clock() - began)

        self.health.looks += 1
        self.health.store_errors = 0
        now = clock()

        due = dict.fromkeys([*decided, *self._dead])

        # Between two scans, a thread whose run failed is not known to be due again.
        if is_scan:
            self._retry = {
                thread_id: (pause, not_before)
                for thread_id, (pause, not_before) in self._retry.items()
                if now < not_before or thread_id in due or thread_id in self._jobs
            }

        for thread_id in due:
            if len(self._jobs) >= self._concurrency:
                return

            _, not_before = self._retry.get(thread_id, (0.0, 0.0))

            if thread_id not in self._jobs and now >= not_before:
                stale = self._dead.pop(thread_id, None)
                job = asyncio.create_task(self._job(thread_id, stale))
                self._jobs[thread_id] = job
                job.add_done_callback(partial(self._ended, thread_id))

    def _ended(self, thread_id: str, job: asyncio.Task[None]) -> None:
        del self._jobs[thread_id]
        self._job_ended.set()

    async def _open_requests(
        self, thread_id: str | None = None
    ) -> list[tuple[Entry, ApprovalRequest]]:
        """Return the requests that are undecided, or decided and not acted on."""
        entries = [
            entry
            for entry in await self._requests.entries()
            if entry.run_thread.startswith(self._prefix)
            and (thread_id is None or entry.run_thread == thread_id)
        ]

        requests = await _read_all(self._requests.of_entry, entries)
        return [
            (entry, request)
            for entry, request in zip(entries, requests, strict=True)
            if request is not None
        ]

    def _measure(
        self, requests: list[tuple[Entry, ApprovalRequest]]
    ) -> dict[str, list[Entry]]:
        """Update the health and the gauges; return decided entries, by thread."""
        health = self.health
        decided = _decided(requests)
        health.decided = sum(map(len, decided.values()))
        decisions = [(one, one.decision) for _, one in requests]
        health.oldest_undecided = _age(
            [one.requested_at for one, made in decisions if made is None]
        )
        health.oldest_decided = _age(
            [made.at or one.requested_at for one, made in decisions if made is not None]
        )

        if self._gauges is not None:
            self._gauges.record(health.oldest_undecided, health.oldest_decided)

        return decided

    async def _scan(self, decided: Iterable[str]) -> dict[str, LeaseState | None]:
        """Return the threads whose run died; with the lease's state, if it is stale.

        If the store cannot list its leases, only those of the decided threads are read.
        """
        if isinstance(self._cp, ListsThreads):
            await self._list_leases(self._cp)
        else:
            await self._read_leases(decided)

        found: dict[str, LeaseState | None] = {}

        for seen in self._leases.values():
            thread_id = seen.state.thread_id

            if thread_id is None or not self._is_mine(seen.state):
                continue

            if seen.stale is None:
                if seen.state.died is not None:
                    found[thread_id] = None

                continue

            read = partial(_already_read, seen.updated_at)
            seen.is_stale = await seen.stale.is_stale(read)

            if seen.is_stale:
                found[thread_id] = seen.state

        return found

    async def _list_leases(self, cp: ListsThreads) -> None:
        """Update the leases that were seen; read those that have changed."""
        listed: set[str] = set()

        # The lease of a long id is listed under its hash.
        for prefix in (f"{LEASES}:{self._prefix}", f"{LEASES}-of:"):
            async for page in self._pages(cp, prefix):
                listed.update(info.thread_id for info in page)
                changed = {
                    info.thread_id: info.updated_at
                    for info in page
                    if (seen := self._leases.get(info.thread_id)) is None
                    or seen.updated_at != info.updated_at
                }
                states = await _read_all(self._lease_state, list(changed))

                for (name, updated_at), state in zip(
                    changed.items(), states, strict=True
                ):
                    self._leases[name] = _SeenLease(
                        updated_at, state, self._stale_after
                    )

        for name in self._leases.keys() - listed:
            del self._leases[name]

    async def _read_leases(self, thread_ids: Iterable[str]) -> None:
        """Read the leases of these threads; those that have changed are new ones."""
        names = [self._terms(thread_id).lease_thread for thread_id in thread_ids]
        states = await _read_all(self._lease_state, names)
        before, self._leases = self._leases, {}

        for name, state in zip(names, states, strict=True):
            seen = before.get(name)

            if seen is None or not seen.state.same_term_and_heartbeat(state):
                seen = _SeenLease(None, state, self._stale_after)

            self._leases[name] = seen

    async def _pages(
        self, cp: ListsThreads, prefix: str
    ) -> AsyncIterator[list[ThreadInfo]]:
        """Yield the leases that can be listed; log the others, once."""
        after = None
        limit = _PAGE

        while True:
            try:
                page = await cp.list_threads(prefix=prefix, after=after, limit=limit)
            except CorruptThread as exc:
                if limit > 1:  # list one by one up to the damaged one
                    limit = 1
                    continue

                damaged = exc.thread_id

                if damaged not in self._damaged:
                    self._damaged.add(damaged)
                    log.exception("cannot list the lease %r", damaged)

                if not damaged.startswith(prefix) or damaged <= (after or ""):
                    return

                after, limit = damaged, _PAGE
                continue

            if not page:
                return

            yield page
            after = page[-1].thread_id

    async def _lease_state(self, lease_thread: str) -> LeaseState:
        try:
            return state_of(await self._cp.load(lease_thread))
        except CorruptThread:  # a person repairs it; the other threads go on
            log.exception("cannot read the lease %r", lease_thread)
            return state_of(None)

    def _terms(self, thread_id: str) -> Terms:
        return Terms(self._cp, thread_id, self._backoff, self._stale_after)

    # Run a thread

    async def _job(self, thread_id: str, stale: LeaseState | None) -> None:
        """Run the thread under its lease; after a failure, note when to try again."""
        try:
            await self._take_and_run(thread_id, stale)
        except asyncio.CancelledError as exc:
            # If this job was not cancelled, the function awaited another task that was.
            # Then the run has failed.
            task = asyncio.current_task()

            if task is None or task.cancelling():
                raise

            self._failed(thread_id, exc)
        except Exception as exc:
            self._failed(thread_id, exc)

    async def _take_and_run(self, thread_id: str, stale: LeaseState | None) -> None:
        terms = self._terms(thread_id)
        state = await terms.look()

        if state.term is not None:
            # A live runner has the lease, or renewed it while this worker read others.
            if stale is None or not state.same_term_and_heartbeat(stale):
                self._not_before(thread_id)
                return

            await terms.take_over(state.term.call.call_id)

        lease = thread_lease(
            self._cp,
            thread_id,
            stale_after=self._stale_after,
            timeout=0,
            holder=self.health.holder,
        )

        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(lease)
            except LeaseTimeout:
                self._not_before(thread_id)
                log.debug("another worker runs %r", thread_id)
                return

            await self._run(thread_id, terms, lease)

    async def _run(self, thread_id: str, terms: Terms, lease: Lease) -> None:
        """Run the thread if it still needs a run.

        After a run that ended well, the lease removes the mark of an earlier dead run.
        """
        entries = _decided(await self._open_requests(thread_id)).get(thread_id, [])
        has_mark = (await terms.look()).died is not None

        if not entries and not has_mark:
            lease.keep_mark()
            return

        # The mark comes first: however this run ends, the store shows that the thread
        # needs a run, until the lease removes the mark after a run that ended well.
        if not has_mark:
            await terms.mark_died()

        log.info("running %r", thread_id)
        self.health.running.append(thread_id)

        try:
            await self._call(thread_id, lease)
        finally:
            self.health.running.remove(thread_id)

        await lease.check()

        # The function saw these decisions, even if it now waits for another one.
        for entry in entries:
            await self._requests.end_entry(entry, "a worker ran the thread")

        self.health.ran += 1
        self._retry.pop(thread_id, None)
        log.info("%r ended", thread_id)

    async def _call(self, thread_id: str, lease: Lease) -> None:
        """Call the function; return if it ended, was denied, or waits for a person."""
        try:
            await self._agent(self._cp, lease)
        except Exception as exc:
            for one in _leaves(exc):
                match one:
                    # With a cause, the notifier failed: call the function again.
                    case EffectTimeout(holder=None, __cause__=None):
                        log.info("%r waits for an approval", thread_id)
                    case EffectDenied():
                        log.warning("the run of %r ended: %s", thread_id, one)
                    case _:
                        # Also a timeout while another run holds the effect: the end of
                        # that run wakes no worker.
                        raise

    def _not_before(self, thread_id: str) -> None:
        """Do not try the thread again at once: another runner has it."""
        pause, _ = self._retry.get(thread_id, (0.0, 0.0))
        now = asyncio.get_running_loop().time()
        self._retry[thread_id] = pause, now + self._pause() / 2

    def _failed(self, thread_id: str, exc: BaseException) -> None:
        pause, _ = self._retry.get(thread_id, (0.0, 0.0))
        pause = min(2 * pause or 1.0, _LONGEST_RETRY)
        now = asyncio.get_running_loop().time()
        self._retry[thread_id] = pause, now + pause
        self.health.failed += 1
        log.warning(
            "the run of %r failed; again in %g s", thread_id, pause, exc_info=exc
        )


def _leaves(exc: Exception) -> Iterator[Exception]:
    """Yield the exceptions of a group, as a ``TaskGroup`` raises it, or the one."""
    if isinstance(exc, ExceptionGroup):
        for inner in exc.exceptions:
            yield from _leaves(inner)
    else:
        yield exc


def _decided(
    requests: list[tuple[Entry, ApprovalRequest]],
) -> dict[str, list[Entry]]:
    """Return the entries whose requests are decided, by the thread to run."""
    found: dict[str, list[Entry]] = {}

    for entry, request in requests:
        if request.decision is not None:
            found.setdefault(entry.run_thread, []).append(entry)

    return found


def _age(times: list[datetime]) -> float | None:
    """Return the seconds since the oldest time; never negative, as clocks differ."""
    if not times:
        return None

    return max(0.0, (datetime.now(UTC) - min(times)).total_seconds())


async def _read_all(read: Callable[[T], Awaitable[R]], items: Sequence[T]) -> list[R]:
    """Return what ``read`` returns for each item; a few reads run in parallel."""
    found: list[R] = []

    for start in range(0, len(items), _AT_A_TIME):
        part = items[start : start + _AT_A_TIME]
        found += await asyncio.gather(*map(read, part))

    return found


async def _already_read(updated_at: datetime | None) -> datetime | None:
    """Stand in for a read of the heartbeat: the scan has read it."""
    return updated_at
