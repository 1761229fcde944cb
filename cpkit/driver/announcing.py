"""Announcing: listeners in other processes hear of this handle's commits.

It runs in the background after a commit, so it adds nothing to a write. A process that
dies between commit and announcement loses the notification, which the listeners' poll
makes up for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from cpkit.driver.lifecycle import Lifecycle
from cpkit.driver.store import AnnouncesChanges
from cpkit.driver.writes import StoreFailure

__all__ = ["Announcing"]

logger = logging.getLogger(__name__)

# Seconds from one announcement to the next, where a process listens and where none
# does. `_IDLE_PAUSE` bounds the delay of a new listener's first notification. It is
# long, because each announcement costs as much as an append.
_PAUSE = 0.01
_IDLE_PAUSE = 0.5

# A notification that takes longer has lost its purpose.
_TIMEOUT = 5.0

# Threads in one announcement.
_AT_ONCE = 500


class Announcing:
    """Announces changed threads, many at a time, never two announcements at once."""

    def __init__(self, lifecycle: Lifecycle, store: AnnouncesChanges) -> None:
        self._lifecycle = lifecycle
        self._store = store
        self._changed: dict[str, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._next = 0.0
        self._closing = asyncio.Event()
        lifecycle.on_close(self._close)

    def committed(self, changed: Sequence[str]) -> None:
        """Announce soon which threads a commit changed."""
        for thread_id in changed:
            self._changed[thread_id] = None

        if self._changed and self._task is None:
            self._task = self._lifecycle.spawn_in_background(self._announce())

    def _close(self) -> None:
        """Cut the pause short, so that what is left is sent at once."""
        self._closing.set()

    async def _announce(self) -> None:
        clock = asyncio.get_running_loop().time

        try:
            while self._changed:
                if clock() < self._next:
                    with suppress(TimeoutError):
                        async with asyncio.timeout_at(self._next):
                            await self._closing.wait()

                some = [*self._changed][:_AT_ONCE]

                for one in some:
                    del self._changed[one]

                is_heard = await self._send(some)
                self._next = clock() + (_PAUSE if is_heard else _IDLE_PAUSE)
        finally:
            self._task = None

    async def _send(self, thread_ids: list[str]) -> bool:
        try:
            async with asyncio.timeout(_TIMEOUT):
                return await self._store.announce(thread_ids)
        except (StoreFailure, TimeoutError) as exc:
            logger.debug("a change was not announced: %s", exc)
        except Exception:
            logger.warning("a change was not announced", exc_info=True)

        return False
