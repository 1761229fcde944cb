"""Close the tool calls without a result in the state of a graph."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import chain, combinations
from typing import Any

from langchain_core.messages import AIMessage, AnyMessage, RemoveMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from cpkit.effects.effect import KeyKind, effect_key
from cpkit.effects.records import effect_of
from cpkit.effects.requests import waiting_tools
from cpkit.heal import Closed, HealReport, Left, result_text
from cpkit.heal.closing import AMBIGUOUS, INTERRUPTED, has_result
from cpkit.integrations.langgraph.names import FENCE
from cpkit.integrations.langgraph.stored import Fence
from cpkit.protocol import Checkpointer, KeepsReceipts
from cpkit.records import CallRecord, JsonValue

__all__ = ["heal"]

# Few tools name an effect by more of its arguments.
_MOST_KEY_FIELDS = 3


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

    Effects with ``scope="global"`` are not seen: such a call counts as interrupted.

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
    reasons_to_wait = await waiting_tools(cp, {calls_thread or thread_id})
    closed: list[Closed] = []
    left: list[Left] = []
    healed: list[AnyMessage] = []
    place = 0
    tools: defaultdict[str, list[str]] = defaultdict(list)
    open_calls = _open_calls(messages)
    same = Counter(
        (str(one["id"]), one["name"]) for calls in open_calls.values() for one in calls
    )

    for message in messages:
        for call in message.tool_calls if isinstance(message, AIMessage) else []:
            tools[str(call["id"])].append(call["name"])

    while place < len(messages):
        calls = open_calls.get(place, [])
        end = place + 1

        while end < len(messages) and isinstance(messages[end], ToolMessage):
            end += 1

        healed += messages[place:end]
        place = end

        for call in calls:
            call_id, name = str(call["id"]), call["name"]

            if end == len(messages) and state.next:
                waiting = ", ".join(state.next)
                reason = f"the graph waits to run {waiting}: resume it"
                left.append(Left(call_id, name, reason))
                continue

            others = list(tools[call_id])
            others.remove(name)
            found = result_text(call_id, records, name, others)

            if isinstance(found, tuple):
                own = [one for one in records if _is_of_arguments(one, call)]
                found = result_text(call_id, own, name)

            if isinstance(found, Left):
                left.append(found)
                continue

            if found is None and name in reasons_to_wait:
                left.append(Left(call_id, name, reasons_to_wait[name]))
                continue

            if same[call_id, name] > 1 and has_result(call_id, name, records):
                left.append(Left(call_id, name, AMBIGUOUS))
                continue

            text, is_error = found or (INTERRUPTED, True)
            status: Any = "error" if is_error else "success"
            healed.append(
                ToolMessage(text, tool_call_id=call_id, name=name, status=status)
            )
            source: Any = "interrupted" if found is None else "recorded"
            closed.append(Closed(call_id, name, source))

    if closed:
        new: list[Any] = healed[len(messages) :]

        if healed[: len(messages)] != messages:
            new = [RemoveMessage(id=REMOVE_ALL_MESSAGES), *healed]

        await graph.aupdate_state(fenced, {channel: new}, as_node=as_node)

    return HealReport(thread_id, tuple(closed), tuple(left))


def _is_of_arguments(record: CallRecord, call: Any) -> bool:
    """Return whether the effect has the call's arguments, and its key is made of them.

    The key is made of all arguments, or of those that ``key_fields`` names. Then the
    ledger would return this result if the call ran now. The effect may have more
    arguments: the tool has filled in defaults.
    """
    effect = effect_of(record)

    if effect is None:
        return False

    args = dict(effect.args)

    if args | call["args"] != args:
        return False

    def key(kind: KeyKind, values: dict[str, JsonValue]) -> str:
        return effect_key("thread", effect.thread_id, effect.tool, kind, values)

    counts = range(1, _MOST_KEY_FIELDS + 1)
    fields = chain.from_iterable(combinations(args, count) for count in counts)
    return effect.key == key("arguments", args) or any(
        effect.key == key("fields", {name: args[name] for name in names})
        for names in fields
    )


def _open_calls(messages: list[AnyMessage]) -> dict[int, list[Any]]:
    """Return the tool calls that no later message answers, by position."""
    answered: set[str] = set()
    found: dict[int, list[Any]] = {}

    for place, message in reversed(list(enumerate(messages))):
        if isinstance(message, ToolMessage):
            answered.add(message.tool_call_id)
        elif isinstance(message, AIMessage):
            found[place] = [
                one for one in message.tool_calls if str(one["id"]) not in answered
            ]

    return found
