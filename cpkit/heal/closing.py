"""Find the calls without a result, and append what the ledger knows of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from cpkit.effects.records import effect_of
from cpkit.heal.forms import (
    OpenCall,
    Result,
    answers_in,
    calls_in,
    closing_messages,
)
from cpkit.protocol import Checkpointer, KeepsReceipts
from cpkit.records import CallRecord
from cpkit.sessions.fenced import append_once

__all__ = ["Closed", "HealReport", "Left", "heal", "result_text"]

INTERRUPTED = "interrupted: the process ended before this call had a result"

# Adapters' threads. The ledger's calls are in the thread without the prefix.
_PREFIXES = ("cpkit:openai-agents:",)


@dataclass(frozen=True, slots=True)
class Closed:
    """A call that has a result now, and where the result is from."""

    call_id: str
    tool_name: str
    source: Literal["recorded", "interrupted"]

    def __str__(self) -> str:
        return f"{self.tool_name} ({self.call_id}): {self.source}"


@dataclass(frozen=True, slots=True)
class Left:
    """A call that still has no result, and why."""

    call_id: str
    tool_name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.tool_name} ({self.call_id}): left, {self.reason}"


@dataclass(frozen=True, slots=True)
class HealReport:
    """What `heal` did in a thread; true if every call has a result now."""

    thread_id: str
    closed: tuple[Closed, ...]
    left: tuple[Left, ...]

    def __bool__(self) -> bool:
        return not self.left

    def __str__(self) -> str:
        if not self.closed and not self.left:
            return f"thread {self.thread_id!r}: every call has a result"

        lines = [f"thread {self.thread_id!r}:"]
        return "\n".join([*lines, *(f"  {one}" for one in [*self.closed, *self.left])])


async def heal(
    cp: Checkpointer[Any],
    thread_id: str,
    report: object = None,
    *,
    calls_thread: str | None = None,
) -> HealReport:
    """Append a result for each tool call of the thread that has none.

    Nothing is executed. A call gets the recorded result of the effect that a ledger ran
    with its ``tool_call_id``, and otherwise a result that says that it was interrupted.
    A call is left open if its effect is issued and its outcome unknown: decide that
    first, with `EffectLedger.recover`. It is left open as well if other messages follow
    it, because a result must stand directly behind its call.

    ``cp`` is opened without ``message_type=``, for typed messages too. The ledger's
    calls are in ``calls_thread``; the default is the thread itself. Call this while the
    thread does not run, for instance as ``heal=`` of `EffectLedger.recover`, whose
    ``report`` is not used. A second call changes nothing.

    Raises ``VersionConflict`` if another process appends meanwhile, and ``TypeError``
    or ``ValueError`` for messages that it cannot read.
    """
    data = await cp.load(thread_id)
    messages: list[Any] = [] if data is None else data.messages
    _check(thread_id, messages)
    results, left = await _results(cp, thread_id, calls_thread, messages)

    if results:
        form = results[0].call.form
        appended, extra = closing_messages(form, results, messages)
        await append_once(
            cp, thread_id, appended, expected_version=len(messages), extra=extra
        )

    closed = (
        Closed(
            one.call.call_id,
            one.call.tool_name,
            "interrupted" if one.text == INTERRUPTED else "recorded",
        )
        for one in results
    )
    return HealReport(thread_id, tuple(closed), tuple(left))


def result_text(
    call_id: str, records: Iterable[CallRecord]
) -> tuple[str, bool] | Left | None:
    """Return the text of a call's recorded result, and whether it is an error.

    ``None`` if no effect of the call is on record, or none that happened. `Left` if the
    outcome of its effect is unknown.
    """
    found: tuple[str, bool] | None = None

    for record in records:
        effect = effect_of(record)

        if effect is None or effect.tool_call_id != call_id or record.erased:
            continue

        if record.status == "issued":
            reason = "its effect is issued and the outcome unknown; recover the thread"
            return Left(call_id, record.call.tool_name, reason)

        if record.status == "completed":
            found = _text_of(record)

    return found


async def _results(
    cp: Checkpointer[Any], thread_id: str, calls_thread: str | None, messages: list[Any]
) -> tuple[list[Result], list[Left]]:
    open_calls = _open_calls(messages)
    results: list[Result] = []
    left: list[Left] = []

    if not open_calls:
        return results, left

    records = await _records(cp, thread_id, calls_thread)
    end = _end_of_answers(messages)

    for call in open_calls:
        found = result_text(call.call_id, records)

        if isinstance(found, Left):
            left.append(found)
        elif call.position < end and call.form != "agents":
            reason = "other messages follow it"
            left.append(Left(call.call_id, call.tool_name, reason))
        else:
            text, is_error = found or (INTERRUPTED, True)
            results.append(Result(call, text, is_error))

    return results, left


async def _records(
    cp: Checkpointer[Any], thread_id: str, calls_thread: str | None
) -> list[CallRecord]:
    """Return the calls on record in the thread of the ledger."""
    if not isinstance(cp, KeepsReceipts):
        raise TypeError(f"{cp!r} cannot list the calls of a thread")

    threads = {thread_id if calls_thread is None else calls_thread}

    if calls_thread is None:
        threads |= {
            thread_id.removeprefix(prefix)
            for prefix in _PREFIXES
            if len(thread_id) > len(prefix)
        }

    return [record for one in sorted(threads) for record in await cp.list_calls(one)]


def _open_calls(messages: list[Any]) -> list[OpenCall]:
    """Return the calls without a result, oldest first. A model may repeat an id."""
    unanswered: dict[str, OpenCall] = {}
    repeated: list[OpenCall] = []

    for position, message in enumerate(messages):
        for call_id in answers_in(message):
            unanswered.pop(call_id, None)

        for call in calls_in(position, message):
            if call.call_id in unanswered:
                repeated.append(unanswered[call.call_id])

            unanswered[call.call_id] = call

        match message:
            case {"clear": True}:
                unanswered.clear()
                repeated.clear()
            case {"pop": int(popped)}:
                unanswered = {
                    call_id: call
                    for call_id, call in unanswered.items()
                    if call.position != popped
                }

    return sorted([*repeated, *unanswered.values()], key=lambda call: call.position)


def _end_of_answers(messages: list[Any]) -> int:
    """Return the position of the last message that is not a result."""
    position = len(messages) - 1

    while position > 0 and next(answers_in(messages[position]), None) is not None:
        position -= 1

    return position


def _check(thread_id: str, messages: list[Any]) -> None:
    for message in messages[:1]:
        if not isinstance(message, dict):
            raise TypeError(
                f"heal reads JSON objects, not {type(message).__name__}: open the "
                "store without message_type="
            )

        if message.get("type") == "session":
            raise ValueError(
                f"thread {thread_id!r} is a session: use its close_missing_results()"
            )

    if thread_id.startswith(("cpkit:langgraph:", "cpkit:langgraph-of:")):
        raise ValueError(
            f"thread {thread_id!r} has LangGraph's checkpoints: use "
            "cpkit.integrations.langgraph.heal(graph, config, cp)"
        )


def _text_of(record: CallRecord) -> tuple[str, bool]:
    match record.result:
        case {"value": str(text), **rest} if not rest:
            return text, False
        case {"value": value, **rest} if not rest:
            return json.dumps(value, ensure_ascii=False), False
        case {"error": {"type": str(kind), "message": str(message)}}:
            return f"{kind}: {message}", True

    return json.dumps(record.result, ensure_ascii=False), False
