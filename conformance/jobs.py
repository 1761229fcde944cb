"""Clauses in other processes: ``--jobs`` shares a certification among cores.

A job process reads the harness and the options as one line of JSON, then the id of a
clause a line, and answers each with its outcome.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from conformance.catalog import select
from conformance.clause import Clause, Level
from conformance.failure import Failure
from conformance.fork_server import fork_own_server, start_worker
from conformance.harness import Harness, address, rebuild
from conformance.parent import lines_from_parent, place_of_parent, take_place
from conformance.runner import Outcome, Patience, Status, run_clause

__all__ = ["main", "may_run_beside", "run_in_jobs"]

TOLD = ("status", "seconds", "reason", "expected", "seen", "where", "trace")
"""The fields of an outcome that a job process prints."""

MEASURE = ("bounded.append-bytes", "bounded.load-beside-huge")
"""The other clauses of the level count what happens in their own process."""


def may_run_beside(clause: Clause, harness: Harness) -> bool:
    """Return whether other clauses may use the store at the same time.

    Not those that kill, pause or start a server, or that measure the time of an
    operation, what it writes, or how many clients a server has.
    """
    counts_clients = type(harness).connections is not Harness.connections
    measures = clause.id in MEASURE or (
        clause.id == "cancel.leaves-nothing-open" and counts_clients
    )
    starts = clause.level is Level.POWERLOSS and harness.lacks("server") is None
    stops = {"server", "pause", "proxy", "nodes"} & set(clause.abilities)
    return not (measures or starts or stops)


def run_in_jobs(
    clauses: list[Clause], harness: Harness, jobs: int, seed: int, rounds: float
) -> Iterator[Outcome]:
    """Yield each outcome at once. Raises ``ValueError`` for an unsuitable harness."""
    try:
        told = address(harness.elsewhere() or harness)
    except TypeError as exc:
        raise ValueError(f"jobs need a harness for other processes: {exc}") from exc

    waiting: queue.SimpleQueue[Clause] = queue.SimpleQueue()
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    head = {"harness": told, "seed": seed, "rounds": rounds}
    started: list[_Job] = []

    # The longest first, so that no process has one left when the others have ended.
    for clause in sorted(clauses, key=lambda one: -one.deadline):
        waiting.put(clause)

    try:
        for _ in range(min(jobs, len(clauses))):
            job = _Job({"place": place_of_parent(), **head})
            started.append(job)
            threading.Thread(
                target=_feed, args=(job, waiting, outcomes), daemon=True
            ).start()

        for _ in clauses:
            yield outcomes.get()
    finally:
        for job in started:
            job.kill()


class _Job:
    """A job process."""

    def __init__(self, head: dict[str, Any]) -> None:
        its_input, our_end = os.pipe()
        self._input = open(our_end, "wb", buffering=0)
        our_end, its_output = os.pipe()
        self._output = open(our_end, "rb")

        try:
            self._process = start_worker(its_input, its_output, 2, "jobs")
        finally:
            os.close(its_input)
            os.close(its_output)

        self._head = f"{json.dumps(head)}\n"

    def ask(self, clause: Clause) -> Outcome:
        """Let the process run a clause."""
        try:
            self._input.write(f"{self._head}{clause.id}\n".encode())
            answer = self._output.readline()
        except BrokenPipeError:
            answer = b""

        self._head = ""

        if answer:
            told = json.loads(answer)
            told["status"] = Status(told["status"])
            return Outcome(clause, **told)

        try:
            gone = f"the job process ended with exit code {self._process.wait()}"
        except Failure as exc:
            gone = f"the job process ended: {exc.seen}"

        return Outcome(clause, Status.FAILED, 0, gone, "an outcome", gone, "", gone)

    def kill(self) -> None:
        with suppress(Failure):  # its fork server died: it ends when its input closes
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        self._input.close()
        self._output.close()


def _feed(
    job: _Job,
    waiting: queue.SimpleQueue[Clause],
    outcomes: queue.SimpleQueue[Outcome],
) -> None:
    """Hand clauses to a job process one by one, until none waits."""
    with suppress(queue.Empty):
        while True:
            outcomes.put(job.ask(waiting.get_nowait()))

    job.close()


def main() -> None:
    """Run the clauses that are read from standard input."""
    if not fork_own_server():
        return

    lines = lines_from_parent()
    head = json.loads(next(lines))
    take_place(head["place"])
    harness, patience = rebuild(head["harness"]), Patience()

    for line in lines:
        (clause,) = select(ids=[line])
        outcome = run_clause(
            clause,
            harness,
            seed=head["seed"],
            rounds=head["rounds"],
            patience=patience,
        )
        told = {name: getattr(outcome, name) for name in TOLD}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
