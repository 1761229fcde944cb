"""An append at one version, through answers that get lost on the way."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from cpkit.errors import BackendUnavailable, VersionConflict
from cpkit.protocol import Checkpointer, ReadsRanges

__all__ = ["append_once", "read_range"]

# The first try and two more: enough for a connection that dropped, too few to hide
# that a store is down.
TRIES = 3


async def append_once(
    cp: Checkpointer[Any],
    thread_id: str,
    messages: Sequence[Any],
    *,
    expected_version: int,
    maybe_there: bool = False,
    same: Callable[[list[Any], list[Any]], bool] = operator.eq,
) -> None:
    """Append the messages at this version, once, whatever becomes of the answers.

    An append whose answer was lost is made again at the same version: either that one
    lands, and the first never can, or the version is taken, and what stands there
    tells by whom. ``same`` compares that with the messages; ``maybe_there`` says that
    an earlier call of this function ended without an answer.

    Raises ``VersionConflict`` where another writer has the version, and
    ``BackendUnavailable``, with ``maybe_applied``, where the store stays silent.
    """
    failure: BackendUnavailable

    for _ in range(TRIES):
        try:
            await cp.append(thread_id, messages, expected_version=expected_version)
            return
        except BackendUnavailable as exc:
            failure = exc
            maybe_there = maybe_there or exc.maybe_applied

            if not maybe_there:
                raise
        except VersionConflict:
            if not maybe_there:
                raise

            end = expected_version + len(messages)

            try:
                found = await read_range(cp, thread_id, expected_version, end)
            except BackendUnavailable as exc:
                failure = exc
                continue

            if same(found, list(messages)):
                return

            raise

    raise BackendUnavailable(
        failure.store, failure.reason, maybe_applied=True
    ) from failure


async def read_range(
    cp: Checkpointer[Any], thread_id: str, start: int = 0, stop: int | None = None
) -> list[Any]:
    """Return ``messages[start:stop]``, at the price of that part where possible."""
    if isinstance(cp, ReadsRanges):
        part: list[Any] = await cp.read(thread_id, start, stop)
        return part

    data = await cp.load(thread_id)
    return [] if data is None else data.messages[start:stop]
