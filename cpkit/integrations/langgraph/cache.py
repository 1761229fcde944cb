"""A cache of the threads that a saver used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

from cpkit.integrations.langgraph.errors import Unsupported
from cpkit.integrations.langgraph.names import HASHED, PLAIN, store_thread_id
from cpkit.integrations.langgraph.thread import Record, Thread
from cpkit.protocol import Checkpointer, ListsThreads
from cpkit.sessions.fenced import read_range

__all__ = ["Threads"]


class Threads:
    """The threads of a store, with the ``limit`` used last in memory.

    It is used only on the store's loop. To read a cached thread, it asks the store for
    the last known record and all later ones. If another record is in that position, the
    thread was deleted, and all of it is read again.
    """

    def __init__(self, cp: Checkpointer[Any], limit: int) -> None:
        self.cp = cp
        self._limit = limit
        self._cached: OrderedDict[str, Thread] = OrderedDict()

    def get(self, thread_id: object) -> Thread:
        """Return the cached thread, or an empty one, without asking the store."""
        store_id = store_thread_id(thread_id)
        thread = self._cached.get(store_id)

        if thread is None:
            thread = self._cached[store_id] = Thread(store_id, str(thread_id))

        self._cached.move_to_end(store_id)

        if len(self._cached) > self._limit:
            self._cached.popitem(last=False)

        return thread

    async def read(self, thread_id: object) -> Thread:
        """Return the thread with every record that is in the store now."""
        while True:
            thread = self.get(thread_id)

            async with thread.turn:
                if await self._catch_up(thread):
                    return thread

                self.forget(thread)

    async def load(self, store_id: str) -> tuple[Thread, list[Record]]:
        """Read a complete thread without caching it; also return its valid records."""
        thread = Thread(store_id)
        records = await read_range(self.cp, store_id)
        return thread, [record for record in records if thread.take(record)]

    def forget(self, thread: Thread) -> None:
        """Remove a thread that was deleted from the cache."""
        if self._cached.get(thread.store_id) is thread:
            del self._cached[thread.store_id]

    async def store_ids(self, method: str) -> AsyncIterator[str]:
        """Yield the ids in the store of all LangGraph threads, page by page."""
        if not isinstance(self.cp, ListsThreads):
            raise Unsupported(method, "list_threads")

        for prefix in (PLAIN, HASHED):
            after = None

            while page := await self.cp.list_threads(prefix=prefix, after=after):
                for info in page:
                    yield info.thread_id

                after = page[-1].thread_id

    async def _catch_up(self, thread: Thread) -> bool:
        """Read new records; return false if the cached thread was deleted."""
        start = max(thread.version - 1, 0)
        records = await read_range(self.cp, thread.store_id, start)

        if thread.version:
            if not records or _id_of(records[0]) != thread.last_id:
                return False

            del records[0]

        is_first = thread.version == 0

        for record in records:
            thread.take(record)

        if is_first:
            thread.check_known()

        return True


def _id_of(record: object) -> object:
    return record.get("id") if isinstance(record, dict) else None
