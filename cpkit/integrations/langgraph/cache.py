"""A cache of the threads that a saver used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any

from cpkit.integrations.langgraph.errors import Unsupported
from cpkit.integrations.langgraph.names import HASHED, PLAIN, store_thread_id
from cpkit.integrations.langgraph.outbox import Outbox
from cpkit.integrations.langgraph.stored import Record
from cpkit.integrations.langgraph.thread import Thread
from cpkit.protocol import Checkpointer, ListsThreads, ReadsRanges
from cpkit.sessions.fenced import read_range

__all__ = ["Threads"]

# Records in the first read from the end of a thread. The next read has as many as the
# newest record asks for, and some more, because others may have written: before a
# record of writes, the tasks that ran beside it. Many of them may have written at once,
# so the next read has still more records; then more each time.
_FIRST_READ = 6
_MARGIN = 2
_MARGIN_OF_WRITES = 8
_MARGIN_OF_MANY = 24
_GROWTH = 4

# With more new records, a reader starts again at the last full checkpoint.
_MANY_RECORDS = 64

Test = Callable[[Thread], bool]


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
            # An append notes its record in the thread that is cached when it begins.
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
        is_enough: Test,
        *,
        first: int | None = 0,
        oldest: bool = False,
    ) -> Thread:
        """Return the thread, or a window of it that is enough.

        A thread in memory is extended by the records that are new in the store. Other
        arguments as for `windows`.
        """
        await self.outbox.wait_until_decided(store_thread_id(thread_id))

        while True:
            thread = self.get(thread_id)

            async with thread.turn:
                if self._cached.get(thread.store_id) is not thread:
                    # Another task has replaced it.
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

                        for name, checkpoint_id in thread.written.items():
                            found.note_written(name, checkpoint_id)

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

        ``first`` is the least number of records to begin with, or ``None`` for all.
        A window begins at a full checkpoint of the namespace, or of any: at the newest
        one that was read, or at the ``oldest``, as all windows but the first.
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
        """Yield the ids in the store of all LangGraph threads, page by page."""
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

        The caller holds the thread's ``turn``.
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

        # Another thread of this id, or more records than were asked for.
        if start >= 0 and (place > 0 or (stop and len(records) == _MANY_RECORDS)):
            return False

        for record in records[place + 1 :]:
            thread.take(record)

        return not thread.is_mixed

    async def locate(self, thread: Thread) -> bool:
        """Find out the version of a window; return false if it must be read again.

        The caller holds the thread's ``turn``.
        """
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

        The thread is then forgotten: it was deleted, or has too many new records.
        """
        async with thread.turn:
            read = self.locate if thread.version is None else self.extend

            if await read(thread):
                return True

        self.forget(thread)
        return False

    def _is_usable(self, thread: Thread, first: int | None) -> bool:
        """Return whether a cached thread may have what is asked for."""
        if first is None:
            return thread.count > 0 and not thread.is_window

        # A large one is replaced by its newest part.
        is_small = thread.bytes_seen <= self._limit_bytes
        return thread.count > 0 and (is_small or not self._reads_ranges)

    def _bytes(self) -> int:
        return sum(thread.bytes_seen for thread in self._cached.values())


def _full_place(records: list[Any], ns: str | None, oldest: bool) -> int | None:
    """Return the index of a full checkpoint whose parts are there too, or ``None``."""
    places = range(len(records))

    for place in places if oldest else reversed(places):
        record = records[place]

        if (
            isinstance(record, dict)
            and record.get("newest") is not None
            and record.get("first") is not None
            and (ns is None or record.get("ns") == ns)
            and place >= int(record.get("parts", 0))
            and len(_needed(records, place)) == len(record.get("needs", ()))
        ):
            return place

    return None


def _needed(records: list[Any], place: int) -> list[Record]:
    """Return the records of writes before a full checkpoint to which it refers."""
    needs = records[place].get("needs", ())
    return [
        record
        for record in records[:place]
        if needs and _id_of(record) in needs and "writes" in record
    ]


def _records_back(records: list[Any], ns: str | None) -> int:
    """Return how many records to read for the last full checkpoint, or 0."""
    for place in reversed(range(len(records))):
        record = records[place]

        if isinstance(record, dict) and (ns is None or record.get("ns") == ns):
            back = record.get("back")

            if type(back) is int:
                margin = _MARGIN_OF_WRITES if "writes" in record else _MARGIN
                return len(records) - place + back + margin

    return 0


def _place_of(record_id: str | None, records: list[Any]) -> int | None:
    """Return the index of the record, which is unlikely to be far from the end."""
    for place in reversed(range(len(records))):
        if _id_of(records[place]) == record_id:
            return place

    return None


def _id_of(record: object) -> object:
    return record.get("id") if isinstance(record, dict) else None
