"""One run: a worker is started, killed at chosen moments, and started again."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, Protocol

__all__ = ["MOMENTS", "WORST", "Event", "Job", "Kill", "Run", "Watcher", "WorkerFailed"]

Event = dict[str, Any]
"""What a worker tells: a thread, what happened there, and facts about it."""

WORST = "effect"

MOMENTS = {
    WORST: "between an effect and its record",
    "append": "in the middle of a message",
    "claimed": "between a claim and its effect",
    "recorded": "between a record and its message",
}
"""When a worker is killed; a worker waits at each until it is let go on."""

_EXAMPLES = Path(__file__).parent.parent


class WorkerFailed(Exception):
    """A worker ended although nobody killed it, or hung."""


@dataclass(frozen=True)
class Job:
    """What a worker has to know."""

    url: str
    data: str
    conversations: int
    run: str
    books: str
    pace: float
    ledger: bool


@dataclass(frozen=True)
class Kill:
    """One SIGKILL: when, and in which conversation, the worker was."""

    number: int
    moment: str
    thread: str
    tool: str | None


class Watcher(Protocol):
    """Somebody who looks on."""

    def started(self) -> None: ...

    def happened(self, event: Event) -> None: ...

    def killed(self, kill: Kill) -> None: ...


@dataclass
class Run:
    """A run of ``planned`` kills, and what was seen of it from outside.

    ``messages`` is how many there are to come in all. ``acknowledged`` has the version
    of each thread as a worker last heard it from the store, and ``lost`` the threads
    where a later load had less. ``settled`` says of each unclear call whether it had
    landed; ``replayed`` counts the answers that came from the record.
    """

    job: Job
    messages: int
    planned: int
    log: Path
    watcher: Watcher
    kills: list[Kill] = field(default_factory=list)
    acknowledged: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    settled: dict[str, bool] = field(default_factory=dict)
    replayed: Counter[str] = field(default_factory=Counter)
    # The next kill is due at this many messages, and overdue at that many.
    _due: float = 0.0
    _overdue: float = float("inf")

    def play(self) -> None:
        """Start workers until one comes to the end."""
        while not self._one_life():
            # Long enough for the kill to be seen.
            time.sleep(min(self.job.pace, 1))

    def _one_life(self) -> bool:
        """Run a worker until it is killed or done, and tell whether it was done."""
        worker = self._start()
        # A worker that takes much longer than its model hangs.
        limit = threading.Timer(120 + self.job.pace * self.messages, worker.kill)
        limit.daemon = True
        limit.start()
        kill = None
        last_words = []

        try:
            assert worker.stdout is not None

            for line in worker.stdout:
                event = json.loads(line)

                if kill is not None:
                    last_words.append(event)
                    continue

                self._note(event)

                if self._is_time(event["what"]):
                    kill = self._kill(worker, event)
                elif event["what"] in MOMENTS:
                    _tell(worker, event["thread"])
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

        for event in last_words:
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
                # Ctrl-C is for the parent, which kills the worker then.
                start_new_session=True,
            )

        self.watcher.started()
        # By the pipe, because a URL in the arguments would show its password in ps.
        _tell(worker, asdict(self.job))
        return worker

    def _is_time(self, moment: str) -> bool:
        """Tell whether to kill at this moment.

        The first kill falls at the first worst moment that there is. The others are
        spread over what is left by then and take turns in their moments; one that is
        overdue takes what comes.
        """
        done = len(self.kills)

        if moment not in MOMENTS or done == self.planned:
            return False

        written = sum(self.acknowledged.values())
        turn = [*MOMENTS][done % len(MOMENTS)]
        return written >= self._overdue or (written >= self._due and moment == turn)

    def _kill(self, worker: Popen[bytes], event: Event) -> Kill:
        if event["what"] == "append":
            _tell(worker, event["thread"])
            # Somewhere in the writing or right behind it; a commit takes that long.
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
            case "settled":
                self.settled[event["call"]] = event["landed"]
            case "replayed":
                self.replayed[event["tool"]] += 1

        self.watcher.happened(event)


def _tell(worker: Popen[bytes], what: object) -> None:
    assert worker.stdin is not None

    # One that died by itself shows at the end of its output.
    with suppress(BrokenPipeError):
        worker.stdin.write(json.dumps(what).encode() + b"\n")
        worker.stdin.flush()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line), "it said nothing")
