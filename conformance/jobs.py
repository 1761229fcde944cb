"""Clauses in other processes: ``--jobs`` shares a certification among cores.

A job process is ``python -m conformance.jobs``. It reads the harness and the options as
one line of JSON, then the id of a clause a line, and answers each with its outcome.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from conformance.clause import Clause, Level
from conformance.harness import Harness, address
from conformance.parent import lines_from_parent
from conformance.runner import Outcome, Status

__all__ = ["may_run_beside", "run_in_jobs"]

TOLD = ("status", "seconds", "reason", "expected", "seen", "where", "trace")
"""The fields of an outcome that a job process prints."""


def may_run_beside(clause: Clause, harness: Harness) -> bool:
    """Return whether other clauses may use the store at the same time.

    Not those that kill, pause or start a server, or that measure what an operation
    costs or how many clients a server has.
    """
    counts_clients = type(harness).connections is not Harness.connections
    measures = clause.subject == "bounded" or (
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
    head = {"path": sys.path, "harness": told, "seed": seed, "rounds": rounds}
    started: list[subprocess.Popen[str]] = []

    # The longest first, so that no process has one left when the others have ended.
    for clause in sorted(clauses, key=lambda one: -one.deadline):
        waiting.put(clause)

    for _ in range(min(jobs, len(clauses))):
        process = subprocess.Popen(
            [sys.executable, "-m", "conformance.jobs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the process that reports
        )
        started.append(process)
        threading.Thread(
            target=_feed, args=(process, head, waiting, outcomes), daemon=True
        ).start()

    try:
        for _ in clauses:
            yield outcomes.get()
    finally:
        for process in started:
            process.kill()
            process.wait()


def _feed(
    process: subprocess.Popen[str],
    head: dict[str, Any],
    waiting: queue.SimpleQueue[Clause],
    outcomes: queue.SimpleQueue[Outcome],
) -> None:
    """Hand clauses to a job process one by one, until none waits."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None
    line = json.dumps(head) + "\n"

    while True:
        try:
            clause = waiting.get_nowait()
        except queue.Empty:
            stdin.close()
            return

        try:
            stdin.write(f"{line}{clause.id}\n")
            stdin.flush()
            answer = stdout.readline()
        except BrokenPipeError:
            answer = ""

        line = ""

        if answer:
            told = json.loads(answer)
            told["status"] = Status(told["status"])
            outcomes.put(Outcome(clause, **told))
        else:
            gone = f"the job process ended with exit code {process.wait()}"
            outcomes.put(
                Outcome(clause, Status.FAILED, 0, gone, "an outcome", gone, "", gone)
            )


def main() -> None:
    """Run the clauses that are read from standard input."""
    lines = lines_from_parent()
    head = json.loads(next(lines))
    sys.path[:] = head["path"]

    # Imported here, because the first line sets sys.path.
    from conformance.catalog import select
    from conformance.harness import rebuild
    from conformance.runner import Patience, run_clause

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


if __name__ == "__main__":
    main()
