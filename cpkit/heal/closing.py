"""Find the calls without a result, and append what the ledger knows of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, Literal

from cpkit.effects.effect import KeyKind, effect_key
from cpkit.effects.records import asked_args, effect_of
from cpkit.effects.requests import waiting_tools
from cpkit.fenced import append_once
from cpkit.protocol import Checkpointer, KeepsReceipts
from cpkit.records import CallRecord, JsonValue
from cpkit.toolcalls import Call, OpenCall, Reading, open_calls, read_message
from cpkit.toolcalls.writing import Answer, can_answer, result_messages

__all__ = ["Closed", "HealReport", "Left", "heal", "is_of_arguments", "result_text"]

INTERRUPTED = "interrupted: the process ended before this call had a result"

AMBIGUOUS = "another open call has the same id, and the result may be of either"

IN_DOUBT = "its effect is issued and the outcome unknown; recover the thread"

UNCLEAR = (
    "a result of its tool is on record that belongs to no answered call; give the "
    "ledger the call's id (tool_call_id=)"
)

# Few tools name an effect by more of its arguments.
_MOST_KEY_FIELDS = 3

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
    with its ``tool_call_id`` and the name of its tool. If the ledger was not given the
    id, the effect of the same tool and arguments counts. Any other call gets a result
    that says that it was interrupted. A call is left open

    - if its effect is issued and its outcome unknown: decide that first, with
      `EffectLedger.recover`;
    - if its tool has an approval request in the thread that is undecided, or approved
      and not used: the next run of the thread gives the result;
    - if it is long-running: its answer comes later;
    - if other messages follow it: a result must directly follow its call;
    - if a result of its tool is on record of which it is not clear whether it is this
      call's: another open call has the same id, or the ledger was not given the id;
    - if its form is unknown, or that of a message after it.

    ``cp`` is opened without ``message_type=``, even if the thread's messages are typed.
    The ledger's calls are in ``calls_thread``; the default is the thread itself. Call
    this while the thread does not run, for instance as ``heal=`` of
    `EffectLedger.recover`, which passes ``report``; it is ignored. A second call
    changes nothing.

    Raises ``VersionConflict`` if another process appends meanwhile, and ``TypeError``
    or ``ValueError`` for messages that it cannot read.
    """
    data = await cp.load(thread_id)
    messages, version = ([], 0) if data is None else (data.messages, data.version)
    _check(thread_id, messages)
    history = _History(messages)
    left = list(history.unknown())
    answers: list[Answer] = []
    closed: list[Closed] = []

    if history.open_calls:
        if calls_thread is None:
            threads = {thread_id, thread_id.removeprefix(_AGENTS) or thread_id}
        else:
            threads = {calls_thread}

        records = await _records(cp, threads)
        waiting = await waiting_tools(cp, threads)

        for one in history.open_calls:
            call_id, name = one.call.call_id, one.call.tool_name
            found = history.recorded(one, records)

            if isinstance(found, Left):
                left.append(found)
            elif reason := history.why_left(one, found, records, waiting):
                left.append(Left(call_id, name, reason))
            else:
                answers.append(Answer(one, *(found or (INTERRUPTED, True))))
                source: Any = "recorded" if found else "interrupted"
                closed.append(Closed(call_id, name, source))

    if answers:
        appended, extra = result_messages(answers, messages)
        await append_once(
            cp, thread_id, appended, expected_version=version, extra=extra or None
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
            return Left(call_id, record.call.tool_name, IN_DOUBT)

        if record.status == "completed" and tool_name in ("", record.call.tool_name):
            found.append(_text_of(record))

    if others and len(found) != others.count(tool_name) + 1:
        return None

    return found[-1] if found else None


class _History:
    """The calls and results of a thread's messages."""

    def __init__(self, messages: list[Any]) -> None:
        self.messages = messages
        self.readings = [read_message(one) for one in messages]
        # Those that were popped or cleared have no open call. Their calls count,
        # because the results of these are still on record.
        live = [(at, self.readings[at]) for at in _live(messages)]
        self.open_calls: list[OpenCall] = open_calls(live)
        self.turn = _last_turn(messages, self.readings)

    def unknown(self) -> Iterator[Left]:
        """Yield what is of an unknown form at the end of the thread."""
        for at in range(self.turn, len(self.messages)):
            for name in self.readings[at].unknown:
                reason = "cpkit does not know this form of a tool call"
                yield Left(f"message {at}", name, reason)

    def recorded(
        self, one: OpenCall, records: Sequence[CallRecord]
    ) -> tuple[str, bool] | Left | None:
        """Return the result on record of an open call; see `result_text`."""
        call = one.call
        same = [it for it in self._calls() if it.call_id == call.call_id != ""]
        others = [it.tool_name for it in same if it is not call]
        found = result_text(call.call_id, records, call.tool_name, others)

        if found is not None:
            return found

        nameless = [it for it in records if _is_nameless(it, call)]

        if any(it.status == "issued" for it in nameless):
            return Left(call.call_id, call.tool_name, IN_DOUBT)

        done = [it for it in nameless if it.status == "completed"]

        for it in done:
            if is_of_arguments(it, call.args):
                return _text_of(it)

        if any(not self._is_of_an_answered_call(it) for it in done):
            return Left(call.call_id, call.tool_name, UNCLEAR)

        return None

    def why_left(
        self,
        one: OpenCall,
        found: tuple[str, bool] | None,
        records: Sequence[CallRecord],
        waiting: Mapping[str, str],
    ) -> str | None:
        """Return why an open call gets no result, or ``None``."""
        call = one.call

        if found is None and call.tool_name in waiting:
            return waiting[call.tool_name]

        if found is None and call.call_id in _long_running(self.messages[one.position]):
            return "it is long-running, and its answer comes later"

        if not self._may_follow(one):
            return "other messages follow it"

        for reading in self.readings[one.position :]:
            if reading.unknown:
                names = ", ".join(reading.unknown)
                return f"cpkit does not know the form of a message: {names}"

        if not can_answer(one):
            return f"cpkit writes no result of {call.kind} ({one.wrapper or call.form})"

        same = [
            it
            for it in self.open_calls
            if (it.call.call_id, it.call.tool_name) == (call.call_id, call.tool_name)
            and self._may_follow(it)
        ]

        if call.call_id and len(same) > 1:
            if has_result(call.call_id, call.tool_name, records):
                return AMBIGUOUS

        return None

    def _may_follow(self, one: OpenCall) -> bool:
        """Return whether a result may be appended: items may stand anywhere."""
        return one.position >= self.turn or one.call.form == "responses"

    def _calls(self) -> Iterator[Call]:
        return chain.from_iterable(it.calls for it in self.readings)

    def _is_of_an_answered_call(self, record: CallRecord) -> bool:
        args = asked_args(record)
        still_open = [one.call for one in self.open_calls]
        return any(
            call.tool_name == record.call.tool_name and _covers(args, call.args)
            for call in self._calls()
            if not any(call is one for one in still_open)
        )


def has_result(call_id: str, tool_name: str, records: Iterable[CallRecord]) -> bool:
    """Return whether a result of a call of this tool and id is on record."""
    of_tool = [one for one in records if one.call.tool_name == tool_name]
    return result_text(call_id, of_tool) is not None


def is_of_arguments(record: CallRecord, args: Any) -> bool:
    """Return whether the effect has a call's arguments, and its key is made of them.

    The key is made of all arguments, or of those that ``key_fields`` names. Then the
    ledger would return this result if the call ran now. The effect may have more
    arguments: the tool has filled in defaults.
    """
    effect = effect_of(record)

    asked = asked_args(record)

    if effect is None or not isinstance(asked, dict) or not _covers(asked, args):
        return False

    def key(kind: KeyKind, values: dict[str, JsonValue]) -> str:
        return effect_key(effect.thread_id, effect.tool, kind, values)

    counts = range(1, _MOST_KEY_FIELDS + 1)
    fields = chain.from_iterable(combinations(asked, count) for count in counts)
    return effect.key == key("arguments", asked) or any(
        effect.key == key("fields", {name: asked[name] for name in names})
        for names in fields
    )


def _covers(recorded: Any, args: Any) -> bool:
    """Return whether recorded arguments are these, or these and defaults."""
    are_objects = isinstance(recorded, dict) and isinstance(args, dict)
    return are_objects and recorded | args == recorded


def _is_nameless(record: CallRecord, call: Call) -> bool:
    """Return whether this is an effect of the call's tool, and no id says of which."""
    effect = effect_of(record)
    return (
        effect is not None
        and effect.tool == call.tool_name
        and (effect.tool_call_id is None or not call.call_id)
        and not record.erased
    )


async def _records(cp: Checkpointer[Any], threads: Collection[str]) -> list[CallRecord]:
    """Return the calls on record in the threads of the ledger."""
    if not isinstance(cp, KeepsReceipts):
        raise TypeError(f"{cp!r} cannot list the calls of a thread")

    return [record for one in sorted(threads) for record in await cp.list_calls(one)]


def _live(messages: list[Any]) -> list[int]:
    """Return the positions of the messages that were not popped or cleared.

    Only sessions of the OpenAI Agents SDK, and those of Codex after a compaction, have
    these.
    """
    live: dict[int, None] = {}

    for position, message in enumerate(messages):
        match message:
            case {"clear": True} | {"type": "compacted"}:
                live.clear()
            case {"pop": int(popped)}:
                live.pop(popped, None)
            case _:
                live[position] = None

    return list(live)


def _long_running(message: Any) -> Collection[str]:
    """Return the ids of an event's calls whose answers come later, as from a person."""
    match message:
        case {"event": {"long_running_tool_ids": list(ids)}}:
            return ids

    return ()


def _response_id(message: Any) -> str | None:
    """Return the id that entries of one response of Claude share.

    The SDK writes each block of a response, so each of its parallel calls, as an entry.
    The results of such calls may be among these entries.
    """
    match message:
        case {"entry": {"type": "assistant", "message": {"id": str(shared)}}} | {
            "type": "assistant",
            "message": {"id": str(shared)},
        }:
            return shared

    return None


def _is_note(message: Any) -> bool:
    """Return whether an entry of Claude's transcript is not of the conversation."""
    match message:
        case {"entry": {"type": str(kind)}}:
            return kind not in ("user", "assistant")

    return False


def _last_turn(messages: list[Any], readings: list[Reading]) -> int:
    """Return where the last turn begins: the calls whose results may be appended."""
    position = len(messages) - 1

    def is_between(at: int) -> bool:
        return bool(readings[at].results) or _is_note(messages[at])

    while position > 0 and is_between(position):
        position -= 1

    if position < 0:
        return 0

    response = _response_id(messages[position])

    while position > 0 and response is not None:
        before = position - 1

        if _response_id(messages[before]) != response and not is_between(before):
            break

        position -= 1

    return position


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
