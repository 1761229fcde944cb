"""Writers that share a commit: order, errors, cancellation and limits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from cpkit import Closed
from cpkit.driver.coalescing import Coalescer
from cpkit.driver.lifetime import Lifetime


class Store:
    """A store whose commits wait until the test releases them, one by one."""

    def __init__(self, *, open: bool = False, by_halves: bool = False) -> None:
        self.lifetime = Lifetime("s://x")
        self.lifetime.begin()
        self.groups: list[list[Any]] = []
        self.gate = asyncio.Semaphore(1_000_000 if open else 0)
        self.writes: Coalescer[Any] = Coalescer(
            self.lifetime, self.commit, len, by_halves=by_halves
        )

    async def commit(self, ops: list[Any]) -> Sequence[object]:
        self.groups.append(ops)
        await self.gate.acquire()

        if "all fail" in ops:
            raise OSError("disk on fire")

        return [ValueError(op) if op.startswith("bad") else f"done {op}" for op in ops]

    def write(self, *ops: str) -> list[asyncio.Task[Any]]:
        """Start a caller for each operation."""
        return [asyncio.create_task(self.run(op)) for op in ops]

    async def run(self, op: str) -> Any:
        self.lifetime.check()
        return await self.writes.run(op)

    async def close(self) -> None:
        await self.lifetime.end(settle)


async def settle() -> None:
    """Let every task that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_lone_operation_is_a_group_of_its_own() -> None:
    """It waits for no company."""
    store = Store(open=True)

    assert await store.run("a") == "done a"
    assert await store.run("b") == "done b"
    assert store.groups == [["a"], ["b"]]
    assert store.writes.idle


async def test_what_queues_during_a_commit_shares_the_next_in_order() -> None:
    """Groups form by themselves, in the order of arrival."""
    store = Store()
    callers = store.write("a")
    await settle()
    callers += store.write("b", "c", "d")
    await settle()
    assert store.groups == [["a"]]
    assert not store.writes.idle

    store.gate.release()
    await settle()
    assert store.groups == [["a"], ["b", "c", "d"]]
    assert [caller.done() for caller in callers] == [True, False, False, False]

    store.gate.release()
    assert await asyncio.gather(*callers) == ["done a", "done b", "done c", "done d"]
    await settle()
    assert store.writes.idle


@pytest.mark.parametrize(
    ("callers", "sizes"), [(64, [32] * 8), (63, [31, 32] * 4), (40, [40] * 4)]
)
async def test_a_crowd_takes_turns_by_halves(callers: int, sizes: list[int]) -> None:
    """One half's callers come back while the other half is committed."""
    store = Store(by_halves=True)
    done = []

    async def write(number: int) -> None:
        done.extend([await store.run(f"{number} {time}") for time in range(4)])

    tasks = [asyncio.create_task(write(number)) for number in range(callers)]

    while not all(task.done() for task in tasks):
        store.gate.release()
        await settle()

    assert [len(group) for group in store.groups] == sizes
    assert len(set(done)) == 4 * callers
    assert store.writes.idle


async def test_an_operation_that_is_refused_is_refused_alone() -> None:
    """Its neighbours in the group have their results."""
    store = Store(open=True)
    first, bad, last = await asyncio.gather(
        *store.write("a", "bad", "c"), return_exceptions=True
    )

    assert (first, last) == ("done a", "done c")
    assert isinstance(bad, ValueError)


async def test_a_commit_that_fails_fails_for_all_and_the_next_one_works() -> None:
    """No caller waits for ever, and the next group is committed."""
    store = Store(open=True)
    outcomes = await asyncio.gather(
        *store.write("a", "all fail", "c"), return_exceptions=True
    )

    assert [type(outcome) for outcome in outcomes] == [OSError] * 3
    assert await store.run("d") == "done d"


async def test_a_caller_cancelled_in_the_queue_takes_its_operation_with_it() -> None:
    """What has not started is not done."""
    store = Store()
    callers = store.write("a")
    await settle()
    callers += store.write("b", "c")
    await settle()
    callers[1].cancel()
    store.gate.release()
    store.gate.release()

    outcomes = await asyncio.gather(*callers, return_exceptions=True)
    assert store.groups == [["a"], ["c"]]
    assert isinstance(outcomes[1], asyncio.CancelledError)


async def test_a_queue_of_cancelled_callers_ends() -> None:
    """Nothing of theirs is committed, and the next caller is served."""
    store = Store()
    callers = store.write("a")
    await settle()
    callers += store.write("b", "c")
    await settle()

    for caller in callers:
        caller.cancel()

    store.gate.release()
    await settle()
    assert store.groups == [["a"]]

    store.gate.release()
    assert await store.run("d") == "done d"


@pytest.mark.parametrize("op", ["a", "bad", "all fail"])
async def test_a_caller_cancelled_during_its_commit_merely_stops_waiting(
    op: str,
) -> None:
    """The operation is done, and its outcome is dropped without an error."""
    store = Store()
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reported.append(context)
    )
    leaver, stayer = store.write(op, "b")
    await settle()
    leaver.cancel()
    store.gate.release()
    outcomes = await asyncio.gather(leaver, stayer, return_exceptions=True)

    assert store.groups == [[op, "b"]]
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert isinstance(outcomes[1], OSError) is (op == "all fail")
    assert not reported


async def test_closing_finishes_what_is_queued() -> None:
    """What was accepted is committed before the handle is released."""
    store = Store()
    callers = store.write("a")
    await settle()
    callers += store.write("b", "c")
    await settle()
    closing = asyncio.create_task(store.close())
    await settle()
    assert not closing.done()

    with pytest.raises(Closed):
        await store.run("late")

    store.gate.release()
    store.gate.release()
    await closing
    assert await asyncio.gather(*callers) == ["done a", "done b", "done c"]


async def test_a_group_is_bounded_in_number() -> None:
    """A flood is committed in pieces, in order, and nothing is left out."""
    store = Store(open=True)
    ops = [f"op {i}" for i in range(2 * Coalescer.GROUP + 1)]
    await asyncio.gather(*store.write(*ops))

    assert [len(group) for group in store.groups] == [Coalescer.GROUP] * 2 + [1]
    assert [op for group in store.groups for op in group] == ops


async def test_a_group_is_bounded_in_bytes() -> None:
    """Big operations do not pile up, and one that is too big goes alone."""
    store = Store(open=True)
    third = "x" * (Coalescer.GROUP_BYTES // 3 + 1)
    huge = "y" * (2 * Coalescer.GROUP_BYTES)
    await asyncio.gather(*store.write(third, third, third, third, huge, "z"))

    assert [len(group) for group in store.groups] == [3, 2, 1]


async def test_the_end_of_the_loop_leaves_no_caller_waiting() -> None:
    """A loop that shuts down cancels the commit; what comes later is served."""
    store = Store()
    before = asyncio.all_tasks()
    callers = store.write("a")
    await settle()
    callers += store.write("b")
    await settle()

    for task in asyncio.all_tasks() - before - set(callers):
        task.cancel()

    store.gate.release()
    cancelled, served = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert served == "done b"
    await settle()
    assert store.writes.idle


async def test_a_task_cancelled_before_it_began_leaves_no_caller_waiting() -> None:
    """It had taken no group, so what is queued goes into the next one."""
    store = Store(open=True)
    before = asyncio.all_tasks()
    callers = store.write("a", "b")
    await asyncio.sleep(0)
    (task,) = asyncio.all_tasks() - before - {*callers}
    task.cancel()  # in the same turn in which it was created

    assert await asyncio.gather(*callers) == ["done a", "done b"]
    assert store.groups == [["a", "b"]]
    await store.close()


async def test_a_lone_caller_cancels_its_commit_and_delays_no_other() -> None:
    """What queued meanwhile is committed, and so is what comes later."""
    store = Store()
    store.gate.release()
    assert await store.run("a") == "done a"
    (lone,) = store.write("b")
    await settle()
    (queued,) = store.write("c")
    await settle()
    assert store.groups == [["a"], ["b"]]

    lone.cancel()
    await settle()
    assert lone.cancelled()
    assert store.groups == [["a"], ["b"], ["c"]]

    store.gate.release()
    assert await queued == "done c"
    store.gate.release()
    assert await store.run("d") == "done d"
    assert store.writes.idle


async def test_closing_waits_for_a_lone_commit() -> None:
    """It has no task of its own to be waited for."""
    store = Store()
    store.gate.release()
    assert await store.run("a") == "done a"
    (lone,) = store.write("b")
    await settle()
    closing = asyncio.create_task(store.close())
    await settle()
    assert not closing.done()

    store.gate.release()
    await closing
    assert await lone == "done b"


async def test_a_crowd_that_comes_back_together_shares_a_commit() -> None:
    """Callers answered by one commit share the next one."""
    store = Store(open=True)

    async def twice(op: str) -> None:
        await store.run(op)
        await store.run(op)

    await asyncio.gather(*map(twice, "abc"))
    assert store.groups == [["a", "b", "c"]] * 2
