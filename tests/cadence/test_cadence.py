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
    ErasesCalls,
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
    TrimsThreads,
    VersionConflict,
    WatchesThreads,
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

TURNS = Cadence(ends_turn=is_turn_end)


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


async def test_one_message_buffers_nothing(store: MemoryCheckpointer[Any]) -> None:
    """Each append is written before it returns, as without the wrapper."""
    async with with_cadence(store, Cadence(1)) as cp:
        assert await cp.append("t", [user("a")]) == 1
        assert await cp.append("t", [], expected_version=1) == 1
        await store.append("t", [user("other")])
        assert await cp.append("t", [user("b")]) == 3
        assert await written(store) == ["a", "other", "b"]


async def test_a_number_of_messages_is_written_in_one_append(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """The append that reaches the number writes all of the thread."""
    async with with_cadence(spy, Cadence(3)) as cp:
        assert await cp.append("t", [user("a")]) == 1
        assert await cp.append("u", [user("x")]) == 1
        assert await cp.append("t", [user("b")]) == 2
        assert await written(store) == []
        assert {one: texts(held) for one, held in cp.buffered.items()} == {
            "t": ["a", "b"],
            "u": ["x"],
        }
        spy.calls.clear()
        assert await cp.append("t", [user("c")]) == 3
        assert await written(store) == ["a", "b", "c"]
        assert spy.calls == [("append", 3, 0)]

        assert await cp.append("t", [user(x) for x in "defg"]) == 7
        assert await written(store) == list("abcdefg")
        assert cp.buffered.keys() == {"u"}


async def test_a_buffer_never_exceeds_max_append() -> None:
    """The buffer is written before it is too large for one append of the store."""
    message = {"text": "x" * 400}

    async with (
        MemoryCheckpointer[Any](max_append=1000) as small,
        with_cadence(small, Cadence(50)) as cp,
    ):
        for n in range(1, 6):
            assert await cp.append("t", [message], expected_version=n - 1) == n
            assert len(await small.read("t")) == (n - 1) // 2 * 2

        assert await cp.append("t", [message], extra={"k": "x" * 300}) == 6
        assert await small.read("t") == [message] * 6

        with pytest.raises(PayloadTooLarge):
            await cp.append("t", [message] * 3)


async def test_messages_are_written_after_some_seconds(
    store: MemoryCheckpointer[Any], spy: RangeSpy, caplog: pytest.LogCaptureFixture
) -> None:
    """Without another call. A write that fails is tried again, with a warning."""
    async with with_cadence(spy, Cadence(seconds=0.01)) as cp:
        await cp.append("t", [user("a")])
        await writes(spy, 1)
        assert await written(store) == ["a"]
        await cp.append("t", [user("b")])
        spy.faults.extend(["refused", "refused"])
        await writes(spy, 3)

    assert await written(store) == ["a", "b"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


async def test_a_claim_comes_after_the_messages_that_led_to_it(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """It is not made if they cannot be written."""
    async with with_cadence(spy, Cadence()) as cp:
        await cp.append("t", [user("a"), assistant("paying", "pay")])
        await cp.append("u", [user("b")])
        spy.faults.extend(["refused"])

        with pytest.raises(BackendUnavailable):
            await cp.record_issued("t", call())

        assert await store.find_call("k") is None
        assert await cp.record_issued("t", call()) is None
        assert await written(store, "t") == ["a", "paying"]
        assert await written(store, "u") == ["b"]


async def test_a_turn_is_written_with_its_last_message(
    store: MemoryCheckpointer[Any],
) -> None:
    """An assistant's message without a tool call, or what a function says."""
    async with with_cadence(store, TURNS) as cp:
        await cp.append("t", [user("a")])
        await cp.append("t", [assistant("looking", "search")])
        assert await written(store) == []
        await cp.append("t", [assistant("b")])
        assert await written(store) == ["a", "looking", "b"]

    mine = Cadence(ends_turn=lambda message: message["content"] == "over")

    async with with_cadence(store, mine) as cp:
        await cp.append("u", [assistant("b")])
        assert await written(store, "u") == []
        await cp.append("u", [user("over"), user("and on")])
        assert await written(store, "u") == ["b", "over", "and on"]


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


async def test_everything_is_written_before_it_is_looked_at(
    store: MemoryCheckpointer[Any],
) -> None:
    """Reads, extra, lists and dumps find the versions that this handle returned."""
    async with with_cadence(store, Cadence(10)) as cp:
        assert isinstance(cp, ReadsRanges)
        assert isinstance(cp, ListsThreads)
        assert isinstance(cp, MovesThreads)
        await store.append("t", [user("a")])

        async def buffer(text: str) -> None:
            before = len(await written(store))
            assert await cp.append("t", [user(text)]) == before + 1
            assert len(await written(store)) == before

        await buffer("b")
        data = await cp.load("t")
        assert data == CheckpointData([user("a"), user("b")], {}, [], 2)
        await buffer("c")
        assert texts(await cp.read("t", 1)) == ["b", "c"]
        await buffer("d")
        part = await cp.load_range("t", start=-2)
        assert part is not None
        assert (texts(part.messages), part.first, part.version) == (["c", "d"], 2, 4)
        await buffer("e")
        assert [one.version for one in await cp.list_threads()] == [5]
        await buffer("f")
        dump = await cp.dump_thread("t")
        assert dump is not None
        assert len(dump.messages) == 6
        await buffer("g")
        await cp.save_extra("t", {"spent": 1})
        assert len(await written(store)) == 7
        await cp.append("new", [user("a")])
        copy = await store.dump_thread("t")
        assert copy is not None

        with pytest.raises(VersionConflict):
            await cp.restore_thread(copy)


async def test_a_result_is_recorded_at_once(store: MemoryCheckpointer[Any]) -> None:
    """Also where the buffered messages of the thread cannot be written."""
    async with with_cadence(store, Cadence(10)) as cp:
        assert isinstance(cp, KeepsReceipts)
        await cp.record_issued("t", call())
        await cp.append("t", [user("a")])
        await store.append("t", [user("other")])
        record = await cp.record_result("t", "c", {"paid": True})
        assert record.status == "completed"
        assert await cp.find_completed("k") == await cp.find_call("k") == record
        assert await cp.list_calls("t") == [record]
        await cp.discard("t")


async def test_flush_and_close_write_everything(store: MemoryCheckpointer[Any]) -> None:
    """The wrapper does not close its store."""
    async with with_cadence(store, Cadence(10)) as cp:
        await cp.append("t", [user("a")])
        await cp.append("u", [user("b")])
        await cp.flush()
        assert [await written(store, one) for one in "tu"] == [["a"], ["b"]]
        await cp.append("t", [user("more")])

    assert await written(store, "t") == ["a", "more"]

    for late in (cp.append("t", [user("late")]), cp.flush(), cp.load("t")):
        with pytest.raises(Closed):
            await late


async def test_expected_version_counts_buffered_messages(
    store: MemoryCheckpointer[Any],
) -> None:
    """A conflict writes nothing and buffers nothing."""
    async with with_cadence(store, Cadence(10)) as cp:
        await cp.append("t", [user("a")], expected_version=0)
        assert await cp.append("t", [user("b")], expected_version=1) == 2
        assert await cp.append("t", [], expected_version=2) == 2

        for wrong in (0, 1, 3):
            with pytest.raises(VersionConflict) as caught:
                await cp.append("t", [user("x")], expected_version=wrong)

            assert (caught.value.expected, caught.value.actual) == (wrong, 2)

        with pytest.raises(VersionConflict):
            await cp.append("u", [user("x")], expected_version=1)

        assert {one: texts(held) for one, held in cp.buffered.items()} == {
            "t": ["a", "b"]
        }


async def test_values_are_checked_and_copied_when_they_are_appended(
    store: MemoryCheckpointer[Any],
) -> None:
    """Not when they are written later; a refused append buffers no message."""
    async with with_cadence(store, Cadence(10), max_payload=100) as cp:
        with pytest.raises(SerializationError):
            await cp.append("t", [user("a"), {"n": float("nan")}])

        with pytest.raises(PayloadTooLarge):
            await cp.append("t", [user("a" * 200)])

        assert cp.buffered == {}
        message = user("cut \ud83d")
        await cp.append("t", [message])
        message["content"] = "changed"
        cp.buffered["t"][0]["content"] = "changed"

    assert await written(store) == ["cut \ud83d"]


async def test_typed_messages_are_buffered_unchanged(
    store: MemoryCheckpointer[Any],
) -> None:
    """They keep their type, in the buffer and in the store."""
    async with (
        MemoryCheckpointer[Any](message_type=Message) as typed,
        with_cadence(typed, Cadence(2), message_type=Message) as cp,
    ):
        await cp.append("t", [UserMessage(content="a")])
        assert cp.buffered == {"t": [UserMessage(content="a")]}
        await cp.append("t", [UserMessage(content="b")])
        assert await typed.read("t") == [
            UserMessage(content="a"),
            UserMessage(content="b"),
        ]


async def test_a_thread_is_deleted_with_its_buffer(
    store: MemoryCheckpointer[Any],
) -> None:
    """``expected_version`` counts what is buffered; a conflict deletes nothing."""
    async with with_cadence(store, Cadence(10)) as cp:
        assert isinstance(cp, ErasesThreads)
        await store.append("t", [user("a")])
        await cp.append("t", [user("b")])

        with pytest.raises(VersionConflict):
            await cp.delete_thread("t", expected_version=1)

        await cp.append("t", [user("c")])
        await cp.delete_thread("t", expected_version=3)
        assert await cp.load("t") is None
        assert await cp.append("t", [user("d")]) == 1

    assert await written(store) == ["d"]


# Another writer


async def test_another_writer_stops_the_thread_until_its_messages_are_discarded(
    store: MemoryCheckpointer[Any],
) -> None:
    """Messages of two writers are never interleaved, and none is lost."""
    async with with_cadence(store, Cadence(2)) as cp:
        assert isinstance(cp, ListsThreads)
        await store.append("t", [user("a")])
        await cp.append("t", [user("b")])
        await store.append("t", [user("other")])

        for use in (
            cp.append("t", [user("c")]),
            cp.load("t"),
            cp.flush(),
            cp.save_extra("t", {"x": 1}),
            cp.list_threads(),
            cp.record_issued("another thread", call()),
        ):
            with pytest.raises(VersionConflict) as caught:
                await use

            assert (caught.value.expected, caught.value.actual) == (1, 2)

        assert await written(store) == ["a", "other"]
        assert await store.find_call("k") is None
        assert texts(await cp.discard("t")) == ["b"]
        assert await cp.discard("t") == []
        assert await cp.append("t", [user("b")], expected_version=2) == 3
        data = await cp.load("t")
        assert data is not None
        assert texts(data.messages) == ["a", "other", "b"]


async def test_closing_raises_what_could_not_be_written(
    store: MemoryCheckpointer[Any],
) -> None:
    """The other threads are written, and ``buffered`` still has the messages."""
    cp = with_cadence(store, Cadence(10, seconds=60))
    await cp.__aenter__()
    await cp.append("t", [user("a")])
    await cp.append("u", [user("b")])
    await store.append("t", [user("other")])

    for _ in range(2):
        with pytest.raises(VersionConflict):
            await cp.aclose()

    assert await written(store, "u") == ["b"]
    assert {thread: texts(held) for thread, held in cp.buffered.items()} == {"t": ["a"]}
    assert len(asyncio.all_tasks()) == 1


# Faults


async def test_a_failed_write_keeps_the_buffered_messages(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """The caller can repeat the append that caused the write."""
    async with with_cadence(spy, Cadence(2)) as cp:
        await cp.append("t", [user("a")])
        spy.faults.append("refused")

        with pytest.raises(BackendUnavailable):
            await cp.append("t", [user("b")])

        assert texts(cp.buffered["t"]) == ["a"]
        assert await cp.append("t", [user("b")]) == 2

    assert await written(store) == ["a", "b"]


@pytest.mark.parametrize("kind", [Spy, RangeSpy])
@pytest.mark.parametrize("fault", ["lost before", "lost after"])
async def test_a_lost_answer_duplicates_nothing(
    store: MemoryCheckpointer[Any], kind: type[Spy], fault: Any
) -> None:
    """Whether the write was applied or not."""
    spy = kind(store)

    async with with_cadence(spy, Cadence(10)) as cp:
        for text in "ab":
            await cp.append("t", [user(text)])
            spy.faults.append(fault)
            await cp.flush()

    assert await written(store) == ["a", "b"]


@pytest.mark.parametrize("use", ["append", "load", "read"])
@pytest.mark.parametrize("landed", [True, False])
async def test_the_next_call_decides_a_write_that_may_have_been_applied(
    store: MemoryCheckpointer[Any], spy: RangeSpy, landed: bool, use: str
) -> None:
    """The next call on the thread finds out whether the messages are stored."""
    async with with_cadence(spy, Cadence(10)) as cp:
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
    async with with_cadence(spy, Cadence(2)) as cp:
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
        with_cadence(RangeSpy(strict), Cadence(10)) as cp,
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
    async with with_cadence(spy, Cadence(2)) as cp:
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
    async with with_cadence(spy, Cadence(3)) as cp:
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


async def test_closing_on_another_loop_closes_nothing(
    store: MemoryCheckpointer[Any], spy: RangeSpy
) -> None:
    """It is refused, and the messages are written at their time."""
    async with with_cadence(spy, Cadence(9, seconds=0.05)) as cp:
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

    async with with_cadence(store, TURNS) as cp:
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
    async with with_cadence(store, Cadence(7)) as cp:
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
        TrimsThreads,
        ErasesCalls,
        MovesThreads,
        WatchesThreads,
        StatesDurability,
    ]
    stores: list[Any] = [store, Spy(store), RangeSpy(store)]

    for inner in stores:
        wrapped = with_cadence(inner, Cadence(2))
        assert isinstance(wrapped, BufferedCheckpointer)

        for ability in abilities:
            assert isinstance(wrapped, ability) == isinstance(inner, ability)


async def test_the_durability_says_what_a_crash_may_lose(
    store: MemoryCheckpointer[Any],
) -> None:
    """Nothing more than the store's, if nothing is buffered."""
    strict = with_cadence(store, Cadence(1))
    assert isinstance(strict, StatesDurability)
    assert strict.durability == store.durability
    lax = with_cadence(store, Cadence(10))
    assert isinstance(lax, StatesDurability)
    assert lax.durability.survives is Survives.NONE
    assert lax.durability.words.startswith("a crash loses at most the last 9 messages")


async def test_a_session_can_be_buffered(store: MemoryCheckpointer[Any]) -> None:
    """A session log works over the wrapper, and its turns end as usual."""
    async with with_cadence(store, TURNS) as cp:
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
