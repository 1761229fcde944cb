"""Notifications between processes: commits are announced, a thread listens.

Announcing runs in the background after a commit, so it adds nothing to a write. A
process that dies between commit and announcement loses the notification, which the
listeners' poll makes up for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from cpkit.driver.group_commit import Outcomes
from cpkit.driver.lifecycle import Lifecycle
from cpkit.driver.store import AnnouncesChanges, Heard
from cpkit.driver.writes import StoreFailure, Write, may_have_changed

__all__ = ["Announcing", "Follow", "listen_in_thread"]

logger = logging.getLogger(__name__)

# Seconds from one announcement to the next, where a process listens and where none
# does. `_IDLE_PAUSE` bounds the delay of a new listener's first notification. It is
# long, because each announcement costs as much as an append.
_PAUSE = 0.01
_IDLE_PAUSE = 0.5

Follow = Callable[[Callable[[], None], threading.Event], None]
"""``follow(changed, stop)``: call ``changed()`` for changes until ``stop`` is set."""


class Announcing:
    """Announces changed threads, many at a time, never two announcements at once."""

    def __init__(self, lifecycle: Lifecycle, store: AnnouncesChanges) -> None:
        self._lifecycle = lifecycle
        self._store = store
        self._changed: dict[str, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._next = 0.0
        # Cuts the pause short, so that what is left is sent at once.
        self._closing = asyncio.Event()
        lifecycle.on_close.append(self._closing.set)

    def committed(self, writes: Sequence[Write], outcomes: Outcomes) -> None:
        """Announce soon which threads a commit changed."""
        for write, outcome in zip(writes, outcomes, strict=True):
            if may_have_changed(write, outcome):
                self._changed[write.thread_id] = None

        if self._changed and self._task is None:
            self._task = self._lifecycle.spawn_in_background(self._announce())

    async def _announce(self) -> None:
        clock = asyncio.get_running_loop().time

        try:
            while self._changed:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self._next):
                        await self._closing.wait()

                changed, self._changed = [*self._changed], {}
                is_heard = False

                try:
                    async with asyncio.timeout(5):  # later it has lost its purpose
                        is_heard = await self._store.announce(changed)
                except (StoreFailure, TimeoutError) as exc:
                    logger.debug("a change was not announced: %s", exc)
                except Exception:
                    logger.warning("a change was not announced", exc_info=True)

                self._next = clock() + (_PAUSE if is_heard else _IDLE_PAUSE)
        finally:
            self._task = None


async def listen_in_thread(follow: Follow, heard: Heard) -> None:
    """Run ``follow`` in a thread of its own; the thread ends when this is cancelled.

    Returns when ``follow`` returns, and raises what it raises.
    """
    loop = asyncio.get_running_loop()
    stop = threading.Event()
    ended: asyncio.Future[None] = loop.create_future()

    def tell(function: Callable[[Any], None], what: object) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(function, what)

    def run() -> None:
        try:
            follow(lambda: tell(heard, None), stop)
            tell(ended.set_result, None)
        except Exception as exc:
            tell(ended.set_exception, exc)
        except BaseException as exc:
            # A SystemExit of this thread is not the program's.
            fault = f"the listening thread ended with {exc!r}"
            tell(ended.set_exception, RuntimeError(fault))

    thread = threading.Thread(target=run, name="cpkit-listen", daemon=True)
    thread.start()

    try:
        await asyncio.shield(ended)
    finally:
        stop.set()
        await asyncio.wait({ended})
        thread.join()  # it reported its end; it has only to return
        ended.exception()  # retrieved, so that asyncio does not log it
