"""Close the tool calls without a result in the state of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    RemoveMessage,
    ToolCall,
    ToolMessage,
)
from langchain_core.runnables import RunnableConfig
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from cpkit.effects.requests import waiting_tools
from cpkit.heal import Closed, HealReport, Left, result_text
from cpkit.heal.closing import (
    AMBIGUOUS,
    INTERRUPTED,
    has_result,
    is_of_arguments,
)
from cpkit.integrations.langgraph.composing import Fence
from cpkit.integrations.langgraph.names import FENCE
from cpkit.protocol import Checkpointer, KeepsReceipts
from cpkit.records import CallRecord

__all__ = ["heal"]


async def heal(
    graph: Any,
    config: RunnableConfig,
    cp: Checkpointer[Any],
    *,
    calls_thread: str | None = None,
    channel: str = "messages",
    as_node: str | None = None,
) -> HealReport:
    """Add a result for each tool call in the graph's messages that has none.

    Nothing is executed. The results are those that the ledger recorded in
    ``calls_thread``, the default is the id of the graph's thread; without a record the
    result says that the call was interrupted. A model may repeat an id, and the earlier
    call may be removed from the messages. So a result is used only if the ledger would
    return it for the arguments of this call. Each result stands behind its call, also
    if other messages follow: then the list of messages is replaced. ``as_node`` is that
    of LangGraph's ``update_state``. A call is left if its effect has an unknown
    outcome, if its tool has an approval request in the thread that is undecided, or
    approved and not used, if the graph still waits to run it, or if another open call
    has its id and tool and a result is on record, which may be of either.

    Raises ``VersionConflict`` if another process writes to the thread meanwhile, and
    changes nothing then. Only a graph with a `CheckpointSaver` has this check.
    """
    thread_id = str(config["configurable"]["thread_id"])

    if not isinstance(cp, KeepsReceipts):
        raise TypeError(f"{cp!r} cannot list the calls of a thread")

    # The saver refuses the update if the thread has grown since this read.
    fenced: RunnableConfig = {**config}
    fenced["configurable"] = {**config["configurable"], FENCE: Fence()}
    state = await graph.aget_state(fenced)
    messages: list[AnyMessage] = state.values.get(channel, [])
    records = await cp.list_calls(calls_thread or thread_id)
    waiting = await waiting_tools(cp, {calls_thread or thread_id})
    recorded = partial(_recorded, messages, records, waiting)
    healed, closed, left = _healed(messages, state.next, recorded)

    if closed:
        new: list[Any] = healed[len(messages) :]

        if healed[: len(messages)] != messages:
            new = [RemoveMessage(id=REMOVE_ALL_MESSAGES), *healed]

        await graph.aupdate_state(fenced, {channel: new}, as_node=as_node)

    return HealReport(thread_id, tuple(closed), tuple(left))


def _healed(
    messages: list[AnyMessage],
    waiting: Sequence[str],
    decide: Callable[[ToolCall], tuple[str, bool] | Left | None],
) -> tuple[list[AnyMessage], list[Closed], list[Left]]:
    """Return the messages with results behind their calls, and what was decided.

    ``waiting`` has the nodes that the graph waits to run. ``decide`` returns the
    recorded result of a call.
    """
    healed: list[AnyMessage] = []
    closed: list[Closed] = []
    left: list[Left] = []
    place = 0

    for end, calls in _open_calls(messages):
        healed += messages[place:end]
        place = end

        for call in calls:
            call_id, name = str(call["id"]), call["name"]
            found = decide(call)

            if end == len(messages) and waiting:
                reason = f"the graph waits to run {', '.join(waiting)}: resume it"
                left.append(Left(call_id, name, reason))
            elif isinstance(found, Left):
                left.append(found)
            else:
                text, is_error = found or (INTERRUPTED, True)
                status: Any = "error" if is_error else "success"
                healed.append(
                    ToolMessage(text, tool_call_id=call_id, name=name, status=status)
                )
                source: Any = "recorded" if found else "interrupted"
                closed.append(Closed(call_id, name, source))

    return healed + messages[place:], closed, left


def _recorded(
    messages: list[AnyMessage],
    records: list[CallRecord],
    waiting: Mapping[str, str],
    call: ToolCall,
) -> tuple[str, bool] | Left | None:
    """Return the recorded result of an open call, or why the call is left."""
    call_id, name = str(call["id"]), call["name"]
    others = [
        one["name"]
        for message in messages
        if isinstance(message, AIMessage)
        for one in message.tool_calls
        if str(one["id"]) == call_id
    ]
    others.remove(name)
    found = result_text(call_id, records, name, others)

    if isinstance(found, tuple):
        own = [one for one in records if is_of_arguments(one, call["args"])]
        found = result_text(call_id, own, name)

    if isinstance(found, Left):
        return found

    if found is None and name in waiting:
        return Left(call_id, name, waiting[name])

    same = [
        one
        for _, calls in _open_calls(messages)
        for one in calls
        if (str(one["id"]), one["name"]) == (call_id, name)
    ]

    if len(same) > 1 and has_result(call_id, name, records):
        return Left(call_id, name, AMBIGUOUS)

    return found


def _open_calls(messages: list[AnyMessage]) -> list[tuple[int, list[ToolCall]]]:
    """Return the tool calls that no later message answers, oldest first.

    Each list stands with the position behind the message's calls and their results.
    """
    answered: set[str] = set()
    found: list[tuple[int, list[ToolCall]]] = []
    end = len(messages)

    for place, message in reversed(list(enumerate(messages))):
        if isinstance(message, ToolMessage):
            answered.add(message.tool_call_id)
            continue

        if isinstance(message, AIMessage):
            open_calls = [
                one for one in message.tool_calls if str(one["id"]) not in answered
            ]
            found.append((end, open_calls))

        end = place

    return found[::-1]
