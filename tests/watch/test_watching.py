"""The handle's watch: over notifications that come, get lost, or fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import pytest

from cpkit import (
    Closed,
    CorruptThread,
    InvalidId,
    MemoryCheckpointer,
    ToolCall,
    VersionConflict,
    WatchesThreads,
)
from cpkit.driver import (
    DriverOptions,
    FullHandle,
    Heard,
    StoreFailure,
    handle_over,
)
from cpkit.driver.notices import listen_in_thread
from cpkit.memory import MemoryStore
from tests.driver.gated import GatedStore, run_ready_tasks
from tests.simulation.loop import simulated_loop

Handle = FullHandle[dict[str, Any]]
Step = Callable[[Handle], Coroutine[Any, Any, Any]]

CALL = ToolCall("c", "pay", {"amount": 1}, "k")

STEPS: list[Step] = [
    lambda cp: cp.append("t", [{"n": 1}]),
    lambda cp: cp.append("t", [], extra={"a": 1}),
    lambda cp: cp.save_extra("t", {"a": 2}),
    lambda cp: cp.record_issued("t", CALL),
    lambda cp: cp.record_result("t", "c", "paid", success=False),
    lambda cp: cp.record_issued("t", ToolCall("c2", "pay", {}, "k")),
    lambda cp: cp.delete_thread("t"),
    lambda cp: cp.record_result("t", "c2", "paid"),
    lambda cp: cp.append("t", [{"n": 1}]),
    lambda cp: cp.delete_thread("t", forget_keys=True),
]


class Plain(MemoryStore):
    """A store that offers nothing for watching."""

    markers: Any = None
    listen: Any = None


class Deaf(MemoryStore):
    """A store whose notifications are all lost."""

    async def listen(self, heard: Heard) -> None:
        await asyncio.get_running_loop().create_future()


class Broken(MemoryStore):
    """A store whose listening fails at each change."""

    listened = 0

    async def listen(self, heard: Heard) -> None:
        self.listened += 1
        failed = asyncio.get_running_loop().create_future()

        def fail(thread_id: str | None) -> None:
            if thread_id is not None and not failed.done():
                failed.set_exception(StoreFailure("unknown", "the connection is lost"))

        listening = asyncio.ensure_future(super().listen(fail))
        heard(None)

        try:
            await failed
        finally:
            listening.cancel()


KINDS: list[type[MemoryStore]] = [MemoryStore, Plain, Deaf, Broken]


@asynccontextmanager
async def two_handles(
    kind: type[MemoryStore], poll: float = 0.01
) -> AsyncIterator[tuple[Handle, Handle]]:
    """Return two handles of one store: one that watches, and one that writes."""
    store = kind()
    other = MemoryStore()
    other._data = store._data
    watching: Any = handle_over(store, options=DriverOptions(poll=poll))
    writing: Any = handle_over(other)

    async with watching, writing:
        yield watching, writing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("named", [True, False], ids=["one", "any"])
async def test_each_change_wakes(kind: type[MemoryStore], named: bool) -> None:
    """Each kind of change of another handle is followed by a yield."""
    async with (
        two_handles(kind) as (watching, writing),
        watching.watch(*["t"] * named) as changes,
    ):
        for step in STEPS:
            await step(writing)
            assert await anext(changes) == "t"


async def test_every_handle_watches() -> None:
    """A handle is a WatchesThreads over any store; ids are checked at once."""
    async with MemoryCheckpointer[Any]() as cp:
        assert isinstance(cp, WatchesThreads)

        with pytest.raises(InvalidId):
            cp.watch("")

    with pytest.raises(Closed):
        cp.watch("t")


@pytest.mark.parametrize("kind", KINDS)
async def test_no_change_does_not_wake(kind: type[MemoryStore]) -> None:
    """Refused writes, writes of nothing and other threads wake no task."""
    async with two_handles(kind) as (watching, writing):
        await writing.record_issued("t", CALL)

        async with watching.watch("t", "last") as changes:
            await writing.record_issued("t", CALL)
            await writing.record_issued("t", ToolCall("c3", "pay", {}, "k"))
            await writing.append("t", [])
            await writing.save_extra("t", {})
            await writing.append("other", [{"n": 1}])
            await writing.append("last", [{"n": 1}])
            assert await anext(changes) == "last"


async def test_changes_are_coalesced() -> None:
    """Changes that were not taken yet are one yield for each thread."""
    async with (
        MemoryCheckpointer[Any]() as cp,
        cp.watch("t") as slow,
        cp.watch("t", "last") as quick,
    ):
        for n in range(5):
            await cp.append("t", [{"n": n}])
            assert await anext(quick) == "t"

        await cp.append("last", [{"n": 1}])
        assert await anext(quick) == "last"
        assert await anext(slow) == "t"
        assert [*slow.changed] == []  # type: ignore[attr-defined]  # a look without waiting


async def test_a_cancelled_waiter_misses_nothing() -> None:
    """A cancelled wait leaves the watch usable, and takes no yield with it."""
    async with MemoryCheckpointer[Any]() as cp, cp.watch("t") as changes:
        waiting = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)
        await cp.append("t", [{"n": 1}])
        waiting.cancel()
        (result,) = await asyncio.gather(waiting, return_exceptions=True)

        if result != "t":
            assert await anext(changes) == "t"


async def test_closing_ends_a_watch() -> None:
    """aclose does not wait for watchers; their iterators raise Closed."""
    cp = MemoryCheckpointer[Any]()

    async with cp:
        watch = cp.watch("t")
        changes = await watch.__aenter__()
        waiting = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)

    with pytest.raises(Closed):
        await waiting

    with pytest.raises(Closed):
        await anext(changes)

    await watch.__aexit__(None, None, None)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_leaving_ends_the_iterator() -> None:
    """Behind the block the iterator ends, for a waiting task too."""
    async with MemoryCheckpointer[Any]() as cp:
        async with cp.watch("t") as changes:
            waiting = asyncio.create_task(_first(changes))
            await asyncio.sleep(0)

        assert await waiting is None
        assert await _first(changes) is None


async def test_watchers_share_one_listener_and_one_poll() -> None:
    """Many watchers cost one listener and one read in each poll interval."""

    class Counted(Deaf):
        listeners = 0

        async def listen(self, heard: Heard) -> None:
            self.listeners += 1
            await super().listen(heard)

        async def markers(self, thread_ids: Any) -> dict[str, Hashable]:
            asked.append(thread_ids)
            return dict(await super().markers(thread_ids))

    asked: list[Any] = []

    async with two_handles(Counted) as (watching, writing):
        watches = [watching.watch(f"t{n}", "t") for n in range(10)]
        iterators = [await watch.__aenter__() for watch in watches]
        asked.clear()
        await writing.append("t", [{"n": 1}])
        assert [await anext(one) for one in iterators] == ["t"] * 10
        assert {len(ids) for ids in asked} == {11}
        store: Any = watching.store
        assert store.listeners == 1

        for watch in watches:
            await watch.__aexit__(None, None, None)


def test_the_listener_stays_until_five_seconds_after_the_last_watcher() -> None:
    """Another process may announce less often after a look without a listener."""
    ends: list[float] = []

    class Listening(MemoryStore):
        async def listen(self, heard: Heard) -> None:
            try:
                await asyncio.sleep(1000)
            finally:
                ends.append(asyncio.get_running_loop().time())

    async def main() -> float:
        cp: Any = handle_over(Listening())

        async with cp:
            for _ in range(20):
                async with cp.watch("t"):
                    await asyncio.sleep(0.5)

                await asyncio.sleep(0.5)

            last = asyncio.get_running_loop().time() - 0.5
            await asyncio.sleep(20)
            return last

    last = simulated_loop(Random(0)).run(main())
    assert len(ends) == 1
    assert 5 <= ends[0] - last <= 5.1


async def test_own_writes_need_no_poll_and_no_listener() -> None:
    """A change by the same handle wakes even where it would be polled in a day."""
    options = DriverOptions(poll=86_400, notify=False)
    cp: Any = handle_over(MemoryStore(), options=options)

    async with cp, cp.watch("t") as changes:
        await cp.append("t", [{"n": 1}])
        assert await anext(changes) == "t"


async def test_a_write_whose_answer_was_lost_wakes() -> None:
    """A write that may have been applied, or was abandoned, wakes as well."""
    store = GatedStore(open_gate=False)
    cp: Any = handle_over(store, options=DriverOptions(poll=86_400, notify=False))

    async with cp, cp.watch("t") as changes:
        writing = asyncio.create_task(cp.append("t", [{"n": 1}]))

        await run_ready_tasks()
        assert store.batches
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        store.lost.append(StoreFailure("unknown", "the answer was lost"))
        store.gate.release()
        assert await anext(changes) == "t"


async def test_a_failed_look_is_made_again() -> None:
    """A store that is away for some polls loses no change."""

    class Away(Deaf):
        failures = 0

        async def markers(self, thread_ids: Any) -> dict[str, Hashable]:
            if self.failures:
                self.failures -= 1
                raise StoreFailure("not sent", "away")

            return dict(await super().markers(thread_ids))

    async with (
        two_handles(Away) as (watching, writing),
        watching.watch("t") as changes,
    ):
        store: Any = watching.store
        store.failures = 3
        await writing.append("t", [{"n": 1}])
        assert await anext(changes) == "t"
        assert not store.failures


@pytest.mark.parametrize(
    "error",
    [
        CorruptThread("t", "its times", "they are missing"),
        StoreFailure("rejected", "the file was moved"),
    ],
    ids=["damaged", "rejected"],
)
async def test_a_look_that_cannot_succeed_wakes(error: Exception) -> None:
    """Watchers of a damaged thread look for themselves, and get its error.

    So do those of a store that cannot be read any more.
    """

    class Damaged(Deaf):
        damaged = False

        async def markers(self, thread_ids: Any) -> dict[str, Hashable]:
            if self.damaged:
                raise error

            return dict(await super().markers(thread_ids))

    store: Any = Damaged()
    cp = handle_over(store, options=DriverOptions(poll=0.01))

    async with cp, cp.watch("t") as changes:
        store.damaged = True
        assert await anext(changes) == "t"


async def test_a_scan_that_cannot_succeed_raises() -> None:
    """A watcher of all threads has no id to read, so it gets the error, and goes on."""
    store: Any = MemoryStore()
    cp: Any = handle_over(store, options=DriverOptions(poll=0.01))

    async with cp, cp.watch() as changes:
        read = cp._watching._read
        failed = asyncio.Event()

        async def fail_once(asked: Any) -> Any:
            if failed.is_set():
                return await read(asked)

            failed.set()
            raise CorruptThread("t", "its times", "they are missing")

        cp._watching._read = fail_once

        with pytest.raises(CorruptThread):
            await anext(changes)

        await cp.append("t", [{"n": 1}])
        assert await anext(changes) == "t"


def test_the_time_of_a_wake_up_begins_at_its_notification() -> None:
    """Not at an earlier one, whose watcher left, or whose thread did not change."""
    times: list[float] = []

    async def main() -> None:
        options = DriverOptions(poll=5, notify=False)
        cp: Any = handle_over(MemoryStore(), options=options)

        async with cp:
            cp._watching.on_wake.append(times.append)

            async with cp.watch("b") as changes:
                async with cp.watch("a"):
                    cp._watching._heard("a")

                await asyncio.sleep(1)
                assert cp._watching._hinted_at is None
                assert times == []
                await cp.append("b", [{"n": 1}])
                assert await anext(changes) == "b"

            assert len(times) == 1

    simulated_loop(Random(0)).run(main())


async def test_a_notification_during_a_read_keeps_its_time() -> None:
    """The read that is under way does not see the change, and the next one does."""
    cp: Any = handle_over(MemoryStore(), options=DriverOptions(poll=5, notify=False))

    async with cp, cp.watch("a", "b") as changes:
        watching = cp._watching
        times: list[float] = []
        watching.on_wake.append(times.append)
        read = watching._read
        reading, go_on = asyncio.Event(), asyncio.Event()

        async def slow(asked: Any) -> Any:
            found = await read(asked)
            reading.set()
            await go_on.wait()
            return found

        watching._read = slow
        watching._heard("a")
        await reading.wait()
        await cp.append("b", [{"n": 1}])
        go_on.set()
        assert await anext(changes) == "b"
        await run_ready_tasks()
        assert len(times) == 1


def test_a_slow_scan_of_all_threads_delays_no_named_watch() -> None:
    """Neither while it runs nor while it rests: they have a poll of their own."""
    waited: list[float] = []

    class Slow(Plain):
        async def threads(self, *args: Any) -> Any:
            await asyncio.sleep(5)
            return await super().threads(*args)

    async def main() -> None:
        clock = asyncio.get_running_loop().time

        async with (
            two_handles(Slow, poll=0.5) as (watching, writing),
            watching.watch(),
            watching.watch("t") as changes,
        ):
            for pause in (1, 7, 13, 20, 60):
                await asyncio.sleep(pause)
                began = clock()
                await writing.append("t", [{"n": 1}])
                await anext(changes)
                waited.append(clock() - began)

    simulated_loop(Random(0)).run(main())
    assert max(waited) <= 0.6  # one poll


def test_a_hint_is_looked_at_during_a_scan_of_all_threads() -> None:
    """The watch without ids yields a change of its own handle meanwhile."""

    async def main() -> None:
        cp: Any = handle_over(MemoryStore(), options=DriverOptions(poll=1))

        async with cp, cp.watch() as changes:
            read = cp._watching._read

            async def hang(asked: Any) -> Any:
                return await (read(asked) if asked else asyncio.Event().wait())

            cp._watching._read = hang
            await asyncio.sleep(3)  # a scan of all threads is under way
            await cp.append("t", [{"n": 1}])
            assert await anext(changes) == "t"

        assert asyncio.all_tasks() == {asyncio.current_task()}

    simulated_loop(Random(0)).run(main())


def scanned(error: Exception, seconds: float, until: float) -> tuple[int, float]:
    """Watch a store whose scans raise the error after so many seconds.

    Returns how many scans began until the store answers again, and how long a change
    after that waited.
    """
    scans: list[float] = []

    async def main() -> float:
        clock = asyncio.get_running_loop().time
        answers = asyncio.Event()
        answers.set()

        class Stalls(Plain):
            async def threads(self, *args: Any) -> Any:
                scans.append(clock())

                try:
                    async with asyncio.timeout(seconds):
                        await answers.wait()
                except TimeoutError:
                    raise error from None

                return await super().threads(*args)

        async with (
            two_handles(Stalls, poll=1) as (watching, writing),
            watching.watch() as changes,
        ):
            scans.clear()
            answers.clear()
            await asyncio.sleep(until)
            answers.set()
            began = clock()
            await writing.append("t", [{"n": 1}])

            while True:
                with suppress(CorruptThread):
                    assert await anext(changes) == "t"
                    return clock() - began

    waited = simulated_loop(Random(0)).run(main())
    return sum(one < until for one in scans), waited


def test_a_scan_without_an_answer_is_repeated_without_a_rest() -> None:
    """A change is yielded within the poll interval, once the store answers again."""
    _, waited = scanned(StoreFailure("not sent", "a lock is held"), 30, 160)
    assert waited <= 1.1


def test_a_scan_that_fails_slowly_for_good_is_followed_by_a_rest() -> None:
    """As one that succeeds: the poll must not keep the store busy."""
    scans, _ = scanned(CorruptThread("t", "its times", "they are missing"), 5, 160)
    assert scans < 6


def test_listening_is_tried_again_soon_after_it_worked() -> None:
    """The pauses grow while it fails, and begin again after it worked."""
    tries: list[float] = []

    class Flaky(MemoryStore):
        async def listen(self, heard: Heard) -> None:
            tries.append(asyncio.get_running_loop().time())

            if len(tries) == 20:
                await asyncio.sleep(100)
                tries.append(asyncio.get_running_loop().time())

            raise StoreFailure("unknown", "the connection is lost")

    async def main() -> None:
        cp: Any = handle_over(Flaky(), options=DriverOptions(poll=100))

        async with cp, cp.watch("t"):
            await asyncio.sleep(400)

    simulated_loop(Random(0)).run(main())
    assert tries[21] - tries[20] <= 0.05


async def test_a_bug_in_a_store_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A lost connection is not: it is expected."""

    class Buggy(MemoryStore):
        async def listen(self, heard: Heard) -> None:
            raise ZeroDivisionError

        async def announce(self, thread_ids: list[str]) -> bool:
            raise ZeroDivisionError

    class Lost(MemoryStore):
        async def listen(self, heard: Heard) -> None:
            raise StoreFailure("unknown", "the connection is lost")

        async def announce(self, thread_ids: list[str]) -> bool:
            raise StoreFailure("unknown", "the connection is lost")

    for kind, count in ((Lost, 0), (Buggy, 2)):
        caplog.clear()
        cp: Any = handle_over(kind())

        async with cp, cp.watch("t"):
            await cp.append("t", [{"n": 1}])
            await run_ready_tasks()

        # A slow machine listens again before the end.
        traced = [one for one in caplog.records if one.exc_info]
        assert len({one.name for one in traced}) == count
        assert all(one.levelname == "WARNING" for one in traced)


async def test_a_listening_thread_that_exits_is_an_error() -> None:
    """SystemExit of that thread is not a normal end: the caller listens again."""

    def follow(changed: Any, stop: threading.Event) -> None:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
        await listen_in_thread(follow, lambda _: None)


class Announced(MemoryStore):
    """A store that collects announcements; ``gate`` holds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.announced: list[list[str]] = []
        self.gate = asyncio.Event()

    async def announce(self, thread_ids: list[str]) -> bool:
        self.announced.append(thread_ids)
        await self.gate.wait()
        return False


async def test_commits_are_announced_together() -> None:
    """Changes during an announcement share the next one, and closing waits for it."""
    store = Announced()

    async with handle_over(store) as cp:
        await cp.append("a", [{"n": 1}])

        await run_ready_tasks()
        assert store.announced

        for name in ("b", "c", "b"):
            await cp.append(name, [{"n": 1}])

        store.gate.set()

    assert store.announced == [["a"], ["b", "c"]]


async def test_refused_writes_are_not_announced() -> None:
    """Only a commit that may have changed something is announced."""
    store = Announced()
    store.gate.set()

    async with handle_over(store) as cp:
        await cp.append("a", [])

        with pytest.raises(VersionConflict):
            await cp.append("a", [{"n": 1}], expected_version=7)

    assert store.announced == []


async def _first(changes: AsyncIterator[str]) -> str | None:
    async for thread_id in changes:
        return thread_id

    return None
