"""Group commit: batches, their bounds, cancelled callers, and the end of the loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from typing import Any

import pytest

from conformance.slowdown import slowdown
from cpkit import (
    BackendUnavailable,
    CorruptThread,
    KeyTaken,
    ToolCall,
    VersionConflict,
)
from cpkit.driver import FullHandle, Outcome, StoreFailure, Write, group_commit
from tests.driver.gated import GatedStore, handle, not_sent, run_ready_tasks

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


@pytest.mark.parametrize(("most", "sizes"), [(4, [4, 4, 2]), (1, [1] * 10)])
async def test_a_batch_is_bounded_in_writes(most: int, sizes: list[int]) -> None:
    """As the store says."""
    store = GatedStore(max_writes=most)

    async with handle(store) as cp:
        await asyncio.gather(*(append(cp, f"t{n}", "y" * 10) for n in range(10)))

    assert store.sizes() == sizes


async def test_a_batch_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that is larger is committed alone."""
    monkeypatch.setattr(group_commit, "_MAX_BYTES", 50)
    store = GatedStore()

    async with handle(store) as cp:
        texts = ["y" * 10, "y" * 10, "y" * 100, "y" * 10]
        await asyncio.gather(*(append(cp, "t", one) for one in texts))

    assert store.sizes() == [2, 1, 1]


async def test_every_kind_of_write_shares_the_queue() -> None:
    """In the order in which the writes came."""
    store = GatedStore(open_gate=False)

    async with handle(store) as cp:
        call = ToolCall("c", "tool", {}, "k")
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(one)
            for one in (
                cp.append("t", [{}]),
                cp.record_issued("t", call),
                cp.record_result("t", "c", None),
                cp.save_extra("t", {"a": 1}),
                cp.delete_thread("t", expected_version=1),
                cp.append("t", [], expected_version=0),
            )
        ]
        await run_ready_tasks()
        store.gate.release()
        await asyncio.gather(*tasks)

    kinds = [type(write).__name__ for write in store.batches[0]]
    assert kinds == ["Append", "Claim", "Resolve", "Merge", "Erase", "Append"]


async def test_a_store_that_locks_threads_has_a_queue_for_each() -> None:
    """A commit has writes of one thread, and does not wait for another thread's."""
    store = GatedStore(open_gate=False, locks_threads=True)

    async with handle(store) as cp:
        tasks = [append(cp, thread) for thread in ("a", "b", "a")]
        await run_ready_tasks()
        assert sorted(store.sizes()) == [1, 2]
        later = append(cp, "b")
        await run_ready_tasks()
        assert len(store.batches) == 2

        for _ in range(3):
            store.gate.release()

        assert [await one for one in tasks] == [1, 1, 2]
        assert await later == 2
        assert not cp._commits._queues


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


async def test_a_caller_takes_its_write_back_from_a_rejected_batch() -> None:
    """The write waits in the queue again, until it is its turn."""
    store = GatedStore(open_gate=False)
    store.failures = [StoreFailure("rejected", "value 7 is bad")]

    async with handle(store) as cp:
        first, second = append(cp, "a"), append(cp, "b")
        await run_ready_tasks()
        store.gate.release()
        await run_ready_tasks()
        assert store.sizes() == [2, 1]
        second.cancel()
        await run_ready_tasks()
        store.gate.release()
        assert await first == 1
        assert await cp.load("b") is None

    assert store.sizes() == [2, 1]


async def test_the_repeats_of_a_refused_batch_keep_its_order() -> None:
    """The write that the engine refuses fails; the others are applied."""

    class SmallDisk(GatedStore):
        async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
            if any(one.size > 100 for one in batch):
                self.batches.append(list(batch))
                raise StoreFailure("rejected", "no space left on device")

            return await super().commit(batch)

    store = SmallDisk()

    async with handle(store) as cp, cp.watch("t") as changes:
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
        assert await anext(changes) == "t"
        data = await cp.load("t")
        assert data is not None
        assert [one["text"] for one in data.messages] == ["first", "last"]
        assert data.extra == {"a": 1}

    assert store.sizes() == [5, 1, 1, 1, 1, 1]


async def test_a_batch_that_was_not_sent_is_repeated_whole_at_first() -> None:
    """One write at a time only when the time for repeats is over."""
    store = GatedStore(timeout=60)
    store.failures = [not_sent()]

    async with handle(store) as cp:
        assert [*await asyncio.gather(append(cp, "a"), append(cp, "b"))] == [1, 1]

    assert store.sizes() == [2, 2]


@pytest.mark.parametrize("locks_threads", [False, True])
async def test_a_batch_that_met_a_lock_waits_once(locks_threads: bool) -> None:
    """One lock keeps every write out; of a thread, one claim may wait for its key."""
    store = GatedStore(locks_threads=locks_threads)
    store.failures = [not_sent()]

    async with handle(store) as cp:
        tasks = append(cp, "t", "first"), append(cp, "t", "second")
        found = await asyncio.gather(*tasks, return_exceptions=True)

    refused = [isinstance(one, BackendUnavailable) for one in found]
    assert refused == [not locks_threads] * 2
    assert store.sizes() == ([2, 1, 1] if locks_threads else [2])


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
    store = GatedStore(open_gate=False, max_writes=1, timeout=0.05)

    async with handle(store) as cp:
        tasks = [append(cp, f"t{n}") for n in range(5)]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert len(store.batches) <= 2

    maybe = [
        isinstance(one, BackendUnavailable) and one.maybe_applied for one in errors
    ]
    assert maybe == sorted(maybe, reverse=True)
    assert maybe[0]
    assert not maybe[-1]


async def test_the_repeats_of_a_batch_share_its_time() -> None:
    """What has not begun when the time is over was not sent."""

    class Slow(GatedStore):
        async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
            self.batches.append(list(batch))

            if len(batch) > 1:
                raise StoreFailure("rejected", "a value is bad")

            if len(self.batches) > 2:
                await asyncio.Event().wait()

            return await super().commit(batch)

    store = Slow(timeout=0.05 * slowdown())

    async with handle(store) as cp:
        tasks = [append(cp, "t", str(n)) for n in range(4)]
        results = await asyncio.gather(*tasks, return_exceptions=True)

    assert results[0] == 1
    maybe = [
        one.maybe_applied for one in results if isinstance(one, BackendUnavailable)
    ]
    assert maybe == [True, False, False]


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


def test_an_interrupted_claim_is_not_granted() -> None:
    """A notebook's interrupt ends the loop inside a commit; the loop runs again."""
    call = ToolCall("c", "pay", {}, "k")

    class Interrupted(GatedStore):
        async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
            raise KeyboardInterrupt

    async def claim() -> None:
        async with handle(Interrupted()) as cp:
            with pytest.raises(BackendUnavailable) as raised:
                await cp.record_issued("t", call)

            assert raised.value.maybe_applied

    with closing(asyncio.new_event_loop()) as loop:
        task = loop.create_task(claim())

        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(task)

        loop.run_until_complete(task)


async def test_a_restored_thread_waits_for_a_cancelled_claim_of_its_key() -> None:
    """The claim came first, so the key is taken when the thread is restored."""
    call = ToolCall("c", "tool", {}, "k")

    async with handle(GatedStore()) as source:
        await source.record_issued("restored", call)
        dump = await source.dump_thread("restored")

    assert dump is not None
    store = GatedStore(open_gate=False, locks_threads=True)

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
        ("claim", ["load t", "list_threads", "find k", "find other"]),
        ("result", ["load t", "list_threads", "find k", "find other"]),
    ],
)
async def test_a_cancelled_write_is_waited_for_by_what_must_see_it(
    kind: str, waits: list[str]
) -> None:
    """A list names no thread, so it waits. A claim or a result may change any key."""
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
        await asyncio.wait([one for name, one in asked.items() if name not in waits])
        await run_ready_tasks()
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


@pytest.mark.parametrize("locks_threads", [False, True])
def test_a_commit_cancelled_before_it_started_is_started_again(
    locks_threads: bool,
) -> None:
    """As by a loop that shuts down in the turn in which a write came."""

    async def main() -> int:
        store = GatedStore(locks_threads=locks_threads)

        async with handle(store) as cp:
            before = asyncio.all_tasks()
            writer = append(cp, "t")
            await asyncio.sleep(0)
            (commit,) = asyncio.all_tasks() - before - {writer}
            commit.cancel()
            await asyncio.sleep(0)
            assert await cp.append("t", [{}]) == 2
            return await writer

    assert asyncio.run(main()) == 1
