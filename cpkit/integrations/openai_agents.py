"""A session of the OpenAI Agents SDK in any store.

::

    session = Session("user-7", cp)
    await Runner.run(agent, "hello", session=session)

The session is an append-only thread with one JSON object for each change. ``item`` adds
an item, ``pop`` removes the newest item and names its position, ``clear`` removes all
items. So the thread's calls, with their idempotency keys, outlive a cleared session.

``by`` is an id of the append that wrote the object. Without it, two tasks that pop at
the same time would write equal objects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from uuid import uuid4

from cpkit.driver.backoff import backoff_pauses
from cpkit.driver.jsontext import encode_json, parse_json
from cpkit.errors import CorruptThread, VersionConflict
from cpkit.fenced import append_once
from cpkit.integrations.bridge import Bridge, completed
from cpkit.integrations.openai_thread import session_thread
from cpkit.protocol import Checkpointer
from cpkit.registry import needs_extra
from cpkit.sessions.context import copied
from cpkit.sessions.follower import Follower
from cpkit.sync import SyncCheckpointer

with needs_extra("cpkit.integrations.openai_agents", "openai-agents"):
    from agents import SessionSettings, TResponseInputItem
    from agents.memory import SessionABC

__all__ = ["Session", "session_thread"]

T = TypeVar("T")

Record = dict[str, Any]


class Session(SessionABC):
    """The history of one conversation, for the ``session=`` of the SDK's ``Runner``.

    It behaves as the SDK's own ``SQLiteSession``. ``cp`` is any store, opened without
    ``message_type=``. For ``Runner.run_sync``, it is an open `SyncCheckpointer`. The
    methods may be called from any event loop. Any number of tasks, handles and
    processes may use one session. `add_items` is atomic, and only one caller gets a
    popped item. Nothing is deleted: popped and cleared items stay in the thread, and so
    do its calls.

    The first use reads the thread, each later one only what was written since. A
    cancelled mutation is still completed. Items are JSON values.

    Raises ``BackendUnavailable`` if the store does not answer; with ``maybe_applied``,
    `get_items` shows whether a mutation was applied. Raises ``CorruptThread`` if
    another program wrote something else into the thread.
    """

    def __init__(
        self,
        session_id: str,
        cp: Checkpointer[Any] | SyncCheckpointer[Any],
        *,
        session_settings: SessionSettings | dict[str, Any] | None = None,
    ) -> None:
        self.session_id = session_id
        self.session_settings: SessionSettings | None = (
            session_settings
            if isinstance(session_settings, SessionSettings)
            else SessionSettings().resolve(session_settings)
        )
        self.thread_id = session_thread(session_id)
        self._bridge = Bridge(cp, wait_for_loop=True)
        self._cp = self._bridge.checkpointer
        # The fields below are used only on the store's event loop.
        self._turn = asyncio.Lock()
        self._forget()

    def __repr__(self) -> str:
        return f"<Session {self.session_id!r}>"

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """Return the items, oldest first; with a limit, only so many of the newest.

        The default is the limit of ``session_settings``. As in the SDK, a limit of 0
        returns no items, and a negative limit returns all.
        """
        # A caller may have replaced the settings, by a dict or None too.
        wanted = (
            SessionSettings().resolve(self.session_settings).limit
            if limit is None
            else limit
        )

        return await self._bridge.go(self._get(wanted))

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Add all items at the end, or none of them.

        Raises ``SerializationError`` for a value that is not JSON.
        """
        texts = [encode_json(item, (place,)) for place, item in enumerate(items)]
        added = [{"item": parse_json(text)} for text in texts]

        if not added:
            # An empty append still raises if the store is closed.
            await self._bridge.go(self._append_nothing())
            return

        await self._mutate(self._write(lambda: added))

    async def pop_item(self) -> TResponseInputItem | None:
        """Remove the newest item and return it, or ``None`` if the session is empty."""
        return await self._mutate(self._pop())

    async def clear_session(self) -> None:
        """Remove all items; the thread, its calls and their keys stay."""
        await self._mutate(self._clear())

    def close(self) -> None:
        """Do nothing: the store is closed where it was opened.

        Programs that used the SDK's ``SQLiteSession`` call this.
        """

    async def _mutate(self, work: Coroutine[Any, Any, T]) -> T:
        """Complete the work even if the caller is cancelled, or its loop ends."""
        return await completed(self._bridge.go(completed(work)))

    async def _append_nothing(self) -> None:
        await self._cp.append(self.thread_id, [])

    async def _get(self, wanted: int | None) -> list[TResponseInputItem]:
        async with self._turn:
            await self._refresh()
            start = (
                0 if wanted is None or wanted < 0 else max(0, len(self._live) - wanted)
            )
            return [copied(item) for _, item in self._live[start:]]

    async def _pop(self) -> TResponseInputItem | None:
        popped: TResponseInputItem | None = None

        def pop() -> list[Record]:
            nonlocal popped
            popped = None

            if not self._live:
                return []

            position, popped = self._live[-1]
            return [{"pop": position}]

        await self._write(pop, refresh=True)
        # This copy of the session no longer has the item, so no copy is made.
        return popped

    async def _clear(self) -> None:
        await self._write(lambda: [{"clear": True}] if self._live else [], refresh=True)

    async def _write(
        self, changes: Callable[[], list[Record]], *, refresh: bool = False
    ) -> None:
        """Append the changes at the version that they were made for.

        ``changes`` is called again after each conflict. With ``refresh``, the new
        objects are read before the first call too.
        """
        pauses = backoff_pauses(first=0.005, longest=0.5)

        async with self._turn:
            while True:
                if refresh:
                    await self._refresh()

                by = uuid4().hex[:16]
                records = [{**change, "by": by} for change in changes()]

                if not records:
                    return

                try:
                    await append_once(
                        self._cp,
                        self.thread_id,
                        records,
                        expected_version=self._thread.version,
                    )
                except VersionConflict:
                    refresh = True
                    await asyncio.sleep(next(pauses))
                else:
                    self._apply(records)
                    self._thread.wrote(records)
                    return

    async def _refresh(self) -> None:
        """Read what others appended."""
        records = await self._thread.news()

        if records is None:
            # The thread was deleted, and a new thread has its id.
            self._forget()
            records = await self._thread.news() or []

        self._apply(records)
        self._thread.read(records)

    def _forget(self) -> None:
        self._thread = Follower(self._cp, self.thread_id)
        self._live: list[tuple[int, Any]] = []

    def _apply(self, records: list[Record]) -> None:
        """Change the items by the records that follow the last known one."""
        for position, record in enumerate(records, self._thread.version):
            match record:
                case {"item": item}:
                    self._live.append((position, item))
                case {"pop": popped} if self._live and self._live[-1][0] == popped:
                    self._live.pop()
                case {"clear": True}:
                    self._live.clear()
                case _:
                    self._forget()
                    raise CorruptThread(
                        self.thread_id,
                        f"message {position}",
                        "not a change of an Agents SDK session",
                    )
