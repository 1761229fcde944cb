"""A worker: calls an agent's function for threads that need a run.

::

    async def agent(cp, lease):
        await ledger.recover(lease.thread_id, tools, lease=lease)
        ...  # the agent's own loop

    await Worker(cp, agent).run()

A thread needs a run if it was submitted, if its last run died or ended unfinished, or
if a person decided an approval request for which it waits. The store's list of runs
(`cpkit.runs`) has all of this, so a worker may be killed at any moment. A run lasts for
one term of the thread's lease (`cpkit.lease`), which says when a run has ended well.

The worker only decides when to call the function. It *looks* at the list of runs and at
their requests again and again, and starts a *job* for each thread that needs a run: the
job takes the thread's lease and calls the function. So any number of workers run each
thread once at a time. An effect that needs an undecided approval raises
``EffectTimeout`` at once: the thread waits, and the worker calls the function again
after the decision. ``EffectDenied`` ends the run. An ``ExceptionGroup`` of these alone
counts as they do. After any other exception the worker calls the function again later,
with growing pauses.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from math import inf
from typing import Any

from cpkit.driver import Handle
from cpkit.driver.ids import check_id
from cpkit.driver.metrics import provided_meter
from cpkit.effects.effect import check_callback, copy_json
from cpkit.effects.requests import ApprovalRequest, Requests
from cpkit.errors import BackendUnavailable
from cpkit.fenced import load_range
from cpkit.lease import Lease, LeaseTimeout, this_process, thread_lease
from cpkit.protocol import Checkpointer, ErasesThreads
from cpkit.records import JsonValue
from cpkit.retention import Retention, check_abilities, prune
from cpkit.runs.threads import (
    HINTS,
    RunList,
    RunState,
    RunThread,
    Wake,
    read_all,
    stale_after_of,
    wake_run,
)
from cpkit.runs.waiting import (
    STALE_AFTER,
    StaleDetector,
    Wakeups,
    check_interval,
    check_limit,
)

__all__ = ["Agent", "Health", "Worker", "submit"]

log = logging.getLogger("cpkit.worker")

Agent = Callable[[Checkpointer[Any], Lease], Awaitable[object]]
"""Runs one thread: the thread of the lease."""

_LONGEST_RETRY = 300.0

_REST = 9
"""The rest after a look at the list of runs, as a multiple of the look's time."""

PRUNING = "cpkit:retention"
"""The thread whose extra says for each prefix when a worker pruned last."""

_PRUNING_PAUSE = 3600.0

_LOOKS_AT_REQUESTS = 4
"""Undecided requests that a look reads again, in turn: a hint may have got lost."""


async def submit(
    cp: Checkpointer[Any],
    thread_id: str,
    *,
    after: float | timedelta | datetime | None = None,
    event: JsonValue = None,
    by: str | None = None,
) -> None:
    """Put a thread before the workers of a store: one of them runs it.

    At once, or ``after`` so many seconds or a time. ``event`` is recorded with it, and
    reaches the function in ``lease.wakes``. Each submission that a run has not seen is
    followed by one more run. ``by`` says who submits; the default is this process.
    """
    check_id("thread_id", thread_id)

    if isinstance(after, (int, float)):
        check_limit("after", after)
        after = timedelta(seconds=after)

    if isinstance(after, timedelta):
        after = datetime.now(UTC) + after

    if after is not None and after.tzinfo is None:
        raise ValueError(f"after must have a time zone, and {after} has none")

    wake = Wake("submitted", copy_json(event, "event"), by or this_process(), after)
    await wake_run(cp, thread_id, wake)


@dataclass
class Health:
    """What a worker does and has done, for people and for health probes."""

    holder: str
    concurrency: int = 1
    ran: int = 0
    """Calls of the function that ended, were denied, or wait for a decision."""
    failed: int = 0
    """Runs that ended in another way; the worker repeats them."""
    running: list[str] = field(default_factory=list)
    """The threads whose function is being called."""
    waiting: int = 0
    """Those of them in which every open effect waits for a person."""
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
        """Whether the last look at the store succeeded, and runs can begin."""
        is_full = self.waiting >= self.concurrency
        return self.looks > 0 and self.store_errors == 0 and not is_full

    def as_json(self) -> dict[str, Any]:
        """Return all fields, and ``ok``, as JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        state = "ok" if self.ok else "no store"

        if self.waiting >= self.concurrency:
            state = "full of runs that wait for people: set approval_timeout=0"

        running = ", ".join(map(repr, self.running)) or "nothing"
        return (
            f"{self.holder}: {state}; running {running}; {self.ran} ran, "
            f"{self.failed} failed, {self.decided} decided and not acted on"
        )


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


@dataclass
class _KnownRun:
    """A run of the list as last read, and since when the worker knows this state."""

    state: RunState
    since: float
    stale: StaleDetector | None = None
    is_stale: bool = False
    failures: int = 0
    """Jobs in a row that could not record how they ended."""


@dataclass
class _KnownRequest:
    """A request as last read, and since when this worker knows its decision."""

    read_at: float = -inf
    request: ApprovalRequest | None = None
    decided_since: float = inf


class Worker:
    """Calls ``agent(cp, lease)`` for each thread that needs a run.

    ``prefix`` limits it to threads whose ids start with it. ``concurrency`` bounds the
    threads that run at a time. ``stale_after`` is that of the leases it takes. ``poll``
    is the longest time between two looks at the store; `watch` wakes the worker
    earlier. A stopped worker gives its runs ``grace`` seconds to end, and then cancels
    them; another worker runs their threads again.

    `run` applies ``retention`` when no worker of the store did so for an hour.

    A store that cannot list its threads, or do what ``retention`` asks, is a
    ``TypeError``.
    """

    def __init__(
        self,
        cp: Checkpointer[Any],
        agent: Agent,
        *,
        prefix: str = "",
        concurrency: int = 4,
        stale_after: float = STALE_AFTER,
        poll: float = 2.0,
        grace: float = 30.0,
        holder: str | None = None,
        retention: Retention | None = None,
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

        if retention is not None:
            check_abilities(cp, retention)

        self.health = Health(holder or f"worker {this_process()}", concurrency)
        self._cp = cp
        self._agent = agent
        self._concurrency = concurrency
        self._stale_after = stale_after
        self._poll = poll
        self._grace = grace
        self._retention = retention
        self._runs = RunList(cp, prefix)
        self._requests = Requests(cp)
        meter = provided_meter()
        self._gauges = None if meter is None else _Gauges(meter, cp)
        self._seen: dict[str, _KnownRun] = {}
        self._seen_requests: dict[str, _KnownRequest] = {}
        self._hints_read: int | None = None
        self._scan_not_before = -inf
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._leases: dict[str, Lease] = {}
        self._job_ended = asyncio.Event()

    async def submit(
        self,
        thread_id: str,
        *,
        after: float | timedelta | datetime | None = None,
        event: JsonValue = None,
    ) -> None:
        """Put a thread before the workers of the store, as the function `submit`."""
        by = self.health.holder
        await submit(self._cp, thread_id, after=after, event=event, by=by)

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Watch the store and run threads, until ``stop`` is set."""
        stop = stop or asyncio.Event()
        stopping = asyncio.create_task(stop.wait())
        pruning = asyncio.create_task(self._prune_every_hour(self._retention))

        try:
            while not stop.is_set():
                try:
                    async with Wakeups(self._cp, HINTS) as wakeups:
                        await self._look_and_wait(wakeups, stopping)
                except BackendUnavailable as exc:
                    self.health.store_errors += 1
                    log.warning("the store is away: %s", exc)
                    await asyncio.wait([stopping], timeout=self._poll)
        finally:
            stopping.cancel()
            pruning.cancel()

            try:
                await self._end_jobs()
            finally:
                await asyncio.wait([pruning])

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
        held: list[_KnownRun] | None = None

        try:
            while True:
                self._scan_not_before = -inf
                await self._look()
                alive = [s for s in self._seen.values() if s.stale and not s.is_stale]
                held = alive if held is None else [one for one in held if one in alive]

                if self._jobs:
                    await asyncio.wait(list(self._jobs.values()))
                elif wait_for_stale and held:
                    await asyncio.sleep(self._pause())
                else:
                    return self.health.ran + self.health.failed - before
        finally:
            await self._end_jobs()

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
        pauses = [one.stale.longest_pause for one in self._seen.values() if one.stale]
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

    async def _prune_every_hour(self, policy: Retention | None) -> None:
        """Apply the policy when no worker did so for an hour; errors are logged.

        Two workers may do so at once, which only costs time.
        """
        while policy is not None:
            try:
                pause = await self._until_pruning(policy)

                if pause <= 0:
                    now = datetime.now(UTC).isoformat()
                    await self._cp.save_extra(PRUNING, {policy.prefix: now})
                    log.info("pruned %s", await prune(self._cp, policy))
                    pause = _PRUNING_PAUSE
            except Exception:
                log.warning("could not prune", exc_info=True)
                pause = _PRUNING_PAUSE

            await asyncio.sleep(pause)

    async def _until_pruning(self, policy: Retention) -> float:
        """Return the seconds until an hour has passed since the last prune."""
        data = await self._cp.load(PRUNING)
        last = None if data is None else data.extra.get(policy.prefix)

        if last is None:
            return 0

        age = (datetime.now(UTC) - datetime.fromisoformat(last)).total_seconds()
        return min(_PRUNING_PAUSE - age, _PRUNING_PAUSE)

    # Look for work

    async def _look(self) -> None:
        """Start a job for each thread that needs a run and may have one."""
        clock = asyncio.get_running_loop().time
        hinted = await self._read_hints()
        began = clock()

        if began >= self._scan_not_before:
            await self._runs.refresh()
            self._scan_not_before = clock() + _REST * (clock() - began)
        else:
            await read_all(
                self._runs.reload, [one["run"] for one in hinted if "run" in one]
            )

        await self._note_runs()
        await self._note_requests({one.get("request") for one in hinted})
        self._measure()
        self.health.looks += 1
        self.health.store_errors = 0

        for thread_id, seen in list(self._seen.items()):
            if len(self._jobs) >= self._concurrency:
                return

            if thread_id not in self._jobs and self._is_due(seen):
                job = asyncio.create_task(self._job(thread_id, seen))
                self._jobs[thread_id] = job
                job.add_done_callback(partial(self._ended, thread_id))

    def _ended(self, thread_id: str, job: asyncio.Task[None]) -> None:
        del self._jobs[thread_id]
        self._job_ended.set()

    async def _read_hints(self) -> list[dict[str, Any]]:
        """Return the hints since the last look; none at the first one."""
        start = self._hints_read
        stop = 0 if start is None else None
        data = await load_range(self._cp, HINTS, start or 0, stop)
        self._hints_read = 0 if data is None else data.version

        if data is None or start is None:
            return []

        if start > data.version:
            self._hints_read = 0  # the thread was started again: all are new
            return await self._read_hints()

        return data.messages

    async def _note_runs(self) -> None:
        """Note what has changed in the list of runs, and which holder is silent."""
        now = asyncio.get_running_loop().time()
        states = self._runs.mine()
        self._seen = {n: one for n, one in self._seen.items() if n in states}

        for thread_id, state in states.items():
            seen = self._seen.get(thread_id)

            if seen is None or seen.state != state:
                before, seen = seen, _KnownRun(state, now)
                self._seen[thread_id] = seen

                if state.term is not None:
                    seen.stale = StaleDetector(stale_after_of(state.term))

                    if before is not None and before.state.term == state.term:
                        seen.failures, seen.since = before.failures, before.since

            if seen.stale is not None:
                # The list was read, and with it what a heartbeat would change.
                seen.is_stale = await seen.stale.is_stale(partial(_read, state))

    async def _note_requests(self, hinted: set[Any]) -> None:
        """Read the requests that runs wait for: new, hinted and some other ones."""
        now = asyncio.get_running_loop().time()
        asks = {
            ask.request: (ask, thread_id)
            for thread_id, seen in self._seen.items()
            for ask in seen.state.asks.values()
        }
        known = self._seen_requests
        self._seen_requests = {
            name: known.get(name) or _KnownRequest() for name in asks
        }
        is_open = [n for n, one in self._seen_requests.items() if not _is_decided(one)]
        is_open.sort(key=lambda name: self._seen_requests[name].read_at)
        wanted = {n for n in is_open if n not in known or n in hinted}
        wanted |= set(is_open[:_LOOKS_AT_REQUESTS])
        found = await read_all(
            self._requests.of_ask, [asks[name][0] for name in wanted]
        )

        for name, request in zip(wanted, found, strict=True):
            seen, thread_id = self._seen_requests[name], asks[name][1]
            seen.read_at = now

            if request == "gone":
                await RunThread(self._cp, thread_id).add(settled=name)
                await self._runs.reload(thread_id)
            elif isinstance(request, ApprovalRequest):
                seen.request = await self._expired(request)

            # A damaged request stays on the list, and is read again: the log, cpkit
            # pending and cpkit doctor name it, and a person repairs it.
            if _is_decided(seen):
                seen.decided_since = min(seen.decided_since, now)

    async def _expired(self, request: ApprovalRequest) -> ApprovalRequest | None:
        """Return the request, which ends here if its time is over."""
        if request.decision is None and await self._requests.seconds_left(request) < 0:
            return await self._requests.expire(request)

        return request

    def _measure(self) -> None:
        """Update the health and the gauges."""
        health, now = self.health, datetime.now(UTC)
        requests = [s.request for s in self._seen_requests.values() if s.request]
        decided = [one for one in requests if one.decision is not None]
        health.decided = len(decided)
        health.oldest_undecided = _age(
            now, [one.requested_at for one in requests if one.decision is None]
        )
        health.oldest_decided = _age(
            now, [one.record.resolved_at or one.requested_at for one in decided]
        )
        health.waiting = sum(
            bool(one.effects) and not one.is_unfinished for one in self._leases.values()
        )

        if self._gauges is not None:
            self._gauges.record(health.oldest_undecided, health.oldest_decided)

    def _is_due(self, seen: _KnownRun) -> bool:
        state = seen.state

        asks = [self._seen_requests[name] for name in state.asks]
        decided = [one.decided_since for one in asks if _is_decided(one)]

        if failures := state.failures + seen.failures:
            pause = min(2.0 ** min(failures - 1, 16), _LONGEST_RETRY)
            is_rested = asyncio.get_running_loop().time() - seen.since >= pause

            # A decision that came after the failure is a new reason to run.
            if not is_rested and not any(since > seen.since for since in decided):
                return False

        if state.term is not None:
            return seen.is_stale

        if not (state.wakes or state.asks):
            # Nothing is open, and the end of its lease deletes the thread.
            return isinstance(self._cp, ErasesThreads)

        return bool(decided) or any(wake.is_due for wake in state.wakes)

    # Run a thread

    async def _job(self, thread_id: str, seen: _KnownRun) -> None:
        """Run the thread under its lease, if it still needs a run."""
        run = RunThread(self._cp, thread_id)

        try:
            if seen.state.term is not None:
                state = await run.look()

                if not state.same_term_and_heartbeat(seen.state):
                    return  # it was renewed, or has ended

                if not await run.take_over(state):
                    return  # another worker did, and runs it

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
                    return  # another worker runs it

                await self._run(thread_id, lease)
        except asyncio.CancelledError as exc:
            # If this job was not cancelled, the function awaited another task that was.
            # Then the run has failed.
            task = asyncio.current_task()

            if task is None or task.cancelling():
                raise

            self._failed(thread_id, seen, exc)
        except Exception as exc:
            self._failed(thread_id, seen, exc)
        finally:
            with suppress(BackendUnavailable):
                await self._runs.reload(thread_id)

    async def _run(self, thread_id: str, lease: Lease) -> None:
        state = lease.began
        decided = {
            ask.request
            for ask in state.asks.values()
            if isinstance(one := await self._requests.of_ask(ask), ApprovalRequest)
            and one.decision is not None
        }

        if not decided and not any(wake.is_due for wake in state.wakes):
            lease.run_no_agent()
            return

        # The function sees these decisions, even if it then waits for another one.
        lease.seen |= decided
        lease.unattended = True
        log.info("running %r", thread_id)
        self.health.running.append(thread_id)
        self._leases[thread_id] = lease

        try:
            await self._agent(self._cp, lease)
        except Exception as exc:
            if not lease.would_end_well(exc):
                raise

            log.info("the run of %r ended for now: %s", thread_id, exc)
        finally:
            self.health.running.remove(thread_id)
            del self._leases[thread_id]

        await lease.check()

        if lease.is_unfinished:
            self.health.failed += 1
            log.warning("the run of %r left an effect open; it is repeated", thread_id)
        else:
            self.health.ran += 1
            log.info("%r ended", thread_id)

    def _failed(self, thread_id: str, seen: _KnownRun, exc: BaseException) -> None:
        seen.failures += 1
        seen.since = asyncio.get_running_loop().time()
        self.health.failed += 1
        log.warning("the run of %r failed; it is repeated", thread_id, exc_info=exc)


def _is_decided(seen: _KnownRequest) -> bool:
    return seen.request is not None and seen.request.decision is not None


def _age(now: datetime, times: list[datetime]) -> float | None:
    """Return the seconds since the oldest time; never negative, as clocks differ."""
    return max(0.0, (now - min(times)).total_seconds()) if times else None


async def _read(state: RunState) -> JsonValue:
    """Stand in for a read of the heartbeat: the list of runs has it."""
    return state.heartbeat
