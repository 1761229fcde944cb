"""The synchronous facade, called from threads with and without an event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from sys import _current_frames as frames
from traceback import extract_stack
from typing import Any

import pytest

from cpkit import (
    CheckpointData,
    Closed,
    InvalidURL,
    MemoryCheckpointer,
    SchemaMismatch,
    ToolCall,
    VersionConflict,
    open_checkpointer,
)
from cpkit.sync import SyncCheckpointer
from tests.servers.postgres import shared_postgres
from tests.servers.redis import shared_redis
from tests.stores import LAYERED, fresh_url


@pytest.fixture(params=["memory", "sqlite", "file", "postgresql", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of each store in turn."""
    if request.param == "postgresql":
        return shared_postgres(schema="sync")

    if request.param == "redis":
        return shared_redis(prefix="sync")

    return {
        "memory": "memory://",
        "sqlite": f"sqlite:///{tmp_path}/agent.db",
        "file": f"file://{tmp_path}/store",
    }[str(request.param)]


@pytest.fixture(autouse=True)
def no_loop_thread_left() -> Any:
    """Fail a test that leaves the facade's thread, which is a daemon thread."""
    yield
    assert [one for one in threading.enumerate() if one.name == "cpkit-sync"] == []


def test_every_method_works(url: str) -> None:
    """The methods do what the contract says, without ``await``."""
    call = ToolCall("call", "pay", {"amount": 1}, os.urandom(8).hex())
    thread = call.idempotency_key

    with SyncCheckpointer(url, max_payload=1000) as cp:
        assert cp.load(thread) is None
        assert cp.append(thread, [{"n": 1}, {"n": 2}]) == 2
        assert cp.append(thread, [{"n": 3}], expected_version=2) == 3
        cp.save_extra(thread, {"a": 1})

        with pytest.raises(VersionConflict):
            cp.append(thread, [{"n": 4}], expected_version=2)

        assert cp.record_issued(thread, call) is None
        assert cp.record_result(thread, "call", "paid").status == "completed"
        found = cp.find_completed(call.idempotency_key)
        assert found is not None
        assert found.result == "paid"
        data = cp.load(thread)
        assert data == CheckpointData([{"n": 1}, {"n": 2}, {"n": 3}], {"a": 1}, [], 3)
        assert cp.read(thread, 1) == [{"n": 2}, {"n": 3}]
        assert cp.read(thread, start=-1) == [{"n": 3}]
        assert [one.thread_id for one in cp.list_threads(prefix=thread)] == [thread]
        assert [one.status for one in cp.list_calls(thread)] == ["completed"]
        assert cp.find_call(call.idempotency_key) == found
        assert cp.durability.words
        cp.delete_thread(thread, forget_keys=True)
        assert cp.load(thread) is None


@pytest.mark.parametrize("kind", LAYERED)
def test_a_thread_is_moved(kind: str, tmp_path: Path) -> None:
    """The facade appends with extra, lists erased threads, dumps and restores."""
    call = ToolCall("call", "pay", {}, "key")
    urls = [fresh_url(kind, tmp_path, name) for name in ("source", "destination")]

    with SyncCheckpointer(urls[0]) as source, SyncCheckpointer(urls[1]) as destination:
        assert source.append("t", [{"n": 1}], expected_version=0, extra={"a": 1}) == 1
        assert source.append("t", [], extra={"b": None}) == 1
        source.record_issued("gone", call)
        source.delete_thread("gone")
        assert [one.thread_id for one in source.list_threads()] == ["t"]
        listed = source.list_threads(erased=True)
        assert [one.thread_id for one in listed] == ["gone", "t"]

        for one in listed:
            dump = source.dump_thread(one.thread_id)
            destination.restore_thread(dump)
            assert destination.dump_thread(one.thread_id) == dump

            with pytest.raises(VersionConflict):
                destination.restore_thread(dump)

        assert destination.load("t") == CheckpointData(
            [{"n": 1}], {"a": 1, "b": None}, [], 1
        )


def test_typed_messages(tmp_path: Path) -> None:
    """``message_type`` is passed to the store, like every other option."""
    with SyncCheckpointer(f"file://{tmp_path}/store", message_type=int) as cp:
        cp.append("t", [1, 2])
        data = cp.load("t")
        assert data is not None
        assert data.messages == [1, 2]


class SixMethods:
    """A store without any optional ability."""

    def __init__(self, inner: Any) -> None:
        for name in (
            "load append save_extra record_issued record_result find_completed"
        ).split():
            setattr(self, name, getattr(inner, name))


def test_optional_methods_are_those_of_the_store() -> None:
    """The facade has an optional method only if the store has it."""

    @asynccontextmanager
    async def opener() -> AsyncIterator[Any]:
        async with MemoryCheckpointer[Any]() as cp:
            yield SixMethods(cp)

    with SyncCheckpointer(opener) as cp:
        assert cp.append("t", [{}]) == 1

        for name in (
            "read list_threads list_calls find_call delete_thread trim dump_thread "
            "restore_thread durability aclose"
        ).split():
            assert not hasattr(cp, name)

    with pytest.raises(TypeError, match="options"):
        SyncCheckpointer(opener, max_payload=1)  # type: ignore[call-overload]  # the mistake under test


def test_threads_can_share_one() -> None:
    """Each append of each thread returns a different version."""
    with SyncCheckpointer("memory://") as cp, ThreadPoolExecutor(8) as pool:
        versions = pool.map(lambda n: cp.append("t", [{"n": n}]), range(100))
        assert sorted(versions) == [*range(1, 101)]


async def test_inside_a_loop_it_raises() -> None:
    """The error says what to use instead of blocking the loop."""
    with pytest.raises(RuntimeError, match="open_checkpointer"):
        SyncCheckpointer("memory://").__enter__()

    cp = SyncCheckpointer("memory://")
    await asyncio.to_thread(cp.__enter__)
    calls: list[Callable[[], Any]] = [
        lambda: cp.load("t"),
        lambda: cp.append("t", [{}]),
        lambda: cp.read("t"),
        lambda: cp.run(lambda inner: inner.load("t")),
        cp.close,
    ]

    for call in calls:
        with pytest.raises(RuntimeError, match="to_thread"):
            call()

    assert await asyncio.to_thread(cp.append, "t", [{}]) == 1
    await asyncio.to_thread(cp.close)


def test_on_its_own_loop_it_raises() -> None:
    """A call on the facade's own loop would never return."""
    with SyncCheckpointer("memory://") as cp:

        async def inside(_: Any) -> None:
            cp.load("t")

        with pytest.raises(RuntimeError, match="open_checkpointer"):
            cp.run(inside)


def test_calls_before_entering_and_after_closing_raise() -> None:
    """It can be entered once, and closing it twice is allowed."""
    cp = SyncCheckpointer("memory://")

    with pytest.raises(Closed):
        cp.load("t")

    cp.close()

    with cp:
        cp.append("t", [{}])

    cp.close()

    for call in (lambda: cp.load("t"), lambda: cp.read("t"), cp.__enter__):
        with pytest.raises(Closed):
            call()

    with pytest.raises(Closed):
        cp.submit(asyncio.sleep(0))


def test_a_failed_opening_leaves_nothing(tmp_path: Path) -> None:
    """A wrong URL raises in the constructor, a wrong store when entering."""
    with pytest.raises(InvalidURL):
        SyncCheckpointer("nothing://")

    store = tmp_path / "agent.db"
    store.write_bytes(b"no database" * 100)
    cp = SyncCheckpointer(f"sqlite:///{store}")

    with pytest.raises(SchemaMismatch):
        cp.__enter__()

    with pytest.raises(Closed):
        cp.load("t")

    with pytest.raises(Closed):
        cp.__enter__()

    cp.close()


def test_an_error_at_close_is_raised() -> None:
    """The error is raised once, and the thread ends."""

    @asynccontextmanager
    async def opener() -> AsyncIterator[Any]:
        async with MemoryCheckpointer[Any]() as cp:
            yield cp

        raise OSError("at close")

    cp = SyncCheckpointer(opener)

    with pytest.raises(OSError, match="at close"), cp:
        cp.append("t", [{}])

    cp.close()


def test_closing_waits_for_calls_in_flight() -> None:
    """A call that started before the closing returns its result."""
    with SyncCheckpointer("memory://") as cp:
        gate = asyncio.Event()

        async def late() -> int:
            await gate.wait()
            await asyncio.sleep(0)
            return await cp_inner.append("t", [{}])

        cp_inner = cp.checkpointer
        future = cp.submit(late())
        cp.loop.call_soon_threadsafe(gate.set)

    assert future.result() == 1


@pytest.fixture
def interrupt() -> Iterator[Callable[[], Awaitable[None]]]:
    """A function that interrupts the main thread, as Ctrl-C does.

    Python misses a signal that comes just before the thread blocks. So the function
    repeats it until the thread has noticed one.
    """
    main = threading.main_thread().ident
    assert main is not None
    noticed = threading.Event()

    def handler(*_: object) -> None:
        noticed.set()
        raise KeyboardInterrupt

    async def interrupt() -> None:
        while not noticed.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            await asyncio.sleep(0.05)

    before = signal.signal(signal.SIGINT, handler)
    yield interrupt
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_cancels_and_leaves_nothing(
    interrupt: Callable[[], Awaitable[None]],
) -> None:
    """The waiting call is cancelled, and the store stays usable."""
    ended = threading.Event()

    async def forever(_: Any) -> None:
        try:
            await interrupt()
            await asyncio.Event().wait()
        finally:
            ended.set()

    with SyncCheckpointer("memory://") as cp:
        with pytest.raises(KeyboardInterrupt):
            cp.run(forever)

        assert ended.wait(10)
        assert cp.append("t", [{}]) == 1


def test_an_interrupt_while_closing_cancels_calls_in_flight(
    interrupt: Callable[[], Awaitable[None]],
) -> None:
    """The thread ends, and the store is closed after the calls have ended."""
    ended: list[str] = []

    @asynccontextmanager
    async def opener() -> AsyncIterator[Any]:
        async with MemoryCheckpointer[Any]() as cp:
            yield cp

        ended.append("store")

    async def forever(cp: SyncCheckpointer[Any]) -> None:
        try:
            while True:
                await asyncio.sleep(0)

                if not cp._is_open:
                    await interrupt()
                    await asyncio.Event().wait()
        finally:
            ended.append("call")

    with pytest.raises(KeyboardInterrupt), SyncCheckpointer(opener) as cp:
        future = cp.submit(forever(cp))

    assert future.cancelled()
    assert ended == ["call", "store"]

    with pytest.raises(Closed):
        cp.load("t")


def test_an_interrupt_while_opening_leaves_nothing(
    interrupt: Callable[[], Awaitable[None]],
) -> None:
    """A store that was opened during the interrupt is closed."""
    main = threading.main_thread().ident
    assert main is not None
    closed = threading.Event()

    def is_waiting() -> bool:
        return "result" in [one.name for one in extract_stack(frames()[main])]

    @asynccontextmanager
    async def opener() -> AsyncIterator[Any]:
        while not is_waiting():  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0)

        await interrupt()

        async with MemoryCheckpointer[Any]() as cp:
            yield cp

        closed.set()

    cp = SyncCheckpointer(opener)

    with pytest.raises(KeyboardInterrupt):
        cp.__enter__()

    assert closed.is_set()

    with pytest.raises(Closed):
        cp.load("t")


FORK = """
import os, warnings
from cpkit.sync import SyncCheckpointer

warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forks

with SyncCheckpointer("memory://") as cp:
    cp.append("t", [{}])
    child = os.fork()

    if child == 0:
        try:
            cp.load("t")
        except RuntimeError as exc:
            assert "os.fork" in str(exc)
            cp.close()

            with SyncCheckpointer("memory://") as own:
                os._exit(40 + own.append("t", [{}]))

        os._exit(1)

    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 41
    assert cp.append("t", [{}]) == 2
"""

FORGOTTEN = """
from cpkit.sync import SyncCheckpointer

cp = SyncCheckpointer("memory://").__enter__()
print(cp.append("t", [{}]))
"""


@pytest.mark.parametrize("program", [FORK, FORGOTTEN])
def test_a_program_ends(program: str) -> None:
    """Also after a fork, and without closing."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_sees_writes_of_other_handles(tmp_path: Path) -> None:
    """A write through an async handle is visible to the facade."""
    url = f"sqlite:///{tmp_path}/agent.db"

    async def write() -> None:
        async with open_checkpointer(url) as cp:
            await cp.append("t", [{"n": 1}])

    with SyncCheckpointer(url) as cp:
        asyncio.run(write())
        data = cp.load("t")
        assert data is not None
        assert data.messages == [{"n": 1}]


async def test_inside_a_loop_the_error_says_what_works() -> None:
    """gevent's greenlets share one thread, so each one seems to be inside a loop."""
    with pytest.raises(RuntimeError, match=r"to_thread.*gevent.*threadpool\.apply"):
        with SyncCheckpointer("memory://"):
            pass
