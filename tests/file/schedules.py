"""Every order in which the system calls of a few operations can follow each other.

Each operation runs in a greenlet of its own, which stops before each call that another
process could notice: `explore` decides which one goes on. It runs the operations again
for each order that may make a difference. Two orders that differ only in calls that do
not touch the same thing have one outcome, and one of them is run: dynamic partial-order
reduction (Flanagan and Godefroid, POPL 2005).

A lock that is held makes an operation fail, as after the time for which a worker thread
polls. It releases its own locks, and is repeated, as the store does, when the lock may
be free.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from greenlet import (  # type: ignore[import-untyped]  # it has no types
    getcurrent,
    greenlet,
)

from cpkit.driver import StoreFailure
from cpkit_file import log, schema, writing

__all__ = ["Killed", "explore", "fail_at", "kill_before", "patched"]

_NOW = 1795232045123456789
"""What the clock says, in nanoseconds since 1970."""

# Repetitions of one operation. Each of them needs a change by another operation.
_REPEATS = 8


class Killed(BaseException):
    """Ends an operation as a kill of its process does: no clean-up has an effect."""


class Step(NamedTuple):
    """A call that is about to run, what it touches, and whether it changes that."""

    name: str
    places: tuple[str, ...]
    changes: bool

    def meets(self, other: Step) -> bool:
        """Tell whether the order of the two may make a difference."""
        return (self.changes or other.changes) and (
            _ANY in self.places + other.places
            or any(one in other.places for one in self.places)
        )

    def __str__(self) -> str:
        return f"{self.name} {self.places[0]}"


_ANY = "any name"
# Folders, opened to sync them, and a file that stands for a missing one: no operation
# changes them.
_FIXED = ("thre", "used", "null")
_BEGIN = Step("begin", ("nothing",), False)


class _Greenlet(greenlet):  # type: ignore[misc]  # it has no types
    task: Task


class Task:
    """An operation that stops before each step, until it is told to go on."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.step: Step | None = None
        self.outcome: Any = None
        self.killed = False
        self.missed = (0, "")
        self.waits_for: object = None
        self.locks: dict[object, object] = {}
        self.places: dict[int, str] = {}
        self.fails = False
        self._work = work
        self._thread = _Greenlet(self._run)
        self._thread.task = self
        self.go_on()

    def go_on(self) -> None:
        """Let the operation take its step, and return when it stops before the next."""
        self._thread.switch()

    def kill(self) -> None:
        if self.step is not None:
            self.killed = True
            self.go_on()
            self.locks.clear()

    def pause(self, step: Step) -> None:
        """Stop before a step; called by the operation."""
        if not self.killed:
            self.step = step
            self._thread.parent.switch()

        if self.killed:
            raise Killed

        if self.fails:
            self.fails = False
            raise OSError(errno.EIO, "Input/output error")

    def _run(self) -> None:
        try:
            self.pause(_BEGIN)
            self.outcome = self._repeated()
        except (Exception, Killed) as exc:
            self.outcome = exc
        finally:
            self.step = None

    def _repeated(self) -> Any:
        """Run the operation; repeat it, as the store does, where a lock was held."""
        for _ in range(_REPEATS):
            try:
                return self._work()
            except StoreFailure as exc:
                if exc.fate != "not sent":
                    raise

            self.waits_for, place = self.missed
            self.pause(Step("retry", (place,), False))
            self.waits_for = None

        raise AssertionError(f"it was repeated {_REPEATS} times")


def _can_go_on(tasks: Sequence[Task]) -> dict[int, Step]:
    """Return the next step of each operation that has one and need not wait."""
    found: dict[int, Step] = {}

    for number, task in enumerate(tasks):
        held = [lock for other in tasks for lock in other.locks.values()]

        if task.step is not None and task.waits_for not in held:
            found[number] = task.step

    return found


@dataclass
class _Node:
    """A point of a schedule: what goes on there, and what must be tried as well."""

    options: dict[int, Step]
    asleep: dict[int, Step]
    chosen: int
    wanted: set[int] = field(default_factory=set)
    clock: list[int] = field(default_factory=list)
    """How many steps of each operation come before the next step, because they meet."""

    @property
    def step(self) -> Step:
        return self.options[self.chosen]

    def try_another(self) -> bool:
        """Choose what was not tried yet; return whether there is such an operation."""
        self.asleep[self.chosen] = self.step
        left = self.wanted - self.asleep.keys()
        self.chosen = min(left, default=self.chosen)
        self.clock = []
        return bool(left)


def explore(
    start: Callable[[], Sequence[Callable[[], Any]]],
) -> Iterator[tuple[list[Any], list[str]]]:
    """Run the operations in every order; yield their outcomes and the order.

    ``start`` prepares the folder and returns the operations. Fails where they wait for
    each other.
    """
    path: list[_Node] = []

    while True:
        tasks = [Task(work) for work in start()]

        try:
            if _follow(path, tasks):
                steps = [f"{node.chosen}: {node.step}" for node in path]
                yield [task.outcome for task in tasks], steps
        finally:
            for task in tasks:
                task.kill()

        while path and not path[-1].try_another():
            path.pop()

        if not path:
            return


def _follow(path: list[_Node], tasks: Sequence[Task]) -> bool:
    """Run a schedule, and extend it; return whether its outcome is a new one."""
    for node in path:
        tasks[node.chosen].go_on()

    while options := _can_go_on(tasks):
        asleep = _asleep_after(path[-1]) if path else {}
        awake = [number for number in options if number not in asleep]

        if not awake:
            return False

        _note_races(path, tasks)
        path.append(_Node(options, asleep, awake[0]))
        tasks[awake[0]].go_on()

    assert all(task.step is None for task in tasks), "they wait for each other"
    return True


def _asleep_after(node: _Node) -> dict[int, Step]:
    """Return what need not be tried next: that order was another schedule's."""
    return {
        number: step
        for number, step in node.asleep.items()
        if number != node.chosen and not step.meets(node.step)
    }


def _note_races(path: list[_Node], tasks: Sequence[Task]) -> None:
    """Ask for the other order of each step and the last one that it could overtake."""
    _set_clocks(path, len(tasks))

    for number, task in enumerate(tasks):
        if task.step is None:
            continue

        own = [node.clock for node in path if node.chosen == number]
        clock = own[-1] if own else [0] * len(tasks)

        for node in reversed(path):
            is_later = node.clock[node.chosen] > clock[node.chosen]

            if node.chosen != number and is_later and node.step.meets(task.step):
                here = number in node.options
                node.wanted |= {number} if here else node.options.keys()
                break


def _set_clocks(path: list[_Node], count: int) -> None:
    """Set the clocks of the steps that have none yet."""
    for depth, node in enumerate(path):
        if node.clock:
            continue

        clock = [0] * count

        for before in path[:depth]:
            if before.chosen == node.chosen or before.step.meets(node.step):
                clock = [*map(max, clock, before.clock)]

        clock[node.chosen] += 1
        node.clock = clock


def kill_before(work: Callable[[], Any], steps: int) -> Any:
    """Run an operation alone, and kill it before its step with this number.

    Returns `Killed`, or the outcome of an operation that ended before.
    """
    task = _stopped(work, steps)
    task.kill()
    return task.outcome


def fail_at(work: Callable[[], Any], steps: int) -> tuple[Any, str]:
    """Run an operation alone, whose step with this number is refused by the disk.

    Returns the outcome, and the name of the step; none where there is no such step.
    """
    task = _stopped(work, steps)
    name = ""

    # The system does not refuse to end a lock, and the others are not calls.
    if task.step is not None:
        name = str(task.step)
        task.fails = task.step.name not in ("begin", "unlock", "retry", "take", "give")

    while task.step is not None:
        task.go_on()

    return task.outcome, name


def _stopped(work: Callable[[], Any], steps: int) -> Task:
    task = Task(work)

    for _ in range(steps):
        if task.step is not None:
            task.go_on()

    return task


# The system calls


@contextmanager
def patched() -> Iterator[None]:
    """Make operations stop before system calls."""
    with pytest.MonkeyPatch.context() as patch:
        _patch_locks(patch, os.fstat)

        for name in ("unlink", "rename"):
            _patch(patch, os, name, _both, True)

        _patch(patch, os, "stat", lambda path: (_name(path),), False, _is_file)
        _patch(patch, os, "listdir", lambda path: (_ANY,), False)

        for name in ("fstat", "pread"):
            _patch(patch, os, name, lambda fd, *_: (_content(fd),), False, _is_open)

        for name in ("write", "ftruncate"):
            _patch(patch, os, name, lambda fd, *_: (_content(fd),), True)

        for name in ("fsync", "fdatasync"):  # they change nothing that can be seen
            patch.setattr(os, name, lambda fd: None)
            _patch(patch, os, name, lambda fd: ("nothing",), False)

        _patch_open(patch)
        patch.setattr(log, "threading", SimpleNamespace(Lock=_Mutex))
        # The clock stands still, so that equal operations write equal files.
        patch.setattr(writing, "time", SimpleNamespace(time_ns=lambda: _NOW))
        yield


class _Mutex:
    """A lock of threads of one process; each operation is a thread."""

    def __enter__(self) -> None:
        if _in_task():
            _task().waits_for = self
            _task().pause(Step("take", (f"mutex {id(self)}",), True))
            _task().waits_for = None
            _task().locks[self] = self

    def __exit__(self, *exc_info: object) -> None:
        if _in_task():
            with suppress(Killed):
                _task().pause(Step("give", (f"mutex {id(self)}",), True))

            del _task().locks[self]


def _name(path: Any) -> str:
    """Return a short name of a file: the start of it, and its ending."""
    name = os.path.basename(path)
    return re.sub(r"^(\w{1,4})[^.]*", r"\1", name)


def _is_file(path: Any) -> bool:
    return _name(path) not in _FIXED


def _is_open(fd: int, *_: Any) -> bool:
    return _task().places.get(fd) not in _FIXED


def _both(*paths: Any) -> tuple[str, ...]:
    """Return names that are changed, and with them the numbers of names of files."""
    names = [_name(path) for path in reversed(paths)]
    return (*names, *(f"content of {name}" for name in names))


def _content(fd: int) -> str:
    return f"content of {_task().places.get(fd)}"


def _task() -> Task:
    current = getcurrent()
    assert isinstance(current, _Greenlet)
    return current.task


def _in_task() -> bool:
    return isinstance(getcurrent(), _Greenlet)


def _patch(
    patch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    places: Callable[..., tuple[str, ...]],
    changes: bool,
    is_step: Callable[..., bool] = lambda *_: True,
) -> None:
    original = getattr(module, name)

    def stepped(*args: Any, **options: Any) -> Any:
        if _in_task() and is_step(*args):
            _task().pause(Step(name, places(*args), changes))

        return original(*args, **options)

    patch.setattr(module, name, stepped)


def _patch_open(patch: pytest.MonkeyPatch) -> None:
    original = os.open

    def stepped(path: Any, flags: int, *mode: int, **options: Any) -> int:
        if not _in_task():
            return original(path, flags, *mode, **options)

        creates = bool(flags & os.O_CREAT)
        name = _name(path)

        if name not in _FIXED:
            _task().pause(Step("create" if creates else "open", (name,), creates))

        fd = original(path, flags, *mode)
        _task().places[fd] = name
        return fd

    patch.setattr(os, "open", stepped)


def _patch_locks(patch: pytest.MonkeyPatch, fstat: Callable[[int], Any]) -> None:
    flock, lock = fcntl.flock, schema.lock

    def locking(fd: int, path: str) -> None:
        if not _in_task():
            lock(fd, path)
            return

        task = _task()
        place = f"lock of {task.places[fd]}"
        task.pause(Step("lock", (place,), True))
        inode = fstat(fd).st_ino

        try:
            flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            task.missed = inode, place
            raise StoreFailure("not sent", f"{path} is locked") from None

        task.locks[fd] = inode

    def unlocking(fd: int, how: int) -> None:
        if _in_task() and not _task().killed and fd in _task().locks:
            with suppress(Killed):  # the lock of a process that is killed ends, too
                _task().pause(Step("unlock", (f"lock of {_task().places[fd]}",), True))

            del _task().locks[fd]

        flock(fd, how)

    patch.setattr(schema, "lock", locking)
    patch.setattr(fcntl, "flock", unlocking)
