"""`SessionEditor`: every kind of entry that can be appended."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from cpkit.records import JsonValue
from cpkit.sessions.entries import LEAF, STATE, Entry, draft, flaw
from cpkit.sessions.errors import UnknownEntry
from cpkit.sessions.toolcalls import synthetic_result
from cpkit.sessions.view import SessionView

__all__ = ["NO_RESULT", "SessionEditor"]

NO_RESULT = (
    "No result was recorded: the run ended before there was one. "
    "The call may have had its effect, or not."
)


class SessionEditor(SessionView, ABC):
    """The appends, each of one entry that follows the leaf and becomes the new leaf.

    What makes the entries (*drafts*) runs when their turn has come, so what it reads
    of the session is what they follow.
    """

    async def append_entry(self, entry: Entry) -> str:
        """Append an entry of any type and return its id.

        ``id``, ``parentId`` and ``timestamp`` are set by the log.
        """
        reason = flaw(entry)

        if reason is None and {"id", "parentId", "timestamp"} & entry.keys():
            reason = "id, parentId and timestamp are set by the log"

        if reason is not None or entry["type"] == "session":
            raise ValueError(f"cannot append this entry: {reason or 'a second header'}")

        return await self._append(entry)

    async def append_message(self, message: Any) -> str:
        """Append a message: a dict, or one of ``message_type``."""
        plain = self._messages.dump(message, self.session_id)
        return await self._append(draft("message", message=plain))

    async def append_model_change(self, provider: str, model_id: str) -> str:
        """Set the default model of the branch; it is no message."""
        return await self._append(
            draft("model_change", provider=provider, modelId=model_id)
        )

    async def append_thinking_level(self, level: str) -> str:
        """Set the thinking level of the branch; it is ``off`` until then."""
        return await self._append(draft("thinking_level_change", thinkingLevel=level))

    async def append_compaction(
        self,
        summary: str,
        first_kept_entry_id: str,
        *,
        tokens_before: int = 0,
        details: JsonValue = None,
    ) -> str:
        """Let a summary stand in for what the branch has before its first kept entry.

        Nothing is deleted: branches from before the compaction still see the whole.
        Raises ``UnknownEntry`` where the first kept entry is not on the branch.
        """

        def drafts() -> list[Entry]:
            if all(entry["id"] != first_kept_entry_id for entry in self.branch()):
                raise UnknownEntry(
                    self.session_id, first_kept_entry_id, "on the active branch"
                )

            return [
                draft(
                    "compaction",
                    summary=summary,
                    firstKeptEntryId=first_kept_entry_id,
                    tokensBefore=tokens_before,
                    details=details,
                )
            ]

        return (await self._write(drafts))[0]

    async def append_custom(self, custom_type: str, data: JsonValue = None) -> str:
        """Append a custom entry, which is no message unless its type is registered."""
        return await self._append(draft("custom", customType=custom_type, data=data))

    async def append_custom_message(
        self,
        custom_type: str,
        content: str | list[JsonValue],
        *,
        display: bool = True,
        details: JsonValue = None,
    ) -> str:
        """Append content that the model is shown, in its place, as a custom message.

        ``display`` and ``details`` are for a user interface.
        """
        return await self._append(
            draft(
                "custom_message",
                customType=custom_type,
                content=content,
                display=display,
                details=details,
            )
        )

    async def append_state(self, /, **changes: JsonValue) -> str:
        """Merge keys into the state of the branch, like ``dict.update``."""
        return await self.append_custom(STATE, dict(changes))

    async def move_to(self, entry_id: str | None, summary: str | None = None) -> str:
        """Move the leaf: what is appended next follows this entry; ``None``: the start.

        The branch that is left stays as it is; a ``summary`` of it becomes a message on
        the new one. Returns the id of the entry that records the move.
        """
        if entry_id is not None:
            self.entry(entry_id)

        def drafts() -> list[Entry]:
            left = self.leaf_id or "root"
            move = draft("custom", customType=LEAF, data={"fromId": left})

            if summary is not None:
                move = draft("branch_summary", fromId=left, summary=summary)

            return [{**move, "parentId": entry_id}]

        return (await self._write(drafts))[0]

    async def label(self, entry_id: str, label: str | None) -> str:
        """Give an entry a label, or with ``None`` take it away."""
        self.entry(entry_id)
        return await self._append(draft("label", targetId=entry_id, label=label))

    async def set_name(self, name: str) -> str:
        """Give the session a name."""
        if not name.strip():
            raise ValueError("a session's name has at least one character")

        return await self._append(draft("session_info", name=name.strip()))

    async def close_missing_results(self, text: str = NO_RESULT) -> list[str]:
        """Append a result that says ``text`` for each tool call that has none.

        For after a crash, as providers refuse a call without a result. Nothing is
        executed and nothing rewritten: the context puts each of these results behind
        its call. Returns the new ids; all or none are appended.
        """

        def drafts() -> list[Entry]:
            timestamp = time.time_ns() // 1_000_000
            return [
                draft(
                    "message",
                    message=synthetic_result(missing, text, timestamp),
                    closes=missing.entry_id,
                )
                for missing in self.context().missing_results
            ]

        return await self._write(drafts)

    async def _append(self, fields: Entry) -> str:
        return (await self._write(lambda: [fields]))[0]

    @abstractmethod
    async def _write(self, drafts: Callable[[], Sequence[Entry]]) -> list[str]:
        """Append the entries that the drafts make, all or none; return their ids."""
