"""The handle over a store: order after a cancellation, retries, time, size, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from conformance.operations import LATER
from cpkit import (
    BackendUnavailable,
    Checkpointer,
    Closed,
    Durability,
    ErasesCalls,
    ErasesThreads,
    KeepsReceipts,
    KeyTaken,
    ListsThreads,
    MemoryCheckpointer,
    MovesThreads,
    PayloadTooLarge,
    ReadsRanges,
    StatesDurability,
    ThreadDump,
    ToolCall,
    TrimsThreads,
    VersionConflict,
    open_checkpointer,
)
from cpkit.driver import (
    DriverOptions,
    FullHandle,
    Limits,
    StoreFailure,
    handle_over,
)
from cpkit.memory import MemoryStore
from tests.driver.gated import GatedStore, handle, not_sent, run_ready_tasks
from tests.stores import KINDS, fresh_url

Handle = FullHandle[dict[str, Any]]
Step = Callable[[Handle], Coroutine[Any, Any, Any]]

CALL = ToolCall("c", "pay", {"amount": 1}, "k")


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


# Order after a cancellation


WRITES: dict[str, Step] = {
    "append": lambda cp: cp.append("t", [{"n": 1}]),
    "save_extra": lambda cp: cp.save_extra("t", {"a": 1}),
    "record_issued": lambda cp: cp.record_issued("t", CALL),
    "record_result": lambda cp: cp.record_result("t", "old", None),
    "trim": lambda cp: cp.trim("t", 1),
    "erase_calls": lambda cp: cp.erase_calls("t", LATER),
    "delete_thread": lambda cp: cp.delete_thread("t", forget_keys=True),
}

READS: dict[str, Step] = {
    "load": lambda cp: cp.load("t"),
    "read": lambda cp: cp.read("t"),
    "load_range": lambda cp: cp.load_range("t", -1),
    "list_calls": lambda cp: cp.list_calls("t"),
    "dump_thread": lambda cp: cp.dump_thread("t"),
    "list_threads": lambda cp: cp.list_threads(),
    "append": lambda cp: cp.append("t", [], expected_version=None),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", WRITES)
async def test_a_later_operation_waits_for_a_cancelled_write(
    write: str, read: str
) -> None:
    """A caller that looks again with its own handle sees the outcome of its write."""
    store = GatedStore()

    async with handle(store) as cp:
        await cp.record_issued("t", ToolCall("old", "pay", {}, "old key"))
        store.gate = asyncio.Semaphore(0)
        writing = asyncio.create_task(WRITES[write](cp))
        await run_ready_tasks()
        await cancelled(writing)
        looking = asyncio.create_task(READS[read](cp))
        await run_ready_tasks()
        assert not looking.done()
        store.gate.release()
        store.gate.release()
        await looking


@pytest.mark.parametrize("write", ["record_issued", "record_result", "delete_thread"])
async def test_a_later_look_at_the_key_waits_as_well(write: str) -> None:
    """Also where the cancelled write does not name the key, as a result."""
    store = GatedStore()

    async with handle(store) as cp:
        await cp.record_issued("t", ToolCall("old", "pay", {}, "old key"))
        store.gate = asyncio.Semaphore(0)
        writing = asyncio.create_task(WRITES[write](cp))
        await run_ready_tasks()
        await cancelled(writing)
        key = "k" if write == "record_issued" else "old key"
        finding = asyncio.create_task(cp.find_call(key))
        await run_ready_tasks()
        assert not finding.done()
        store.gate.release()
        found = await finding

    expected = {"record_issued": "issued", "record_result": "completed"}
    assert (found.status if found else None) == expected.get(write)


async def test_other_threads_do_not_wait() -> None:
    """Only the same thread is ordered, and what looks at keys."""
    store = GatedStore(open_gate=False)

    async with handle(store) as cp:
        writing = asyncio.create_task(cp.record_issued("t", CALL))
        await run_ready_tasks()
        await cancelled(writing)
        assert await cp.load("other") is None
        assert await cp.load_range("other") is None
        store.gate.release()


async def test_closing_waits_for_a_cancelled_write() -> None:
    """It is decided before the store closes."""
    store = GatedStore(open_gate=False)
    cp = handle(store)

    async with cp:
        writing = asyncio.create_task(cp.append("t", [{}]))
        await run_ready_tasks()
        await cancelled(writing)
        closing = asyncio.create_task(cp.aclose())
        await run_ready_tasks()
        assert not store.closed
        store.gate.release()
        await closing
        assert store.closed


# Retries


async def test_what_was_not_sent_is_repeated() -> None:
    """The caller does not notice."""
    store = GatedStore(timeout=60)
    store.failures = [not_sent(), not_sent()]

    async with handle(store) as cp:
        assert await cp.append("t", [{}]) == 1

    assert store.sizes() == [1, 1, 1]


async def test_repeating_ends() -> None:
    """And nothing was written, provably."""
    store = GatedStore()  # without a limit of time nothing is repeated
    store.failures = [not_sent()]

    async with handle(store) as cp:
        with pytest.raises(BackendUnavailable, match="no connection") as caught:
            await cp.append("t", [{}])

        assert not caught.value.maybe_applied
        assert await cp.append("t", [{}]) == 1


async def test_a_write_whose_answer_was_lost_is_not_repeated() -> None:
    """It may have been applied; here it was."""
    store = GatedStore(timeout=60)
    store.lost = [StoreFailure("unknown", "connection reset")]

    async with handle(store) as cp:
        with pytest.raises(BackendUnavailable, match="connection reset") as caught:
            await cp.append("t", [{}])

        assert caught.value.maybe_applied
        assert len(await cp.read("t")) == 1


async def test_a_read_whose_answer_was_lost_is_repeated() -> None:
    """A read changes nothing."""
    store = GatedStore(timeout=60)

    async with handle(store) as cp:
        store.failures = [StoreFailure("unknown", "connection reset")]
        assert await cp.find_completed("k") is None


async def test_a_rejection_is_final() -> None:
    """It would be rejected again."""
    store = GatedStore(timeout=60)
    store.failures = [StoreFailure("rejected", "disk full")]

    async with handle(store) as cp:
        with pytest.raises(BackendUnavailable, match="disk full") as caught:
            await cp.append("t", [{}])

    assert not caught.value.maybe_applied
    assert store.sizes() == [1]


async def test_an_unexpected_error_of_a_store_is_an_error_of_the_contract() -> None:
    """With the store's own error as its cause, and the doubt about a write."""
    store = GatedStore()
    store.failures = [OverflowError("port 99999")]

    async with handle(store) as cp:
        with pytest.raises(BackendUnavailable, match="OverflowError") as caught:
            await cp.append("t", [{}])

    assert caught.value.maybe_applied
    assert isinstance(caught.value.__cause__, OverflowError)


# Time


async def test_a_write_without_an_answer_ends_in_time() -> None:
    """It may have been applied."""
    store = GatedStore(open_gate=False, timeout=0.01)

    async with handle(store) as cp:
        with pytest.raises(BackendUnavailable, match="within 0.01 s") as caught:
            await cp.append("t", [{}])

        assert caught.value.maybe_applied


async def test_a_write_that_was_never_sent_ends_in_time_without_a_doubt() -> None:
    """Between two tries the handle knows that nothing was written."""
    store = GatedStore(timeout=0.2)
    store.failures = [not_sent() for _ in range(10_000)]

    async with handle(store) as cp:
        with pytest.raises(BackendUnavailable) as caught:
            await cp.append("t", [{}])

        assert not caught.value.maybe_applied
        store.failures.clear()


@pytest.mark.parametrize("limit", [None, 60])
async def test_a_cancelled_read_stays_cancelled(limit: float | None) -> None:
    """It runs in the caller's task."""
    ended = []

    class Waits(GatedStore):
        async def holder(self, key: str) -> Any:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(asyncio.current_task())

    async with handle(Waits(timeout=limit)) as cp:
        reading = asyncio.create_task(cp.find_completed("k"))
        await run_ready_tasks()
        await cancelled(reading)

    assert ended == [reading]


async def test_a_read_that_is_late_is_an_error_however_its_store_ends() -> None:
    """A store may answer its cancellation with a failure."""

    class Answers(GatedStore):
        async def holder(self, key: str) -> Any:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise StoreFailure("not sent", "no connection") from None

    async with handle(Answers(timeout=0.01)) as cp:
        with pytest.raises(BackendUnavailable, match=r"within 0\.01 s") as caught:
            await cp.find_completed("k")

    assert not caught.value.maybe_applied


async def test_a_cancelled_caller_is_not_a_timeout() -> None:
    """It gets its CancelledError."""
    store = GatedStore(open_gate=False, timeout=60)

    async with handle(store) as cp:
        writing = asyncio.create_task(cp.append("t", [{}]))
        await run_ready_tasks()
        await cancelled(writing)
        store.gate.release()


# Size


async def test_an_append_is_bounded_in_all() -> None:
    """Messages and extra together; nothing is written."""
    async with handle(GatedStore(), max_append=100) as cp:
        for messages, extra in (
            ([{"a": "x" * 40}] * 3, None),
            ([{"a": "x" * 40}], {"b": "y" * 60}),
        ):
            with pytest.raises(PayloadTooLarge, match="max_append is 100") as caught:
                await cp.append("t", messages, extra=extra)

            assert caught.value.option == "max_append"

        with pytest.raises(PayloadTooLarge, match="max_append"):
            await cp.save_extra("t", {"a": "x" * 50, "b": "y" * 50})

        assert await cp.load("t") is None


async def test_an_engine_that_holds_less_lowers_the_limits() -> None:
    """And the handle says which limits hold."""
    store = GatedStore()
    store.limits = Limits(max_value=50, max_append=80)

    async with handle(store) as cp:
        assert cp.limits == Limits(50, 80)

        with pytest.raises(PayloadTooLarge, match="max_payload is 50"):
            await cp.append("t", [{"a": "x" * 60}])


# Messages and extra in one step


async def test_an_append_with_extra_is_one_write() -> None:
    """And fenced as a whole."""
    store = GatedStore()

    async with handle(store) as cp:
        assert await cp.append("t", [{"n": 1}], extra={"at": 1}) == 1
        assert await cp.append("t", [], expected_version=1, extra={"b": None}) == 1

        with pytest.raises(VersionConflict):
            await cp.append("t", [], expected_version=9, extra={"at": 9})

        data = await cp.load("t")

    assert data is not None
    assert (data.version, data.extra) == (1, {"at": 1, "b": None})
    assert store.sizes() == [1, 1, 1]


async def test_extra_alone_creates_a_thread() -> None:
    """As ``save_extra`` does; an append of nothing does not."""
    async with MemoryCheckpointer[dict[str, Any]]() as cp:
        assert await cp.append("a", [], extra={}) == 0
        assert await cp.append("b", [], extra={"k": 1}) == 0
        assert [one.thread_id for one in await cp.list_threads()] == ["b"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "version", [2**53, 2**63, 2**64, pytest.param(10**5000, id="of 5,001 digits")]
)
async def test_a_version_that_no_thread_reaches_is_a_conflict(
    kind: str, version: int, tmp_path: Path
) -> None:
    """On every store, and the other writes of the batch succeed."""
    async with open_checkpointer(fresh_url(kind, tmp_path)) as cp:
        first = asyncio.create_task(cp.append("first", [{}]))
        await asyncio.sleep(0)  # so that the next ones share a batch
        outcomes = await asyncio.gather(
            first,
            cp.append("t", [{}]),
            cp.append("u", [{}], expected_version=version),
            cp.append("v", [], expected_version=version),
            cp.append("w", [], expected_version=version, extra={"a": 1}),
            cp.append("x", [{}]),
            return_exceptions=True,
        )

    assert [*outcomes[:2], outcomes[5]] == [1, 1, 1]

    for refused in outcomes[2:5]:
        assert isinstance(refused, VersionConflict)
        assert "is at version 0" in str(refused)


# Moving threads


async def test_a_thread_is_moved_exactly() -> None:
    """Messages, extra, and every call with its times, attempts and status."""
    async with (
        MemoryCheckpointer[dict[str, Any]]() as here,
        MemoryCheckpointer[dict[str, Any]]() as there,
    ):
        await here.append("t", [{"n": 1.5}, {"n": 10**30}], extra={"b": 1, "a": None})
        await here.record_issued("t", CALL)
        await here.record_result("t", "c", "declined", success=False)
        await here.record_issued("t", ToolCall("c2", "pay", {"amount": 1}, "k"))
        dump = await here.dump_thread("t")
        assert dump is not None
        await there.restore_thread(dump)
        assert await there.dump_thread("t") == dump
        assert await there.load("t") == await here.load("t")
        assert await there.list_threads() == await here.list_threads()
        assert await there.find_call("k") == await here.find_call("k")

        with pytest.raises(VersionConflict):
            await there.restore_thread(dump)


async def test_a_thread_without_messages_is_not_overwritten() -> None:
    """Its version is that of a missing thread, and the error names its extra."""
    async with handle(GatedStore()) as cp:
        await cp.save_extra("t", {"a": 1})
        dump = await cp.dump_thread("t")
        assert dump is not None

        with pytest.raises(VersionConflict, match="'t' exists without messages"):
            await cp.restore_thread(dump)


async def test_what_is_left_of_a_deleted_thread_is_moved() -> None:
    """Its keys stay held at the other end."""
    async with (
        MemoryCheckpointer[dict[str, Any]]() as here,
        MemoryCheckpointer[dict[str, Any]]() as there,
    ):
        await here.record_issued("t", CALL)
        await here.delete_thread("t")
        assert await here.list_threads() == []
        (info,) = await here.list_threads(erased=True)
        assert (info.thread_id, info.version) == ("t", 0)
        dump = await here.dump_thread("t")
        assert dump is not None
        assert dump.created_at is None
        await there.restore_thread(dump)
        assert await there.load("t") is None
        assert await there.list_threads(erased=True) == [info]

        with pytest.raises(VersionConflict):
            await there.restore_thread(dump)

        holder = await there.record_issued("t2", ToolCall("x", "pay", {}, "k"))
        assert holder is not None
        assert holder.erased


@pytest.mark.parametrize(
    ("attempts_there", "taken"),
    [(["issued"], True), (["failed"], True), (["failed", "issued"], True), ([], False)],
)
async def test_a_restored_key_must_be_free(
    attempts_there: list[str], taken: bool
) -> None:
    """Attempt 1 of the key cannot be restored beside another attempt 1."""
    async with (
        MemoryCheckpointer[dict[str, Any]]() as here,
        MemoryCheckpointer[dict[str, Any]]() as there,
    ):
        await here.record_issued("t", CALL)
        dump = await here.dump_thread("t")
        assert dump is not None

        for i, status in enumerate(attempts_there):
            await there.record_issued("u", ToolCall(str(i), "pay", {}, "k"))

            if status == "failed":
                await there.record_result("u", str(i), None, success=False)

        if taken:
            with pytest.raises(KeyTaken, match="'u'"):
                await there.restore_thread(dump)

            assert await there.dump_thread("t") is None
        else:
            await there.restore_thread(dump)


async def test_attempts_of_a_key_are_restored_in_any_order() -> None:
    """The newest attempt holds the key, whichever came first."""
    async with (
        MemoryCheckpointer[dict[str, Any]]() as here,
        MemoryCheckpointer[dict[str, Any]]() as there,
    ):
        await here.record_issued("a", CALL)
        await here.record_result("a", "c", None, success=False)
        await here.record_issued("b", CALL)
        dumps = [await here.dump_thread("b"), await here.dump_thread("a")]

        for dump in dumps:
            assert dump is not None
            await there.restore_thread(dump)

        found = await there.find_call("k")

    assert found is not None
    assert (found.thread_id, found.attempt) == ("b", 2)


async def test_a_dump_that_no_store_could_hold_is_refused() -> None:
    """Nothing of it is written."""
    async with MemoryCheckpointer[dict[str, Any]]() as cp:
        await cp.record_issued("t", CALL)
        dump = await cp.dump_thread("t")
        assert dump is not None
        wrong = ThreadDump("t", [], {}, [*dump.calls] * 2, dump.created_at, None)

        with pytest.raises(ValueError, match="twice"):
            await cp.restore_thread(wrong)

        with pytest.raises(TypeError, match="ThreadDump"):
            await cp.restore_thread({"thread_id": "t"})  # type: ignore[arg-type]  # what is asked here


async def test_a_restore_drops_nothing_in_silence() -> None:
    """Content that no store keeps is refused, and the error says what it is."""
    async with (
        MemoryCheckpointer[dict[str, Any]]() as here,
        MemoryCheckpointer[dict[str, Any]]() as there,
    ):
        await here.append("t", [{"n": 1}])
        await here.record_issued("t", CALL)
        live = await here.dump_thread("t")
        await here.delete_thread("t")
        left = await here.dump_thread("t")
        assert live is not None
        assert left is not None
        issued, erased = live.calls[0], left.calls[0]
        wrong = {
            "issued or erased": [
                replace(live, calls=[replace(issued, result="paid")]),
                replace(live, calls=[replace(erased, result="paid")]),
                replace(left, calls=[replace(erased, result="paid")]),
            ],
            "has args": [
                replace(live, calls=[replace(erased, call=CALL)]),
                replace(left, calls=[replace(erased, call=CALL)]),
            ],
            "a dump with times": [
                replace(live, messages=[], calls=[]),
            ],
            "is after updated_at": [
                replace(live, created_at=issued.issued_at + timedelta(days=1))
            ],
        }

        for words, dumps in wrong.items():
            for dump in dumps:
                with pytest.raises(ValueError, match=words):
                    await there.restore_thread(dump)

        assert await there.dump_thread("t") is None
        await there.restore_thread(live)


async def test_a_thread_of_a_clock_that_was_set_back_is_moved() -> None:
    """The last change may be before the claim of a call that was erased."""
    async with (
        MemoryCheckpointer[dict[str, Any]]() as here,
        MemoryCheckpointer[dict[str, Any]]() as there,
    ):
        await here.record_issued("t", CALL)
        await here.delete_thread("t")
        await here.append("t", [{"n": 1}])
        dump = await here.dump_thread("t")
        assert dump is not None
        assert dump.updated_at is not None
        late = replace(dump.calls[0], issued_at=dump.updated_at + timedelta(days=1))
        dump = replace(dump, calls=[late])
        await there.restore_thread(dump)
        assert await there.dump_thread("t") == dump


# Opening, closing, optional protocols


async def test_a_store_that_cannot_open_is_closed() -> None:
    """The error reaches the caller, and nothing is left open."""

    class Down(GatedStore):
        async def open(self) -> None:
            raise StoreFailure("rejected", "no permission")

    store = Down()
    cp = handle(store)

    with pytest.raises(BackendUnavailable, match="no permission"):
        await cp.__aenter__()

    assert store.closed

    with pytest.raises(Closed):
        await cp.load("t")


def test_what_is_not_a_store_is_refused() -> None:
    """The error names the missing parts."""
    with pytest.raises(TypeError, match="object is not .* lacks name, max_writes"):
        handle_over(object())  # type: ignore[arg-type]  # what is asked here


def test_a_store_with_an_async_durability_is_refused() -> None:
    """It is the only method without ``async``, which is easily missed."""

    async def durability() -> Durability:
        return MemoryStore().durability()

    wrong: Any = MemoryStore()
    wrong.durability = durability

    with pytest.raises(TypeError, match="durability must not be async"):
        handle_over(wrong)


async def test_a_commit_without_outcomes_is_an_error_that_says_so() -> None:
    """A store's bug reaches the caller as an error of the contract."""

    class Forgetful(GatedStore):
        async def commit(self, batch: Any) -> Any:
            await super().commit(batch)

    async with handle(Forgetful()) as cp:
        with pytest.raises(BackendUnavailable, match="one outcome for each of 1"):
            await cp.append("t", [{}])


async def test_a_handle_has_the_protocols_of_its_store() -> None:
    """``isinstance`` finds them, and does not find what the store lacks."""

    class Small:
        """The required methods of a store, and no others."""

        def __init__(self) -> None:
            self._inner = GatedStore()
            self.name = "small"
            self.limits = self._inner.limits
            self.max_writes = self._inner.max_writes
            self.timeout = self._inner.timeout
            self.locks_threads = self._inner.locks_threads
            self.erases = False
            self.open = self._inner.open
            self.close = self._inner.close
            self.durability = self._inner.durability
            self.commit = self._inner.commit
            self.snapshot = self._inner.snapshot
            self.holder = self._inner.holder

    small, full = handle_over(Small()), handle_over(GatedStore())
    required: list[type] = [Checkpointer, ReadsRanges, StatesDurability]
    optional: list[type] = [
        ListsThreads,
        KeepsReceipts,
        ErasesThreads,
        TrimsThreads,
        ErasesCalls,
        MovesThreads,
    ]

    for protocol in required:
        assert isinstance(small, protocol)
        assert isinstance(full, protocol)

    for protocol in optional:
        assert not isinstance(small, protocol)
        assert isinstance(full, protocol)

    async with small as cp:
        assert await cp.append("t", [{}]) == 1
        assert await cp.read("t") == [{}]


async def test_a_store_that_cannot_trim_refuses_a_trimmed_thread() -> None:
    """Its positions would begin at 0 there."""
    store: Any = GatedStore()
    store.trims = False
    source, there = handle_over(GatedStore()), handle_over(store)

    async with source as opened, there as other:
        here: Any = opened
        to: Any = other
        assert not isinstance(other, TrimsThreads)
        await here.append("t", [{"n": 1}, {"n": 2}])
        await to.restore_thread(await here.dump_thread("t"))
        await to.delete_thread("t")
        await here.trim("t", 1)

        with pytest.raises(ValueError, match="cannot hold a trimmed thread"):
            await to.restore_thread(await here.dump_thread("t"))

        assert await to.load("t") is None


async def test_a_trim_whose_answer_is_lost_may_be_repeated() -> None:
    """The caller learns that it may have been applied; the second one removes 0."""
    store = GatedStore()

    async with handle(store) as cp:
        await cp.append("t", [{"n": 1}, {"n": 2}])
        store.lost = [StoreFailure("unknown", "no answer")]

        with pytest.raises(BackendUnavailable) as raised:
            await cp.trim("t", 1)

        assert raised.value.maybe_applied
        assert await cp.trim("t", 1) == 0
        assert await cp.read("t") == [{"n": 2}]


async def test_a_store_need_not_state_limits_or_deletions() -> None:
    """Without them it has no limits of its own, and its handle deletes nothing."""

    class Small:
        """The methods and attributes of the interface, and no more."""

        name, max_writes, timeout, locks_threads = "small", 1, None, False

        def __init__(self) -> None:
            memory = MemoryStore()
            self.open, self.close = memory.open, memory.close
            self.commit, self.snapshot = memory.commit, memory.snapshot
            self.holder, self.durability = memory.holder, memory.durability

    store: Any = Small()

    async with handle_over(store) as handle:
        assert await handle.append("t", [{}]) == 1
        assert handle.limits == (
            DriverOptions().max_payload,
            DriverOptions().max_append,
        )
        assert not isinstance(handle, ErasesThreads | TrimsThreads | MovesThreads)
