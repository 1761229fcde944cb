"""The tool calls of a session's entries that have no result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cpkit.sessions.entries import Entry, Message
from cpkit.toolcalls import OpenCall, open_calls, read_message
from cpkit.toolcalls.writing import Answer, can_answer, result_messages

__all__ = ["MissingResult", "missing_results", "synthetic_result"]


@dataclass(frozen=True)
class MissingResult:
    """A tool call without a result; ``entry_id`` is the entry with the call.

    ``form`` names the notation of the call, as `cpkit.toolcalls` does.
    """

    entry_id: str
    open_call: OpenCall

    @property
    def call_id(self) -> str:
        return self.open_call.call.call_id

    @property
    def tool_name(self) -> str:
        return self.open_call.call.tool_name

    @property
    def form(self) -> str:
        return self.open_call.call.form


def missing_results(shown: Iterable[tuple[Entry, Message]]) -> list[MissingResult]:
    """Return the calls without a result in the messages of these entries, in order."""
    entries = list(shown)
    readings = ((at, read_message(one)) for at, (_, one) in enumerate(entries))
    return [
        MissingResult(entries[one.position][0]["id"], one)
        for one in open_calls(readings)
    ]


def synthetic_result(missing: MissingResult, text: str) -> Message | None:
    """Return a result with this text, in the form of the call.

    ``None`` for a call whose results cpkit does not write.
    """
    if not can_answer(missing.open_call):
        return None

    (message,), _ = result_messages([Answer(missing.open_call, text, True)], [])
    return message
