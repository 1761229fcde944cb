"""Many operations under one limit of time."""

from __future__ import annotations

import asyncio

import pytest

from cpkit.driver.timelimit import TimeLimit


async def test_what_is_in_time_is_left_alone() -> None:
    """Its result, its error and its caller's cancellation are its own."""
    limit = TimeLimit(60)

    async def fail() -> None:
        raise TimeoutError("its own")

    assert await limit.within(asyncio.sleep(0, "done")) == "done"

    with pytest.raises(TimeoutError, match="its own"):
        await limit.within(fail())

    caller = asyncio.create_task(limit.within(asyncio.Event().wait()))
    await asyncio.sleep(0)
    caller.cancel()

    with pytest.raises(asyncio.CancelledError):
        await caller

    limit.stop()


async def test_each_is_ended_when_its_own_time_is_up() -> None:
    """One timer, set again for the next; the order is that of the beginnings."""
    limit, ended = TimeLimit(0.05), []

    async def begin(name: str, after: float) -> None:
        await asyncio.sleep(after)

        with pytest.raises(TimeoutError):
            await limit.within(asyncio.Event().wait())

        ended.append(name)

    names = {"third": 0.04, "first": 0.0, "second": 0.02}
    await asyncio.gather(*(begin(name, after) for name, after in names.items()))
    assert ended == ["first", "second", "third"]
    assert await limit.within(asyncio.sleep(0, "next")) == "next"
    limit.stop()


async def test_a_caller_that_is_cancelled_as_well_gets_the_cancellation() -> None:
    """A time-out hides no cancellation, and leaves none behind."""
    limit = TimeLimit(0.01)

    async def cancelled_twice() -> None:
        task = asyncio.current_task()
        assert task is not None

        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            task.cancel()
            raise

    caller = asyncio.create_task(limit.within(cancelled_twice()))

    with pytest.raises(asyncio.CancelledError):
        await caller

    with pytest.raises(TimeoutError):
        await limit.within(asyncio.Event().wait())

    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    limit.stop()


async def test_a_timer_is_set_for_many_and_not_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That is what it is for."""
    loop, limit = asyncio.get_running_loop(), TimeLimit(60)
    timers: list[float] = []
    call_at = loop.call_at

    def counted(when: float, *args: object, **kwargs: object) -> asyncio.TimerHandle:
        timers.append(when)
        return call_at(when, *args, **kwargs)  # type: ignore[arg-type]  # as it came

    monkeypatch.setattr(loop, "call_at", counted)

    for _ in range(10):
        await limit.within(asyncio.sleep(0))

    assert len(timers) == 1
    limit.stop()
