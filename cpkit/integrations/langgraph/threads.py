"""The threads that a saver used last: reading them, and appending to them."""

from __future__ import annotations

import asyncio
from collections import ChainMap, OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from cpkit.errors import (
    BackendUnavailable,
    CheckpointerError,
    CorruptThread,
    VersionConflict,
)
from cpkit.fenced import append_once, load_range
from cpkit.fitting import append_what_fits
from cpkit.integrations.langgraph.composing import Draft, Offers
from cpkit.integrations.langgraph.errors import Unsupported
from cpkit.integrations.langgraph.names import HASHED, PLAIN, store_thread_id
from cpkit.integrations.langgraph.records import Record, View, new_thread
from cpkit.protocol import Checkpointer, ListsThreads, TrimsThreads

__all__ = ["Thread", "Threads"]

# A first read has this many records from the end of a thread.
_FIRST_READ = 4

# With more new records than this, a reader begins again at the end of the thread.
_MANY_RECORDS = 64

# LangGraph puts the next checkpoint a few turns of the event loop after the append that
# it waited for. The writes that are queued wait as long, so that one append has both.
_TURNS = 3

# The checkpoints whose writes are offered to the next one.
_MOST_OFFERED = 8

Need = Callable[[View], int]
"""Returns where a view must begin, for what it is needed for."""


_Queued = tuple[Draft, asyncio.Future[Exception | None]]
"""A draft, and the answer for which its caller waits."""


@dataclass(slots=True, eq=False)
class Thread:
    """A thread, the ``view`` of it in memory, and the drafts that wait.

    ``lock`` is held by each read and each append, so the view is always that of the
    store at one version. It is ``None`` until it is read.
    """

    store_id: str
    name: str
    view: View | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    queue: list[_Queued] = field(default_factory=list)
    sender: asyncio.Task[None] | None = None
    offers: dict[tuple[str, str | None], Offers] = field(default_factory=dict)

    def offers_of(self, ns: str, checkpoint_id: str) -> Offers:
        """Return the offers of the tasks of a checkpoint, to add to them."""
        while len(self.offers) > _MOST_OFFERED:
            del self.offers[next(iter(self.offers))]

        return self.offers.setdefault((ns, checkpoint_id), {})


class Threads:
    """The threads of a store; those used last are in memory.

    ``limit`` bounds their number, and ``limit_bytes`` their weight. It is used only on
    the store's loop.
    """

    def __init__(
        self, cp: Checkpointer[Any], limit: int, limit_bytes: int = 64 * 1024 * 1024
    ) -> None:
        self.cp = cp
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._cached: OrderedDict[str, Thread] = OrderedDict()

    def get(self, thread_id: object) -> Thread:
        """Return the cached thread, or a new one, without asking the store."""
        store_id = store_thread_id(thread_id)
        thread = self._cached.get(store_id)

        if thread is None:
            thread = self._cached[store_id] = Thread(store_id, str(thread_id))

        self._cached.move_to_end(store_id)
        return thread

    async def read(self, thread: Thread, need: Need = lambda view: view.first) -> View:
        """Return a view with every record that is in the store now, as far as needed.

        The caller uses it before it awaits anything else.
        """
        async with thread.lock:
            view = await self._catch_up(thread)

            while (found := await self._reached(view, need)) is None:
                thread.view = None
                view = await self._catch_up(thread)

            if found.first <= found.begin:
                view.names = {*found.spaces}  # also if it is not kept whole

            if found.weight <= self._limit_bytes // 2:
                thread.view = found

        self._evict()
        return found

    async def window(self, store_id: str, need: Need = lambda view: view.first) -> View:
        """Read a thread from its end, and back until it has what is needed."""
        while True:
            data = await load_range(self.cp, store_id, -_FIRST_READ)

            if data is None:
                return View(store_id)

            view = View(store_id, data.extra, data.messages, data.version)

            if (found := await self._reached(view, need)) is not None:
                return found

    async def append(self, thread: Thread, draft: Draft) -> None:
        """Append a draft; raise ``Stale`` if it builds on what is not there.

        A caller that is cancelled before the append begins takes its draft back. The
        drafts of one thread that are put at the same time share an append.
        """
        if draft.fence is not None and draft.record["type"] == "writes":
            draft.fence.writes.append(draft)
            return

        queued: _Queued = draft, asyncio.get_running_loop().create_future()
        thread.queue.append(queued)

        if thread.sender is None:
            thread.sender = asyncio.create_task(self._send(thread))

        try:
            outcome = await queued[1]
        except asyncio.CancelledError:
            if queued in thread.queue:
                thread.queue.remove(queued)

            raise

        if outcome is not None:
            raise outcome

    async def begin_again(
        self, thread: Thread, view: View, drafts: list[Draft]
    ) -> None:
        """Store the drafts again at the end of a thread, and trim all before them.

        Raises ``VersionConflict`` if another writer appended after the view was read.
        Then, or if the process dies, the thread has all that it had.
        """
        end = View(view.store_id)
        positions: dict[object, int] = {}
        records: list[Record] = []

        for draft in drafts:
            records += draft.placed(end, view.version + len(records), positions)

        records.append({"type": "begin", "before": view.version, "size": 0})

        async with thread.lock:
            thread.view = None  # it has what goes
            await self.append_at(thread.store_id, records, view.version)

        await self.trim(thread, view, view.version)

    async def append_at(
        self,
        store_id: str,
        records: list[Record],
        position: int,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Append records at this position, in more steps if one would be too large."""

        async def append(part: list[Record]) -> None:
            nonlocal position, extra
            await append_once(
                self.cp, store_id, part, expected_version=position, extra=extra
            )
            position += len(part)
            extra = None

        await append_what_fits(append, records, None)

    async def trim(self, thread: Thread, view: View, before: int) -> None:
        """Trim the records of a view before a position, if the store can."""
        if view.first < before and isinstance(self.cp, TrimsThreads):
            async with thread.lock:
                thread.view = None
                await self.cp.trim(thread.store_id, before)

    async def windows(self, method: str, need: Need) -> AsyncIterator[View]:
        """Yield a window of each LangGraph thread, but not of foreign threads."""
        if not isinstance(self.cp, ListsThreads):
            raise Unsupported(method, "list_threads")

        for prefix in (PLAIN, HASHED):
            after = None

            while page := await self.cp.list_threads(prefix=prefix, after=after):
                after = page[-1].thread_id

                for info in page:
                    try:
                        yield await self.window(info.thread_id, need)
                    except CorruptThread:
                        data = await load_range(self.cp, info.thread_id, 0, 0)

                        if data is not None and "thread" in data.extra:
                            raise

    # Reading

    async def _reached(self, view: View, need: Need) -> View | None:
        """Return the view with earlier records as needed; ``None`` if it is gone."""
        while (start := need(view)) < view.first:
            data = await load_range(self.cp, view.store_id, start, view.first)

            # Or a prune has stored again what this view needs.
            if data is None or not view.is_of(data.extra) or data.first > view.first:
                return None

            if not data.messages:  # they were trimmed before
                view.begin = view.first
                return view

            records = data.messages + view.records
            view = View(view.store_id, view.extra, records, view.version)

        return view

    async def _catch_up(self, thread: Thread) -> View:
        """Add what is new in the store to the view, or read the end of the thread."""
        view = thread.view

        # A view that has grown large is replaced by the end of the thread.
        if view is not None and view.weight <= self._limit_bytes // 2:
            end = view.version + _MANY_RECORDS
            data = await load_range(self.cp, thread.store_id, view.version, end)

            if data is None and view.version == 0:
                return view

            # Otherwise the thread was deleted, or has too many new records.
            if (
                data is not None
                and view.is_of(data.extra)
                and data.version == view.version + len(data.messages)
            ):
                view.extra = data.extra
                view.extend(data.messages)
                return view

        thread.view = await self.window(thread.store_id)
        return thread.view

    def _evict(self) -> None:
        """Forget the threads that were used longest ago, if there are too many."""
        views = [one.view for one in self._cached.values() if one.view is not None]
        weight = sum(view.weight for view in views)
        count = len(self._cached)

        for store_id, thread in [*self._cached.items()]:
            if count <= self._limit and weight <= self._limit_bytes:
                break

            if thread.sender is None and not thread.lock.locked():
                del self._cached[store_id]
                count -= 1
                weight -= thread.view.weight if thread.view else 0

    # Appending

    async def _send(self, thread: Thread) -> None:
        """Append what is queued for a thread, until nothing is."""
        batch: list[_Queued] = []

        try:
            while thread.queue:
                for _ in range(_TURNS):
                    await asyncio.sleep(0)

                async with thread.lock:
                    batch, thread.queue = thread.queue, []
                    await self._append(thread, batch)
        finally:
            thread.sender = None

            # If the event loop shuts down, the callers are cancelled too.
            for _, answer in batch + thread.queue:
                answer.cancel()

            thread.queue = []

    async def _append(self, thread: Thread, batch: list[_Queued]) -> None:
        """Append the drafts in one step, and answer the callers."""
        try:
            while True:
                view = thread.view or await self._catch_up(thread)
                batch, records, extra = _admitted(view, thread.name, batch)

                if not batch:
                    return

                try:
                    await append_once(
                        self.cp,
                        thread.store_id,
                        records,
                        expected_version=view.version,
                        extra=extra or None,
                    )
                    break
                except VersionConflict:
                    await self._catch_up(thread)

            view.extra = {**view.extra, **extra}
            view.extend(records)
            _answer(batch, None)
        except Exception as exc:
            # What is stored is not known, or not known to this process.
            thread.view = None

            is_unclear = isinstance(exc, BackendUnavailable)

            if is_unclear or len(batch) == 1 or not isinstance(exc, CheckpointerError):
                _answer(batch, exc)
                return

            # One draft that is refused must not make the others fail.
            for queued in batch:
                await self._append(thread, [queued])


def _admitted(
    view: View, name: str, batch: list[_Queued]
) -> tuple[list[_Queued], list[Record], dict[str, Any]]:
    """Return the drafts that may be appended to the view, their records and extra.

    The callers of the others are answered.
    """
    admitted: list[_Queued] = []
    records: list[Record] = []
    positions: ChainMap[object, int] = ChainMap({}, view.positions)
    extra = {} if "thread" in view.extra else new_thread(name)

    for draft, answer in batch:
        if (refusal := draft.refusal(view, positions)) is not None:
            _answer([(draft, answer)], refusal)
            continue

        for one in (*(draft.fence.writes if draft.fence else ()), draft):
            end = view.version + len(records)
            records += one.placed(view, end, positions)
            extra |= one.extra

        admitted.append((draft, answer))

    return admitted, records, extra


def _answer(batch: list[_Queued], outcome: Exception | None) -> None:
    for _, answer in batch:
        if not answer.done():
            answer.set_result(outcome)
