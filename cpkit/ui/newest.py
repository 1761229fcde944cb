"""The threads that changed last: stores list by id, so all ids are looked at."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from heapq import nlargest
from typing import Any

from cpkit.protocol import ListsThreads
from cpkit.records import ThreadInfo
from cpkit.tools.paging import thread_pages

__all__ = ["Newest", "Order"]

_KEPT = 2_000
_LISTED = 100_000  # ids, some seconds of work; the page says if there are more
_ALWAYS = 2_000  # ids that are listed again for each page, a tenth of a second of work

# For each of more ids, the order is used for so long: listing takes 4 % of the time.
_REUSED = timedelta(milliseconds=1)


@dataclass
class Newest:
    """The threads that changed last, newest first: at most two thousand.

    They are those of the ``count`` ids that were listed at ``time``. ``is_all`` if the
    store has no other ids.
    """

    threads: list[ThreadInfo] = field(default_factory=list)
    count: int = 0
    is_all: bool = True
    time: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def is_usable(self) -> bool:
        """Whether listing so many ids again is not worth it yet."""
        age = datetime.now(UTC) - self.time
        return self.count > _ALWAYS and age < self.count * _REUSED

    @classmethod
    async def of(
        cls,
        store: ListsThreads,
        *,
        prefix: str = "",
        internal: bool = False,
        part: str = "",
        most: int | None = None,
    ) -> Newest:
        """List the ids that start with a prefix, and keep those that have a part.

        Upper and lower case are alike in the part. Stops after ``most`` ids.
        """
        found = cls()
        limit = None if most is None else most + 1

        async for page in thread_pages(
            store, prefix=prefix, internal=internal, limit=limit
        ):
            rest = page if most is None else page[: most - found.count]
            found.is_all = len(rest) == len(page)
            found.count += len(rest)
            named = [one for one in rest if part in one.thread_id.casefold()]
            found.threads = nlargest(
                _KEPT, [*found.threads, *named], key=lambda info: info.updated_at
            )

        return found


class Order:
    """The threads of a store that changed last; of very many, as of a while ago."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._last: Newest | None = None
        self._turn = asyncio.Lock()

    async def newest(self) -> Newest:
        """Return the newest threads, without those of cpkit's own."""
        async with self._turn:
            last = self._last

            if last is None or not last.is_usable:
                last = self._last = await Newest.of(self._store, most=_LISTED)

            return last
