"""A power loss at any instant: what was acknowledged is there, and nothing is torn.

A writer is recorded while it uses a new store. The trace shows what was on disk at each
instant for certain, and what may have been. Each state that a power loss can leave is
written into the folder and opened. For a server, the writer starts it on the folder and
is recorded together with it; then the server is started on each state.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from conformance.case import Case
from conformance.clause import Level, clause
from conformance.difference import check_equal
from conformance.explain import explain
from conformance.failure import Failure, Skip
from conformance.harness import address
from conformance.operations import WRITES, Write
from conformance.powerloss.script import (
    SEVERAL_SECTORS,
    SHARED,
    abilities_of,
    continued,
    observe,
    outcome,
    perform,
    table,
)
from conformance.powerloss.trace import Call
from conformance.powerloss.trial import Moment, Trial
from cpkit import CallRecord, CheckpointerError, KeepsReceipts, StatesDurability
from cpkit.records import Survives

POWERLOSS = Level.POWERLOSS

NAMES = ["a", "b", "c", "d"]
SESSIONS = [[0, 1, 2], [3]]
"""Three clients at once, on two handles; then the store is opened again."""

LONE = 3
"""The client that is alone does each kind of write."""

_MEMORY = "/dev/shm"

STEPS = 16
"""Steps of each client, for which the writer takes about a second."""

SLOW_SYNCS = "--inject=?fsync,?fdatasync:delay_enter=50000:when=2+4"
"""Lets every fourth sync of a thread begin 50 milliseconds later."""

ROOM = 2**28
"""Bytes that a folder in memory must have; a server's data are up to 50 MB."""


@asynccontextmanager
async def new_store(case: Case, *, embedded: bool = False) -> AsyncIterator[Trial]:
    """Yield a trial in a new folder; skip where the store is not in a folder.

    With ``embedded`` skip servers too.
    """
    place = None if case.harness.maps_in_memory else _memory()

    with tempfile.TemporaryDirectory(prefix="cpkit-", dir=place) as temporary:
        # As the kernel shows it: without symbolic links.
        folder = Path(temporary, "disk").resolve()  # noqa: ASYNC240  # no store is open yet
        folder.mkdir()
        harness = await case.harness.in_folder(str(folder))

        if harness is None:
            raise Skip(
                "not tested: the harness cannot put a store in a folder; if the store "
                "keeps files, define in_folder() in its harness, or inspect() in its "
                "driver"
            )

        try:
            address(harness)
        except TypeError as exc:
            kind = type(harness).__qualname__
            raise Skip(
                f"not tested: another process cannot build the harness {kind}: {exc}; "
                "make it a dataclass of JSON values in a module"
            ) from exc

        is_served = harness.lacks("server") is None
        trial = Trial(case, harness, folder, abilities_of(case.cp), is_served)

        if is_served:
            if embedded:
                raise Skip("not tested: the faults are for an embedded store")

            # A server may have a user of its own.
            os.chmod(temporary, 0o711)
            await trial.create()

        yield trial


def _memory() -> str | None:
    """Return a folder in memory, where there is one.

    Syncs are recorded, and need not reach a real disk.
    """
    has_room = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > ROOM
    return _MEMORY if has_room else None


def _promise(case: Case) -> Survives:
    """Return what the store promises; skip where it promises nothing."""
    cp: object = case.cp

    if not isinstance(cp, StatesDurability):
        raise Skip(
            "the store does not state its durability; give it the property durability"
        )

    if cp.durability.survives is Survives.NONE:
        raise Skip("the store does not promise that anything survives")

    return cp.durability.survives


def _needs_machine(case: Case) -> None:
    promise = _promise(case)

    if promise is not Survives.MACHINE:
        case.skip(f"the store promises {promise}, not {Survives.MACHINE}")


async def _recorded(trial: Trial) -> list[Call]:
    """Record the clients of `SESSIONS`."""
    job = await trial.job(NAMES, STEPS, SESSIONS, lone=LONE)
    return await trial.record(job)


@clause("powerloss.acknowledged-survives", level=POWERLOSS, deadline=120)
async def acknowledged_survives(case: Case) -> None:
    """After a power loss everything acknowledged is there, and nothing else in part."""
    promise = _promise(case)
    lost = total = 0

    async with new_store(case) as trial:
        calls = await _recorded(trial)

        for moment in trial.moments(calls, trial.states(200)):
            total += 1

            try:
                await trial.check(moment)
            except Failure:
                if promise is Survives.MACHINE:
                    raise

                lost += 1

    if promise is not Survives.MACHINE:
        case.skip(
            f"the store promises {promise}, not {Survives.MACHINE}; {lost} of {total} "
            "states after a power loss had lost something acknowledged"
        )


MEGABYTES, LARGE = 5_000_000, 1_000_000
"""Characters of the large messages in all, and of each. Engines begin a new log after
four megabytes, or write what is in memory to another file."""


@clause("powerloss.megabytes-survive", level=POWERLOSS, deadline=120)
async def megabytes_survive(case: Case) -> None:
    """What is acknowledged after megabytes of writes survives a power loss too."""
    _needs_machine(case)
    size = LARGE

    if (limits := getattr(case.cp, "limits", None)) is not None:
        size = min(LARGE, limits.max_value - 100)  # a message is a little more

    async with new_store(case) as trial:
        count = -(-MEGABYTES // size)
        calls = await trial.record(await trial.job(["a"], count, [[0]], large=size))

        for moment in trial.moments(calls, trial.states(12)):
            await trial.check(moment)


@clause("powerloss.next-write-works", level=POWERLOSS, deadline=120)
async def next_write_works(case: Case) -> None:
    """After a power loss the store takes the next writes of all threads."""
    _needs_machine(case)

    async with new_store(case) as trial:
        calls = await _recorded(trial)
        moments = trial.moments(calls, trial.states(120), variants=("a mixture",))
        found = list(moments)
        torn = [moment for moment in found if moment.state.torn]
        everyone = range(len(trial.clients))
        some = case.random.sample(found, min(trial.states(40), len(found)))
        plans = [(moment, [*everyone]) for moment in some]
        # A store may repair at its first write only: each kind is the first one twice.
        plans += [
            (moment, [case.random.choice(everyone)])
            for moment in islice(cycle(torn), trial.states(2 * len(WRITES)))
        ]
        kinds = table(trial.abilities)
        rows = cycle(case.random.sample(kinds, len(kinds)))

        for moment, numbers in plans:
            trial.write(moment.state)

            try:
                async with trial.serving(str(moment)):
                    await _goes_on(trial, moment, numbers, rows)
            except Exception as exc:
                told = explain(exc, _goes_on)
                where = f"{moment}\n{told.where}"
                raise Failure(told.expected, told.seen, where) from exc


async def _goes_on(
    trial: Trial, moment: Moment, numbers: list[int], rows: Iterator[Write]
) -> None:
    """Write threads after a power loss, each the first time by any kind of write."""
    async with trial.harness.open() as opened:
        cp: Any = opened
        done = await trial.done(cp, moment.progress, "before the next write")

    clients = [
        continued(trial.clients[n], done[n], next(rows), "next") for n in numbers
    ]

    async with trial.harness.open() as opened:
        cp = opened

        for n, client in zip(numbers, clients, strict=True):
            for step in client.steps[done[n] :]:
                await perform(cp, step)

    async with trial.harness.open() as opened:
        cp = opened

        for client in clients:
            seen = await observe(cp, client, trial.abilities)
            wanted = await outcome(client, trial.abilities)
            check_equal(seen, wanted, f"{client.thread!r} after the next writes")


@clause("powerloss.second-loss", level=POWERLOSS, deadline=120)
async def second_loss(case: Case) -> None:
    """After a power loss and new writes, a second power loss loses nothing either."""
    _needs_machine(case)

    async with new_store(case) as trial:
        calls = await _recorded(trial)
        first = _torn(trial, calls)
        trial.write(first.state)
        job = await trial.job(["e", "f"], STEPS, [[4, 5]])
        calls = await trial.record(job)

        for moment in trial.moments(calls, trial.states(60), before=first):
            await trial.check(moment)


def _torn(trial: Trial, calls: list[Call]) -> Moment:
    """Return a state that the store has to repair, if there is one.

    The states are not kept: a server's are large.
    """
    chosen, count = None, 0

    for moment in trial.moments(calls, trial.states(120), variants=("a mixture",)):
        count += moment.state.torn

        if chosen is None or (
            moment.state.torn and trial.case.random.random() * count < 1
        ):
            chosen = moment

    assert chosen is not None, "the writer made no system call"
    return chosen


@clause("powerloss.failed-sync", level=POWERLOSS, deadline=120)
async def failed_sync(case: Case) -> None:
    """After a failed sync, what is acknowledged later survives a power loss too."""
    # After a failed sync the kernel marks the pages as written, so that a second sync
    # does not write them.
    _needs_machine(case)

    # A small write that a failed sync lost shares its sector with the next write, whose
    # sync writes both. A large one has sectors that no later sync writes.
    for large in (0, SEVERAL_SECTORS):
        async with new_store(case, embedded=True) as trial:
            calls = await trial.record(await trial.job(["a"], 4, [[0]]))
            *_, first = trial.moments(calls, 1000, variants=("everything",))
            job = await trial.job(
                ["b", "c", "d", "e"], STEPS, [[1, 2]], spares=[3, 4], large=large
            )
            when = case.random.randint(4, 8)
            fault = f"--inject=?fsync,?fdatasync:error=EIO:when={when}"
            calls = await trial.record(job, [fault], fails=True)

            for moment in trial.moments(calls, trial.states(30), before=first):
                await trial.check(moment)


@clause("powerloss.kill-at-every-call", level=POWERLOSS, deadline=120)
async def kill_at_every_call(case: Case) -> None:
    """After SIGKILL between any two system calls everything acknowledged is there."""
    _promise(case)

    async with new_store(case) as trial:
        calls = await _recorded(trial)

        for moment in trial.moments(calls, trial.states(120), variants=("everything",)):
            await trial.check(moment)


@clause("powerloss.one-holder", KeepsReceipts, level=POWERLOSS, deadline=120)
async def one_holder(case: Case) -> None:
    """After a power loss a key has one holder at most, whatever the store promises."""
    # A client claims the key once it sees that another client's attempt has failed. So
    # that failure must be on disk before the claim is.
    promise = _promise(case)
    keeps_all = promise is Survives.MACHINE

    async with new_store(case) as trial:
        # The threads are created first, so that a power loss can leave a part of them.
        await trial.run(await trial.job(NAMES, 1, [[0, 1, 2, 3]]))
        trial.keep()
        job = await trial.job(NAMES, STEPS // 2, [[4, 5, 6, 7]], shares=True)
        calls = await trial.record(job, [SLOW_SYNCS])

        for moment in trial.moments(calls, trial.states(80), ("a mixture",)):
            trial.write(moment.state)

            try:
                found = await _shared_calls(trial, str(moment))
            except (CheckpointerError, Failure) as exc:
                if keeps_all:
                    seen = f"{type(exc).__name__}: {exc}"
                    raise Failure("a store that loads", seen, str(moment)) from exc

                continue

            _check_holders(found, moment)

            if keeps_all:
                _check_steps(found, moment)


async def _shared_calls(trial: Trial, where: str) -> list[list[CallRecord]]:
    """Return the calls of the shared key in the threads of its clients."""
    async with trial.serving(where), trial.harness.open() as cp:
        assert isinstance(cp, KeepsReceipts)
        found = [await cp.list_calls(client.thread) for client in trial.clients[4:]]
        return [
            [one for one in calls if one.call.idempotency_key == SHARED]
            for calls in found
        ]


def _check_holders(found: list[list[CallRecord]], moment: Moment) -> None:
    held = [
        f"attempt {one.attempt} in {one.thread_id!r}, {one.status}"
        for calls in found
        for one in calls
        if one.status != "failed"
    ]

    if len(held) > 1:
        expected = "one call at most that holds the key"
        raise Failure(expected, " and ".join(held), str(moment))


def _check_steps(found: list[list[CallRecord]], moment: Moment) -> None:
    """Check that each client has its acknowledged claims and results."""
    steps = [sum(1 + (one.status == "failed") for one in calls) for calls in found]
    least, most = moment.progress.least[4:], moment.progress.most[4:]

    if not all(a <= b <= c for a, b, c in zip(least, steps, most, strict=True)):
        expected = f"the acknowledged claims and results of each client: {least}"
        raise Failure(expected, str(steps), str(moment))
