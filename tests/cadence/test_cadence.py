"""The wrapper: what it buffers, when it writes, and what it does after an error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conformance.slowdown import slowdown
from cpkit import (
    BackendUnavailable,
    CheckpointData,
    Closed,
    ErasesThreads,
    KeepsReceipts,
    ListsThreads,
    MemoryCheckpointer,
    MovesThreads,
    PayloadTooLarge,
    ReadsRanges,
    SerializationError,
    StatesDurability,
    Survives,
    ToolCall,
    VersionConflict,
    WrongEventLoop,
)
from cpkit.cadence import BufferedCheckpointer, Cadence, is_turn_end, with_cadence
from cpkit.effects import Effect, EffectLedger
from cpkit.messages import AssistantMessage, Message, ToolCallBlock, UserMessage
from cpkit.sessions import SessionLog
from tests.sessions.spy import RangeSpy, Spy
from tests.sessions.talk import assistant, texts, user

PATIENCE = 10.0 * slowdown()
"""Seconds to wait for a write; it takes milliseconds."""


@pytest.fixture
async def store() -> AsyncIterator[MemoryCheckpointer[Any]]:
    """The store below the wrapper: it has a message once it is written."""
    async with MemoryCheckpointer[Any]() as opened:
        yield opened


@pytest.fixture
async def spy(store: MemoryCheckpointer[Any]) -> RangeSpy:
    """The same store, with its calls counted and its faults planned by the test."""
    return RangeSpy(store)


async def written(store: MemoryCheckpointer[Any], thread_id: str = "t") -> list[str]:
    """Return the texts of a thread that are in the store."""
    return texts(await store.read(thread_id))


async def writes(spy: Spy, count: int) -> None:
    """Wait until this many appends with messages have ended."""
    async with asyncio.timeout(PATIENCE):
        while count:
            count -= await spy.ended.get() > 0


def call(key: str = "k", call_id: str = "c") -> ToolCall:
    return ToolCall(call_id, "pay", {}, key)


# When it writes


async def test_per_message_buffers_nothing(store: MemoryCheckpointer[Any]) -> None:
    """Each append is written before it returns."""
    async with with_cadence(store, Cadence.per_message()) as cp:
        assert await cp.append("t", [user("a")]) == 1
        assert await written(store) == ["a"]
        assert cp.buffered == {}


async def test_a_number_of_messages_is_written_in_one_append(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """The append that reaches the number writes all buffered messages."""
    async with with_cadence(spy, Cadence.every(3)) as cp:
        assert await cp.append("t", [user("a")]) == 1
        assert await cp.append("t", [user("b")]) == 2
        assert await written(store) == []
        assert texts(cp.buffered["t"]) == ["a", "b"]
        assert await cp.append("t", [user("c")]) == 3
        assert await written(store) == ["a", "b", "c"]
        assert spy.calls == [("append", 0, None), ("append", 3, 0)]

        assert await cp.append("t", [user(x) for x in "defg"]) == 7
        assert await written(store) == list("abcdefg")
        assert cp.buffered == {}


async def test_a_buffer_never_exceeds_max_append() -> None:
    """The buffer is written before it is too large for one append of the store."""
    message = {"text": "x" * 400}

    async with (
        MemoryCheckpointer[Any](max_append=1000) as small,
        with_cadence(small, Cadence.every(50)) as cp,
    ):
        for n in range(1, 6):
            assert await cp.append("t", [message], expected_version=n - 1) == n
            assert len(await small.read("t")) == (n - 1) // 2 * 2

        assert await cp.append("t", [message], extra={"k": "x" * 300}) == 6
        assert await small.read("t") == [message] * 6

        with pytest.raises(PayloadTooLarge):
            await cp.append("t", [message] * 3)

        assert cp.buffered == {}


async def test_each_thread_is_counted_separately(
    store: MemoryCheckpointer[Any],
) -> None:
    """The messages of one thread do not count for another."""
    async with with_cadence(store, Cadence.every(2)) as cp:
        await cp.append("t", [user("a")])
        await cp.append("u", [user("b")])
        assert await written(store, "t") == await written(store, "u") == []


async def test_the_timer_writes_messages_of_some_seconds_ago(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """Without another call, and again after each write."""
    async with with_cadence(spy, Cadence.every(seconds=0.01)) as cp:
        for text in "ab":
            await cp.append("t", [user(text)])
            await writes(spy, 1)
            assert text in await written(store)


async def test_the_timer_tries_again(
    store: MemoryCheckpointer[Any], spy: RangeSpy, caplog: pytest.LogCaptureFixture
) -> None:
    """While the store is unavailable, a warning is logged and no message is lost."""
    async with with_cadence(spy, Cadence.every(seconds=0.01)) as cp:
        await cp.append("t", [user("a")])
        spy.faults.extend(["refused", "refused"])
        await writes(spy, 3)

    assert await written(store) == ["a"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


async def test_the_timer_meets_another_writer(
    store: MemoryCheckpointer[Any], spy: RangeSpy, caplog: pytest.LogCaptureFixture
) -> None:
    """The conflict is logged, and raised by the next call on the thread."""
    async with with_cadence(spy, Cadence.every(seconds=0.01)) as cp:
        await cp.append("t", [user("a")])
        await store.append("t", [user("other")])
        await writes(spy, 1)

        with pytest.raises(VersionConflict):
            await cp.append("t", [user("b")])

        assert texts(await cp.discard("t")) == ["a"]

    assert [record.levelno for record in caplog.records] == [logging.ERROR]


async def test_per_tool_call_writes_before_the_claim(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """The buffered messages of every thread are written before an effect can run."""
    async with with_cadence(spy, Cadence.per_tool_call()) as cp:
        await cp.append("t", [user("a"), assistant("paying", "pay")])
        await cp.append("u", [user("b")])
        spy.calls.clear()
        assert await cp.record_issued("t", call()) is None
        assert [name for name, *_ in spy.calls] == ["append", "append", "record_issued"]
        assert await written(store, "t") == ["a", "paying"]
        assert await written(store, "u") == ["b"]


async def test_a_claim_is_not_made_when_the_messages_cannot_be_written(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """An effect does not run before the messages that led to it are stored."""
    async with with_cadence(spy, Cadence.per_tool_call()) as cp:
        await cp.append("t", [user("a")])
        await cp.append("u", [user("b")])
        spy.faults.extend(["refused"])

        with pytest.raises(BackendUnavailable):
            await cp.record_issued("t", call())

        assert await store.find_call("k") is None
        assert await cp.record_issued("t", call()) is None
        assert await written(store, "t") == ["a"]


async def test_per_turn_writes_with_the_last_message(
    store: MemoryCheckpointer[Any],
) -> None:
    """An assistant's message without a tool call ends the turn."""
    async with with_cadence(store, Cadence.per_turn()) as cp:
        await cp.append("t", [user("a")])
        await cp.append("t", [assistant("looking", "search")])
        assert await written(store) == []
        await cp.append("t", [assistant("b")])
        assert await written(store) == ["a", "looking", "b"]
        assert cp.buffered == {}


async def test_a_function_of_the_caller_decides_where_a_turn_ends(
    store: MemoryCheckpointer[Any],
) -> None:
    """``ends_turn`` is called with each message."""
    cadence = Cadence.per_turn(ends_turn=lambda message: message["content"] == "over")

    async with with_cadence(store, cadence) as cp:
        await cp.append("t", [assistant("b")])
        assert await written(store) == []
        await cp.append("t", [user("over"), user("and on")])
        assert await written(store) == ["b", "over", "and on"]


@pytest.mark.parametrize(
    ("message", "ends"),
    [
        (user("a"), False),
        (assistant("a"), True),
        (assistant("a", "search"), False),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}, False),
        ({"role": "assistant", "content": "a", "tool_calls": []}, True),
        (AssistantMessage(content="a"), True),
        (AssistantMessage(content=[ToolCallBlock(id="c", name="pay")]), False),
        (UserMessage(content="a"), False),
        ({"type": "message", "message": assistant("a")}, True),
        ({"type": "message", "message": assistant("a", "search")}, False),
        ({"type": "model_change"}, False),
        ("words", False),
    ],
)
def test_is_turn_end_knows_the_usual_messages(message: Any, ends: bool) -> None:
    """Dicts, typed messages, and the entries of a session."""
    assert is_turn_end(message) is ends


async def test_save_extra_writes_the_messages_first(
    store: MemoryCheckpointer[Any],
) -> None:
    """The extra of a thread is never newer than its messages."""
    async with with_cadence(store, Cadence.every(10)) as cp:
        await cp.append("t", [user("a")])
        await cp.append("u", [user("b")])
        await cp.save_extra("t", {"spent": 1})
        assert await written(store, "t") == ["a"]
        assert await written(store, "u") == []
        data = await store.load("t")
        assert data is not None
        assert data.extra == {"spent": 1}


async def test_a_result_is_recorded_at_once(store: MemoryCheckpointer[Any]) -> None:
    """Also where the buffered messages of the thread cannot be written."""
    async with with_cadence(store, Cadence.every(10)) as cp:
        await cp.record_issued("t", call())
        await cp.append("t", [user("a")])
        await store.append("t", [user("other")])
        record = await cp.record_result("t", "c", {"paid": True})
        assert record.status == "completed"
        assert await cp.find_completed("k") == record
        await cp.discard("t")


async def test_flush_and_close_write_everything(store: MemoryCheckpointer[Any]) -> None:
    """``flush`` for one thread or for all; closing for all."""
    async with with_cadence(store, Cadence.every(10)) as cp:
        for thread_id in "tuv":
            await cp.append(thread_id, [user(thread_id)])

        await cp.flush("t")
        assert [await written(store, one) for one in "tuv"] == [["t"], [], []]
        await cp.flush()
        await cp.flush("nothing buffered")
        assert [await written(store, one) for one in "tuv"] == [["t"], ["u"], ["v"]]
        await cp.append("t", [user("more")])

    assert await written(store, "t") == ["t", "more"]

    with pytest.raises(Closed):
        await cp.append("t", [user("late")])

    with pytest.raises(Closed):
        await cp.flush()

    assert await store.load("t") is not None, "the wrapper must not close the store"


# Reads, versions, fences


async def test_reads_include_buffered_messages(store: MemoryCheckpointer[Any]) -> None:
    """On this handle, for any slice, as if they were written."""
    await store.append("t", [user(x) for x in "ab"])
    await store.save_extra("t", {"x": 1})

    async with with_cadence(store, Cadence.every(10)) as cp:
        assert isinstance(cp, ReadsRanges)
        assert await cp.append("t", [user(x) for x in "cde"], expected_version=2) == 5
        data = await cp.load("t")
        assert data is not None
        assert texts(data.messages) == list("abcde")
        assert (data.version, data.extra) == (5, {"x": 1})
        data.messages[-1]["content"] = "changed"

        for start in (0, 1, 2, 3, 5, 9, -1, -4, -9):
            for stop in (None, 0, 1, 2, 3, 5, 9, -1, -4):
                part = texts(await cp.read("t", start, stop))
                assert part == list("abcde")[start:stop]

        assert await written(store) == ["a", "b"]

        new = await cp.append("new", [user("a")])
        data = await cp.load("new")
        assert data == CheckpointData([user("a")], {}, [], 1)
        assert (new, await store.load("new")) == (1, None)


async def test_a_listing_writes_everything_first(
    store: MemoryCheckpointer[Any],
) -> None:
    """So it has the versions that this handle returned."""
    async with with_cadence(store, Cadence.every(10)) as cp:
        assert isinstance(cp, ListsThreads)
        await cp.append("t", [user("a")])
        assert [(one.thread_id, one.version) for one in await cp.list_threads()] == [
            ("t", 1)
        ]
        assert await written(store) == ["a"]


async def test_expected_version_counts_buffered_messages(
    store: MemoryCheckpointer[Any],
) -> None:
    """A conflict writes nothing and buffers nothing."""
    async with with_cadence(store, Cadence.every(10)) as cp:
        await cp.append("t", [user("a")], expected_version=0)
        assert await cp.append("t", [user("b")], expected_version=1) == 2
        assert await cp.append("t", [], expected_version=2) == 2

        for wrong in (0, 1, 3):
            with pytest.raises(VersionConflict) as caught:
                await cp.append("t", [user("x")], expected_version=wrong)

            assert (caught.value.expected, caught.value.actual) == (wrong, 2)

        assert texts(cp.buffered["t"]) == ["a", "b"]

        with pytest.raises(VersionConflict):
            await cp.append("u", [user("x")], expected_version=1)

        assert "u" not in cp.buffered


async def test_values_are_checked_when_they_are_appended(
    store: MemoryCheckpointer[Any],
) -> None:
    """Not when they are written later; a refused append buffers no message."""
    async with with_cadence(store, Cadence.every(10), max_payload=100) as cp:
        with pytest.raises(SerializationError):
            await cp.append("t", [user("a"), {"n": float("nan")}])

        with pytest.raises(PayloadTooLarge):
            await cp.append("t", [user("a" * 200)])

        assert cp.buffered == {}


async def test_typed_messages_are_buffered_unchanged(
    store: MemoryCheckpointer[Any],
) -> None:
    """They keep their type, in the buffer and in the store."""
    async with (
        MemoryCheckpointer[Any](message_type=Message) as typed,
        with_cadence(typed, Cadence.every(2), message_type=Message) as cp,
    ):
        await cp.append("t", [UserMessage(content="a")])
        assert cp.buffered == {"t": [UserMessage(content="a")]}
        await cp.append("t", [UserMessage(content="b")])
        data = await typed.load("t")
        assert data is not None
        assert data.messages == [UserMessage(content="a"), UserMessage(content="b")]


async def test_deleting_a_thread_drops_its_buffered_messages(
    store: MemoryCheckpointer[Any],
) -> None:
    """The next append starts again at version 0."""
    async with with_cadence(store, Cadence.every(10)) as cp:
        assert isinstance(cp, ErasesThreads)
        await store.append("t", [user("a")])
        await cp.append("t", [user("b")])
        await cp.delete_thread("t")
        assert await cp.load("t") is None
        assert await cp.append("t", [user("c")]) == 1

    assert await written(store) == ["c"]


# Another writer


async def test_a_conflict_blocks_the_thread_until_its_messages_are_discarded(
    store: MemoryCheckpointer[Any],
) -> None:
    """Messages of two writers are never interleaved, and none is lost."""
    async with with_cadence(store, Cadence.every(3)) as cp:
        assert isinstance(cp, ReadsRanges)
        assert isinstance(cp, KeepsReceipts)
        assert isinstance(cp, ListsThreads)
        assert isinstance(cp, MovesThreads)
        await store.append("t", [user("a")])
        await cp.record_issued("t", call("old key", "old"))
        await cp.append("t", [user("b")])
        await store.append("t", [user("other")])
        dump = await store.dump_thread("t")
        assert dump is not None

        with pytest.raises(VersionConflict) as caught:
            await cp.flush("t")

        assert (caught.value.expected, caught.value.actual) == (1, 2)

        for use in (
            cp.append("t", [user("c")]),
            cp.append("t", []),
            cp.load("t"),
            cp.read("t"),
            cp.read("t", 1),
            cp.flush("t"),
            cp.flush(),
            cp.save_extra("t", {"x": 1}),
            cp.dump_thread("t"),
            cp.restore_thread(dump),
            cp.list_threads(),
            cp.record_issued("t", call()),
            cp.record_issued("another thread", call()),
        ):
            with pytest.raises(VersionConflict):
                await use

        assert (await cp.record_result("t", "old", 1)).status == "completed"
        assert await cp.find_completed("old key") == await cp.find_call("old key")
        assert len(await cp.list_calls("t")) == 1
        assert texts(await cp.read("t", 0, 1)) == ["a"]

        assert await written(store) == ["a", "other"]
        assert await store.find_call("k") is None
        assert texts(cp.buffered["t"]) == ["b"]

        assert texts(await cp.discard("t")) == ["b"]
        assert await cp.discard("t") == []
        assert await cp.append("t", [user("b")], expected_version=2) == 3
        data = await cp.load("t")
        assert data is not None
        assert texts(data.messages) == ["a", "other", "b"]


@pytest.mark.parametrize("read", ["load", "read"])
async def test_a_read_meets_another_writer_too(
    store: MemoryCheckpointer[Any], read: str
) -> None:
    """It raises, instead of showing a thread that is in no store."""
    async with with_cadence(store, Cadence.every(3)) as cp:
        await cp.append("t", [user("a")])
        await store.append("t", [user("other")])

        with pytest.raises(VersionConflict):
            await getattr(cp, read)("t")

        await cp.discard("t")


async def test_an_append_that_meets_another_writer_is_not_buffered(
    store: MemoryCheckpointer[Any],
) -> None:
    """The messages before it stay in the buffer; its own are not added."""
    async with with_cadence(store, Cadence.every(2)) as cp:
        await cp.append("t", [user("a")])
        await store.append("t", [user("other")])

        with pytest.raises(VersionConflict):
            await cp.append("t", [user("b")])

        assert texts(await cp.discard("t")) == ["a"]


async def test_closing_raises_what_could_not_be_written(
    store: MemoryCheckpointer[Any],
) -> None:
    """The other threads are written, and ``buffered`` still has the messages."""
    cp = with_cadence(store, Cadence.every(10, seconds=60))
    await cp.__aenter__()
    await cp.append("t", [user("a")])
    await cp.append("u", [user("b")])
    await store.append("t", [user("other")])

    for _ in range(2):
        with pytest.raises(VersionConflict):
            await cp.aclose()

    assert await written(store, "u") == ["b"]
    assert {thread: texts(held) for thread, held in cp.buffered.items()} == {"t": ["a"]}


# Faults


async def test_a_failed_write_keeps_the_buffered_messages(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """The caller can repeat the append that caused the write."""
    async with with_cadence(spy, Cadence.every(2)) as cp:
        await cp.append("t", [user("a")])
        spy.faults.append("refused")

        with pytest.raises(BackendUnavailable):
            await cp.append("t", [user("b")])

        assert texts(cp.buffered["t"]) == ["a"]
        assert await cp.append("t", [user("b")]) == 2

    assert await written(store) == ["a", "b"]


@pytest.mark.parametrize("kind", [Spy, RangeSpy])
@pytest.mark.parametrize("faults", [["lost before"], ["lost after"]])
async def test_a_lost_answer_duplicates_nothing(
    store: MemoryCheckpointer[Any], kind: type[Spy], faults: list[Any]
) -> None:
    """Whether the write was applied or not."""
    spy = kind(store)

    async with with_cadence(spy, Cadence.every(10)) as cp:
        for text in "ab":
            await cp.append("t", [user(text)])
            spy.faults.extend(faults)
            await cp.flush()

    assert await written(store) == ["a", "b"]


@pytest.mark.parametrize("use", ["append", "load", "read", "flush"])
@pytest.mark.parametrize("landed", [True, False])
async def test_the_next_call_decides_a_write_that_may_have_been_applied(
    store: MemoryCheckpointer[Any], spy: RangeSpy, landed: bool, use: str
) -> None:
    """The next call on the thread finds out whether the messages are stored."""
    async with with_cadence(spy, Cadence.every(10)) as cp:
        await cp.append("t", [user("a")])
        spy.faults.extend(["lost after" if landed else "lost before", "refused"])
        spy.faults.append("refused")

        with pytest.raises(BackendUnavailable) as caught:
            await cp.flush()

        assert caught.value.maybe_applied
        await getattr(cp, use)("t", *([[user("b")]] if use == "append" else []))
        assert await written(store) == ["a"]
        await cp.append("t", [user("c")])

    assert await written(store) == (["a", "b", "c"] if use == "append" else ["a", "c"])


async def test_a_repeated_append_that_was_applied_is_a_conflict(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """It was applied with the messages before it, and the version shows that."""
    async with with_cadence(spy, Cadence.every(2)) as cp:
        await cp.append("t", [user("a")])
        spy.faults.extend(["lost after", "refused", "refused"])

        with pytest.raises(BackendUnavailable):
            await cp.append("t", [user("b")], expected_version=1)

        with pytest.raises(VersionConflict):
            await cp.append("t", [user("b")], expected_version=1)

    assert await written(store) == ["a", "b"]


async def test_a_message_that_the_store_refuses_stays_buffered(
    store: MemoryCheckpointer[Any],
) -> None:
    """The store has a lower limit than the wrapper knows: a spy has no ``limits``."""
    async with (
        MemoryCheckpointer[Any](max_payload=50) as strict,
        with_cadence(RangeSpy(strict), Cadence.every(10)) as cp,
    ):
        await cp.append("t", [user("a" * 100)])

        for _ in range(2):
            with pytest.raises(PayloadTooLarge):
                await cp.flush()

        assert texts(await cp.discard("t")) == ["a" * 100]


async def test_a_cancelled_append_is_applied_as_a_whole(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """When the caller is cancelled during the write, the write goes on."""
    async with with_cadence(spy, Cadence.every(2)) as cp:
        await cp.append("t", [user("a")])
        spy.gate.clear()
        spy.waiting.clear()
        task = asyncio.create_task(cp.append("t", [user("b")]))
        await spy.waiting.wait()
        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task

        spy.gate.set()
        assert await cp.append("t", [user("c")]) == 3

    assert await written(store) == ["a", "b", "c"]


@pytest.mark.parametrize("follow", ["save_extra", "record_issued"])
async def test_what_follows_a_cancelled_append_comes_after_it(
    store: MemoryCheckpointer[Any], spy: RangeSpy, follow: str
) -> None:
    """The first append of a thread is in no buffer until the store has answered."""
    async with with_cadence(spy, Cadence.every(3)) as cp:
        spy.gate.clear()
        task = asyncio.create_task(cp.append("t", [user("a")]))
        await spy.waiting.wait()
        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task

        later: asyncio.Task[Any] = asyncio.create_task(
            cp.save_extra("t", {"a": 1})
            if follow == "save_extra"
            else cp.record_issued("u", call())
        )
        await asyncio.sleep(0.01)
        assert not later.done()
        spy.gate.set()
        await later
        assert await written(store) == ["a"]


async def test_closing_on_another_loop_leaves_the_timer(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """It is refused, and the messages are written at their time."""
    async with with_cadence(spy, Cadence.every(9, seconds=0.05)) as cp:
        await cp.append("t", [user("a")])

        with pytest.raises(WrongEventLoop):
            await asyncio.to_thread(lambda: asyncio.run(cp.aclose()))

        await writes(spy, 1)
        assert await written(store) == ["a"]


@pytest.mark.parametrize("thread_id", ["t", "other"])
async def test_a_buffer_that_cannot_be_written_hides_no_outcome(
    store: MemoryCheckpointer[Any], thread_id: str
) -> None:
    """A released effect happened, and its run claims again to record that."""
    paid = []

    async with with_cadence(store, Cadence.per_turn()) as cp:
        await cp.append(thread_id, [user("0")])
        await cp.flush()

        async def pay(effect: Effect) -> str:
            # A buffer conflicts, and a person takes the run for dead.
            await cp.append(thread_id, [user("1")])
            await store.append(thread_id, [user("2")])
            data = await store.load("t")
            assert data is not None
            await EffectLedger(store).release(data.pending[0], "not sent")
            paid.append(effect.attempt)
            return "paid"

        assert await EffectLedger(cp).run("t", "pay", {}, pay) == "paid"
        assert await EffectLedger(store).run("t", "pay", {}, pay) == "paid"
        assert paid == [1]

        with pytest.raises(VersionConflict):
            await cp.flush()

        await cp.discard(thread_id)


async def test_many_tasks_share_a_wrapper(store: MemoryCheckpointer[Any]) -> None:
    """Versions have no gaps, and each message is stored once."""
    async with with_cadence(store, Cadence.every(7)) as cp:
        versions = await asyncio.gather(
            *(cp.append("t", [user(str(n))]) for n in range(100))
        )

    assert sorted(versions) == list(range(1, 101))
    found = await written(store)
    assert [found[version - 1] for version in versions] == [str(n) for n in range(100)]


# Optional protocols, durability, options


def test_the_wrapper_has_the_optional_protocols_of_its_store(
    store: MemoryCheckpointer[Any],
) -> None:
    """``isinstance`` finds the same ones."""
    abilities = [
        ListsThreads,
        ReadsRanges,
        KeepsReceipts,
        ErasesThreads,
        StatesDurability,
    ]
    stores: list[Any] = [store, Spy(store), RangeSpy(store)]

    for inner in stores:
        wrapped = with_cadence(inner, Cadence.every(2))
        assert isinstance(wrapped, BufferedCheckpointer)

        for ability in abilities:
            assert isinstance(wrapped, ability) == isinstance(inner, ability)


async def test_the_durability_says_what_a_crash_may_lose(
    store: MemoryCheckpointer[Any],
) -> None:
    """``may_lose`` is a sentence, and the handle's durability starts with it."""
    assert Cadence.per_message().may_lose == (
        "a crash loses nothing that was acknowledged"
    )
    assert "at most the last message of" in Cadence.every(2).may_lose
    assert Cadence.every(10, seconds=2.5).may_lose == (
        "a crash loses at most the last 9 messages of a thread, none from before "
        "the last claim or 2.5 seconds ago"
    )
    assert "the last turn's end" in Cadence.per_turn().may_lose
    assert "the last 99 messages" in Cadence.per_tool_call().may_lose

    strict = with_cadence(store, Cadence.per_message())
    assert isinstance(strict, StatesDurability)
    assert strict.durability == store.durability

    lax = with_cadence(store, Cadence.every(10))
    assert isinstance(lax, StatesDurability)
    assert lax.durability.survives is Survives.NONE
    assert lax.durability.words.startswith("a crash loses at most the last 9 messages")
    assert repr(lax) == f"<BufferedCheckpointer over {store!r}>"


@pytest.mark.parametrize(
    "wrong", [{"messages": 0}, {"messages": True}, {"seconds": 0}, {"seconds": -1.0}]
)
def test_a_wrong_cadence_is_refused(wrong: dict[str, Any]) -> None:
    """The number and the time must be positive."""
    with pytest.raises(ValueError, match="at least 1|more than 0"):
        Cadence(**wrong)


async def test_a_session_can_be_buffered(store: MemoryCheckpointer[Any]) -> None:
    """A session log works over the wrapper, and its turns end as usual."""
    async with with_cadence(store, Cadence.per_turn()) as cp:
        log = await SessionLog.open(cp, "s")
        await log.append_message(user("a"))
        await log.append_state(spent=1)
        assert (await store.load("s"), log.version) == (None, 3)
        await log.append_message(assistant("b"))
        assert (await SessionLog.open(store, "s")).entries == log.entries
        await log.append_message(user("c"))
        assert await log.refresh() == []
        assert texts(log.context().messages) == ["a", "b", "c"]

    assert (await SessionLog.open(store, "s")).entries == log.entries
