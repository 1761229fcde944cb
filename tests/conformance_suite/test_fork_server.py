"""Workers that are forked from a warm process are as separate as new processes."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from conformance import Harness, certify, harness_for
from conformance.failure import Failure
from conformance.fork_server import close_server
from conformance.workers import Worker, workers
from tests.processes import interrupted_output

STORE = '''
"""A store whose module does what a stranger's module may do when it is imported."""
import json, os, threading, uuid
from dataclasses import dataclass
from conformance import Harness
from cpkit import MemoryCheckpointer

TOKEN = uuid.uuid4().hex
OPENED = open(os.devnull)
threading.Thread(target=threading.Event().wait, daemon=True).start()


@dataclass
class Facts(Harness):
    """Each handle writes the facts of its process into a file of the folder."""

    folder: str

    def open(self, **options):
        links = {n: link(n) for n in os.listdir("/proc/self/fd")}
        facts = {
            "parent": os.getppid(),
            "open": {n: path for n, path in links.items() if path},
            "threads": threading.active_count(),
            "token": TOKEN,
            "place": os.getcwd(),
            "colour": os.environ.get("COLOUR"),
        }

        with open(f"{self.folder}/{os.getpid()}", "w") as file:
            json.dump(facts, file)

        return MemoryCheckpointer("facts", **options)


def link(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:
        return None  # the descriptor of the listing itself
'''

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of the facts."""
    made = tmp_path / "facts"
    made.mkdir()
    return made


@pytest.fixture
def harness(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Harness]:
    (tmp_path / "stranger.py").write_text(
        f"{STORE}\n\ndef made():\n    return Facts({str(folder)!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield harness_for("stranger:made")
    sys.modules.pop("stranger").OPENED.close()


def job(count: int) -> dict[str, Any]:
    """Return a job of so many operations."""
    options = {"threads": ["t"], "count": count}
    return {"does": "threads", "with": options, "clients": ["a"], "seed": 1}


@asynccontextmanager
async def idle(harness: Harness, count: int) -> AsyncIterator[list[Worker]]:
    """Yield workers that wait with an open store."""
    with ExitStack() as stack:
        started = []

        for _ in range(count):
            worker = Worker(harness, job(10_000))
            stack.callback(worker.close)
            started.append(worker)

        for stage in ("opening", "ready"):
            for worker in started:
                await worker.reaches(stage)

        yield started


def facts(folder: Path) -> list[dict[str, Any]]:
    """Return the facts of each process that opened the store."""
    return [json.loads(path.read_text()) for path in folder.iterdir()]


async def test_a_worker_has_its_own_descriptors_only(
    harness: Harness, folder: Path
) -> None:
    """Nothing that is open here, or for another worker, is open in a worker."""
    with (folder.parent / "lock").open("w") as lock, socket.socket() as listening:
        for ours in (lock, listening):
            os.set_inheritable(ours.fileno(), True)

        async with idle(harness, 3):
            found = facts(folder)

    pipes = [one["open"][n] for one in found for n in "01"]
    assert len(set(pipes)) == 2 * 3

    for one in found:
        # The file of the store's module, then those of the worker's event loop.
        _, _, errors, *others = (one["open"][n] for n in sorted(one["open"], key=int))
        assert errors.endswith("(deleted)")
        assert sorted(other.partition(":")[0] for other in others) == [
            os.devnull,
            "anon_inode",
            "socket",
            "socket",
        ]


async def test_a_worker_imports_the_store_itself(
    harness: Harness, folder: Path
) -> None:
    """Threads, files and ids that a module makes belong to one worker."""
    async with idle(harness, 2):
        one, two = facts(folder)

    assert one["token"] != two["token"]
    # The main thread, the one that reads what this process sends, the module's.
    assert one["threads"] == two["threads"] == 3


async def test_workers_are_forked_from_one_process(
    harness: Harness, folder: Path
) -> None:
    """The process that starts them is warm: it is not this one."""
    async with idle(harness, 2):
        one, two = facts(folder)

    assert one["parent"] == two["parent"] != os.getpid()


@pytest.mark.long
async def test_jobs_are_forked_from_one_process(harness: Harness, folder: Path) -> None:
    """Each job imports the store itself, and has a warm process for its workers."""
    clauses = ["append.returns-version", "append.keeps-order", "kill.writes-survive"]
    report = await certify(harness, clauses=clauses, jobs=2, rounds=0.2)
    assert [one.status for one in report.outcomes[:2]] == ["passed", "passed"]
    (folder / str(os.getpid())).unlink()
    found = facts(folder)
    # The process that started the jobs, and the one that started the worker.
    assert len({one["parent"] for one in found}) == 2
    assert os.getpid() not in {one["parent"] for one in found}
    assert len({one["token"] for one in found}) == len(found)


async def test_a_worker_has_the_folder_and_the_environment_of_its_start(
    harness: Harness, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm process was started before they changed."""
    async with idle(harness, 1):
        (before,) = facts(folder)

    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLOUR", "gr\udcfcn")

    async with idle(harness, 1):
        (after,) = (one for one in facts(folder) if one != before)

    assert (before["place"], before["colour"]) != (after["place"], after["colour"])
    assert (after["place"], after["colour"]) == (str(folder), "gr\udcfcn")


async def test_a_kill_ends_one_worker(harness: Harness) -> None:
    """The other workers go on, and a new one starts."""
    async with idle(harness, 2) as (killed, other):
        killed.kill()
        assert await killed.lines() == []

        async with workers(harness, [job(3)]) as (third,):
            assert len(await third.finished()) >= 3

        other.go()
        assert await other.line()
        assert await asyncio.to_thread(killed._process.wait) == -9


async def test_tasks_wait_for_a_worker_at_once(harness: Harness) -> None:
    """A clause may be cancelled while it waits, and then waits for the end again."""
    async with workers(harness, [job(1)]) as (worker,):
        await asyncio.gather(*(worker.finished() for _ in range(5)))

    async with workers(harness, [job(1)]) as (worker,):
        await worker.finished()


async def test_a_worker_that_fails_says_why(harness: Harness, tmp_path: Path) -> None:
    """Its error is that of the store's module, in a process that can go on."""
    (tmp_path / "stranger.py").write_text("raise ImportError('not on a Sunday')")

    with pytest.raises(Failure, match="not on a Sunday"):
        async with workers(harness, [job(1)]):
            raise AssertionError("the worker is open")


REFUSES = """
import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from conformance import Harness
from cpkit import BackendUnavailable

async def linger():
    try:
        await asyncio.sleep(99)
    finally:
        await asyncio.sleep(0.2)

@dataclass
class Facts(Harness):
    folder: str

    @asynccontextmanager
    async def open(self, **options):
        lingering = asyncio.create_task(linger())
        await asyncio.sleep(0)
        raise BackendUnavailable("a stranger", "no room")
        yield
"""


async def test_a_refused_worker_says_why(harness: Harness, tmp_path: Path) -> None:
    """The failure has the reason, even if the traceback is not printed yet."""
    (tmp_path / "stranger.py").write_text(REFUSES)

    with pytest.raises(Failure, match="BackendUnavailable.*no room"):
        async with workers(harness, [job(1)]):
            raise AssertionError("the worker is open")


ALONE = """
import asyncio, sys
from conformance import harness_for
from conformance.workers import workers

async def main():
    job = {"does": "threads", "with": {"threads": ["t"], "count": 1}, "seed": 1}

    async with workers(harness_for("stranger:made"), [{**job, "clients": ["a"]}]) as w:
        await w[0].finished()

asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "made",
    [
        "import _thread, time; _thread.start_new_thread(time.sleep, (99,))",
        "opened = open('/dev/zero')",
    ],
    ids=["thread", "file"],
)
def test_a_process_with_more_is_not_forked(
    made: str, harness: Harness, folder: Path
) -> None:
    """A site's own module may start a thread in each process: no fork copies it."""
    (folder.parent / "sitecustomize.py").write_text(made)
    environment = {**os.environ, "PYTHONPATH": str(folder.parent)}
    run = subprocess.Popen([sys.executable, "-c", ALONE], env=environment)
    assert run.wait() == 0
    (found,) = facts(folder)
    assert found["parent"] == run.pid


async def test_a_killed_server_is_started_again(harness: Harness, folder: Path) -> None:
    """A worker that it had forked says what happened; the next worker has another."""
    async with idle(harness, 1) as (worker,):
        (before,) = facts(folder)
        (number,) = (int(path.name) for path in folder.iterdir())
        ended = os.pidfd_open(number)
        os.kill(before["parent"], signal.SIGKILL)

        with pytest.raises(Failure, match=r"fork server .* exit code -9"):
            await asyncio.to_thread(worker._process.wait)

        async with workers(harness, [job(1)]) as (next_worker,):
            await next_worker.finished()

        with pytest.raises(Failure, match="says nothing about the store"):
            worker.kill()

    after = [one["parent"] for one in facts(folder)]
    assert len(set(after)) == 2
    # Its id may be another process's by then: it ends because its pipes close.
    assert await asyncio.to_thread(select.select, [ended], [], [], 30)
    os.close(ended)


async def test_a_closed_server_is_started_again(harness: Harness, folder: Path) -> None:
    """A certification after the end of an earlier one has its own.

    The exit code of an earlier worker is lost, which is a failure with a reason and no
    system error.
    """
    async with idle(harness, 1) as (worker,):
        (before,) = facts(folder)
        close_server()

        with pytest.raises(Failure, match="fork server"):
            await asyncio.to_thread(worker._process.wait)

    async with idle(harness, 1):
        (after,) = (one for one in facts(folder) if one != before)

    assert before["parent"] != after["parent"]


async def test_reading_the_errors_of_a_worker_overwrites_none(harness: Harness) -> None:
    """The worker writes at its own place while they are read."""
    async with idle(harness, 1) as (worker,):
        os.write(worker._errors.fileno(), b"one\n")
        assert worker.errors() == "one\n"
        os.write(worker._errors.fileno(), b"two\n")
        assert worker.errors() == "one\ntwo\n"


def test_a_worker_that_is_stopped_and_continued_completes_its_line() -> None:
    """Also with ``PYTHONUNBUFFERED``."""
    command = "from conformance.worker import emit; emit('x' * 1_000_000)"
    assert json.loads(interrupted_output("-c", command)) == "x" * 1_000_000
