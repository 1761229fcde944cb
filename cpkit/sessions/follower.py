"""Reading what others append to a thread, and noticing that it was replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpkit.fenced import read_part, read_range
from cpkit.protocol import Checkpointer

__all__ = ["Follower"]


class Follower:
    """Reads what others append to a thread, and notices if the thread was replaced.

    A thread can be deleted, and a new one with its id can grow to the same version. The
    new thread then accepts appends that were meant for the old one. So finding the
    messages of such an append does not prove that the thread is the old one. `news`
    looks for a message that proves it: the last message that was read, or the last one
    of the first append. The last message of an append must be unique.

    ``first`` is the position of the oldest message left, as far as the reader noticed:
    it looks when the proof was trimmed. The thread then counts as the same, and a
    message that was trimmed before it was read is missing.
    """

    def __init__(self, cp: Checkpointer[Any], thread_id: str) -> None:
        self.version = self.first = 0
        self._cp, self._thread_id = cp, thread_id
        self._proof: tuple[int, Any] | None = None

    async def news(self) -> list[Any] | None:
        """Return the messages after ``version``, or ``None`` for a replaced thread."""
        position, known = self._proof or (0, None)
        messages: list[Any] = []

        if self._proof:
            messages = await read_range(self._cp, self._thread_id, position)

        if messages[:1] != [known]:
            first, messages = await read_part(self._cp, self._thread_id, position)

            if first > position:  # the proof was trimmed, if there was one
                self.first = first
                read = max(0, self.version - first)
                self.version, self._proof = max(self.version, first), None
                return messages[read:]

            if self._proof:
                return None

        read = self.version - position

        if 1 < read <= len(messages):
            # The thread is the same, so it has all messages up to `version`. The next
            # read can begin at the last of them, which is a proof as well.
            self._proof = self.version - 1, messages[read - 1]

        return messages[read:]

    def wrote(self, messages: Sequence[Any]) -> None:
        """Count messages that were appended at ``version``."""
        self._count(messages, is_proof=self._proof is None)

    def read(self, messages: Sequence[Any]) -> None:
        """Count messages that `news` returned."""
        self._count(messages, is_proof=True)

    def _count(self, messages: Sequence[Any], *, is_proof: bool) -> None:
        self.version += len(messages)

        if messages and is_proof:
            self._proof = self.version - 1, messages[-1]
