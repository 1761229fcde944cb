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
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

from cpkit.driver.backoff import backoff_pauses
from cpkit.errors import CorruptThread, VersionConflict
from cpkit.fenced import append_once
from cpkit.fitting import (
    append_what_fits,
    log_missing,
    storable,
)
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


@dataclass(frozen=True)
class _Snapshot:
    """The newest items, as the SDK's compaction reads and replaces them."""

    items: list[TResponseInputItem]
    complete: bool
    replace_suffix: Callable[[int, list[TResponseInputItem]], Awaitable[bool]]


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

        A value that is not JSON, and the largest parts of an item above the store's
        limit, are replaced by a text that says what is missing, and logged. Items above
        ``max_append`` together take several appends.
        """
        added = self._storable(items)

        if not added:
            # An empty append still raises if the store is closed.
            await self._bridge.go(self._append_nothing())
            return

        await self._mutate(append_what_fits(self._add, added, self._report))

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

    # What the SDK's compaction looks for, to replace items in one step. These are
    # private names of the SDK, for its own stores. Without them it clears, then adds.

    async def _get_compaction_snapshot(
        self, limit: int, *, prune_prefix: Callable[[Any], bool] | None = None
    ) -> _Snapshot | None:
        """Return so many of the newest items, and how to replace the last of them."""
        if not self._has_own_items():
            return None

        newest, is_complete = await self._bridge.go(self._newest(limit))

        async def replace_suffix(start: int, output: list[TResponseInputItem]) -> bool:
            expected = newest[start:]

            def remove() -> list[Record] | None:
                first = len(self._live) - len(expected)

                if not expected or self._live[first:] != expected:
                    return None

                kept = [item for _, item in self._live[:first]]
                expired = 0

                while prune_prefix and kept[expired:] and prune_prefix(kept[expired]):
                    expired += 1

                if not expired:
                    return [{"pop": position} for position, _ in reversed(expected)]

                return [{"clear": True}, *({"item": one} for one in kept[expired:])]

            return await self._mutate(self._replace(remove, self._storable(output)))

        items = [copied(item) for _, item in newest]
        return _Snapshot(items, is_complete, replace_suffix)

    async def _atomic_replace_items(self, items: list[TResponseInputItem]) -> bool:
        """Replace all items; return False if the SDK has to clear and add them."""
        if not self._has_own_items():
            return False

        def remove() -> list[Record]:
            return [{"clear": True}] if self._live else []

        return await self._mutate(self._replace(remove, self._storable(items)))

    def _has_own_items(self) -> bool:
        """Return whether no subclass stores other items than it is given."""
        kind = type(self)
        return (kind.get_items, kind.add_items) == (
            Session.get_items,
            Session.add_items,
        )

    async def _newest(self, limit: int) -> tuple[list[tuple[int, Any]], bool]:
        async with self._turn:
            await self._refresh()
            return self._live[-limit:], len(self._live) <= limit

    async def _replace(
        self, remove: Callable[[], list[Record] | None], items: list[Any]
    ) -> bool:
        """Append the removals and the items in one step; False: nothing to append.

        If they are more than ``max_append``, the removals come with the first of them.
        """
        replaced: bool | None = None

        async def append(part: list[Any]) -> None:
            nonlocal replaced
            removals: list[Record] | None = []

            def changes() -> list[Record]:
                nonlocal removals
                removals = [] if replaced else remove()
                added = [{"item": item} for item in part]
                return [] if removals is None else [*removals, *added]

            if replaced is not False:
                await self._write(changes, refresh=True)
                replaced = removals is not None

        await append_what_fits(append, items, self._report)
        return bool(replaced)

    async def _mutate(self, work: Coroutine[Any, Any, T]) -> T:
        """Complete the work even if the caller is cancelled, or its loop ends."""
        return await completed(self._bridge.go(completed(work)))

    def _storable(self, items: list[Any]) -> list[Any]:
        """Return the items as JSON objects, and log what is missing in them."""
        missing: list[str] = []
        added = [_item(item, storable(item, missing)) for item in items]
        self._report(missing)
        return added

    def _report(self, missing: list[str]) -> None:
        log_missing(self.thread_id, missing)

    async def _add(self, items: list[Any]) -> None:
        await self._write(lambda: [{"item": item} for item in items])

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

    def _forget(self) -> None:
        self._thread = Follower(self._cp, self.thread_id)
        self._live: list[tuple[int, Any]] = []

    async def _refresh(self) -> None:
        """Read what others appended."""
        records = await self._thread.news()

        if records is None:
            # The thread was deleted, and a new thread has its id.
            self._forget()
            records = await self._thread.news() or []

        # Records that were trimmed unread may have removed items before them.
        if self._live and self._live[0][0] < (first := self._thread.first):
            self._live = [one for one in self._live if one[0] >= first]

        self._apply(records)
        self._thread.read(records)

    def _apply(self, records: list[Record]) -> None:
        """Change the items by the records that follow the last known one."""
        for position, record in enumerate(records, self._thread.version):
            match record:
                case {"item": item}:
                    self._live.append((position, item))
                case {"pop": popped} if self._live and self._live[-1][0] == popped:
                    self._live.pop()
                case {"pop": int(popped)} if popped < self._thread.first:
                    pass  # it was trimmed
                case {"clear": True}:
                    self._live.clear()
                case _:
                    self._forget()
                    raise CorruptThread(
                        self.thread_id,
                        f"message {position}",
                        "not a change of an Agents SDK session",
                    )


def _item(given: Any, stored: Any) -> Any:
    """Return what is stored; a message if the item is replaced as a whole."""
    if isinstance(given, dict | list | tuple) or stored == given:
        return stored

    return {"role": "system", "content": stored}
