"""Group commit: batches, their bounds, cancelled callers, and the end of the loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from cpkit import (
    BackendUnavailable,
    CorruptThread,
    KeyTaken,
    ToolCall,
    VersionConflict,
)
from cpkit.driver import (
    Append,
    Batching,
    FullHandle,
    Merge,
    Outcome,
    StoreFailure,
    Timeouts,
    Write,
)
from cpkit.driver.writes import stored_size
from tests.driver.gated import GatedStore, handle, not_sent, run_ready_tasks
from tests.simulation.loop import simulated_loop

Message = dict[str, Any]
Ask = Callable[[], Coroutine[Any, Any, Any]]


def append(cp: FullHandle[Message], thread: str, text: str = "x") -> asyncio.Task[int]:
    return asyncio.create_task(cp.append(thread, [{"text": text}]))


async def test_a_lone_write_is_a_batch_of_its_own() -> None:
    """It does not wait for others."""
    store = GatedStore()

    async with handle(store) as cp:
        assert await cp.append("t", [{"n": 1}]) == 1
        assert await cp.append("t", [{"n": 2}]) == 2

    assert store.sizes() == [1, 1]


async def test_writes_that_queue_during_a_commit_share_the_next_in_order() -> None:
    """A batch has the order in which its writes came."""
    store = GatedStore(open_gate=False)

    async with handle(store) as cp:
        first = append(cp, "t", "first")
        await run_ready_tasks()
        others = [append(cp, "t", str(n)) for n in range(5)]
        await run_ready_tasks()
        assert store.sizes() == [1]
        store.gate.release()
        store.gate.release()
        assert [await first, *[await one for one in others]] == [1, 2, 3, 4, 5, 6]
        found = await cp.read("t", 1)

    assert [one["text"] for one in found] == ["0", "1", "2", "3", "4"]
    assert store.sizes() == [1, 5]


async def test_callers_answered_together_share_their_next_commit() -> None:
    """A batch leaves one turn of the loop for the callers that it answered."""
    store = GatedStore()

    async with handle(store) as cp:

        async def writer(thread: str) -> None:
            for _ in range(3):
                await cp.append(thread, [{}])

        await asyncio.gather(*(writer(f"t{n}") for n in range(8)))

    assert store.sizes() == [8, 8, 8]


@pytest.mark.parametrize(
    ("batching", "sizes"),
    [
        (Batching(max_writes=4), [4, 4, 2]),
        (Batching(max_writes=1), [1] * 10),
        (Batching(max_bytes=40), [2, 2, 2, 2, 2]),
    ],
)
async def test_a_batch_is_bounded(batching: Batching, sizes: list[int]) -> None:
    """In writes, and roughly in bytes."""
    store = GatedStore(batching=batching)

    async with handle(store) as cp:
        await asyncio.gather(*(append(cp, f"t{n}", "y" * 10) for n in range(10)))

    assert store.sizes() == sizes


@pytest.mark.parametrize(("callers", "sizes"), [(47, [47]), (64, [32])])
async def test_a_crowd_is_divided_where_the_store_asks_for_halves(
    callers: int, sizes: list[int]
) -> None:
    """Only where enough writes wait."""
    store = GatedStore(open_gate=False, batching=Batching(halves=True))

    async with handle(store) as cp:
        tasks = [append(cp, f"t{n}") for n in range(callers)]
        await run_ready_tasks()
        assert store.sizes() == sizes
        store.gate.release()
        store.gate.release()
        await asyncio.gather(*tasks)


async def test_the_halves_of_a_crowd_are_committed_by_turns() -> None:
    """The store has the next half before the callers of the last one go on."""
    store = GatedStore(open_gate=False, batching=Batching(halves=True))
    commits_seen: list[int] = []

    async with handle(store) as cp:

        async def writer(thread: str) -> None:
            await cp.append(thread, [{}])
            commits_seen.append(len(store.sizes()))
            await cp.append(thread, [{}])

        tasks = [asyncio.create_task(writer(f"t{n}")) for n in range(64)]

        for _ in range(4):
            await run_ready_tasks()
            store.gate.release()

        await asyncio.gather(*tasks)

    assert store.sizes() == [32, 32, 32, 32]
    assert commits_seen == [2] * 32 + [3] * 32


async def test_only_the_kinds_that_a_store_asks_for_are_grouped() -> None:
    """A write of another kind neither waits for a batch nor joins one.

    An append without messages is a merge that returns a version.
    """
    store = GatedStore(open_gate=False, batching=Batching(kinds=(Append,)))

    async with handle(store) as cp:
        tasks: list[asyncio.Task[Any]] = [append(cp, "t") for _ in range(3)]
        tasks += [asyncio.create_task(cp.append("t", []))]
        tasks += [asyncio.create_task(cp.save_extra("t", {"n": n})) for n in range(2)]
        await run_ready_tasks()
        assert sorted(store.sizes()) == [1, 1, 1, 3]
        tasks[-1].cancel()
        await run_ready_tasks()
        looking = asyncio.create_task(cp.load("t"))
        await run_ready_tasks()
        assert not looking.done()

        for _ in store.sizes():
            store.gate.release()

        await asyncio.wait(tasks)
        data = await looking
        assert data is not None
        assert (data.version, data.extra) == (3, {"n": 1})


class LockedStore(GatedStore):
    """Cannot write to the threads that are locked."""

    def __init__(self, locked: set[str] | None = None, *, retry: float = 60) -> None:
        super().__init__(timeouts=Timeouts(retry=retry))
        self.locked = {"locked"} if locked is None else locked

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []

        for write in batch:
            if write.thread_id in self.locked:
                outcomes.append(not_sent())
            else:
                outcomes += await super().commit([write])

        return outcomes


async def test_a_lone_write_that_waits_for_a_lock_holds_up_no_other_thread() -> None:
    """It is repeated apart from the writes that come after it."""
    store = LockedStore()

    async with handle(store) as cp:
        locked = append(cp, "locked")
        await run_ready_tasks()
        assert await append(cp, "t") == 1
        assert not locked.done()
        store.locked.clear()
        assert await locked == 1


async def test_two_locked_threads_hold_up_no_third() -> None:
    """A batch of which nothing ran is divided too, if each write has its own reason."""
    store = LockedStore({"a", "b"})

    async with handle(store) as cp:
        locked = [append(cp, "a"), append(cp, "b")]
        await run_ready_tasks()
        assert await append(cp, "t") == 1
        assert not any(one.done() for one in locked)
        store.locked.clear()
        assert [await one for one in locked] == [1, 1]


async def test_a_write_that_waits_for_a_lock_does_not_hold_up_the_others() -> None:
    """It is repeated apart from them, in order; closing waits for it."""
    store = LockedStore()

    async with handle(store) as cp:
        first = append(cp, "t"), append(cp, "locked"), append(cp, "u")
        assert [await first[0], await first[2]] == [1, 1]
        later = [append(cp, "locked", str(n)) for n in range(3)]
        assert await append(cp, "t") == 2
        assert not first[1].done()
        later[1].cancel()
        await run_ready_tasks()
        closing = asyncio.create_task(cp.aclose())
        await run_ready_tasks()
        assert not any(task.done() for task in [first[1], later[0], later[2], closing])
        store.locked.clear()
        assert [await first[1], await later[0], await later[2]] == [1, 2, 3]
        await closing


def test_writes_that_queue_for_a_lock_wait_no_longer_than_the_first() -> None:
    """The time of each one counts from its call; ``aclose`` does not add them up."""

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        store = LockedStore(retry=10)
        store.batching = Batching(max_writes=1)
        waited: list[float] = []

        async def write(cp: FullHandle[Message]) -> None:
            began = clock()

            with pytest.raises(BackendUnavailable) as caught:
                await cp.append("locked", [{}])

            waited.append(clock() - began)
            assert not caught.value.maybe_applied

        async with handle(store) as cp:
            tasks = [asyncio.create_task(write(cp)) for _ in range(6)]
            await asyncio.sleep(1)
            tasks += [asyncio.create_task(write(cp)) for _ in range(6)]
            await asyncio.sleep(1)
            cancelled = append(cp, "locked")
            await asyncio.sleep(1)
            cancelled.cancel()
            await cp.aclose()
            assert clock() < 13
            await asyncio.gather(*tasks)

        assert len(waited) == 12
        assert 10 <= min(waited) <= max(waited) < 11

    simulated_loop(Random(0)).run(main())


def test_a_later_write_to_a_locked_thread_has_its_own_time() -> None:
    """It does not fail with an older write of its batch."""

    async def main() -> None:
        store = LockedStore(retry=10)

        async with handle(store) as cp:
            tasks = []

            # The first one is alone in its batch. The others share the next batch.
            for _ in range(4):
                tasks.append(append(cp, "locked"))
                await asyncio.sleep(3)

            await asyncio.sleep(6)
            store.locked.clear()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)

        assert [type(one) for one in outcomes[:3]] == [BackendUnavailable] * 3
        assert outcomes[3] == 1

    simulated_loop(Random(0)).run(main())


async def test_a_cancelled_write_that_waits_for_a_lock_is_not_repeated() -> None:
    """Nothing of it was written, and a later look does not wait for the lock."""
    store = LockedStore()
    store.gate = asyncio.Semaphore(0)

    async with handle(store) as cp:
        tasks = append(cp, "locked"), append(cp, "t")
        await run_ready_tasks()
        tasks[0].cancel()
        looking = asyncio.create_task(cp.load("locked"))
        await run_ready_tasks()
        assert not looking.done()
        store.gate.release()
        assert await looking is None
        assert await tasks[1] == 1


async def test_a_refused_write_is_refused_alone() -> None:
    """The other writes of its batch are applied."""
    store = GatedStore()

    async with handle(store) as cp:
        results = await asyncio.gather(
            cp.append("a", [{}]),
            cp.append("b", [{}], expected_version=7),
            cp.append("c", [{}]),
            return_exceptions=True,
        )

    assert store.sizes() == [3]
    assert results[0] == results[2] == 1
    assert isinstance(results[1], VersionConflict)


@pytest.mark.parametrize(
    "failure",
    [StoreFailure("rejected", "value 7 is bad"), CorruptThread("b", "row 1", "torn")],
)
async def test_a_batch_that_is_rejected_is_committed_write_by_write(
    failure: Exception,
) -> None:
    """One write that the engine refuses does not fail its neighbours."""
    store = GatedStore()
    store.failures = [failure, failure]

    async with handle(store) as cp:
        results = await asyncio.gather(
            cp.append("a", [{}]), cp.append("b", [{}]), return_exceptions=True
        )
        assert await cp.load("a") is None
        assert (store.sizes(), results[1]) == ([2, 1, 1], 1)
        assert isinstance(results[0], (BackendUnavailable, CorruptThread))


async def test_writes_that_are_rejected_together_are_repeated_one_by_one() -> None:
    """As by a disk that has room for most writes to a thread, and not for all."""

    class FullDisk(GatedStore):
        """Writes all lines of a thread at once, or refuses them with one failure."""

        async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
            too_large = StoreFailure("rejected", "no space left on device")
            refused = {one.thread_id for one in batch if stored_size(one) > 100}
            kept = [one for one in batch if one.thread_id not in refused]
            outcomes = iter(await super().commit(kept) if kept else [])
            return [
                too_large if one.thread_id in refused else next(outcomes)
                for one in batch
            ]

    store = FullDisk()

    async with handle(store) as cp, cp.watch("t", "u") as changes:
        tasks: list[asyncio.Task[Any]] = [
            append(cp, "t", "first"),
            append(cp, "u", "of another thread"),
            append(cp, "t", "y" * 1000),
            asyncio.create_task(cp.save_extra("t", {"a": 1})),
            append(cp, "t", "last"),
        ]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        error = results.pop(2)
        assert results == [1, 1, None, 2]
        assert isinstance(error, BackendUnavailable)
        assert error.rejected
        assert {await anext(changes), await anext(changes)} == {"t", "u"}
        data = await cp.load("t")
        assert data is not None
        assert [one["text"] for one in data.messages] == ["first", "last"]
        assert data.extra == {"a": 1}

    assert store.sizes() == [1, 1, 1, 1]


async def test_every_caller_gets_an_error_of_its_own() -> None:
    """A raised error gathers tracebacks, so two callers never share one."""
    store = GatedStore()
    store.failures = [StoreFailure("unknown", "gone")]

    async with handle(store) as cp:
        first, second = await asyncio.gather(
            cp.append("a", [{}]), cp.append("b", [{}]), return_exceptions=True
        )

    assert isinstance(first, BackendUnavailable)
    assert isinstance(second, BackendUnavailable)
    assert first is not second
    assert first.maybe_applied
    assert isinstance(first.__cause__, StoreFailure)


async def test_a_caller_cancelled_in_the_queue_takes_its_write_back() -> None:
    """No commit ever has it."""
    store = GatedStore(open_gate=False)

    async with handle(store) as cp:
        first = append(cp, "t", "first")
        await run_ready_tasks()
        queued, other = append(cp, "t", "queued"), append(cp, "t", "other")
        await run_ready_tasks()
        queued.cancel()
        await run_ready_tasks()
        store.gate.release()
        store.gate.release()
        assert [await first, await other] == [1, 2]
        assert [one["text"] for one in await cp.read("t")] == ["first", "other"]


async def test_a_write_behind_slow_commits_ends_in_time() -> None:
    """Its own time is over before its commit begins, so it is not sent."""
    store = GatedStore(
        open_gate=False,
        batching=Batching(max_writes=1),
        timeouts=Timeouts(operation=0.05),
    )

    async with handle(store) as cp:
        tasks = [append(cp, f"t{n}") for n in range(5)]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert len(store.batches) <= 3

    maybe = [
        isinstance(one, BackendUnavailable) and one.maybe_applied for one in errors
    ]
    assert maybe == sorted(maybe, reverse=True)
    assert maybe[0]
    assert not maybe[-1]


async def test_a_repeated_write_has_no_new_time() -> None:
    """Each write of a rejected batch is committed alone, in the time of all."""

    class Slow(GatedStore):
        async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
            self.batches.append(list(batch))

            if len(batch) > 1:
                raise StoreFailure("rejected", "a value is bad")

            await asyncio.Event().wait()
            return []

    store = Slow(timeouts=Timeouts(operation=0.05))

    async with handle(store) as cp:
        tasks = [append(cp, "t", str(n)) for n in range(5)]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, BackendUnavailable) for one in errors)
        assert len(store.batches) <= 4


@pytest.mark.parametrize("ids", [("t", "t", "t"), ("a", "b", "c")])
async def test_a_repeated_write_that_hangs_puts_no_other_in_doubt(
    ids: tuple[str, ...],
) -> None:
    """What was committed before is acknowledged, though a later repeat has no end."""

    class HangsOnTwo(GatedStore):
        async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
            if len(batch) > 1:
                raise StoreFailure("rejected", "a value is bad")

            while isinstance(batch[0], Append) and b"two" in batch[0].bodies[0]:
                with suppress(asyncio.CancelledError):
                    await end.wait()
                    break

            return await super().commit(batch)

    end = asyncio.Event()
    store = HangsOnTwo(timeouts=Timeouts(operation=0.05))

    async with handle(store) as cp:
        tasks = [append(cp, *one) for one in zip(ids, ("1", "two", "3"), strict=True)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        end.set()
        error = results[1]
        assert results[0] == 1
        assert isinstance(error, BackendUnavailable)
        assert error.maybe_applied
        # The third may wait for the one that hangs until its own time is over.
        last = results[2]
        assert last == 1 or ids[2] == ids[1]
        assert not isinstance(last, BackendUnavailable) or not last.maybe_applied


@pytest.mark.skipif(sys.version_info < (3, 12), reason="is new in Python 3.12")
def test_an_eager_task_factory_works() -> None:
    """A task that starts before its creator has noted it would commit nothing."""

    async def main() -> list[int]:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)

        async with asyncio.timeout(20), handle(GatedStore()) as cp:
            async with cp.watch("t") as changes:
                tasks = [append(cp, "t") for _ in range(3)]
                assert await anext(changes) == "t"
                return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [1, 2, 3]


async def test_a_restored_thread_waits_for_a_cancelled_claim_of_its_key() -> None:
    """The claim came first, so the key is taken when the thread is restored."""
    call = ToolCall("c", "tool", {}, "k")

    async with handle(GatedStore()) as source:
        await source.record_issued("restored", call)
        dump = await source.dump_thread("restored")

    assert dump is not None
    store = GatedStore(open_gate=False, batching=Batching(kinds=(Append,)))

    async with handle(store) as cp:
        claim = asyncio.create_task(cp.record_issued("other", call))
        await run_ready_tasks()
        claim.cancel()
        restore = asyncio.create_task(cp.restore_thread(dump))
        await run_ready_tasks()
        assert store.sizes() == [1]
        store.gate.release()
        store.gate.release()

        with pytest.raises(KeyTaken):
            await restore


@pytest.mark.parametrize(
    ("kind", "waits"),
    [
        ("append", ["load t", "list_threads"]),
        ("claim", ["load t", "list_threads", "find k"]),
        ("result", ["load t", "list_threads", "find k", "find other"]),
    ],
)
async def test_a_cancelled_write_is_waited_for_by_what_must_see_it(
    kind: str, waits: list[str]
) -> None:
    """A list names no thread, so it waits; a load of another thread does not."""
    store = GatedStore(open_gate=False)

    async with handle(store) as cp:
        store.gate.release()
        await cp.record_issued("t", ToolCall("issued", "tool", {}, "other"))
        writes: dict[str, Ask] = {
            "append": lambda: cp.append("t", [{}]),
            "claim": lambda: cp.record_issued("t", ToolCall("c", "tool", {}, "k")),
            "result": lambda: cp.record_result("t", "issued", "done"),
        }
        reads: dict[str, Ask] = {
            "load t": lambda: cp.load("t"),
            "load u": lambda: cp.load("u"),
            "list_threads": cp.list_threads,
            "find k": lambda: cp.find_call("k"),
            "find other": lambda: cp.find_call("other"),
        }
        write = asyncio.create_task(writes[kind]())
        await run_ready_tasks()
        write.cancel()
        await run_ready_tasks()
        asked = {name: asyncio.create_task(read()) for name, read in reads.items()}
        await asyncio.wait(asked.values(), timeout=0.05)
        waiting = [name for name, one in asked.items() if not one.done()]
        store.gate.release()
        await asyncio.gather(*asked.values())

    assert waiting == waits


async def test_a_queue_of_cancelled_callers_ends() -> None:
    """The task that commits ends, and the next write starts another."""
    store = GatedStore(open_gate=False)

    async with handle(store) as cp:
        first = append(cp, "t")
        await run_ready_tasks()
        queued = [append(cp, "t") for _ in range(3)]
        await run_ready_tasks()

        for task in queued:
            task.cancel()

        store.gate.release()
        store.gate.release()
        await first
        await run_ready_tasks()
        assert await cp.append("t", [{}]) == 2


async def test_closing_commits_what_is_queued() -> None:
    """The store closes after the last write."""
    store = GatedStore(open_gate=False)
    cp = handle(store)

    async with cp:
        tasks = [append(cp, "t") for _ in range(3)]
        await run_ready_tasks()
        later = append(cp, "t")
        await run_ready_tasks()
        closing = asyncio.create_task(cp.aclose())
        await run_ready_tasks()
        assert store.sizes() == [3]
        store.gate.release()
        store.gate.release()
        await closing

    assert store.closed
    assert store.sizes() == [3, 1]
    assert sorted([await one for one in tasks] + [await later]) == [1, 2, 3, 4]


def test_the_end_of_the_loop_leaves_no_caller_waiting() -> None:
    """A loop that shuts down cancels the commit; a later write starts another."""
    store = GatedStore(open_gate=False)
    late: list[int] = []

    async def writer(cp: FullHandle[Message]) -> None:
        try:
            await cp.append("t", [{}])
        finally:
            store.gate.release()
            late.append(await cp.append("late", [{}]))

    async def main() -> asyncio.Task[None]:
        cp = handle(store)
        await cp.__aenter__()
        task = asyncio.create_task(writer(cp))
        await run_ready_tasks()
        return task

    assert asyncio.run(main()).cancelled()
    assert late == [1]


@pytest.mark.parametrize("kind", [Append, Merge])
def test_a_commit_cancelled_before_it_started_is_started_again(
    kind: type[Write],
) -> None:
    """As by a loop that shuts down in the turn in which a write came."""

    async def main() -> int:
        store = GatedStore(batching=Batching(kinds=(kind,)))

        async with handle(store) as cp:
            before = asyncio.all_tasks()
            writer = append(cp, "t")
            await asyncio.sleep(0)
            (commit,) = asyncio.all_tasks() - before - {writer}
            commit.cancel()
            return await writer

    assert asyncio.run(main()) == 1
