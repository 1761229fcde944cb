"""One run: start a worker, kill it at chosen moments, and start it again."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, Protocol

__all__ = ["MOMENTS", "WORST", "Event", "Job", "Kill", "Run", "Watcher", "WorkerFailed"]

Event = dict[str, Any]
"""A worker's report: a thread, what happened to it, and more facts."""

WORST = "effect"

MOMENTS = {
    WORST: "between an effect and its record",
    "append": "in the middle of a message",
    "claimed": "between a claim and its effect",
    "recorded": "between a record and its message",
}
"""When to kill a worker; a worker pauses at each until the parent resumes it."""

_EXAMPLES = Path(__file__).parent.parent


class WorkerFailed(Exception):
    """A worker ended although the parent did not kill it, or hung."""


@dataclass(frozen=True)
class Job:
    """The settings of a worker."""

    url: str
    data: str
    conversations: int
    run: str
    books: str
    pace: float
    ledger: bool


@dataclass(frozen=True)
class Kill:
    """One SIGKILL: the moment, and the conversation in which the worker paused."""

    number: int
    moment: str
    thread: str
    tool: str | None


class Watcher(Protocol):
    """Receives the events of a run, for display."""

    def started(self) -> None: ...

    def happened(self, event: Event) -> None: ...

    def killed(self, kill: Kill) -> None: ...

    def lost_primary(self, address: str) -> None: ...


@dataclass
class Run:
    """A run of ``planned`` kills, and what the parent has observed.

    ``messages`` is the number of messages of all recordings. ``acknowledged`` has the
    newest version of each thread that a worker reported, and ``lost`` the threads
    whose version was lower in a later load. ``resolved`` has, for each unclear call,
    whether its effect had happened. ``replayed`` counts the recorded results that were
    used in place of a call. ``kill_primary`` kills a server of the store in the middle
    of the run, and returns its address, which is in ``primary`` then.
    """

    job: Job
    messages: int
    planned: int
    log: Path
    watcher: Watcher
    kill_primary: Callable[[], str] | None = None
    primary: str | None = None
    kills: list[Kill] = field(default_factory=list)
    acknowledged: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    resolved: dict[str, bool] = field(default_factory=dict)
    replayed: Counter[str] = field(default_factory=Counter)
    # Numbers of written messages at which the next kill is due, and overdue.
    _due: float = 0.0
    _overdue: float = float("inf")

    def play(self) -> None:
        """Start workers until one finishes."""
        while not self._run_worker():
            # Leaves a person the time to see the kill.
            time.sleep(min(self.job.pace, 1))

    def _run_worker(self) -> bool:
        """Run a worker until it is killed or done; return whether it was done."""
        worker = self._start()
        # A worker that takes much longer than its model must be hanging.
        limit = threading.Timer(120 + self.job.pace * self.messages, worker.kill)
        limit.daemon = True
        limit.start()
        kill = None
        late_events = []

        try:
            assert worker.stdout is not None

            for line in worker.stdout:
                event = json.loads(line)

                if kill is not None:
                    late_events.append(event)
                    continue

                self._note(event)

                if self._is_kill_due(event["what"]):
                    kill = self._kill(worker, event)
                elif event["what"] in MOMENTS:
                    self._lose_primary()
                    _send(worker, event["thread"])
        except BaseException:
            worker.kill()
            raise
        finally:
            worker.communicate()
            limit.cancel()

        if kill is not None and worker.returncode == -signal.SIGKILL:
            self.kills.append(kill)
            self.watcher.killed(kill)
        elif worker.returncode:
            status = f"a worker hung, or ended by itself (status {worker.returncode})"
            raise WorkerFailed(f"{status}: {_last_line(self.log)} ({self.log})")

        for event in late_events:
            self._note(event)

        return worker.returncode == 0

    def _start(self) -> Popen[bytes]:
        path = [str(_EXAMPLES), os.environ.get("PYTHONPATH", "")]

        with open(self.log, "ab") as errors:
            worker = Popen(
                [sys.executable, "-m", "demo.worker"],
                stdin=PIPE,
                stdout=PIPE,
                stderr=errors,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
                # Ctrl-C must reach the parent only, which then kills the worker.
                start_new_session=True,
            )

        self.watcher.started()
        # Through the pipe: in the arguments, ps would show the password of the URL.
        _send(worker, asdict(self.job))
        return worker

    def _is_kill_due(self, moment: str) -> bool:
        """Return whether to kill the worker at this moment.

        The first kill is at the first moment of kind ``WORST``. The others are spread
        over the remaining messages, and take turns in their kinds of moments. An
        overdue kill takes the next moment of any kind.
        """
        done = len(self.kills)

        if moment not in MOMENTS or done == self.planned:
            return False

        written = sum(self.acknowledged.values())
        turn = [*MOMENTS][done % len(MOMENTS)]
        return written >= self._overdue or (written >= self._due and moment == turn)

    def _lose_primary(self) -> None:
        """Kill a server of the store when half of the messages are written."""
        written = sum(self.acknowledged.values())

        if self.kill_primary and not self.primary and 2 * written >= self.messages:
            self.primary = self.kill_primary()
            self.watcher.lost_primary(self.primary)

    def _kill(self, worker: Popen[bytes], event: Event) -> Kill:
        if event["what"] == "append":
            _send(worker, event["thread"])
            # During or right after the write: a commit takes about that long.
            time.sleep(random.uniform(0, 0.004))

        worker.kill()
        number = len(self.kills) + 1
        written = sum(self.acknowledged.values())
        step = (self.messages - written) / (self.planned - number + 1)
        self._due = written + step / 4
        self._overdue = written + step * 5 / 4
        return Kill(number, event["what"], event["thread"], event.get("tool"))

    def _note(self, event: Event) -> None:
        thread = event["thread"]

        match event["what"]:
            case "loaded":
                if event["version"] < self.acknowledged.get(thread, 0):
                    self.lost.append(thread)

                self.acknowledged[thread] = event["version"]
            case "appended":
                self.acknowledged[thread] = event["version"]
            case "resolved":
                self.resolved[event["call"]] = event["landed"]
            case "replayed":
                self.replayed[event["tool"]] += 1

        self.watcher.happened(event)


def _send(worker: Popen[bytes], what: object) -> None:
    assert worker.stdin is not None

    # If the worker has died by itself, the end of its output shows that.
    with suppress(BrokenPipeError):
        worker.stdin.write(json.dumps(what).encode() + b"\n")
        worker.stdin.flush()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line), "the log is empty")
