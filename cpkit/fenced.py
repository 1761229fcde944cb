"""What every layer writes and reads with: an append that a lost answer cannot repeat.

Also for programs that hold a checkpointer: ``from cpkit import append_once``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpkit.driver.ids import span
from cpkit.errors import BackendUnavailable, VersionConflict
from cpkit.protocol import Checkpointer, ReadsRanges
from cpkit.records import CheckpointData, JsonValue

__all__ = ["append_once", "load_range", "read_part", "read_range"]

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

    return (await read_part(cp, thread_id, start, stop))[1]


async def load_range(
    cp: Checkpointer[Any], thread_id: str, start: int = 0, stop: int | None = None
) -> CheckpointData[Any] | None:
    """Return a snapshot with ``messages[start:stop]``, as `ReadsRanges.load_range`."""
    if isinstance(cp, ReadsRanges):
        return await cp.load_range(thread_id, start, stop)

    if (data := await cp.load(thread_id)) is None:
        return None

    first, last = span(start, stop, data.version, data.first)
    part = data.messages[first - data.first : last - data.first]
    return replace(data, messages=part, first=first)


async def read_part(
    cp: Checkpointer[Any], thread_id: str, start: int = 0, stop: int | None = None
) -> tuple[int, list[Any]]:
    """Return a range as `read_range`, and the position where it begins.

    That is later than ``start`` if the messages before it were trimmed.
    """
    data = await load_range(cp, thread_id, start, stop)
    return (start, []) if data is None else (data.first, data.messages)
