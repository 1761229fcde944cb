"""`SessionEditor`: one method for each kind of entry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
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
    """The methods that append entries.

    Each entry follows the leaf and becomes the new leaf. Appends take turns. A function
    that makes entries (*drafts*) runs in its turn, so that it sees the session which
    its entries follow.
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

    async def append_message(self, message: Any, *, after: str | None = None) -> str:
        """Append a message: a dict, or an object of ``message_type``.

        It follows the leaf, or begins a new branch behind the entry ``after``.
        """
        plain = self._messages.dump(message, self.session_id)
        entry = draft("message", message=plain)

        if after is not None:
            entry["parentId"] = self.entry(after)["id"]

        return await self._append(entry)

    async def append_model_change(self, provider: str, model_id: str) -> str:
        """Set the default model of the branch. The context gets no message."""
        return await self._append(
            draft("model_change", provider=provider, modelId=model_id)
        )

    async def append_thinking_level(self, level: str) -> str:
        """Set the thinking level of the branch, which is ``off`` at first."""
        return await self._append(draft("thinking_level_change", thinkingLevel=level))

    async def append_compaction(
        self,
        summary: str,
        first_kept_entry_id: str,
        *,
        tokens_before: int = 0,
        details: JsonValue = None,
    ) -> str:
        """Replace the messages before the first kept entry by a summary.

        Nothing is deleted: a branch from an earlier entry still shows all messages.
        Raises ``UnknownEntry`` if the first kept entry is not on the branch.
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
        """Append a custom entry. It gives a message only if its type is registered."""
        return await self._append(draft("custom", customType=custom_type, data=data))

    async def append_custom_message(
        self,
        custom_type: str,
        content: str | list[JsonValue],
        *,
        display: bool = True,
        details: JsonValue = None,
    ) -> str:
        """Append a message of role ``custom`` for the model.

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
        """Move the leaf, so that the next entry follows this one, or none for ``None``.

        The old branch stays as it is. A ``summary`` of it becomes a message on the new
        branch. Returns the id of the entry that records the move.
        """
        if entry_id is not None:
            self.entry(entry_id)

        def drafts() -> list[Entry]:
            old_leaf = self.leaf_id or "root"
            move = draft("custom", customType=LEAF, data={"fromId": old_leaf})

            if summary is not None:
                move = draft("branch_summary", fromId=old_leaf, summary=summary)

            return [{**move, "parentId": entry_id}]

        return (await self._write(drafts))[0]

    async def label(self, entry_id: str, label: str | None) -> str:
        """Give an entry a label; ``None`` removes its label."""
        self.entry(entry_id)
        return await self._append(draft("label", targetId=entry_id, label=label))

    async def set_name(self, name: str) -> str:
        """Give the session a name."""
        if not name.strip():
            raise ValueError(f"a session's name must not be blank, as {name!r} is")

        return await self._append(draft("session_info", name=name.strip()))

    async def close_missing_results(self, text: str = NO_RESULT) -> list[str]:
        """Append a synthetic result with this text for each tool call without one.

        Use it after a crash: providers refuse a call without a result. Nothing is
        executed, and no entry changes. The context shows each of these results behind
        its call. Returns the new ids. Either all results are appended or none.

        A call is left if its tool has an approval request in the session's thread that
        is undecided, or approved and not used: the next run gives the result. It stays
        in the context's ``missing_results``, and so does a call whose form of a result
        cpkit does not write.
        """
        waiting = await self._waiting_tools()

        def drafts() -> list[Entry]:
            return [
                draft("message", message=message, closes=missing.entry_id)
                for missing in self.context().missing_results
                if missing.tool_name not in waiting
                and (message := synthetic_result(missing, text)) is not None
            ]

        return await self._write(drafts)

    async def _append(self, fields: Entry) -> str:
        return (await self._write(lambda: [fields]))[0]

    @abstractmethod
    async def _waiting_tools(self) -> Collection[str]:
        """Return the tools whose effects wait for an approval in this session."""

    @abstractmethod
    async def _write(self, drafts: Callable[[], Sequence[Entry]]) -> list[str]:
        """Append all entries that ``drafts`` returns, or none; return their ids."""
