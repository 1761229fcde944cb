"""A cache of the threads that a saver used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any

from cpkit.fenced import read_range
from cpkit.integrations.langgraph.errors import Unsupported
from cpkit.integrations.langgraph.names import HASHED, PLAIN, store_thread_id
from cpkit.integrations.langgraph.outbox import Outbox
from cpkit.integrations.langgraph.stored import Record, may_begin_window
from cpkit.integrations.langgraph.thread import Thread
from cpkit.protocol import Checkpointer, ListsThreads, ReadsRanges

__all__ = ["Threads"]

# How many records to read from the end of a thread. The first read has _FIRST_READ. The
# newest record says how far back the last full checkpoint is, so the second read goes
# that far, plus a margin for records that other processes appended at the same time. If
# that read has no full checkpoint, many may have appended, so the next read goes
# _MARGIN_OF_MANY further back. After that each read is _GROWTH times as long.
_FIRST_READ = 6
_MARGIN = 2
_MARGIN_OF_MANY = 24
_GROWTH = 4

# With more new records than this, a reader starts again at the last full checkpoint.
_MANY_RECORDS = 64

IsEnough = Callable[[Thread], bool]


class Threads:
    """The threads of a store; those used last are in memory.

    ``limit`` bounds their number, and ``limit_bytes`` their size. It is used only on
    the store's loop. To read a cached thread, it asks the store for the last known
    record and all later ones. If the last known record is missing, the thread was
    deleted, and it is read again.
    """

    def __init__(
        self, cp: Checkpointer[Any], limit: int, limit_bytes: int = 64 * 1024 * 1024
    ) -> None:
        self.cp = cp
        self._reads_ranges = isinstance(cp, ReadsRanges)
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._cached: OrderedDict[str, Thread] = OrderedDict()
        self.outbox = Outbox(cp, self.forget, self.catch_up)

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
            # Keep a thread with an append under way, which will add its record to it.
            idle = next(
                (one for one in self._cached if not self.outbox.is_appending(one)),
                store_id,
            )

            if idle == store_id:
                break

            del self._cached[idle]

        return thread

    async def read(self, thread_id: object) -> Thread:
        """Return the thread with every record that is in the store now."""
        return await self.find(thread_id, None, lambda _: False, first=None)

    async def find(
        self,
        thread_id: object,
        ns: str | None,
        is_enough: IsEnough,
        *,
        first: int | None = 0,
        oldest: bool = False,
    ) -> Thread:
        """Return the whole thread, or a window of it for which ``is_enough`` is true.

        Records that are new in the store are added to a cached thread. `windows`
        describes the other arguments.
        """
        await self.outbox.wait_until_decided(store_thread_id(thread_id))

        while True:
            thread = self.get(thread_id)

            async with thread.lock:
                if self._cached.get(thread.store_id) is not thread:
                    # Another task replaced it while this one waited for the lock.
                    continue

                if (
                    self._is_usable(thread, first)
                    and await self.extend(thread)
                    and (not thread.is_window or is_enough(thread))
                ):
                    return thread

                async for found in self.windows(
                    thread.store_id, thread.thread_id, ns, first=first, oldest=oldest
                ):
                    if not found.is_window or is_enough(found):
                        found.known = thread.known
                        found.check_known()
                        found.empty = thread.empty

                        for name, checkpoint_id in thread.early_writes.items():
                            found.note_early_writes(name, checkpoint_id)

                        self._cached[thread.store_id] = found
                        return found

    async def windows(
        self,
        store_id: str,
        thread_id: str | None,
        ns: str | None,
        *,
        first: int | None = 0,
        oldest: bool = False,
    ) -> AsyncIterator[Thread]:
        """Read a thread from its end, farther back each time; at last all of it.

        ``first`` is the least number of records to begin with, or ``None`` for all. A
        window begins at a full checkpoint of the namespace ``ns``, or for ``None`` of
        any namespace. The first window begins at the newest one that was read, and the
        later windows at the oldest. With ``oldest`` all of them begin at the oldest.
        """
        count = None

        if first is not None and self._reads_ranges:
            count = max(first, _FIRST_READ)

        while True:
            start = 0 if count is None else -count
            records: list[Any] = await read_range(self.cp, store_id, start)

            if count is None or len(records) < count:
                whole = Thread(store_id, thread_id)

                for record in records:
                    whole.take(record)

                yield whole
                return

            place = _full_place(records, ns, oldest)

            if place is not None:
                window = Thread(store_id, thread_id, records[place])

                for record in _needed(records, place):
                    window.note_writes(record)

                for record in records[place - records[place].get("parts", 0) :]:
                    window.take(record)

                if not window.is_mixed:
                    yield window

                oldest = True

            asked = _records_back(records, ns)

            if asked > count:
                count = asked
            elif place is None and asked + _MARGIN_OF_MANY > count:
                count = asked + _MARGIN_OF_MANY
            else:
                count *= _GROWTH

    async def load(self, store_id: str) -> tuple[Thread, list[Record]]:
        """Read a complete thread without caching it; also return its valid records."""
        thread = Thread(store_id)
        valid: list[Record] = []
        parts: list[Record] = []

        for record in await read_range(self.cp, store_id):
            parts.append(record)

            if not thread.take(record):
                parts.clear()
            elif record["type"] != "part":
                valid += parts
                parts.clear()

        return thread, valid

    def forget(self, thread: Thread) -> None:
        """Remove a thread from the cache."""
        if self._cached.get(thread.store_id) is thread:
            del self._cached[thread.store_id]

    async def store_ids(self, method: str) -> AsyncIterator[str]:
        """Yield the store's ids of all LangGraph threads."""
        if not isinstance(self.cp, ListsThreads):
            raise Unsupported(method, "list_threads")

        for prefix in (PLAIN, HASHED):
            after = None

            while page := await self.cp.list_threads(prefix=prefix, after=after):
                for info in page:
                    yield info.thread_id

                after = page[-1].thread_id

    async def extend(self, thread: Thread) -> bool:
        """Read new records; return false if the thread must be read again.

        The caller holds the thread's ``lock``.
        """
        count = len(thread.appended) + 1

        while True:
            if thread.version is not None:
                start = thread.version - 1
                stop = start + _MANY_RECORDS if thread.is_window else None
            else:
                start, stop = -count, None

            records = await read_range(self.cp, thread.store_id, start, stop)
            place = _place_of(thread.last_id, records)

            if place is not None:
                break

            if start >= 0 or len(records) < count or count > _MANY_RECORDS:
                return False

            count *= _GROWTH

        # The thread was deleted and begun again, or a window has too many new records.
        if start >= 0 and (place > 0 or (stop and len(records) == _MANY_RECORDS)):
            return False

        for record in records[place + 1 :]:
            thread.take(record)

        return not thread.is_mixed

    async def locate(self, thread: Thread) -> bool:
        """Find out the version of a window; return false if it must be read again.

        The caller holds the thread's ``lock``.
        """
        # An empty append writes nothing, and returns the version.
        end = await self.cp.append(thread.store_id, [])

        for count in (len(thread.appended) + 1, _MANY_RECORDS):
            start = max(0, end - count)
            records = await read_range(self.cp, thread.store_id, start, end)
            place = _place_of(thread.last_id, records)

            if len(records) < end - start:
                return False

            if place is not None:
                thread.version = start + place + 1

                for record in records[place + 1 :]:
                    thread.take(record)

                return not thread.is_mixed

        return False

    async def catch_up(self, thread: Thread) -> bool:
        """Read new records, and find out the version; return false if this failed.

        The thread was then deleted, or has too many new records. The next checkpoint
        reads it again.
        """
        async with thread.lock:
            read = self.locate if thread.version is None else self.extend

            if await read(thread):
                return True

        if self._cached.get(thread.store_id) is thread:
            self._cached[thread.store_id] = thread.unread()

        return False

    def _is_usable(self, thread: Thread, first: int | None) -> bool:
        """Return whether it is worth to extend a cached thread."""
        if first is None:
            return thread.count > 0 and not thread.is_window

        # A thread that is too large is replaced by a window of its newest records.
        is_small = thread.bytes_seen <= self._limit_bytes
        return thread.count > 0 and (is_small or not self._reads_ranges)

    def _bytes(self) -> int:
        return sum(thread.bytes_seen for thread in self._cached.values())


def _full_place(records: list[Any], ns: str | None, oldest: bool) -> int | None:
    """Return the index of a full checkpoint that can begin a window, or ``None``.

    Its parts, and the writes that it needs, must be among the records.
    """
    places = range(len(records))

    for place in places if oldest else reversed(places):
        record = records[place]

        if (
            isinstance(record, dict)
            and may_begin_window(record)
            and (ns is None or record.get("ns") == ns)
            and place >= int(record.get("parts", 0))
            and len(_needed(records, place)) == len(record.get("needs", ()))
        ):
            return place

    return None


def _needed(records: list[Any], place: int) -> list[Record]:
    """Return the records of writes to which the full checkpoint refers."""
    needs = records[place].get("needs", ())
    return [
        record
        for record in records[:place]
        if needs and _id_of(record) in needs and "writes" in record
    ]


def _records_back(records: list[Any], ns: str | None) -> int:
    """Return how many records to read to find the last full checkpoint, or 0."""
    for place in reversed(range(len(records))):
        record = records[place]

        if isinstance(record, dict) and (ns is None or record.get("ns") == ns):
            back = record.get("back")

            if type(back) is int:
                return len(records) - place + back + _MARGIN

    return 0


def _place_of(record_id: str | None, records: list[Any]) -> int | None:
    """Return the index of the record; it is usually near the end."""
    for place in reversed(range(len(records))):
        if _id_of(records[place]) == record_id:
            return place

    return None


def _id_of(record: object) -> object:
    return record.get("id") if isinstance(record, dict) else None
