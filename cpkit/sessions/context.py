"""What the model is shown: a projection of one branch of the log.

Nothing here changes the log, and nothing is executed again: a branch is read from the
root to an entry, and read again it gives the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpkit.sessions.entries import STATE, Entry, Message, milliseconds
from cpkit.sessions.toolcalls import MissingResult, answered_call, calls_in

__all__ = ["CustomMessages", "Model", "SessionContext", "copied", "project"]

CustomMessages = Mapping[str, Callable[[Entry], Message | None]]
"""By type of custom entry: what makes a message of one, or ``None`` of it."""


@dataclass(frozen=True)
class Model:
    """The model that the branch is at; the provider where it is known."""

    provider: str | None
    model_id: str


@dataclass(frozen=True)
class SessionContext:
    """The state of a session at one entry; the caller's to keep and to change.

    ``messages`` are what to send, in order. ``model`` is the default, ``None`` where
    nothing named one. ``state`` is merged from the branch. ``compaction`` is the entry
    whose summary stands in for what came before, if there is one.
    ``missing_results`` are the tool calls among the messages that have no result.
    """

    messages: list[Any]
    model: Model | None
    thinking_level: str
    state: dict[str, Any]
    compaction: Entry | None
    missing_results: list[MissingResult]


def project(
    branch: Sequence[Entry],
    custom_messages: CustomMessages,
    load: Callable[[Entry], Any],
) -> SessionContext:
    """Return the context of a branch, given from the root on.

    ``load`` returns the message of a message entry, as the caller wants it; those that
    are projected from other entries are dicts always.
    """
    model: Model | None = None
    thinking_level = "off"
    state: dict[str, Any] = {}
    compaction: int | None = None

    for place, entry in enumerate(branch):
        kind = entry["type"]

        if kind == "message":
            model = _model_of(entry["message"]) or model
        elif kind == "model_change":
            model = Model(entry.get("provider"), str(entry.get("modelId")))
        elif kind == "thinking_level_change":
            thinking_level = str(entry.get("thinkingLevel"))
        elif kind == "compaction":
            compaction = place
        elif kind == "custom" and entry.get("customType") == STATE:
            data = entry.get("data")
            state |= copied(data) if isinstance(data, dict) else {}

    shown = _placed(_shown(branch, compaction, custom_messages))
    return SessionContext(
        [load(e) if e["type"] == "message" else copied(m) for e, m in shown],
        model,
        thinking_level,
        state,
        None if compaction is None else copied(branch[compaction]),
        _missing(shown),
    )


def copied(value: Any) -> Any:
    """Copy a JSON value, ten times faster than `copy.deepcopy` does."""
    if type(value) is dict:
        return {key: copied(inner) for key, inner in value.items()}

    if type(value) is list:
        return [copied(inner) for inner in value]

    return value


def _model_of(message: Message) -> Model | None:
    name = message.get("model") if message.get("role") == "assistant" else None
    return Model(message.get("provider"), name) if isinstance(name, str) else None


def _shown(
    branch: Sequence[Entry], compaction: int | None, custom_messages: CustomMessages
) -> list[tuple[Entry, Message]]:
    """Return the entries that are messages, and the messages that they are."""
    entries = list(branch)

    if compaction is not None:
        summary = branch[compaction]
        first = summary.get("firstKeptEntryId")
        kept = next(
            (at for at in range(compaction) if branch[at]["id"] == first), compaction
        )
        # Compactions among those kept are skipped below: the newest says it all.
        entries = [summary, *branch[kept:compaction], *branch[compaction + 1 :]]

    shown = []

    for place, entry in enumerate(entries):
        is_summary = place == 0 and compaction is not None
        message = _summary(entry) if is_summary else _message(entry, custom_messages)

        if message is not None:
            shown.append((entry, message))

    return shown


def _summary(entry: Entry) -> Message:
    return {
        "role": "compactionSummary",
        "summary": entry.get("summary"),
        "tokensBefore": entry.get("tokensBefore"),
        "timestamp": milliseconds(entry),
    }


def _message(entry: Entry, custom_messages: CustomMessages) -> Message | None:
    kind = entry["type"]

    if kind == "message":
        message: Message = entry["message"]
        return message

    if kind == "custom_message":
        details = {"details": entry["details"]} if "details" in entry else {}
        return {
            "role": "custom",
            "customType": entry.get("customType"),
            "content": entry.get("content"),
            "display": entry.get("display"),
            **details,
            "timestamp": milliseconds(entry),
        }

    if kind == "branch_summary" and entry.get("summary"):
        return {
            "role": "branchSummary",
            "summary": entry["summary"],
            "fromId": entry.get("fromId"),
            "timestamp": milliseconds(entry),
        }

    if kind == "custom" and (make := custom_messages.get(str(entry.get("customType")))):
        return make(copied(entry))

    return None


def _placed(shown: list[tuple[Entry, Message]]) -> list[tuple[Entry, Message]]:
    """Put each synthetic result behind the call that it closes.

    It was appended at the leaf, when the conversation may have gone on already, and a
    provider wants a result right after its call. One whose call is not shown goes.
    """
    closing = defaultdict(list)

    for entry, message in shown:
        if (call := _closed(entry, message)) is not None:
            closing[call].append((entry, message))

    if not closing:
        return shown

    placed: list[tuple[Entry, Message]] = []
    due: list[tuple[Entry, Message]] = []

    for entry, message in shown:
        if _closed(entry, message) is not None:
            continue

        if answered_call(message) is None:
            placed += due
            due = closing.get(entry["id"], [])

        placed.append((entry, message))

    return placed + due


def _closed(entry: Entry, message: Message) -> str | None:
    """Return the id of the entry whose call this is a synthetic result of, if it is."""
    closes = entry.get("closes")
    is_result = isinstance(closes, str) and answered_call(message) is not None
    return closes if is_result else None


def _missing(shown: list[tuple[Entry, Message]]) -> list[MissingResult]:
    # Models repeat ids: a result answers the newest call of its id.
    unanswered: dict[str, list[MissingResult]] = defaultdict(list)

    for entry, message in shown:
        for call in calls_in(entry["id"], message):
            unanswered[call.call_id].append(call)

        answered = answered_call(message)

        if answered is not None and unanswered[answered]:
            unanswered[answered].pop()

    order = {entry["id"]: place for place, (entry, _) in enumerate(shown)}
    missing = [call for calls in unanswered.values() for call in calls]
    return sorted(missing, key=lambda call: order[call.entry_id])
