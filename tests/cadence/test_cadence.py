"""What the wrapper holds back, when it writes, and what becomes of it in trouble."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cpkit import (
    BackendUnavailable,
    CheckpointData,
    Closed,
    ErasesThreads,
    KeepsReceipts,
    ListsThreads,
    MemoryCheckpointer,
    PayloadTooLarge,
    ReadsRanges,
    SerializationError,
    StatesDurability,
    Survives,
    ToolCall,
    VersionConflict,
)
from cpkit.cadence import BufferedCheckpointer, Cadence, is_turn_end, with_cadence
from cpkit.messages import AssistantMessage, Message, ToolCallBlock, UserMessage
from cpkit.sessions import SessionLog
from tests.sessions.spy import RangeSpy, Spy
from tests.sessions.talk import assistant, texts, user

PATIENCE = 10.0
"""Seconds for what must happen to happen; it takes milliseconds."""


@pytest.fixture
async def store() -> AsyncIterator[MemoryCheckpointer[Any]]:
    """What other handles see: a message is there once it is written."""
    async with MemoryCheckpointer[Any]() as opened:
        yield opened


@pytest.fixture
async def spy(store: MemoryCheckpointer[Any]) -> RangeSpy:
    """The same store, with its calls counted and its answers lost at will."""
    return RangeSpy(store)


async def said(store: MemoryCheckpointer[Any], thread_id: str = "t") -> list[str]:
    """Return what is written of a thread."""
    return texts(await store.read(thread_id))


async def writes(spy: Spy, count: int) -> None:
    """Wait until so many appends with messages are over."""
    async with asyncio.timeout(PATIENCE):
        while count:
            count -= await spy.ended.get() > 0


def call(key: str = "k", call_id: str = "c") -> ToolCall:
    return ToolCall(call_id, "pay", {}, key)


# When


async def test_per_message_holds_nothing_back(store: MemoryCheckpointer[Any]) -> None:
    """Each append is the store's own."""
    async with with_cadence(store, Cadence.per_message()) as cp:
        assert await cp.append("t", [user("a")]) == 1
        assert await said(store) == ["a"]
        assert cp.buffered == {}


async def test_every_so_many_messages(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """The append that fills the measure writes all of them in one."""
    async with with_cadence(spy, Cadence.every(3)) as cp:
        assert await cp.append("t", [user("a")]) == 1
        assert await cp.append("t", [user("b")]) == 2
        assert await said(store) == []
        assert texts(cp.buffered["t"]) == ["a", "b"]
        assert await cp.append("t", [user("c")]) == 3
        assert await said(store) == ["a", "b", "c"]
        assert spy.calls == [("append", 0, None), ("append", 3, 0)]

        assert await cp.append("t", [user(x) for x in "defg"]) == 7
        assert await said(store) == list("abcdefg")
        assert cp.buffered == {}


async def test_each_thread_has_its_own_measure(store: MemoryCheckpointer[Any]) -> None:
    """What one holds back does not count for another."""
    async with with_cadence(store, Cadence.every(2)) as cp:
        await cp.append("t", [user("a")])
        await cp.append("u", [user("b")])
        assert await said(store, "t") == await said(store, "u") == []


async def test_every_so_many_seconds(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """Without another call, and each time anew."""
    async with with_cadence(spy, Cadence.every(seconds=0.01)) as cp:
        for text in "ab":
            await cp.append("t", [user(text)])
            await writes(spy, 1)
            assert text in await said(store)


async def test_the_clock_tries_again(
    store: MemoryCheckpointer[Any], spy: RangeSpy, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that is away for a while costs a warning, and no message."""
    async with with_cadence(spy, Cadence.every(seconds=0.01)) as cp:
        await cp.append("t", [user("a")])
        spy.faults.extend(["refused", "refused"])
        await writes(spy, 3)

    assert await said(store) == ["a"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


async def test_the_clock_meets_another_writer(
    store: MemoryCheckpointer[Any], spy: RangeSpy, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and raised by the next use of the thread."""
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
    """Whatever any thread holds back is there before an effect can run."""
    async with with_cadence(spy, Cadence.per_tool_call()) as cp:
        await cp.append("t", [user("a"), assistant("paying", "pay")])
        await cp.append("u", [user("b")])
        spy.calls.clear()
        assert await cp.record_issued("t", call()) is None
        assert [name for name, *_ in spy.calls] == ["append", "append", "record_issued"]
        assert await said(store, "t") == ["a", "paying"]
        assert await said(store, "u") == ["b"]


async def test_a_claim_that_cannot_be_preceded_is_not_made(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """No effect runs whose reason is not in the store."""
    async with with_cadence(spy, Cadence.per_tool_call()) as cp:
        await cp.append("t", [user("a")])
        await cp.append("u", [user("b")])
        spy.faults.extend(["refused"])

        with pytest.raises(BackendUnavailable):
            await cp.record_issued("t", call())

        assert await store.find_call("k") is None
        assert await cp.record_issued("t", call()) is None
        assert await said(store, "t") == ["a"]


async def test_per_turn_writes_with_the_last_message(
    store: MemoryCheckpointer[Any],
) -> None:
    """An assistant's message that asks for no tool ends the turn."""
    async with with_cadence(store, Cadence.per_turn()) as cp:
        await cp.append("t", [user("a")])
        await cp.append("t", [assistant("looking", "search")])
        assert await said(store) == []
        await cp.append("t", [assistant("b")])
        assert await said(store) == ["a", "looking", "b"]
        assert cp.buffered == {}


async def test_a_turn_is_what_one_says(store: MemoryCheckpointer[Any]) -> None:
    """Any function of a message can tell its end."""
    cadence = Cadence.per_turn(ends_turn=lambda message: message["content"] == "over")

    async with with_cadence(store, cadence) as cp:
        await cp.append("t", [assistant("b")])
        assert await said(store) == []
        await cp.append("t", [user("over"), user("and on")])
        assert await said(store) == ["b", "over", "and on"]


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
def test_the_end_of_a_turn_is_known(message: Any, ends: bool) -> None:
    """In each form of message that is known, typed or in a session's entry."""
    assert is_turn_end(message) is ends


async def test_other_writes_come_after_the_messages(
    store: MemoryCheckpointer[Any],
) -> None:
    """What is saved beside a thread is never ahead of what was said in it."""
    async with with_cadence(store, Cadence.every(10)) as cp:
        await cp.append("t", [user("a")])
        await cp.append("u", [user("b")])
        await cp.save_extra("t", {"spent": 1})
        assert await said(store, "t") == ["a"]
        assert await said(store, "u") == []
        data = await store.load("t")
        assert data is not None
        assert data.extra == {"spent": 1}


async def test_a_result_is_never_held_up(store: MemoryCheckpointer[Any]) -> None:
    """The outcome of an effect is recorded, whatever the messages have met."""
    async with with_cadence(store, Cadence.every(10)) as cp:
        await cp.record_issued("t", call())
        await cp.append("t", [user("a")])
        await store.append("t", [user("other")])
        record = await cp.record_result("t", "c", {"paid": True})
        assert record.status == "completed"
        assert await cp.find_completed("k") == record
        await cp.discard("t")


async def test_flush_and_close_write_everything(store: MemoryCheckpointer[Any]) -> None:
    """On demand for one thread or for all, and at the end by itself."""
    async with with_cadence(store, Cadence.every(10)) as cp:
        for thread_id in "tuv":
            await cp.append(thread_id, [user(thread_id)])

        await cp.flush("t")
        assert [await said(store, one) for one in "tuv"] == [["t"], [], []]
        await cp.flush()
        await cp.flush("nothing held back")
        assert [await said(store, one) for one in "tuv"] == [["t"], ["u"], ["v"]]
        await cp.append("t", [user("more")])

    assert await said(store, "t") == ["t", "more"]

    with pytest.raises(Closed):
        await cp.append("t", [user("late")])

    with pytest.raises(Closed):
        await cp.flush()

    assert await store.load("t") is not None, "the store is its owner's to close"


# Reads, versions, fences


async def test_reads_see_what_is_held_back(store: MemoryCheckpointer[Any]) -> None:
    """As if it were written, on this handle; any slice of it."""
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

        assert await said(store) == ["a", "b"]

        new = await cp.append("new", [user("a")])
        data = await cp.load("new")
        assert data == CheckpointData([user("a")], {}, [])
        assert (new, await store.load("new")) == (1, None)


async def test_a_listing_is_of_what_is_written(store: MemoryCheckpointer[Any]) -> None:
    """So everything is written first."""
    async with with_cadence(store, Cadence.every(10)) as cp:
        assert isinstance(cp, ListsThreads)
        await cp.append("t", [user("a")])
        assert [(one.thread_id, one.version) for one in await cp.list_threads()] == [
            ("t", 1)
        ]
        assert await said(store) == ["a"]


async def test_expected_version_counts_what_is_held_back(
    store: MemoryCheckpointer[Any],
) -> None:
    """A conflict writes nothing and holds nothing back."""
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
    """Not when they are written, and nothing of a refused batch is held back."""
    async with with_cadence(store, Cadence.every(10), max_payload=100) as cp:
        with pytest.raises(SerializationError):
            await cp.append("t", [user("a"), {"n": float("nan")}])

        with pytest.raises(PayloadTooLarge):
            await cp.append("t", [user("a" * 200)])

        assert cp.buffered == {}


async def test_typed_messages_are_held_back_as_they_are(
    store: MemoryCheckpointer[Any],
) -> None:
    """With the type that the store was opened with."""
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


async def test_deleting_takes_what_is_held_back_along(
    store: MemoryCheckpointer[Any],
) -> None:
    """The id starts again at version 0."""
    async with with_cadence(store, Cadence.every(10)) as cp:
        assert isinstance(cp, ErasesThreads)
        await store.append("t", [user("a")])
        await cp.append("t", [user("b")])
        await cp.delete_thread("t")
        assert await cp.load("t") is None
        assert await cp.append("t", [user("c")]) == 1

    assert await said(store) == ["c"]


# Another writer


async def test_another_writer_is_found_out_and_nothing_is_lost(
    store: MemoryCheckpointer[Any],
) -> None:
    """Nothing interleaves; the thread is shut here until its messages are taken."""
    async with with_cadence(store, Cadence.every(3)) as cp:
        assert isinstance(cp, ReadsRanges)
        await store.append("t", [user("a")])
        await cp.append("t", [user("b")])
        await store.append("t", [user("other")])

        with pytest.raises(VersionConflict) as caught:
            await cp.flush("t")

        assert (caught.value.expected, caught.value.actual) == (1, 2)

        for use in (
            cp.append("t", [user("c")]),
            cp.append("t", []),
            cp.load("t"),
            cp.read("t"),
            cp.flush(),
            cp.save_extra("t", {"x": 1}),
            cp.record_issued("t", call()),
            cp.record_issued("another thread", call()),
        ):
            with pytest.raises(VersionConflict):
                await use

        assert await said(store) == ["a", "other"]
        assert await store.find_call("k") is None
        assert texts(cp.buffered["t"]) == ["b"]

        assert texts(await cp.discard("t")) == ["b"]
        assert await cp.discard("t") == []
        assert await cp.append("t", [user("b")], expected_version=2) == 3
        data = await cp.load("t")
        assert data is not None
        assert texts(data.messages) == ["a", "other", "b"]


@pytest.mark.parametrize("read", ["load", "read"])
async def test_a_read_finds_another_writer_too(
    store: MemoryCheckpointer[Any], read: str
) -> None:
    """Rather than show a thread that nobody has."""
    async with with_cadence(store, Cadence.every(3)) as cp:
        await cp.append("t", [user("a")])
        await store.append("t", [user("other")])

        with pytest.raises(VersionConflict):
            await getattr(cp, read)("t")

        await cp.discard("t")


async def test_an_append_that_meets_another_writer_is_not_done(
    store: MemoryCheckpointer[Any],
) -> None:
    """What came before it is still held back, its own messages are not."""
    async with with_cadence(store, Cadence.every(2)) as cp:
        await cp.append("t", [user("a")])
        await store.append("t", [user("other")])

        with pytest.raises(VersionConflict):
            await cp.append("t", [user("b")])

        assert texts(await cp.discard("t")) == ["a"]


async def test_closing_says_what_could_not_be_written(
    store: MemoryCheckpointer[Any],
) -> None:
    """The other threads are written, and the messages can still be had."""
    cp = with_cadence(store, Cadence.every(10, seconds=60))
    await cp.__aenter__()
    await cp.append("t", [user("a")])
    await cp.append("u", [user("b")])
    await store.append("t", [user("other")])

    for _ in range(2):
        with pytest.raises(VersionConflict):
            await cp.aclose()

    assert await said(store, "u") == ["b"]
    assert {thread: texts(held) for thread, held in cp.buffered.items()} == {"t": ["a"]}


# Faults


async def test_a_failed_write_keeps_what_was_held_back(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """And the append that brought it on may be made again."""
    async with with_cadence(spy, Cadence.every(2)) as cp:
        await cp.append("t", [user("a")])
        spy.faults.append("refused")

        with pytest.raises(BackendUnavailable):
            await cp.append("t", [user("b")])

        assert texts(cp.buffered["t"]) == ["a"]
        assert await cp.append("t", [user("b")]) == 2

    assert await said(store) == ["a", "b"]


@pytest.mark.parametrize("kind", [Spy, RangeSpy])
@pytest.mark.parametrize("faults", [["lost before"], ["lost after"]])
async def test_a_lost_answer_doubles_nothing(
    store: MemoryCheckpointer[Any], kind: type[Spy], faults: list[Any]
) -> None:
    """Whether the write had landed or not."""
    spy = kind(store)

    async with with_cadence(spy, Cadence.every(10)) as cp:
        for text in "ab":
            await cp.append("t", [user(text)])
            spy.faults.extend(faults)
            await cp.flush()

    assert await said(store) == ["a", "b"]


@pytest.mark.parametrize("use", ["append", "load", "read", "flush"])
@pytest.mark.parametrize("landed", [True, False])
async def test_a_write_that_stayed_unclear_is_cleared_up_first(
    store: MemoryCheckpointer[Any], spy: RangeSpy, landed: bool, use: str
) -> None:
    """The next use of the thread finds out whether the messages are there."""
    async with with_cadence(spy, Cadence.every(10)) as cp:
        await cp.append("t", [user("a")])
        spy.faults.extend(["lost after" if landed else "lost before", "refused"])
        spy.faults.append("refused")

        with pytest.raises(BackendUnavailable) as caught:
            await cp.flush()

        assert caught.value.maybe_applied
        await getattr(cp, use)("t", *([[user("b")]] if use == "append" else []))
        assert await said(store) == ["a"]
        await cp.append("t", [user("c")])

    assert await said(store) == (["a", "b", "c"] if use == "append" else ["a", "c"])


async def test_an_append_that_stayed_unclear_is_not_lost_twice(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """It landed with those before it; the version tells the caller."""
    async with with_cadence(spy, Cadence.every(2)) as cp:
        await cp.append("t", [user("a")])
        spy.faults.extend(["lost after", "refused", "refused"])

        with pytest.raises(BackendUnavailable):
            await cp.append("t", [user("b")], expected_version=1)

        with pytest.raises(VersionConflict):
            await cp.append("t", [user("b")], expected_version=1)

    assert await said(store) == ["a", "b"]


async def test_a_refusal_of_the_store_loses_nothing(
    store: MemoryCheckpointer[Any],
) -> None:
    """Where the wrapper was told less than the store knows, the store has its say."""
    async with (
        MemoryCheckpointer[Any](max_payload=50) as strict,
        with_cadence(strict, Cadence.every(10)) as cp,
    ):
        await cp.append("t", [user("a" * 100)])

        for _ in range(2):
            with pytest.raises(PayloadTooLarge):
                await cp.flush()

        assert texts(await cp.discard("t")) == ["a" * 100]


async def test_a_cancelled_append_is_wholly_done(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """Where it is cancelled in the middle of the write, the write goes on."""
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

    assert await said(store) == ["a", "b", "c"]


async def test_many_tasks_share_a_wrapper(store: MemoryCheckpointer[Any]) -> None:
    """Versions are dense, and each message is there once."""
    async with with_cadence(store, Cadence.every(7)) as cp:
        versions = await asyncio.gather(
            *(cp.append("t", [user(str(n))]) for n in range(100))
        )

    assert sorted(versions) == list(range(1, 101))
    there = await said(store)
    assert [there[version - 1] for version in versions] == [str(n) for n in range(100)]


# What it is


def test_it_has_the_abilities_of_what_it_wraps(store: MemoryCheckpointer[Any]) -> None:
    """No more and no fewer, as isinstance sees it."""
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


async def test_what_a_crash_costs_is_said(store: MemoryCheckpointer[Any]) -> None:
    """In words, and in the handle's durability."""
    assert Cadence.per_message().may_lose == (
        "a crash loses nothing that was acknowledged"
    )
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
def test_a_cadence_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    """Nothing can be written before no message, or at no time."""
    with pytest.raises(ValueError, match="at least 1|more than 0"):
        Cadence(**wrong)


async def test_a_session_can_be_held_back(store: MemoryCheckpointer[Any]) -> None:
    """A log over the wrapper is the same log, and its turns end as any others."""
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
