"""The session for the Agents SDK behaves as the SDK's own, in any store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from agents import SessionSettings, SQLiteSession
from agents.memory import OpenAIResponsesCompactionSession
from agents.memory import Session as SessionProtocol
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit import (
    BackendUnavailable,
    Closed,
    CorruptThread,
    InvalidId,
    MemoryCheckpointer,
    ToolCall,
    open_checkpointer,
)
from cpkit.integrations import openai_agents
from cpkit.integrations.bridge import Bridge
from cpkit.integrations.openai_agents import Session, session_thread
from tests.sessions.spy import Fault, RangeSpy, Spy
from tests.sweeps import sweep

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)
items = st.lists(st.dictionaries(st.text(max_size=3), values, max_size=3), max_size=4)
limits = st.none() | st.integers(-2, 6)
operations = st.lists(
    st.tuples(st.just("add"), items)
    | st.tuples(st.just("get"), limits)
    | st.tuples(st.sampled_from(["pop", "clear", "reopen"]), st.none())
    | st.tuples(st.just("set limit"), limits),
    max_size=25,
)


@pytest.fixture
async def memory() -> AsyncIterator[MemoryCheckpointer[Any]]:
    """A store in memory, for tests that do not depend on the store."""
    async with MemoryCheckpointer[Any]() as cp:
        yield cp


def numbered(*numbers: int) -> list[Any]:
    return [{"role": "user", "content": str(number)} for number in numbers]


async def test_a_session_reads_its_own_items_once(
    memory: MemoryCheckpointer[Any],
) -> None:
    """Each read begins at the last message that the read before it knew."""
    spy = RangeSpy(memory)
    session = Session("s", spy)

    for n in range(20):
        assert len(await session.get_items()) == n
        await session.add_items(numbered(n))

    starts = [call[1] for call in spy.calls if call[0] == "read"]
    assert starts[-1] >= 17
    assert await session.get_items() == numbered(*range(20))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_ends_if_the_loop_of_the_store_ends(is_async: bool) -> None:
    """Also one that came in the last turn of the loop, which drops it."""
    loop = asyncio.new_event_loop()
    last_turn, given = threading.Event(), threading.Event()

    async def make() -> Bridge:
        return Bridge(MemoryCheckpointer[Any]())

    bridge = loop.run_until_complete(make())
    submit = bridge._submit

    def give(work: Any) -> Any:
        future = submit(work)
        given.set()
        return future

    bridge._submit = give

    def stop() -> None:
        loop.stop()
        last_turn.set()
        given.wait(10)

    def serve() -> None:
        loop.call_soon(stop)
        loop.run_forever()
        loop.close()

    async def work() -> None:
        """Never begin."""

    thread = threading.Thread(target=serve)
    thread.start()
    last_turn.wait(10)

    with pytest.raises(RuntimeError, match="does not run any more"):
        asyncio.run(bridge.go(work())) if is_async else bridge.wait(work())

    thread.join()


def test_a_caller_is_not_cancelled_if_the_loop_of_the_store_ends() -> None:
    """The store's loop cancels its tasks when it ends; the caller gets an error."""
    begun, bridges = threading.Event(), []

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def serve() -> None:
        bridges.append(Bridge(MemoryCheckpointer[Any]()))
        is_made.set()
        await asyncio.to_thread(begun.wait, 10)

    is_made = threading.Event()
    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    is_made.wait(10)

    with pytest.raises(RuntimeError, match="does not run any more"):
        asyncio.run(bridges[0].go(work()))

    thread.join()


async def test_a_program_may_close_its_session(
    memory: MemoryCheckpointer[Any],
) -> None:
    """As it did with the SDK's own session. The store stays open for others."""
    session, other = Session("s", memory), Session("s", memory)
    await session.add_items(numbered(1))
    session.close()
    await other.add_items(numbered(2))
    assert await other.get_items() == numbered(1, 2)


@pytest.mark.parametrize("examples", sweep([25, 100], [25]))
def test_it_behaves_as_the_sdks_own_session(examples: int) -> None:
    """Random operations from two handles, with all kinds of limits."""

    @given(script=operations, first=limits)
    @settings(max_examples=examples)
    def check(script: list[tuple[str, Any]], first: int | None) -> None:
        asyncio.run(play(script, first))

    check()


async def play(script: list[tuple[str, Any]], first: int | None) -> None:
    """Apply the operations to a session of the store and to the SDK's own."""
    limited = SessionSettings(limit=first)
    reference = SQLiteSession("s", session_settings=limited)

    async with open_checkpointer("memory://") as cp:
        session, other = (
            Session("s", cp, session_settings={"limit": first}) for _ in range(2)
        )

        try:
            for kind, given_value in [*script, ("get", -1)]:
                if kind == "reopen":
                    session, other = other, Session("s", cp, session_settings=limited)
                elif kind == "set limit":
                    limited = SessionSettings(limit=given_value)
                    session.session_settings = other.session_settings = limited
                    reference.session_settings = limited
                else:
                    seen, wanted = [
                        await apply(one, kind, given_value)
                        for one in (session, reference)
                    ]
                    assert repr(seen) == repr(wanted)

                session, other = other, session
        finally:
            reference.close()


async def apply(session: SessionProtocol, kind: str, value: Any) -> Any:
    if kind == "add":
        return await session.add_items(value)

    if kind == "get":
        return await session.get_items(limit=value)

    return await (session.pop_item() if kind == "pop" else session.clear_session())


async def test_it_is_a_session_of_the_sdk(memory: MemoryCheckpointer[Any]) -> None:
    """It satisfies the SDK's protocol."""
    session = Session("user-7", memory)
    assert isinstance(session, SessionProtocol)
    assert session.session_settings == SessionSettings()
    assert repr(session) == "<Session 'user-7'>"


async def test_items_are_copied(
    memory: MemoryCheckpointer[Any],
) -> None:
    """Changing an added or a returned item does not change the session."""
    session = Session("s", memory)
    added: Any = [{"content": [1]}]
    await session.add_items(added)
    added[0]["content"].append(2)
    got: Any = await session.get_items()
    got[0]["content"].append(3)
    again: Any = await session.get_items()
    assert again == [{"content": [1]}]
    popped: Any = await session.pop_item()
    assert popped == {"content": [1]}


async def test_clearing_keeps_the_keys(memory: MemoryCheckpointer[Any]) -> None:
    """Nothing is deleted: a paid call stays paid, and the thread grows."""
    session = Session("s", memory)
    await session.add_items(numbered(1, 2))
    call = ToolCall("call-1", "pay", {}, "order-1")
    await memory.record_issued(session.thread_id, call)
    await memory.record_result(session.thread_id, "call-1", "paid")
    await session.pop_item()
    await session.clear_session()
    assert await session.get_items() == []

    found = await memory.find_completed("order-1")
    assert found is not None
    assert found.result == "paid"
    data = await memory.load(session.thread_id)
    assert data is not None
    assert [message.get("item") for message in data.messages[:2]] == numbered(1, 2)


async def test_an_empty_change_writes_nothing(
    memory: MemoryCheckpointer[Any],
) -> None:
    """An empty session has no thread."""
    session = Session("s", memory)
    await session.add_items([])
    await session.clear_session()
    assert await session.pop_item() is None
    assert await memory.load(session.thread_id) is None


async def test_a_later_read_fetches_only_new_records() -> None:
    """They, and those that this session has written since the last read."""
    async with MemoryCheckpointer[Any]() as inner:
        await Session("s", inner).add_items(numbered(*range(500)))
        cp = RangeSpy(inner)
        session = Session("s", cp)
        assert len(await session.get_items()) == 500
        await session.add_items(numbered(500))
        await Session("s", inner).add_items(numbered(501))
        assert await session.get_items(limit=2) == numbered(500, 501)
        assert await session.pop_item() == numbered(501)[0]
        assert cp.calls == [
            ("load_range", 0, None),
            ("append", 1, 500),
            ("read", 499, None),
            ("read", 501, None),
            ("append", 1, 502),
        ]


async def test_six_methods_are_enough() -> None:
    """A store that cannot read ranges is loaded."""
    async with MemoryCheckpointer[Any]() as inner:
        session, other = (Session("s", Spy(inner)) for _ in range(2))
        await session.add_items(numbered(1, 2))
        assert await other.pop_item() == numbered(2)[0]
        assert await session.get_items() == numbered(1)


@pytest.mark.parametrize("count", [1, 2])
async def test_each_item_is_popped_by_one_task(count: int) -> None:
    """Tasks may share a handle or not."""
    async with MemoryCheckpointer[Any]() as cp:
        await Session("s", cp).add_items(numbered(*range(30)))
        handles = [Session("s", cp) for _ in range(count)]
        popped: list[Any] = await asyncio.gather(
            *(handles[n % count].pop_item() for n in range(40))
        )
        there = [int(item["content"]) for item in popped if item is not None]
        assert sorted(there) == list(range(30))
        assert await handles[0].get_items() == []


FAULTS: list[list[Fault]] = [
    ["lost after"],
    ["lost before"],
    ["lost before", "lost before"],
    ["lost after", "lost before"],
]


@pytest.mark.parametrize("faults", FAULTS, ids=lambda faults: ", ".join(faults))
async def test_a_lost_answer_is_retried(faults: list[Fault]) -> None:
    """The change is applied once, whether or not the first try was applied."""
    async with MemoryCheckpointer[Any]() as inner:
        cp = RangeSpy(inner)
        session = Session("s", cp)

        for work in ("add", "pop", "clear"):
            cp.faults.extend(faults)

            if work == "add":
                await session.add_items(numbered(1, 2, 3))
            elif work == "pop":
                assert await session.pop_item() == numbered(3)[0]
            else:
                await session.clear_session()

            wanted = {"add": numbered(1, 2, 3), "pop": numbered(1, 2), "clear": []}
            assert await session.get_items() == wanted[work]
            assert await Session("s", inner).get_items() == wanted[work]


async def test_two_pops_with_lost_answers_get_different_items() -> None:
    """Their records differ, so each finds out which one was stored."""
    async with MemoryCheckpointer[Any]() as inner:
        await Session("s", inner).add_items(numbered(1, 2, 3))
        slow, fast = RangeSpy(inner), RangeSpy(inner)
        slow.gate.clear()
        slow.faults.append("lost before")
        pop = asyncio.create_task(Session("s", slow).pop_item())
        await slow.waiting.wait()
        assert await Session("s", fast).pop_item() == numbered(3)[0]
        slow.gate.set()
        assert await pop == numbered(2)[0]
        assert await Session("s", inner).get_items() == numbered(1)


async def test_the_later_of_two_pops_of_the_last_item_gets_none() -> None:
    """It does not return the item that it had read before."""
    async with MemoryCheckpointer[Any]() as inner:
        await Session("s", inner).add_items(numbered(1))
        slow = RangeSpy(inner)
        slow.gate.clear()
        pop = asyncio.create_task(Session("s", slow).pop_item())
        await slow.waiting.wait()
        assert await Session("s", inner).pop_item() == numbered(1)[0]
        slow.gate.set()
        assert await pop is None


async def test_a_store_without_answers_is_an_error() -> None:
    """The session works afterwards, and get_items shows the truth."""
    async with MemoryCheckpointer[Any]() as inner:
        cp = RangeSpy(inner)
        session = Session("s", cp)
        cp.faults.extend(["lost after", "lost before", "lost before"])
        cp.read_faults.extend(["refused", "refused"])

        with pytest.raises(BackendUnavailable) as caught:
            await session.add_items(numbered(1))

        assert caught.value.maybe_applied
        cp.faults.clear()
        cp.read_faults.clear()
        assert await session.get_items() == numbered(1)
        await session.add_items(numbered(2))
        assert await session.get_items() == numbered(1, 2)
        cp.faults.append("refused")

        with pytest.raises(BackendUnavailable) as caught:
            await session.clear_session()

        assert not caught.value.maybe_applied
        assert await session.get_items() == numbered(1, 2)


async def test_a_cancelled_mutation_is_completed() -> None:
    """The cancellation is raised after the mutation, as the SDK expects."""
    async with MemoryCheckpointer[Any]() as inner:
        cp = RangeSpy(inner)
        session = Session("s", cp)
        cp.gate.clear()
        add = asyncio.create_task(session.add_items(numbered(1, 2)))
        await cp.waiting.wait()

        for _ in range(3):
            add.cancel()
            await asyncio.sleep(0)

        assert not add.done()
        cp.gate.set()

        with pytest.raises(asyncio.CancelledError):
            await add

        assert await session.get_items() == numbered(1, 2)


async def test_a_cancelled_mutation_that_fails_reports_both() -> None:
    """The cancellation is raised, with the failure as its cause."""
    async with MemoryCheckpointer[Any]() as inner:
        cp = RangeSpy(inner)
        cp.gate.clear()
        cp.faults.append("refused")
        add = asyncio.create_task(Session("s", cp).add_items(numbered(1)))
        await cp.waiting.wait()
        add.cancel()
        await asyncio.sleep(0)
        cp.gate.set()

        with pytest.raises(asyncio.CancelledError) as caught:
            await add

        assert isinstance(caught.value.__cause__, BackendUnavailable)


async def test_a_cancelled_read_changes_nothing(
    memory: MemoryCheckpointer[Any],
) -> None:
    """The next read returns all items."""
    session = Session("s", memory)
    await session.add_items(numbered(1))
    read = asyncio.create_task(session.get_items())
    await asyncio.sleep(0)
    read.cancel()
    await asyncio.gather(read, return_exceptions=True)
    assert await session.get_items() == numbered(1)


async def test_a_deleted_thread_is_an_empty_session(
    memory: MemoryCheckpointer[Any],
) -> None:
    """An open handle drops its copy, also if another session has started."""
    session, writer = Session("s", memory), Session("s", memory)
    await session.add_items(numbered(1, 2))
    await memory.delete_thread(session.thread_id)
    assert await session.get_items() == []
    await session.add_items(numbered(3))
    await memory.delete_thread(session.thread_id)
    await writer.add_items(numbered(4))
    assert await session.get_items() == numbered(4)


async def test_an_item_of_a_deleted_session_never_comes_back(
    memory: MemoryCheckpointer[Any],
) -> None:
    """A new session of the same length took an append of the old one."""
    session, writer = Session("s", memory), Session("s", memory)
    await session.add_items(numbered(1))
    await session.add_items(numbered(2))
    await memory.delete_thread(session.thread_id)
    await writer.add_items(numbered(3, 4))
    await session.add_items(numbered(5))
    assert await session.get_items() == numbered(3, 4, 5)
    assert [await session.pop_item() for _ in range(4)] == [*numbered(5, 4, 3), None]
    assert await writer.get_items() == []


async def test_a_foreign_thread_is_an_error(
    memory: MemoryCheckpointer[Any],
) -> None:
    """Each read raises an error with the thread and the position."""
    session = Session("s", memory)
    await session.add_items(numbered(1))
    await memory.append(session.thread_id, [{"role": "user"}])

    for _ in range(2):
        with pytest.raises(CorruptThread, match="openai-agents:s.*message 1"):
            await session.get_items()


@pytest.mark.parametrize("item", [{"a": float("nan")}, {1: 2}, {"a": {1, 2}}, b""])
async def test_an_item_that_is_not_json_costs_no_neighbour(
    memory: MemoryCheckpointer[Any], item: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A text stands for what is missing, and it is logged."""
    session = Session("s", memory)
    await session.add_items([*numbered(1), item, *numbered(2)])
    items: list[Any] = [*await Session("s", memory).get_items()]
    first, replaced, last = items
    assert [first, last] == numbered(1, 2)
    assert isinstance(replaced, dict)
    assert replaced == {"1": 2} or "[cpkit: not stored: " in str(replaced)
    assert caplog.text.count("cpkit:openai-agents:s: a part of an entry is not") == 1


async def test_an_item_that_is_too_large_costs_no_neighbour() -> None:
    """The output's text is missing; its call id is there. All need several appends."""
    output: Any = {"type": "function_call_output", "call_id": "c", "output": "x" * 5000}

    async with MemoryCheckpointer[Any](max_payload=4000, max_append=6000) as cp:
        await Session("s", cp).add_items([*numbered(*range(60)), output, *numbered(7)])
        *before, replaced, after = await Session("s", cp).get_items()

    assert [*before, after] == numbered(*range(60), 7)
    assert replaced == {
        "type": "function_call_output",
        "call_id": "c",
        "output": "[cpkit: not stored: 5002 bytes are more than the store takes]",
    }


async def test_all_items_are_replaced_in_one_step(
    memory: MemoryCheckpointer[Any],
) -> None:
    """As the SDK's compaction asks for; a lost answer replaces nothing twice."""
    spy = Spy(memory)
    session, other = Session("s", spy), Session("s", memory)
    await session.add_items(numbered(1, 2, 3))
    await other.add_items(numbered(4))
    spy.calls.clear()
    spy.faults.append("lost after")
    assert await session._atomic_replace_items(numbered(5, 6))
    assert [call[:2] for call in spy.calls if call[0] == "append"] == [
        ("append", 3)
    ] * 2
    assert await session.get_items() == await other.get_items() == numbered(5, 6)
    assert await session._atomic_replace_items([])
    assert await session._atomic_replace_items([])
    assert await other.get_items() == []


async def test_the_newest_items_are_replaced_if_they_are_still_the_newest(
    memory: MemoryCheckpointer[Any],
) -> None:
    """Older ones stay, and expired ones in front go, as in the SDK's own sessions."""
    session, other = Session("s", memory), Session("s", memory)
    await session.add_items(numbered(1, 2, 3, 4))
    seen: Any = await session._get_compaction_snapshot(3)
    assert (seen.items, seen.complete) == (numbered(2, 3, 4), False)
    assert not await seen.replace_suffix(3, numbered(9))
    assert await seen.replace_suffix(1, numbered(9))
    assert await other.get_items() == numbered(1, 2, 9)
    assert not await seen.replace_suffix(0, numbered(8))
    seen = await session._get_compaction_snapshot(5)
    assert seen.complete
    await other.add_items(numbered(10))
    assert not await seen.replace_suffix(0, numbered(8))

    def is_expired(item: Any) -> bool:
        return item["content"] in ("1", "9")

    seen = await session._get_compaction_snapshot(1, prune_prefix=is_expired)
    assert await seen.replace_suffix(0, numbered(11))
    assert await other.get_items() == numbered(2, 9, 11) == await session.get_items()


async def test_the_sdks_compaction_replaces_items_in_one_step(
    memory: MemoryCheckpointer[Any],
) -> None:
    """It uses the private methods: a process that dies leaves the old items or new."""

    class Responses:
        async def compact(self, **_: Any) -> Any:
            summary = {"type": "compaction", "id": "c", "encrypted_content": "short"}
            return SimpleNamespace(output=[summary], usage=None)

    spy = Spy(memory)
    session = Session("s", spy)
    await session.add_items(numbered(*range(7)))
    spy.calls.clear()
    client: Any = SimpleNamespace(responses=Responses())
    compaction = OpenAIResponsesCompactionSession("s", session, client=client)
    await compaction.run_compaction({"force": True, "compaction_mode": "input"})
    assert [call[1] for call in spy.calls if call[0] == "append"] == [2]
    (left,) = await Session("s", memory).get_items()
    assert left.get("type") == "compaction"


async def test_a_session_that_changes_items_is_not_passed_by(
    memory: MemoryCheckpointer[Any],
) -> None:
    """A subclass may encrypt them: the SDK clears and adds then."""

    class Upper(Session):
        async def add_items(self, items: Any) -> None:
            changed: Any = [{**one, "content": "X"} for one in items]
            await super().add_items(changed)

    session = Upper("s", memory)
    await session.add_items(numbered(1))
    assert await session._get_compaction_snapshot(3) is None
    assert not await session._atomic_replace_items(numbered(2))
    assert await session.get_items() == [{"role": "user", "content": "X"}]


def test_each_session_has_its_own_thread() -> None:
    """Its id has a prefix."""
    odd = ["a", "A", "cpkit:openai-agents:a", "../a", "%", "é", "e\u0301", "x" * 400]
    assert len({session_thread(one) for one in odd}) == len(odd)
    assert all(session_thread(one).endswith(one) for one in odd)


@pytest.mark.parametrize("session_id", ["", "a\0", "x" * 500, 7])
async def test_an_invalid_session_id_is_refused(
    memory: MemoryCheckpointer[Any], session_id: Any
) -> None:
    """The constructor raises, and names the id."""
    with pytest.raises(InvalidId, match="session_id"):
        Session(session_id, memory)


async def test_after_close_everything_raises() -> None:
    """Empty writes raise too."""
    async with MemoryCheckpointer[Any]() as cp:
        session = Session("s", cp)

    for work in (
        session.get_items(),
        session.add_items([]),
        session.add_items(numbered(1)),
        session.pop_item(),
        session.clear_session(),
    ):
        with pytest.raises(Closed):
            await work


def test_public_names_exist() -> None:
    """__all__ lists only names of the module."""
    assert all(hasattr(openai_agents, name) for name in openai_agents.__all__)
