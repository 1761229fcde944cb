"""Find the calls without a result, and append what the ledger knows of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cpkit.effects.records import effect_of
from cpkit.effects.requests import waiting_tools
from cpkit.fenced import append_once
from cpkit.heal.forms import (
    OpenCall,
    Result,
    answers_in,
    calls_in,
    closing_messages,
    is_answer,
    is_note,
    long_running,
    response_id,
)
from cpkit.protocol import Checkpointer, KeepsReceipts
from cpkit.records import CallRecord

__all__ = ["Closed", "HealReport", "Left", "heal", "result_text"]

INTERRUPTED = "interrupted: the process ended before this call had a result"

AMBIGUOUS = "another open call has the same id, and the result may be of either"

# Forms whose results may stand anywhere behind their calls.
_ANYWHERE = ("agents", "codex")

_AGENTS = "cpkit:openai-agents:"
"""Prefix of the OpenAI Agents SDK's thread ids; the ledger's threads do not have it."""


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
    """What `heal` did in a thread. It is true if every call has a result now."""

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
    with its ``tool_call_id`` and the name of its tool. Any other call gets a result
    that says that it was interrupted. A call is left open

    - if its effect is issued and its outcome unknown: decide that first, with
      `EffectLedger.recover`;
    - if its tool has an approval request in the thread that is undecided, or approved
      and not used: the next run of the thread gives the result;
    - if it is long-running: its answer comes later;
    - if other messages follow it: a result must directly follow its call;
    - if another open call of its tool has the same id and a result is on record: the
      result may be of either.

    ``cp`` is opened without ``message_type=``, even if the thread's messages are typed.
    The ledger's calls are in ``calls_thread``; the default is the thread itself. Call
    this while the thread does not run, for instance as ``heal=`` of
    `EffectLedger.recover`, which passes ``report``; it is ignored. A second call
    changes nothing.

    Raises ``VersionConflict`` if another process appends meanwhile, and ``TypeError``
    or ``ValueError`` for messages that it cannot read.
    """
    data = await cp.load(thread_id)
    messages: list[Any] = [] if data is None else data.messages
    _check(thread_id, messages)
    results, left = await _results(cp, thread_id, calls_thread, messages)

    if results:
        appended: list[Any] = []
        extra: dict[str, Any] = {}

        for form in dict.fromkeys(one.call.form for one in results):
            same = [one for one in results if one.call.form == form]
            closing, change = closing_messages(form, same, messages)
            appended += closing
            extra |= change

        await append_once(
            cp, thread_id, appended, expected_version=len(messages), extra=extra or None
        )

    closed = (
        Closed(
            one.call.call_id,
            one.call.tool_name,
            "recorded" if one.is_recorded else "interrupted",
        )
        for one in results
    )
    return HealReport(thread_id, tuple(closed), tuple(left))


def result_text(
    call_id: str,
    records: Iterable[CallRecord],
    tool_name: str = "",
    others: Sequence[str] = (),
) -> tuple[str, bool] | Left | None:
    """Return the text of a call's recorded result, and whether it is an error.

    ``None`` if no effect of the call is on record, or only failed ones. `Left` if the
    outcome of its effect is unknown.

    A result counts only if its effect has the name of the tool: a call may have run
    other effects before the process died. Without ``tool_name`` any result counts.

    ``others`` has the tools of the other calls with the same id: models repeat ids.
    Then a result counts only if there is exactly one for each call of this tool. If
    there are fewer, the last result may be that of another call. If there are more, it
    may be a call's second result.
    """
    found: list[tuple[str, bool]] = []

    for record in records:
        effect = effect_of(record)

        if effect is None or effect.tool_call_id != call_id or record.erased:
            continue

        if record.status == "issued":
            reason = "its effect is issued and the outcome unknown; recover the thread"
            return Left(call_id, record.call.tool_name, reason)

        if record.status == "completed" and tool_name in ("", record.call.tool_name):
            found.append(_text_of(record))

    if others and len(found) != others.count(tool_name) + 1:
        return None

    return found[-1] if found else None


async def _results(
    cp: Checkpointer[Any], thread_id: str, calls_thread: str | None, messages: list[Any]
) -> tuple[list[Result], list[Left]]:
    live = _live(messages)
    open_calls = _open_calls(live)
    results: list[Result] = []
    left: list[Left] = []

    if not open_calls:
        return results, left

    if calls_thread is None:
        threads = {thread_id, thread_id.removeprefix(_AGENTS) or thread_id}
    else:
        threads = {calls_thread}

    records = await _records(cp, threads)
    waiting = await waiting_tools(cp, threads)
    turn = _last_turn(messages)
    # Results of calls that were popped or cleared are on record, so these calls count.
    calls = [
        one for at, message in enumerate(messages) for one in calls_in(at, message)
    ]

    for call in open_calls:
        others = [one.tool_name for one in calls if one.call_id == call.call_id]
        others.remove(call.tool_name)
        found = result_text(call.call_id, records, call.tool_name, others)

        if isinstance(found, Left):
            left.append(found)
        elif found is None and call.tool_name in waiting:
            left.append(Left(call.call_id, call.tool_name, waiting[call.tool_name]))
        elif found is None and call.call_id in long_running(messages[call.position]):
            reason = "it is long-running, and its answer comes later"
            left.append(Left(call.call_id, call.tool_name, reason))
        elif call.position < turn and call.form not in _ANYWHERE:
            reason = "other messages follow it"
            left.append(Left(call.call_id, call.tool_name, reason))
        elif _is_one_of_several(call, open_calls, turn) and has_result(
            call.call_id, call.tool_name, records
        ):
            left.append(Left(call.call_id, call.tool_name, AMBIGUOUS))
        else:
            text, is_error = found or (INTERRUPTED, True)
            results.append(Result(call, text, is_error, is_recorded=found is not None))

    return results, left


def _is_one_of_several(call: OpenCall, open_calls: list[OpenCall], turn: int) -> bool:
    """Return whether other open calls of this tool and id could get a result too."""
    mine = call.call_id, call.tool_name
    same = [
        one
        for one in open_calls
        if (one.call_id, one.tool_name) == mine
        and (one.position >= turn or one.form in _ANYWHERE)
    ]
    return len(same) > 1


def has_result(call_id: str, tool_name: str, records: Iterable[CallRecord]) -> bool:
    """Return whether a result of a call of this tool and id is on record."""
    of_tool = [one for one in records if one.call.tool_name == tool_name]
    return result_text(call_id, of_tool) is not None


async def _records(cp: Checkpointer[Any], threads: Collection[str]) -> list[CallRecord]:
    """Return the calls on record in the threads of the ledger."""
    if not isinstance(cp, KeepsReceipts):
        raise TypeError(f"{cp!r} cannot list the calls of a thread")

    return [record for one in sorted(threads) for record in await cp.list_calls(one)]


def _live(messages: list[Any]) -> dict[int, Any]:
    """Return the messages by position, without those that were popped or cleared.

    Only sessions of the OpenAI Agents SDK, and those of Codex after a compaction, have
    these.
    """
    live: dict[int, Any] = {}

    for position, message in enumerate(messages):
        match message:
            case {"clear": True} | {"type": "compacted"}:
                live.clear()
            case {"pop": int(popped)}:
                live.pop(popped, None)
            case _:
                live[position] = message

    return live


def _open_calls(messages: dict[int, Any]) -> list[OpenCall]:
    """Return the calls without a result, oldest first.

    A model may repeat an id. Then a result belongs to the newest open call.
    """
    unanswered: list[OpenCall] = []

    for position, message in messages.items():
        for call_id in answers_in(message):
            for index in reversed(range(len(unanswered))):
                if unanswered[index].call_id == call_id:
                    del unanswered[index]
                    break

        unanswered += calls_in(position, message)

    return unanswered


def _last_turn(messages: list[Any]) -> int:
    """Return where the last turn begins: the calls whose results may be appended."""
    position = len(messages) - 1

    while position > 0 and _is_between(messages[position]):
        position -= 1

    response = response_id(messages[position])

    while position > 0 and response is not None:
        before = messages[position - 1]

        if response_id(before) != response and not _is_between(before):
            break

        position -= 1

    return position


def _is_between(message: Any) -> bool:
    return is_answer(message) or is_note(message)


def _check(thread_id: str, messages: list[Any]) -> None:
    first = messages[0] if messages else {}

    if not isinstance(first, dict):
        raise TypeError(
            f"heal reads JSON objects, not {type(first).__name__}: open the store "
            "without message_type="
        )

    if first.get("type") == "session":
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
