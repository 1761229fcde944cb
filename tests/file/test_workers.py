"""The threads: each job once, its outcome to its loop, and no process held up."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpkit_file.workers import Workers


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Two threads at most, ended after the test."""
    workers = Workers(2, "worker")
    yield workers
    workers.shutdown()
    assert not any(thread.name == "worker" for thread in threading.enumerate())


async def test_each_caller_gets_its_own_outcome(workers: Workers) -> None:
    """A result or an exception, from no more threads than were asked for."""
    names = set()

    def work(number: int) -> int:
        names.add(threading.get_ident())
        return 100 // number

    assert await workers.submit(work, 5) == 20
    assert len(names) == 1

    found = await asyncio.gather(
        *(workers.submit(work, n) for n in range(20)), return_exceptions=True
    )
    assert isinstance(found[0], ZeroDivisionError)
    assert found[1:] == [100 // n for n in range(1, 20)]
    assert len(names) <= 2


async def test_what_is_given_up_before_it_begins_is_not_done(workers: Workers) -> None:
    """What has begun is done to its end, and shutting down waits for it."""
    begun, gate = threading.Semaphore(0), threading.Event()
    done = []

    def work(number: int) -> None:
        begun.release()
        gate.wait()
        done.append(number)

    answers = [workers.submit(work, n) for n in range(6)]
    await asyncio.to_thread(lambda: (begun.acquire(), begun.acquire()))

    for answer in answers[1:4]:
        answer.cancel()

    gate.set()
    await asyncio.gather(answers[0], *answers[4:])
    await asyncio.to_thread(workers.shutdown)
    assert sorted(done) == [0, 1, 4, 5]


async def test_where_no_more_threads_are_allowed_one_does_it_all(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's limit is felt only where there is no thread at all."""

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", fail)

        with pytest.raises(RuntimeError, match="start new thread"):
            workers.submit(int)

    assert await workers.submit(int) == 0
    monkeypatch.setattr(threading.Thread, "start", fail)
    assert await asyncio.gather(*(workers.submit(int) for _ in range(5))) == [0] * 5
    monkeypatch.undo()


def test_what_nobody_closes_ends_with_its_last_user() -> None:
    """A handle that is merely forgotten leaves no thread behind."""

    async def use() -> threading.Thread:
        workers = Workers(2, "worker")
        await workers.submit(int)
        (thread,) = workers._threads
        return thread

    asyncio.run(use()).join(10)
    gc.collect()
    assert not any(thread.name == "worker" for thread in threading.enumerate())


def test_a_loop_that_is_closed_is_told_nothing(workers: Workers) -> None:
    """What was begun is done, and the thread goes on."""
    gate = threading.Event()
    done: list[int] = []

    async def leave() -> None:
        workers.submit(gate.wait)
        workers.submit(done.append, 1)

    async def again() -> None:
        await workers.submit(done.append, 2)

    asyncio.run(leave())
    gate.set()
    asyncio.run(again())
    assert 2 in done


def test_a_handle_that_is_not_closed_keeps_no_process(home: Path) -> None:
    """The interpreter ends without waiting for its threads."""
    script = f"""
import asyncio
from cpkit_file import FileCheckpointer

async def main():
    cp = await FileCheckpointer({str(home)!r}).__aenter__()
    print(await cp.append("t", [{{}}]))

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n", "")
