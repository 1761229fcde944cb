"""A store that ignores its cancellation: the handle reports it until it is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from cpkit import BackendUnavailable
from cpkit.driver import FullHandle, Outcome, StoredCall, Write, store_calls
from tests.driver.gated import GatedStore, handle, run_ready_tasks

Step = Callable[[FullHandle[dict[str, Any]]], Awaitable[object]]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_calls, "_GRACE", 0.02)


class Stubborn(GatedStore):
    """A store whose commits catch each CancelledError, as some client libraries do.

    A commit to the thread ``"t"`` waits until the test sets ``end``.
    """

    def __init__(self, *, locks_threads: bool = False) -> None:
        super().__init__(timeout=0.02, locks_threads=locks_threads)
        self.end = asyncio.Event()
        self.was_cancelled = asyncio.Event()

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        while batch[0].thread_id == "t" and not self.end.is_set():
            try:
                await self.end.wait()
            except asyncio.CancelledError:
                self.was_cancelled.set()

        return await super().commit(batch)


OPERATIONS: dict[str, Step] = {
    "append": lambda cp: cp.append("u", [{}]),
    "save_extra": lambda cp: cp.save_extra("t", {"a": 1}),
    "delete_thread": lambda cp: cp.delete_thread("u"),
    "load": lambda cp: cp.load("u"),
    "find_call": lambda cp: cp.find_call("k"),
    "list_threads": lambda cp: cp.list_threads(),
}


@pytest.mark.parametrize("locks_threads", [False, True])
async def test_a_write_ends_without_its_store_and_later_operations_fail(
    locks_threads: bool,
) -> None:
    """The write may have been applied. Nothing later is sent."""
    store = Stubborn(locks_threads=locks_threads)

    async with handle(store) as cp:
        first = asyncio.create_task(cp.append("t", [{}]))
        await store.was_cancelled.wait()
        queued = asyncio.create_task(cp.append("t", [{}]))
        errors = await asyncio.gather(first, queued, return_exceptions=True)
        assert [getattr(one, "maybe_applied", None) for one in errors] == [True, False]
        assert "ignored the cancellation" in str(errors[0])

        for name, later in OPERATIONS.items():
            with pytest.raises(BackendUnavailable, match="open the store again") as one:
                await later(cp)

            assert not one.value.maybe_applied, name

    assert store.closed
    assert store.batches == []
    store.end.set()
    await run_ready_tasks()


async def test_a_write_that_ends_late_takes_effect() -> None:
    """The next handle sees it."""
    store = Stubborn()

    async with handle(store) as cp:
        with pytest.raises(BackendUnavailable):
            await cp.append("t", [{}])

        store.end.set()
        await run_ready_tasks()

    again = GatedStore()
    again._data = store._data

    async with handle(again) as cp:
        assert await cp.append("t", [], expected_version=1) == 1


async def test_a_cancelled_write_that_never_ends_holds_up_its_reader_no_longer() -> (
    None
):
    """The order after a cancellation holds until the store counts as stuck."""
    store = Stubborn()

    async with handle(store) as cp:
        writing = asyncio.create_task(cp.append("t", [{}]))
        await run_ready_tasks()
        writing.cancel()
        await asyncio.wait({writing})

        try:
            with pytest.raises(BackendUnavailable, match="open the store again"):
                await cp.load("t")

            assert writing.cancelled()
        finally:
            store.end.set()


@pytest.mark.parametrize("stuck", ["open", "close"])
async def test_opening_and_closing_end(stuck: str) -> None:
    """Both raise, and the handle is closed."""

    class Hangs(GatedStore):
        async def open(self) -> None:
            if stuck == "open":
                await asyncio.Event().wait()

        async def close(self) -> None:
            if stuck == "close":
                await asyncio.Event().wait()

    with pytest.raises(BackendUnavailable, match=r"within 0\.02 s"):
        async with handle(Hangs(timeout=0.02)) as cp:
            assert await cp.append("t", [{}]) == 1


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

    async with handle(Cleans()) as cp:
        reading = asyncio.create_task(cp.find_call("k"))
        await run_ready_tasks()
        reading.cancel()

    assert cleaned == [False]

    with suppress(asyncio.CancelledError):
        await reading
