"""The time limit: one timer for all operations of a handle."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cpkit.driver.time_limit import TimeLimit

SOON = 0.001


class Operation:
    """What a task does under a limit, until it is cancelled; how that looked inside."""

    def __init__(self, limit: TimeLimit) -> None:
        self.limit = limit
        self.started = asyncio.Event()
        self.given_up = asyncio.Event()
        self.timed_out: bool | None = None

    async def run(self) -> Any:
        deadline = self.limit.start(self.given_up.set)
        self.started.set()

        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.timed_out = deadline.is_timeout()

            if not self.timed_out:
                raise
        finally:
            self.limit.end(deadline)


async def test_each_operation_that_is_late_is_cancelled() -> None:
    """The timer goes on to the next operation; their tasks end normally."""
    limit = TimeLimit(SOON)
    operations = [Operation(limit) for _ in range(3)]
    tasks = []

    for operation in operations:
        tasks.append(asyncio.create_task(operation.run()))
        await asyncio.sleep(SOON / 2)

    await asyncio.gather(*tasks)
    assert [operation.timed_out for operation in operations] == [True] * 3
    assert not any(task.cancelling() for task in tasks)


async def test_an_operation_in_time_is_left_alone() -> None:
    """Its task is not cancelled after it ended, while the next operation runs."""
    limit = TimeLimit(SOON)
    limit.end(limit.start(lambda: None))
    later = Operation(limit)
    task = asyncio.create_task(later.run())
    await task
    assert later.timed_out
    current = asyncio.current_task()
    assert current is not None
    assert not current.cancelling()


async def test_a_task_cancelled_by_another_too_gets_its_cancellation() -> None:
    """As with ``asyncio.timeout``: the limit takes only its own cancellation back."""
    limit = TimeLimit(SOON)
    operation = Operation(limit)
    task = asyncio.create_task(operation.run())
    await operation.started.wait()
    deadline = next(iter(limit._running))

    while not deadline.cancels:  # noqa: ASYNC110  # the very next turn
        await asyncio.sleep(0)

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task

    assert task.cancelling() == 1


async def test_a_closed_limit_leaves_no_timer() -> None:
    """A loop does not keep a closed handle alive until the timer's time."""
    limit = TimeLimit(1000)
    limit.end(limit.start(lambda: None))
    timer = limit._timer
    assert timer is not None
    limit.close()
    assert timer.cancelled()


async def test_an_operation_that_goes_on_is_given_up() -> None:
    """It is cancelled again; its task is left with no cancellation in the end."""
    limit = TimeLimit(SOON)
    given_up = asyncio.Event()
    cancelled: list[bool] = []

    async def run() -> None:
        deadline = limit.start(given_up.set)

        try:
            while len(cancelled) < 2:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled.append(given_up.is_set())

            assert deadline.is_timeout()
        finally:
            limit.end(deadline)

    task = asyncio.create_task(run())
    await task
    assert cancelled == [False, True]
    assert not task.cancelling()
    limit.close()
