"""A disk that fails or is full, and a clock that jumps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from conformance.case import Case
from conformance.clause import Level, clause
from conformance.clauses.powerloss import new_store
from conformance.failure import Failure, Skip
from conformance.powerloss.recording import Report, reports
from conformance.powerloss.script import abilities_of
from conformance.powerloss.trial import Progress, Trial
from conformance.powerloss.writer import NOT_OPEN
from cpkit import ListsThreads

DURABLE = Level.DURABLE

STEPS = 12

WRITERS = ["b", "c"]
"""They write when the fault comes; the thread of ``a`` was written before."""

SPARES = [f"spare {n}" for n in range(9)]
"""They write afterwards. A call fails once in each thread of the writer's process."""

DAY = 24 * 60 * 60


Write = Callable[[Trial, dict[str, Any]], Awaitable[list[Report]]]
"""Runs a writer's job while a fault happens, and returns what the writer reported."""


async def _survives(case: Case, writes: list[Write], room: int = 0) -> None:
    """Let clients write through faults, and judge what they reported."""
    failed = 0

    async with new_store(case, embedded=True) as trial:
        found = await trial.run(await trial.job(["a"], 4, [[0]]))

        for n, write in enumerate(writes):
            count = len(trial.clients)
            spares = list(range(count + 2, count + 2 + len(SPARES)))
            names = [f"{name} {n}" for name in (*WRITERS, *SPARES)]
            size = case.random.randint(1, room) if room else 0
            job = await trial.job(names, STEPS, [[count, count + 1]], spares, size)
            now = await write(trial, job)
            failed += _check_errors(trial, now, spares)
            found += now
            progress = Progress.of(len(trial.clients))

            for report in found:
                progress.add(report)

            shown = [trial.described(report) for report in now if report.error]
            await trial.check_store(progress, "\n".join(["after a fault", *shown]))

    if not failed:
        raise Skip("not tested: no fault reached the store")


def _check_errors(trial: Trial, found: list[Report], spares: list[int]) -> int:
    """Check the types of errors, and that a client finished after the last of them."""
    errors = [report for report in found if report.error]

    for report in errors:
        if report.error != "BackendUnavailable":
            raise Failure(
                "BackendUnavailable for an operation that a fault made fail",
                f"{report.error}: {report.reason}",
                trial.described(report),
            )

    done = {report.client: report.step for report in found if not report.error}
    works = any(done.get(n) == len(trial.clients[n].steps) for n in spares)

    if not works and all(report.client != NOT_OPEN for report in errors):
        last = errors[-1].reason if errors else "no error was reported"
        raise Failure("a handle that works again after the fault", last)

    return len(errors)


def _injected(case: Case, fault: str, ranges: list[tuple[int, int]]) -> list[Write]:
    """Return for each range how to run a writer in which such a call fails."""

    def one(number: int) -> Write:
        async def write(trial: Trial, job: dict[str, Any]) -> list[Report]:
            options = [f"--inject={fault}:when={number}"]
            calls = await trial.record(job, options, fails=True)
            return [report for call in calls for report in reports(call)]

        return write

    random = case.random
    return [one(random.randint(*span)) for span in ranges for _ in range(case.times(1))]


@clause("faults.failed-sync", level=DURABLE, deadline=60)
async def failed_sync(case: Case) -> None:
    """After EIO of a sync nothing acknowledged is lost, and the handle works again."""
    fault = "?fsync,?fdatasync:error=EIO"
    await _survives(case, _injected(case, fault, [(2, 4), (3, 6), (5, 9)]))


@clause("faults.failed-write", level=DURABLE, deadline=60)
async def failed_write(case: Case) -> None:
    """After ENOSPC of a write nothing acknowledged is lost; the handle works again."""
    fault = "?write,?pwrite64,?writev,?pwritev,?pwritev2:error=ENOSPC"
    await _survives(case, _injected(case, fault, [(2, 4), (5, 20), (21, 40)]))


@clause("faults.short-write", level=DURABLE, deadline=60)
async def short_write(case: Case) -> None:
    """After a write that is cut short nothing is torn, and the handle works again."""

    async def write(trial: Trial, job: dict[str, Any]) -> list[Report]:
        return await trial.run(job)

    await _survives(case, [write] * case.times(3), room=500)


@clause("faults.clock-jumps", ListsThreads, "processes", level=DURABLE, deadline=40)
async def clock_jumps(case: Case) -> None:
    """Where the clock jumps back and forth, order, attempts and results stay right."""
    target = case.harness.elsewhere()
    assert target is not None, "the clause needs 'processes'"
    trial = Trial(case, target, None, abilities_of(case.cp))
    jumps = [case.random.choice((-2 * DAY, -1, 1, DAY)) for _ in range(2 * STEPS)]
    job = await trial.job([case.id() for _ in range(2)], STEPS, [[0, 1]], jumps=jumps)
    found = await trial.run(job)
    progress = Progress.of(2)
    newest: dict[str, str] = {}

    for report in found:
        if report.error:
            raise Failure("no error", f"{report.error}: {report.reason}")

        progress.add(report)
        step = trial.clients[report.client].steps[report.step - 1]
        last = newest.get(step.thread, "")

        # A deleted thread begins again, and a restored one has the times of its dump.
        if step.method in ("delete_thread", "restore_thread"):
            newest[step.thread] = ""
        elif report.reason < last:
            raise Failure(
                f"an updated_at that is not before {last}",
                report.reason,
                f"step {report.step}: {step}",
            )
        else:
            newest[step.thread] = report.reason

    await trial.check_store(progress, "after jumps of the clock")
