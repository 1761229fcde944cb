"""A cache of the threads that a saver used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

from cpkit.integrations.langgraph.errors import Unsupported
from cpkit.integrations.langgraph.names import HASHED, PLAIN, store_thread_id
from cpkit.integrations.langgraph.thread import Record, Thread
from cpkit.protocol import Checkpointer, ListsThreads, ReadsRanges
from cpkit.sessions.fenced import read_range

__all__ = ["Threads"]

# The first read from the end of a thread. Each further read is three times as long.
_FIRST_READ = 4

# With more new records, a reader starts again at the last full checkpoint.
_MANY_RECORDS = 64


class Threads:
    """The threads of a store; those used last are in memory.

    ``limit`` bounds their number, and ``limit_bytes`` their size. It is used only on
    the store's loop. To read a cached thread, it asks the store for the last known
    record and all later ones. If another record is in that position, the thread was
    deleted, and it is read again.
    """

    def __init__(
        self, cp: Checkpointer[Any], limit: int, limit_bytes: int = 64 * 1024 * 1024
    ) -> None:
        self.cp = cp
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._cached: OrderedDict[str, Thread] = OrderedDict()

    def get(self, thread_id: object) -> Thread:
        """Return the cached thread, or an empty one, without asking the store."""
        store_id = store_thread_id(thread_id)
        thread = self._cached.get(store_id)

        if thread is None:
            thread = self._cached[store_id] = Thread(store_id, str(thread_id))

        self._cached.move_to_end(store_id)

        while len(self._cached) > self._limit or (
            len(self._cached) > 1 and self._bytes() > self._limit_bytes
        ):
            self._cached.popitem(last=False)

        return thread

    async def read(self, thread_id: object) -> Thread:
        """Return the thread with every record that is in the store now."""
        while True:
            thread = self.get(thread_id)

            async with thread.turn:
                if thread.start == 0 and await self._catch_up(thread):
                    return thread

                self.forget(thread)

            if thread.start:
                # Some of the known lists may be in the records that are read next.
                self.get(thread_id).known = thread.known

    async def read_newest(self, thread_id: object, ns: str) -> Thread:
        """Return the thread from a full checkpoint of the namespace on, or all of it.

        A thread in memory is extended by the records that are new in the store.
        """
        while True:
            thread = self.get(thread_id)

            async with thread.turn:
                if thread.version == 0 or thread.bytes_seen > self._limit_bytes:
                    window = await self._window(thread, ns)

                    if window is not None:
                        window.known = thread.known
                        window.check_known()
                        self._cached[thread.store_id] = window
                        return window

                if await self._catch_up(thread):
                    return thread

                self.forget(thread)

    async def load(self, store_id: str) -> tuple[Thread, list[Record]]:
        """Read a complete thread without caching it; also return its valid records."""
        thread = Thread(store_id)
        records = await read_range(self.cp, store_id)
        return thread, [record for record in records if thread.take(record)]

    def forget(self, thread: Thread) -> None:
        """Remove a thread from the cache."""
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

    async def _window(self, thread: Thread, ns: str) -> Thread | None:
        """Read a thread backwards, up to a full checkpoint of the namespace.

        Return ``None`` if the thread is short, or has no such checkpoint.
        """
        if not isinstance(self.cp, ReadsRanges):
            return None

        store_id = thread.store_id
        end = await self.cp.append(store_id, [])

        if end <= _FIRST_READ:
            return None

        # Not at the same time: a second connection would take longer to open.
        first = (await self.cp.read(store_id, 0, 1))[:1]
        records: list[Any] = []
        start, count = end, _FIRST_READ

        while start > 0:
            stop, start = start, max(0, start - count)
            records[:0] = await self.cp.read(store_id, start, stop)

            if len(records) != end - start:
                # The thread was deleted during the read.
                return None

            if place := _full_place(records, ns, first):
                window = Thread(store_id, thread.thread_id, start + place)
                window.first_id = str(_id_of(first[0]))

                for record in records[place:]:
                    window.take(record)

                return window

            count *= 3

        return None

    async def extend(self, thread: Thread) -> bool:
        """Read new records; return false if the thread was deleted.

        The caller holds the thread's ``turn``.
        """
        return await self._catch_up(thread)

    async def _catch_up(self, thread: Thread) -> bool:
        """Read new records; return false if the cached thread must be read again."""
        start = max(thread.version - 1, 0)

        stop = start + _MANY_RECORDS if thread.start else None
        records = await read_range(self.cp, thread.store_id, start, stop)

        if len(records) == _MANY_RECORDS and thread.start:
            return False

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

    def _bytes(self) -> int:
        return sum(thread.bytes_seen for thread in self._cached.values())


def _full_place(records: list[Any], ns: str, first: list[Any]) -> int:
    """Return the index of the newest full checkpoint's first record, or 0."""
    for place in range(len(records) - 1, 0, -1):
        record = records[place]

        if (
            isinstance(record, dict)
            and record.get("newest") is not None
            and record.get("ns") == ns
            and first
            and record.get("first") == _id_of(first[0])
        ):
            # 0 as well if some of its parts are not read yet.
            return max(0, place - int(record.get("parts", 0)))

    return 0


def _id_of(record: object) -> object:
    return record.get("id") if isinstance(record, dict) else None
