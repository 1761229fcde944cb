"""Close the tool calls without a result in the state of a graph."""

from __future__ import annotations

from collections.abc import Mapping
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
from cpkit.heal.closing import AMBIGUOUS, INTERRUPTED, has_result, is_of_arguments
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
    ``calls_thread``, by default the id of the graph's thread; without a record the
    result says that the call was interrupted. A model may repeat an id, and the earlier
    call may be removed from the messages. So a result is used only if the ledger would
    return it for the arguments of this call. Each result stands behind its call, also
    if other messages follow: then the list of messages is replaced. ``as_node`` is that
    of LangGraph's ``update_state``. A call is left if the graph still waits to run it,
    and for the reasons that `cpkit.heal.heal` names.

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
    open_calls = _open_calls(messages)
    results: list[tuple[int, ToolMessage]] = []
    closed: list[Closed] = []
    left: list[Left] = []

    for end, call in open_calls:
        call_id, name = str(call["id"]), call["name"]
        found = _recorded(messages, open_calls, records, waiting, call)

        if end == len(messages) and state.next:
            reason = f"the graph waits to run {', '.join(state.next)}: resume it"
            left.append(Left(call_id, name, reason))
        elif isinstance(found, Left):
            left.append(found)
        else:
            results.append((end, _message(call, *(found or (INTERRUPTED, True)))))
            closed.append(Closed(call_id, name, "recorded" if found else "interrupted"))

    if results:
        update = {channel: _update(messages, results)}
        await graph.aupdate_state(fenced, update, as_node=as_node)

    return HealReport(thread_id, tuple(closed), tuple(left))


def _message(call: ToolCall, text: str, is_error: bool) -> ToolMessage:
    return ToolMessage(
        text,
        tool_call_id=str(call["id"]),
        name=call["name"],
        status="error" if is_error else "success",
    )


def _update(
    messages: list[AnyMessage], results: list[tuple[int, ToolMessage]]
) -> list[Any]:
    """Return the results alone, or all messages if some stand between them."""
    if all(end == len(messages) for end, _ in results):
        return [result for _, result in results]

    update: list[Any] = [RemoveMessage(id=REMOVE_ALL_MESSAGES), *messages]

    for end, result in reversed(results):
        update.insert(1 + end, result)

    return update


def _recorded(
    messages: list[AnyMessage],
    open_calls: list[tuple[int, ToolCall]],
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

    if found is None and name in waiting:
        return Left(call_id, name, waiting[name])

    same = [(str(one["id"]), one["name"]) for _, one in open_calls]

    if isinstance(found, Left) or same.count((call_id, name)) == 1:
        return found

    if has_result(call_id, name, records):
        return Left(call_id, name, AMBIGUOUS)

    return found


def _open_calls(messages: list[AnyMessage]) -> list[tuple[int, ToolCall]]:
    """Return the tool calls that no later message answers, oldest first.

    Each stands with the position behind its message and the results there.
    """
    answered: set[str] = set()
    found: list[tuple[int, ToolCall]] = []
    end = len(messages)

    for place, message in reversed(list(enumerate(messages))):
        if isinstance(message, ToolMessage):
            answered.add(message.tool_call_id)
            continue

        if isinstance(message, AIMessage):
            found += [
                (end, call)
                for call in reversed(message.tool_calls)
                if str(call["id"]) not in answered
            ]

        end = place

    return found[::-1]
