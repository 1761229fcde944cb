"""Appends that survive lost answers, and reads that notice a replaced thread."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cpkit.errors import BackendUnavailable, VersionConflict
from cpkit.protocol import Checkpointer, ReadsRanges
from cpkit.records import JsonValue

__all__ = ["Follower", "append_once", "read_range"]

# Enough tries for a dropped connection, and too few to hide that a store is down.
_TRIES = 3


async def append_once(
    cp: Checkpointer[Any],
    thread_id: str,
    messages: Sequence[Any],
    *,
    expected_version: int,
    extra: Mapping[str, JsonValue] | None = None,
    maybe_stored: bool = False,
    same: Callable[[list[Any], list[Any]], bool] = operator.eq,
) -> None:
    """Append the messages at this version exactly once, even if an answer is lost.

    An append without an answer is retried at the same version. If the retry succeeds,
    the first append can never be applied. If the version is taken, ``same(stored,
    messages)`` decides whether the stored messages are those of the first append.
    ``maybe_stored`` says that an earlier call of this function got no answer.

    Raises ``VersionConflict`` if another writer has the version, and
    ``BackendUnavailable``, with ``maybe_applied``, if no try gets an answer.
    """
    failure: BackendUnavailable

    for _ in range(_TRIES):
        try:
            await cp.append(
                thread_id, messages, expected_version=expected_version, extra=extra
            )
            return
        except BackendUnavailable as exc:
            failure = exc
            maybe_stored = maybe_stored or exc.maybe_applied

            if not maybe_stored:
                raise
        except VersionConflict:
            if not maybe_stored:
                raise

            end = expected_version + len(messages)

            try:
                stored = await read_range(cp, thread_id, expected_version, end)
            except BackendUnavailable as exc:
                failure = exc
                continue

            if same(stored, list(messages)):
                return

            raise

    raise BackendUnavailable(
        failure.store, failure.reason, maybe_applied=True
    ) from failure


async def read_range(
    cp: Checkpointer[Any], thread_id: str, start: int = 0, stop: int | None = None
) -> list[Any]:
    """Return ``messages[start:stop]``; a store without ``read`` loads the thread."""
    if isinstance(cp, ReadsRanges):
        part: list[Any] = await cp.read(thread_id, start, stop)
        return part

    data = await cp.load(thread_id)
    return [] if data is None else data.messages[start:stop]


class Follower:
    """Reads what others append to a thread, and notices if the thread was replaced.

    A thread can be deleted, and a new one with its id can grow to the same version. The
    new thread then accepts appends that were meant for the old one. So finding the
    messages of such an append does not prove that the thread is the old one. `news`
    looks for a message that proves it: the last message that was read, or the last one
    of the first append. The last message of an append must be unique.
    """

    def __init__(self, cp: Checkpointer[Any], thread_id: str) -> None:
        self.version = 0
        self._cp, self._thread_id = cp, thread_id
        self._proof: tuple[int, Any] | None = None

    async def news(self) -> list[Any] | None:
        """Return the messages after ``version``, or ``None`` for a replaced thread."""
        position, known = self._proof or (0, None)
        messages = await read_range(self._cp, self._thread_id, position)

        if self._proof and messages[:1] != [known]:
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
