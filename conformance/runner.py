"""Run one clause against one store, within its deadline.

Each clause runs in its own thread with its own event loop. At the deadline the runner
cancels the clause. If the store blocks the event loop or swallows the cancellation, the
runner abandons the thread. Either way the clause fails and the run continues.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Any, cast

from conformance.case import Case
from conformance.clause import Clause
from conformance.explain import explain
from conformance.failure import Failure, Skip
from conformance.harness import Harness
from conformance.slowdown import growth, slowdown

__all__ = [
    "Hung",
    "Outcome",
    "Patience",
    "Status",
    "Unsupported",
    "perform",
    "run_clause",
]

HURRIED, SHORTEST = 3.0, 0.3
"""Seconds, on an idle machine, that a clause has after another one has hung.

After each further one that hangs the time is half as long."""

TOO_MANY = 12
"""Clauses that hang until no further one is begun."""

GRACE = 3.0
"""Seconds that a cancelled clause has to end, before its thread is abandoned."""


class Status(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"
    SKIPPED = "skipped"


class Unsupported(Skip):
    """The store does not implement an optional protocol that the clause needs."""


class Hung(Failure):
    """A clause did not end within its deadline."""


@dataclass(frozen=True)
class Outcome:
    """The result of one clause.

    ``reason`` says why the clause did not pass. The fields from ``expected`` to
    ``error`` are set only for a failure: what was expected, what was seen, where, the
    traceback as text, and the exception itself. ``acknowledged`` and ``lost`` count the
    writes of a clause that loses a leader.
    """

    clause: Clause
    status: Status
    seconds: float
    reason: str = ""
    expected: str = ""
    seen: str = ""
    where: str = ""
    trace: str = ""
    error: BaseException | None = None
    acknowledged: int = 0
    lost: int = 0


class Patience:
    """How long a run waits for a store that hung before: one deadline in all.

    After the first clause that hung, each clause has `HURRIED` seconds at most, and
    less after others. One that does not end by then is skipped, and the reason names
    the first. Where the store hangs in every handle, or in `TOO_MANY` clauses, no
    further clause is begun.
    """

    def __init__(self) -> None:
        self.hung = ""
        self._is_dead: bool | None = None
        self._undecided = 0

    def attempt(self, clause: Clause, case: Case) -> BaseException | None:
        """Run the check, and return what it raised."""
        if not self.hung:
            error = _attempt(clause, case)
            self.hung = clause.id if isinstance(error, Hung) else ""
            return error

        if self._is_dead is None:
            probe = replace(clause, needs=(), deadline=HURRIED, check=_use)
            answer = _attempt(probe, Case(case.harness, case.random))
            self._is_dead = isinstance(answer, Hung)

        if self._is_dead or self._undecided == TOO_MANY:
            return Skip(f"not run: the store hangs since {self.hung}")

        limit = max(HURRIED / 2**self._undecided, SHORTEST)
        error = _attempt(replace(clause, deadline=min(clause.deadline, limit)), case)

        if isinstance(error, Hung):
            self._undecided += 1
            return Skip(
                f"not decided in {limit:g} s, after {self.hung} hung; run it alone "
                f"with --clause {clause.id}"
            )

        return error


async def _use(case: Case) -> None:
    """Do what nearly every clause does."""
    thread = case.id()
    await case.cp.append(thread, [{"n": 1}])
    await case.cp.load(thread)


def run_clause(
    clause: Clause,
    harness: Harness,
    *,
    seed: int = 0,
    rounds: float = 1.0,
    patience: Patience | None = None,
) -> Outcome:
    """Return the outcome of the clause; an exception of the check is in it.

    ``patience`` is that of the whole run, if there is one.
    """
    start = time.monotonic()
    case = _case(clause, harness, seed, rounds)
    error = (patience or Patience()).attempt(clause, case)
    outcome = Outcome(
        clause,
        Status.PASSED,
        time.monotonic() - start,
        acknowledged=case.acknowledged,
        lost=case.lost,
    )

    if error is None:
        return outcome

    if isinstance(error, Skip):
        is_unsupported = isinstance(error, Unsupported)
        status = Status.UNSUPPORTED if is_unsupported else Status.SKIPPED
        return replace(outcome, status=status, reason=str(error))

    failure = explain(error, clause.check)
    return replace(
        outcome,
        status=Status.FAILED,
        reason=str(error),
        expected=failure.expected,
        seen=failure.seen,
        where=failure.where,
        trace="".join(traceback.format_exception(error)),
        error=error,
    )


def perform(
    clause: Clause,
    harness: Harness,
    *,
    seed: int = 0,
    rounds: float = 1.0,
    patience: Patience | None = None,
) -> Case:
    """Run the check and return its case.

    Raises the check's exception, `Skip`, `Unsupported` or `Hung`.
    """
    __tracebackhide__ = True  # pytest shows the frames of the clause only
    case = _case(clause, harness, seed, rounds)
    error = (patience or Patience()).attempt(clause, case)

    if error is not None:
        raise error

    return case


def _case(clause: Clause, harness: Harness, seed: int, rounds: float) -> Case:
    shares = not {"handles", "processes"}.isdisjoint(clause.abilities)
    return Case(harness, Random(f"{seed} {clause.id}"), seed, rounds, shares)


class _Deadline:
    """How long a clause may take: longer if the machine has become busier meanwhile."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._more: float | None = None
        self._lock = threading.Lock()

    def grow(self) -> float:
        """Return by how many seconds it grows, when it has passed; measured once."""
        with self._lock:
            if self._more is None:
                self._more = self.seconds * (growth() - 1)
                self.seconds += self._more

            return self._more


def _attempt(clause: Clause, case: Case) -> BaseException | None:
    """Run the check in a thread; return what it raised, a `Skip` or a `Hung` too."""
    for ability in clause.abilities:
        lack = case.harness.lacks(ability)

        if lack is not None:
            return Skip(lack)

    deadline = _Deadline(clause.deadline * max(1.0, case.rounds) * slowdown())
    raised: list[BaseException] = []

    def body() -> None:
        __tracebackhide__ = True

        try:
            _run(clause, case, deadline)
        except BaseException as exc:
            raised.append(exc)

            if case.uses_handles and not isinstance(exc, Skip):
                raised.append(_explain_private_stores(case, exc))

    thread = threading.Thread(target=body, name=clause.id, daemon=True)
    thread.start()
    # A clause with event loops of its own cannot be cancelled, so it gets no grace.
    thread.join(deadline.seconds + (0 if clause.runs_own_loops else GRACE))

    if thread.is_alive():
        thread.join(deadline.grow())

    if raised:
        return raised[-1]

    if thread.is_alive():
        return Hung(
            f"an end within {deadline.seconds:g} s",
            "a thread that still runs",
            _stack(thread),
        )

    return None


def _explain_private_stores(case: Case, error: BaseException) -> BaseException:
    """Return the likely cause of the error: two handles do not share a store.

    Return the error itself if they do.
    """

    async def is_shared() -> bool:
        async with asyncio.timeout(GRACE), case.open() as one, case.open() as other:
            thread_id = case.id("shared")
            await one.append(thread_id, [{}])
            return await other.load(thread_id) is not None

    try:
        with asyncio.Runner() as runner:
            if runner.run(is_shared()):
                return error
    except Exception:  # the clause's own error says more
        return error

    cause = Failure(
        "handles that share one store",
        f"a store of its own for each handle of {case.harness.name}",
        "the harness: let each call open the same path, URL or name, or set "
        "shared = False on a Harness",
    )
    cause.__cause__ = error
    return cause


def _run(clause: Clause, case: Case, deadline: _Deadline) -> None:
    __tracebackhide__ = True
    with asyncio.Runner() as runner:
        runner.run(case.harness.reset())

        if not clause.runs_own_loops:
            runner.run(_within_deadline(clause, case, deadline))
            return

    clause.check(case)


async def _within_deadline(clause: Clause, case: Case, deadline: _Deadline) -> None:
    """Run the clause as a task, and cancel every task at the deadline."""
    __tracebackhide__ = True
    task = asyncio.create_task(_with_store(clause, case))
    done, _ = await asyncio.wait([task], timeout=deadline.seconds)

    if not done and (more := deadline.grow()):
        done, _ = await asyncio.wait([task], timeout=more)

    if done:
        task.result()
        return

    waits = "".join(map(_waits_at, asyncio.all_tasks() - {asyncio.current_task()}))

    # Repeated, because a cancelled task may wait for other tasks before it ends.
    while not done:
        for other in asyncio.all_tasks() - {asyncio.current_task()}:
            other.cancel()

        done, _ = await asyncio.wait([task], timeout=0.1)

    raise Hung(f"an end within {deadline.seconds:g} s", "tasks that still wait", waits)


async def _with_store(clause: Clause, case: Case) -> None:
    __tracebackhide__ = True

    async with case.open() as cp:
        for protocol in clause.protocols:
            if not isinstance(cp, protocol):
                raise Unsupported(f"the store does not implement {protocol.__name__}")

        case._cp = cp
        await cast(Awaitable[None], clause.check(case))


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(cast(int, thread.ident))
    stack: Any = [] if frame is None else traceback.extract_stack(frame)[-3:]
    return "".join(traceback.format_list(stack))


def _waits_at(task: asyncio.Task[Any]) -> str:
    """Return the innermost line outside asyncio where a task waits."""
    awaited: Any = task.get_coro()
    place = task.get_name()

    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None)

        package = "" if frame is None else frame.f_globals["__name__"].partition(".")[0]

        if frame is not None and package != "asyncio":
            code = frame.f_code
            place = f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"

        awaited = getattr(awaited, "cr_await", None)

    return f"  {place}\n"
