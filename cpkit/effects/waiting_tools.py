"""Which tools of a thread wait for a person: their open calls must stay open."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from cpkit.driver.backoff import Backoff
from cpkit.effects.attempts import Attempts
from cpkit.effects.requests import Requests
from cpkit.protocol import Checkpointer

__all__ = ["waiting_tools"]

_RETRY_TIMEOUT = 30.0
"""Seconds for which a read is repeated whose answer was lost."""


async def waiting_tools(
    cp: Checkpointer[Any], threads: Collection[str]
) -> dict[str, str]:
    """Return the tools whose effects wait for an approval in these threads, and why.

    A request does not say which call of the model asked for it. So an open call of the
    same tool may be that call.
    """
    attempts = Attempts(cp, Backoff(), _RETRY_TIMEOUT)
    requests = Requests(attempts, None)
    found: dict[str, str] = {}

    for entry in await requests.entries():
        if entry.run_thread not in threads and entry.thread_id not in threads:
            continue

        request = await requests.get(entry.key, entry.number, entry.thread_id)

        if request is None or request.record.erased:
            continue

        if request.decision is None:
            found[request.tool] = (
                "its approval request is undecided; approve or deny it"
            )
        elif request.is_approved and not await _has_ended(attempts, entry.key):
            reason = "its approval is not used; run the thread again"
            found.setdefault(request.tool, reason)

    return found


async def _has_ended(attempts: Attempts, key: str) -> bool:
    """Tell whether an effect has an outcome: its run may not have ended the entry."""
    holder = await attempts.find_holder(key)
    return holder is not None and holder.status == "completed"
