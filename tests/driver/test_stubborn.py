"""A store that goes on when it is cancelled: no caller waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from conformance import Harness, Status, all_clauses, run_clause
from cpkit import BackendUnavailable, ToolCall
from cpkit.driver import Decode, FullHandle, Outcome, Snapshot, StoredCall, Timeouts
from cpkit.driver.writes import Write
from tests.driver.gated import GatedStore, handle, run_ready_tasks

SOON = 0.02

Step = Callable[[FullHandle[dict[str, Any]]], Awaitable[object]]


class Stubborn(GatedStore):
    """A store that catches each CancelledError, as some client libraries do.

    What is in ``stuck`` waits until the test ends it: threads, ``"open"``, ``"close"``.
    """

    def __init__(self, *stuck: str, timeout: float = SOON) -> None:
        super().__init__(timeouts=Timeouts(operation=timeout))
        self.stuck = set(stuck)
        self.end = asyncio.Event()
        self.was_cancelled = asyncio.Event()

    async def open(self) -> None:
        await self._stand("open")
        await super().open()

    async def close(self) -> None:
        await self._stand("close")
        await super().close()

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        for write in batch:
            await self._stand(write.thread_id)

        return await super().commit(batch)

    async def snapshot(self, thread_id: str, decode: Decode) -> Snapshot | None:
        await self._stand(thread_id)
        return await super().snapshot(thread_id, decode)

    async def holder(self, key: str) -> StoredCall | None:
        await self._stand(key)
        return await super().holder(key)

    async def _stand(self, where: str) -> None:
        while where in self.stuck and not self.end.is_set():
            try:
                await self.end.wait()
            except asyncio.CancelledError:
                self.was_cancelled.set()


OPERATIONS: dict[str, Step] = {
    "append": lambda cp: cp.append("t", [{}]),
    "save_extra": lambda cp: cp.save_extra("t", {"a": 1}),
    "delete_thread": lambda cp: cp.delete_thread("t"),
    "load": lambda cp: cp.load("t"),
    "find_call": lambda cp: cp.find_call("t"),
}


@pytest.mark.parametrize("name", OPERATIONS)
async def test_an_operation_ends_without_its_store(name: str) -> None:
    """A write may have been applied; another thread is served meanwhile."""
    store = Stubborn("t")

    async with handle(store) as cp:
        with pytest.raises(BackendUnavailable, match=r"within 0\.02 s") as caught:
            await OPERATIONS[name](cp)

        is_read = name in ("load", "find_call")
        assert caught.value.maybe_applied is not is_read
        assert await cp.append("other", [{}]) == 1
        assert await cp.load("other") is not None

    assert store.closed
    store.end.set()


async def test_a_read_that_can_be_cancelled_is_cancelled_until_it_ends() -> None:
    """In its caller's task; here it catches two cancellations."""
    tasks: list[asyncio.Task[Any] | None] = []

    class CancelsReads(GatedStore):
        async def holder(self, key: str) -> StoredCall | None:
            tasks.append(asyncio.current_task())

            for _ in range(2):
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()

            await asyncio.Event().wait()
            return None

    async with handle(CancelsReads(timeouts=Timeouts(SOON, cancels_reads=True))) as cp:
        with pytest.raises(BackendUnavailable, match=r"within 0\.02 s"):
            await cp.find_call("k")

    caller = asyncio.current_task()
    assert tasks == [caller]
    assert caller is not None
    assert not caller.cancelling()


async def test_a_later_operation_ends_too() -> None:
    """It waits for the write before it, for its own time, and is not sent."""
    store = Stubborn("t")

    async with handle(store) as cp:
        with pytest.raises(BackendUnavailable):
            await cp.append("t", [{}])

        sent = len(store.batches)

        for later in (lambda: cp.append("t", [{}]), lambda: cp.load("t")):
            with pytest.raises(BackendUnavailable, match="earlier write") as caught:
                await later()

            assert not caught.value.maybe_applied

        assert len(store.batches) == sent

    store.end.set()


@pytest.mark.long
@pytest.mark.parametrize("name", ["append", "load"])
async def test_the_wait_for_a_write_before_is_part_of_the_time(name: str) -> None:
    """The earlier write ends late, and then the store hangs again."""

    class HangsAgain(Stubborn):
        async def _stand(self, where: str) -> None:
            end = self.end

            while where in self.stuck and not end.is_set():
                with suppress(asyncio.CancelledError):
                    await end.wait()

    store = HangsAgain("t", timeout=1)
    loop = asyncio.get_running_loop()

    async with handle(store) as cp:
        with pytest.raises(BackendUnavailable):
            await cp.append("t", [{}])

        first, store.end = store.end, asyncio.Event()
        loop.call_later(0.9, first.set)
        began = loop.time()

        with pytest.raises(BackendUnavailable, match="no answer within 1 s"):
            await OPERATIONS[name](cp)

        took = loop.time() - began
        store.end.set()

    assert took < 2.5  # 1 and a second; with both waits it was 2.9


async def test_a_write_that_ends_late_is_before_later_ones() -> None:
    """Its outcome shows in what the handle does after it."""
    store = Stubborn("t")

    async with handle(store) as cp:
        with pytest.raises(BackendUnavailable):
            await cp.append("t", [{}])

        later = asyncio.create_task(cp.append("t", [{}], expected_version=1))
        await run_ready_tasks()
        assert not later.done()
        store.end.set()
        assert await later == 2
        assert await cp.append("t", [{}]) == 3


@pytest.mark.parametrize(
    "free",
    [
        lambda cp: cp.record_result("t", "c", None, success=False),
        lambda cp: cp.delete_thread("t", forget_keys=True),
    ],
)
async def test_a_claim_that_ends_late_does_not_get_a_key_that_was_freed_later(
    free: Step,
) -> None:
    """What frees the key names another thread and no key, and waits for the claim."""
    store = Stubborn("u")

    async with handle(store) as cp:
        await cp.record_issued("t", ToolCall("c", "x", {}, "k"))

        with pytest.raises(BackendUnavailable):
            await cp.record_issued("u", ToolCall("d", "x", {}, "k"))

        freeing = asyncio.ensure_future(free(cp))
        await run_ready_tasks()
        store.end.set()
        await freeing
        assert await cp.find_call("k") is None


async def test_callers_of_one_batch_all_end() -> None:
    """Those that queued behind it are committed by another task."""
    store = Stubborn("t", timeout=0.2)

    async with handle(store) as cp:
        first = asyncio.create_task(cp.append("t", [{}]))
        await store.was_cancelled.wait()
        queued = [asyncio.create_task(cp.append("u", [{}])) for _ in range(3)]
        failed = await asyncio.gather(first, return_exceptions=True)
        assert isinstance(failed[0], BackendUnavailable)
        assert sorted(await asyncio.gather(*queued)) == [1, 2, 3]

    store.end.set()


async def test_a_write_that_waits_when_the_handle_closes_is_committed() -> None:
    """The store is open until it is: the write had begun."""
    closed_at_commit: list[bool] = []

    class Notes(Stubborn):
        async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
            outcomes = await super().commit(batch)
            closed_at_commit.append(self.closed)
            return outcomes

    store = Notes("t", timeout=0.2)
    cp = handle(store)

    async with cp:
        with pytest.raises(BackendUnavailable):
            await cp.append("t", [{}])

        later = asyncio.create_task(cp.append("t", [{}]))
        reader = asyncio.create_task(cp.read("t"))
        await run_ready_tasks()
        closing = asyncio.create_task(cp.aclose())
        await run_ready_tasks()
        assert not store.closed
        store.end.set()
        await closing
        assert await later == 2
        assert {} in await reader

    assert closed_at_commit == [False, False]


@pytest.mark.parametrize("stuck", ["open", "close"])
async def test_opening_and_closing_end(stuck: str) -> None:
    """Both raise, and the handle is closed."""
    store = Stubborn(stuck)

    with pytest.raises(BackendUnavailable, match=r"within 0\.02 s"):
        async with handle(store) as cp:
            assert await cp.append("t", [{}]) == 1

    store.end.set()


async def test_a_cancelled_reader_does_not_wait() -> None:
    """It gets its CancelledError at once, and closing ends."""
    store = Stubborn("t")

    async with handle(store) as cp:
        reading = asyncio.create_task(cp.load("t"))
        await run_ready_tasks()
        reading.cancel()
        await run_ready_tasks()
        assert reading.cancelled()

    assert store.closed
    store.end.set()


async def test_closing_waits_for_the_clean_up_of_a_cancelled_read() -> None:
    """The store is open until its last call has ended."""
    cleaned: list[bool] = []

    class Cleans(GatedStore):
        async def holder(self, key: str) -> StoredCall | None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned.append(self.closed)

            return None

    store = Cleans()

    async with handle(store) as cp:
        reading = asyncio.create_task(cp.find_call("k"))
        await run_ready_tasks()
        reading.cancel()

    assert cleaned == [False]
    assert reading.cancelled()


@dataclass
class PausedHarness(Harness):
    """A stranger's store on the driver kit, whose server can be paused."""

    data: Stubborn = field(default_factory=Stubborn)
    is_paused: bool = False

    options = Harness.options | {"timeout"}

    def open(self, *, timeout: float = 30, **options: Any) -> Any:
        harness = self

        class OfThisServer(Stubborn):
            async def _stand(self, where: str) -> None:
                while harness.is_paused:
                    try:
                        await asyncio.sleep(0.005)
                    except asyncio.CancelledError:
                        continue

        store = OfThisServer()
        store._data = self.data._data
        store.timeouts = Timeouts(operation=timeout)
        return handle(store, **options)

    def elsewhere(self) -> Harness | None:
        return None

    async def pause(self) -> None:
        self.is_paused = True

    async def resume(self) -> None:
        self.is_paused = False


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "clause",
    [one for one in all_clauses() if "pause" in one.needs],
    ids=lambda one: one.id,
)
def test_a_stubborn_store_passes_the_clauses_of_a_paused_server(clause: Any) -> None:
    """The handle keeps the contract for it."""
    outcome = run_clause(clause, PausedHarness())
    assert (outcome.status, outcome.seen) == (Status.PASSED, "")
