"""A graph's messages with tool calls that have no result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    HumanMessage,
    RemoveMessage,
    ToolMessage,
)
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from cpkit import VersionConflict, open_checkpointer
from cpkit.effects import Effect, EffectLedger, EffectTimeout
from cpkit.integrations.langgraph import (
    CheckpointSaver,
    NotOwner,
    heal,
    store_thread_id,
)

CONFIG: Any = {"configurable": {"thread_id": "t"}}


def ask() -> list[AnyMessage]:
    calls: Any = [{"name": "pay", "args": {}, "id": one} for one in ("a", "b", "c")]
    return [
        HumanMessage("pay", id="1"),
        AIMessage("", id="2", tool_calls=calls),
        ToolMessage("done", tool_call_id="b", id="3"),
    ]


def builder() -> StateGraph[Any, Any, Any, Any]:
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": []})
    graph.add_edge(START, "agent")
    graph.add_edge("agent", END)
    return graph


async def pay(effect: Effect) -> str:
    return "paid"


@pytest.mark.parametrize("goes_on", [False, True])
async def test_results_stand_behind_their_calls(url: str, goes_on: bool) -> None:
    """Also if the talk went on: every provider takes the history then."""
    later: list[AnyMessage] = [HumanMessage("hello?", id="4")] if goes_on else []

    async with open_checkpointer(url) as cp:
        graph = builder().compile(checkpointer=CheckpointSaver(cp))
        await graph.ainvoke({"messages": [*ask(), *later]}, CONFIG)
        await EffectLedger(cp).run("t", "pay", {}, pay, tool_call_id="a")
        report = await heal(graph, CONFIG, cp)
        assert [(one.call_id, one.source) for one in report.closed] == [
            ("a", "recorded"),
            ("c", "interrupted"),
        ]
        assert not (await heal(graph, CONFIG, cp)).closed

    async with open_checkpointer(url) as cp:
        graph = builder().compile(checkpointer=CheckpointSaver(cp))
        messages = (await graph.aget_state(CONFIG)).values["messages"]

    assert [one.id for one in messages[:3]] == ["1", "2", "3"]
    assert [(one.tool_call_id, one.content[:11]) for one in messages[3:5]] == [
        ("a", "paid"),
        ("c", "interrupted"),
    ]
    assert messages[5:] == later


async def test_a_call_that_waits_for_a_person_is_left() -> None:
    """The graph's run that uses the approval gives the result."""
    async with open_checkpointer("memory://") as cp:
        graph = builder().compile(checkpointer=CheckpointSaver(cp))
        await graph.ainvoke({"messages": ask()}, CONFIG)
        ledger = EffectLedger(cp, requires_approval=lambda _: True, approval_timeout=0)

        with pytest.raises(EffectTimeout):
            await ledger.run("t", "pay", {}, pay, tool_call_id="a")

        report = await heal(graph, CONFIG, cp)
        assert [one.call_id for one in report.left] == ["a", "c"]
        assert not report.closed


async def test_a_result_is_not_given_to_two_calls() -> None:
    """Two open calls have one id, and one of them has a result."""
    call: Any = {"name": "pay", "args": {}, "id": "a"}
    asked = AIMessage("", id="1", tool_calls=[call, call])

    async with open_checkpointer("memory://") as cp:
        graph = builder().compile(checkpointer=CheckpointSaver(cp))
        await graph.ainvoke({"messages": [asked]}, CONFIG)
        assert len((await heal(graph, CONFIG, cp)).closed) == 2

    async with open_checkpointer("memory://") as cp:
        graph = builder().compile(checkpointer=CheckpointSaver(cp))
        await graph.ainvoke({"messages": [asked]}, CONFIG)
        await EffectLedger(cp).run("t", "pay", {}, pay, tool_call_id="a")
        report = await heal(graph, CONFIG, cp)
        assert report.closed == ()
        assert [one.reason for one in report.left] == [
            "another open call has the same id, and the result may be of either"
        ] * 2


@pytest.mark.parametrize(
    ("removed", "source"),
    [(5, "interrupted"), (None, "recorded")],
)
@pytest.mark.parametrize("options", [{}, {"key_fields": ["amount"]}])
async def test_the_result_of_a_removed_call_is_not_that_of_a_later_call(
    options: Any, removed: int | None, source: str
) -> None:
    """The messages were summarized, and the model repeats the id of a removed call."""

    def asked(amount: int) -> AIMessage:
        call: Any = {"name": "pay", "args": {"amount": amount, "to": "x"}, "id": "a"}
        return AIMessage("", id=f"ai{amount}", tool_calls=[call])

    async with open_checkpointer("memory://") as cp:
        graph = builder().compile(checkpointer=CheckpointSaver(cp))
        args: Any = {"amount": removed or 9, "to": "x"}
        await EffectLedger(cp).run("t", "pay", args, pay, tool_call_id="a", **options)

        if removed:
            done = ToolMessage("paid", tool_call_id="a")
            await graph.ainvoke({"messages": [asked(removed), done]}, CONFIG)

        cleared = RemoveMessage(id=REMOVE_ALL_MESSAGES)
        summary = HumanMessage("summary")
        await graph.ainvoke({"messages": [cleared, summary, asked(9)]}, CONFIG)
        report = await heal(graph, CONFIG, cp)
        assert [one.source for one in report.closed] == [source]


@pytest.mark.parametrize(
    ("amount", "source"), [(9, "recorded"), (5, "interrupted"), (9.0, "recorded")]
)
async def test_a_result_counts_if_the_tool_filled_in_defaults(
    amount: float, source: str
) -> None:
    """The effect has arguments that the model left out."""
    call: Any = {"name": "pay", "args": {"amount": amount}, "id": "a"}

    async with open_checkpointer("memory://") as cp:
        graph = builder().compile(checkpointer=CheckpointSaver(cp))
        asked = AIMessage("", id="1", tool_calls=[call])
        await graph.ainvoke({"messages": [asked]}, CONFIG)
        args: Any = {"amount": 9, "currency": "EUR"}
        await EffectLedger(cp).run("t", "pay", args, pay, tool_call_id="a")
        report = await heal(graph, CONFIG, cp)
        assert [one.source for one in report.closed] == [source]


async def test_a_result_under_a_key_of_its_own_may_be_of_a_removed_call() -> None:
    """The arguments are equal, but the ledger would run the effect of this call."""
    call: Any = {"name": "pay", "args": {"amount": 5}, "id": "a"}
    asked = AIMessage("", id="1", tool_calls=[call])

    async with open_checkpointer("memory://") as cp:
        graph = builder().compile(checkpointer=CheckpointSaver(cp))
        await graph.ainvoke({"messages": [asked]}, CONFIG)
        await EffectLedger(cp).run(
            "t", "pay", call["args"], pay, tool_call_id="a", idempotency_key="1"
        )
        report = await heal(graph, CONFIG, cp)
        assert [one.source for one in report.closed] == ["interrupted"]


class Interrupted(CheckpointSaver):
    """Calls ``before`` with the name of each method that a graph calls."""

    before: Callable[[str], Awaitable[None]] | None = None

    async def _called(self, method: str) -> None:
        if self.before is not None:
            await self.before(method)

    async def aget_tuple(self, config: Any) -> Any:
        await self._called("aget_tuple")
        return await super().aget_tuple(config)

    async def aput_writes(self, config: Any, *args: Any, **options: Any) -> None:
        await self._called("aput_writes")
        await super().aput_writes(config, *args, **options)

    async def aput(self, config: Any, *args: Any, **options: Any) -> Any:
        await self._called("aput")
        return await super().aput(config, *args, **options)


@pytest.mark.parametrize("method", ["aget_tuple", "aput_writes", "aput"])
@pytest.mark.parametrize("goes_on", [False, True])
async def test_messages_of_another_process_are_kept(
    url: str, goes_on: bool, method: str
) -> None:
    """It continues the thread after the read. Then nothing is written."""
    later: list[AnyMessage] = [HumanMessage("hello?", id="4")] if goes_on else []
    steps: list[str] = []

    async with open_checkpointer(url) as cp, open_checkpointer(url) as other_cp:
        saver = Interrupted(cp)
        graph = builder().compile(checkpointer=saver)
        other = builder().compile(checkpointer=CheckpointSaver(other_cp))
        await graph.ainvoke({"messages": [*ask(), *later]}, CONFIG)
        stored: list[Any] = []

        async def continue_once(called: str) -> None:
            steps.append(called)

            # The first read is that of the state.
            if not stored and called == method and len(steps) > 1:
                new = HumanMessage("wait", id="5")
                await other.ainvoke({"messages": [new]}, CONFIG)
                stored.append(await other_cp.load(store_thread_id("t")))

        saver.before = continue_once

        with pytest.raises(VersionConflict):
            await heal(graph, CONFIG, cp)

        assert [await other_cp.load(store_thread_id("t"))] == stored
        messages = (await other.aget_state(CONFIG)).values["messages"]
        assert messages[-1].id == "5"
        assert (await graph.aget_state(CONFIG)).values["messages"] == messages

        assert len((await heal(graph, CONFIG, cp)).closed) == 2
        messages = (await other.aget_state(CONFIG)).values["messages"]
        ends = ["4", "5"] if goes_on else ["5"]
        assert [one.id for one in messages if one.id in ("1", "4", "5")] == ["1", *ends]
        assert [one.id for one in messages[5:]] == ends


async def test_it_heals_as_the_owner_of_the_thread(url: str) -> None:
    """The run stays the owner. A stale run cannot heal."""
    async with open_checkpointer(url) as cp:
        saver = CheckpointSaver(cp)
        graph = builder().compile(checkpointer=saver)
        owned = await saver.aclaim(CONFIG)
        await graph.ainvoke({"messages": ask()}, owned)
        assert len((await heal(graph, owned, cp)).closed) == 2
        call: Any = {"name": "pay", "args": {}, "id": "d"}
        await graph.ainvoke({"messages": [AIMessage("", tool_calls=[call])]}, owned)
        await saver.aclaim(CONFIG)

        with pytest.raises(NotOwner):
            await heal(graph, owned, cp)

        assert len((await heal(graph, CONFIG, cp)).closed) == 1


async def test_a_long_conversation_is_healed_in_one_append(url: str) -> None:
    """Its messages are stored in parts, and another process reads them."""
    talk: list[AnyMessage] = [HumanMessage("long " * 500_000, id="4")]

    async with open_checkpointer(url) as cp:
        graph = builder().compile(checkpointer=CheckpointSaver(cp))
        await graph.ainvoke({"messages": [*ask(), *talk]}, CONFIG)

    for expected in (2, 0):
        async with open_checkpointer(url) as cp:
            graph = builder().compile(checkpointer=CheckpointSaver(cp))
            assert len((await heal(graph, CONFIG, cp)).closed) == expected
            messages = (await graph.aget_state(CONFIG)).values["messages"]
            assert [one.id for one in messages[:3]] == ["1", "2", "3"]
            assert messages[5:] == talk
