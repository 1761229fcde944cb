"""What a store must hold after a power loss at each instant of a recording."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from conformance.case import Case, Store
from conformance.difference import shown
from conformance.failure import Failure, Skip
from conformance.harness import Harness
from conformance.powerloss import script
from conformance.powerloss.disk import Contents, Disk
from conformance.powerloss.recording import Report, record, reports, run_writer
from conformance.powerloss.states import VARIANTS, State, state
from conformance.powerloss.trace import Call
from conformance.powerloss.writer import NOT_OPEN, STARTED
from cpkit import CheckpointerError

__all__ = ["Moment", "Progress", "Trial"]

_RECENT = 6
"""How many changes before an instant a failure shows."""


@dataclass
class Progress:
    """How many steps of each client are stored: at least, and at most.

    ``again`` has the clients that had a step fail, and then wrote to its thread: which
    step, and whether that write is stored for certain.
    """

    least: list[int]
    most: list[int]
    again: dict[int, tuple[int, bool]] = field(default_factory=dict)

    @classmethod
    def of(cls, count: int) -> Progress:
        return cls([0] * count, [1] * count)

    def copy(self) -> Progress:
        return Progress(list(self.least), list(self.most), dict(self.again))

    def add(self, report: Report) -> None:
        """Take a report; a step that failed with ``maybe_applied`` may be stored."""
        if report.client < 0:
            return

        if report.again:
            if report.error and not report.maybe_applied:
                del self.again[report.client]
            else:
                self.again[report.client] = report.step, not report.error

            return

        if report.error:  # the next write begins before it is reported
            self.again[report.client] = report.step, False

        if not report.error:
            self.least[report.client] = report.step
            self.most[report.client] = report.step + 1
        elif not report.maybe_applied:
            self.most[report.client] = report.step - 1


class Moment(NamedTuple):
    """A state at an instant, and what it must hold."""

    state: State
    progress: Progress
    recent: list[str]

    def __str__(self) -> str:
        return "\n".join([*self.recent, "then the power fails", self.state.what])


@dataclass
class Trial:
    """A store in a folder, and the clients that write it while they are recorded.

    ``is_served``: the harness starts and kills a server whose data is in the folder.
    ``contents`` are in the folder when the recording begins.
    """

    case: Case
    harness: Harness
    folder: Path | None
    abilities: list[str]
    is_served: bool = False
    contents: Contents = field(default_factory=dict)
    clients: list[script.Client] = field(default_factory=list)
    expected: list[list[Any]] = field(default_factory=list)
    after: dict[tuple[int, int, int], Any] = field(default_factory=dict)

    async def create(self) -> None:
        """Let the server create its data in the empty folder."""
        async with self.serving("when it creates its data"):
            pass

        self.keep()

    def keep(self) -> None:
        """Take what is in the folder for synced, for the next recording."""
        assert self.folder is not None
        self.contents = _contents(self.folder)

    def states(self, normal: int) -> int:
        """Return how many states to try: fewer where a server starts on each one."""
        return self.case.times(normal // 4 if self.is_served else normal)

    async def job(
        self,
        names: list[str],
        count: int,
        sessions: list[list[int]],
        spares: list[int] | None = None,
        room: int = 0,
        jumps: Sequence[int] = (),
        shares: bool = False,
        lone: int | None = None,
        large: int = 0,
    ) -> dict[str, Any]:
        """Add clients with ``count`` steps each, and return the job of a writer.

        ``spares`` follow on the same handle until one acknowledges all its steps.
        ``room``: no file can grow larger than the largest by so many bytes, until the
        spares begin. ``jumps``: seconds by which the clock is set before the steps.
        ``shares``: the clients claim one key. ``lone``: the index of the name whose
        client does each kind of write. ``large``: each step appends a message of so
        many characters, and small writes follow.
        """
        seed = self.case.random.random()
        first = len(self.clients)

        told = (names, count, seed, self.abilities, shares, lone, large)

        for client in script.clients(*told):
            self.clients.append(client)
            self.expected.append(await script.expected(client, self.abilities))

        return {
            "names": names,
            "first": first,
            "count": count,
            "seed": seed,
            "abilities": self.abilities,
            "served": self.is_served,
            "sessions": sessions,
            "spares": spares or [],
            "folder": str(self.folder),
            "room": room,
            "jumps": list(jumps),
            "shares": shares,
            "lone": lone,
            "large": large,
        }

    async def record(
        self, job: dict[str, Any], options: Sequence[str] = (), *, fails: bool = False
    ) -> list[Call]:
        """Let the clients of a job write the store in the folder, and record them.

        ``options`` are strace's. Only where one of them makes calls fail may a step
        fail.
        """
        calls = await record(self.harness, job, options)

        for call in calls if not fails else ():
            for report in reports(call):
                if report.error:
                    seen = f"{report.error}: {report.reason}"
                    raise Failure("no error", seen, self.described(report))

        return calls

    async def run(self, job: dict[str, Any]) -> list[Report]:
        """Let the clients of a job write the store, without a tracer."""
        return await run_writer(self.harness, job)

    def moments(
        self,
        calls: list[Call],
        budget: int,
        variants: tuple[str, ...] = VARIANTS,
        before: Moment | None = None,
    ) -> Iterator[Moment]:
        """Yield up to ``budget`` different states, in the order of their instants.

        First choice is what is synced at each acknowledgement. The others are spread
        over the instants of all acknowledgements, syncs, names and writes.
        ``before`` is what the folder held when the recording began.
        """
        contents = before.state.contents if before else self.contents
        chosen = self._chosen(calls, budget, variants, contents)
        disk = Disk(str(self.folder), contents)
        progress = Progress.of(len(self.clients))

        if before is not None:
            progress.least[: len(before.progress.least)] = before.progress.least
            progress.most[: len(before.progress.most)] = before.progress.most

        recent: list[str] = []
        seen = set()

        for number, call in enumerate([None, *calls]):
            if call is not None:
                recent += filter(None, [disk.follow(call)])

                for report in reports(call):
                    progress.add(report)
                    recent.append(self.described(report))

            for variant in chosen.get(number, ()):
                in_order = self.harness.appends_in_order
                found = state(
                    disk,
                    variant,
                    self.case.random,
                    in_order=in_order,
                    names_in_order=self.harness.names_in_order,
                )
                key = hash((frozenset(found.contents.items()), *progress.least))

                if key not in seen:
                    seen.add(key)
                    yield Moment(found, progress.copy(), recent[-_RECENT:])

    def _chosen(
        self,
        calls: list[Call],
        budget: int,
        variants: tuple[str, ...],
        contents: Contents,
    ) -> dict[int, list[str]]:
        """Return the variants to try after a number of calls."""
        disk = Disk(str(self.folder), contents)
        first: list[tuple[int, str]] = []
        others: list[tuple[int, str]] = []
        random = self.case.random

        def add(number: int, some: tuple[str, ...]) -> None:
            others.extend((number, one) for one in random.sample(some, len(some)))

        # What a server does to start is not the store's.
        has_started = not self.is_served

        for number, call in enumerate(calls, 1):
            was_synced = disk.is_synced
            changed = disk.follow(call)
            has_started = has_started or STARTED in {
                one.client for one in reports(call)
            }

            if not has_started:
                continue

            if "sync" in changed and not was_synced:
                add(number - 1, variants)

            if reports(call) and VARIANTS[0] in variants:
                first.append((number, VARIANTS[0]))
            elif not (changed or reports(call)):
                continue

            if not disk.is_synced:
                rest = variants[-1:] if changed.startswith("write") else variants
                add(number, rest)

        self._check_explained(disk)
        picked = _spread(first, 2 * budget // 3, random)
        picked += _spread([*dict.fromkeys(others)], budget - len(picked), random)
        chosen: dict[int, list[str]] = {}

        for number, variant in picked:
            chosen.setdefault(number, []).append(variant)

        return chosen

    def _check_explained(self, disk: Disk) -> None:
        """Skip where the recorded calls do not lead to what is in the folder."""
        assert self.folder is not None
        kept = state(disk, "everything", self.case.random).contents
        seen = _contents(self.folder)
        mapped = {file.path for file in disk.unsynced.values() if file.mapped}

        for path in sorted((kept.keys() | seen.keys()) - mapped - disk.unclear):
            if path not in kept or path not in seen or kept[path] != seen[path]:
                raise Skip(
                    f"not tested: {path} was changed by calls that were not recorded"
                    + self.is_served * "; start() has to start the server as a child"
                )

    def described(self, report: Report) -> str:
        """Return a report as text."""
        if report.client == NOT_OPEN:
            return "fail to open the store"

        if report.client == STARTED:
            return "start the server"

        done = "fail at" if report.error else "acknowledge"
        done += " the write after" if report.again else ""
        return f"{done} step {report.step} of {self.clients[report.client].thread!r}"

    async def check(self, moment: Moment) -> None:
        """Write the state into the folder, open it, and compare every client."""
        self.write(moment.state)
        await self.check_store(moment.progress, str(moment))

    async def check_store(self, progress: Progress, where: str) -> None:
        """Open what is in the folder, and compare every client."""
        try:
            async with self.serving(where), self.harness.open() as cp:
                await self.done(cp, progress, where)  # type: ignore[arg-type]  # see `case.Store`
        except CheckpointerError as exc:
            seen = f"{type(exc).__name__}: {exc}"
            raise Failure("a store that opens and loads", seen, where) from exc

    @asynccontextmanager
    async def serving(self, where: str) -> AsyncIterator[None]:
        """Let the server run, if there is one, on what is in the folder."""
        if not self.is_served:
            yield
            return

        try:
            try:
                await self.harness.start()
            except Exception as exc:
                expected = "a server that starts on what is in its folder"
                raise Failure(expected, f"{type(exc).__name__}: {exc}", where) from exc

            yield
        finally:
            await self.harness.kill()

    def write(self, found: State) -> None:
        """Replace what is in the folder by a state."""
        assert self.folder is not None

        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

        found.write(self.folder)

    async def done(self, cp: Store, progress: Progress, where: str) -> list[int]:
        """Return how many steps of each client the open store shows.

        Raises `Failure` where those are not the acknowledged ones.
        """
        steps = []
        seen = await asyncio.gather(
            *(script.observe(cp, client, self.abilities) for client in self.clients)
        )

        for number, (client, found) in enumerate(zip(self.clients, seen, strict=True)):
            least, most = progress.least[number], progress.most[number]
            expected = self.expected[number]
            allowed = expected[least : most + 1]

            if number in progress.again:
                step, certain = progress.again[number]
                after = [
                    await self._again(number, step, done)
                    for done in range(least, min(most, len(client.steps)) + 1)
                ]

                if found in after:
                    steps.append(least)
                    continue

                allowed = [] if certain else allowed

            if found not in allowed:
                raise _failure(client, expected, least, most, found, where)

            steps.append(expected.index(found, least))

        return steps

    async def _again(self, number: int, failed: int, done: int) -> Any:
        """Return what a client shows that wrote to the thread of a failed step."""
        key, client = (number, failed, done), self.clients[number]

        if key not in self.after:
            steps = [*client.steps[:done], script.again(client.steps[failed - 1])]
            self.after[key] = await script.outcome(client, self.abilities, steps)

        return self.after[key]


def _spread(
    found: list[tuple[int, str]], count: int, random: Random
) -> list[tuple[int, str]]:
    """Return so many of them at equal distances, from a random start on, or all.

    A state that lasts for several instants is then among them.
    """
    step = max(1.0, len(found) / count) if count else 0.0
    start = random.random() * step
    return [found[int(start + n * step)] for n in range(min(count, len(found)))]


def _contents(folder: Path) -> Contents:
    """Return what is in a folder; sockets are left out."""
    found: Contents = {}

    for at, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(at, name)
            key = str(path.relative_to(folder))

            if path.is_symlink():
                found[key] = os.readlink(path)
            elif path.is_dir():
                found[key] = None
            elif path.is_file():
                found[key] = path.read_bytes()

    return found


def _failure(
    client: script.Client,
    expected: list[Any],
    least: int,
    most: int,
    found: Any,
    where: str,
) -> Failure:
    last = str(client.steps[least - 1]) if least else "none"
    wanted = f"{client.thread!r} with the steps up to the last acknowledged: {last}"

    if least < min(most, len(client.steps)):
        wanted += f"\nor with the next one too: {client.steps[least]}"

    if found in expected[:least]:
        lost = least - expected.index(found)
        seen = f"the last {lost} of {least} acknowledged steps are lost"
    else:
        seen = "\n".join(
            f"{name} is {shown(value)}, not {shown(expected[least][name])}"
            for name, value in found.items()
            if value != expected[least][name]
        )
        seen = seen or "what was acknowledged after the failed write is lost"

    return Failure(wanted, seen, where)
