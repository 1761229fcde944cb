"""Hiding checkpoints, and deleting and copying threads."""

from __future__ import annotations

from collections.abc import Sequence

from langgraph.checkpoint.serde.base import SerializerProtocol

from cpkit.fenced import append_once, read_part, read_range
from cpkit.fitting import append_what_fits
from cpkit.integrations.langgraph.composing import Draft
from cpkit.integrations.langgraph.errors import Unsupported
from cpkit.integrations.langgraph.records import Record, Stored, new_thread, weight_of
from cpkit.integrations.langgraph.threads import Threads
from cpkit.protocol import ErasesThreads

__all__ = ["Upkeep"]

# A copy reads and appends about as much at a time, in records and in characters.
_MOST_RECORDS = 32
_MOST_COPIED = 4 * 1024 * 1024


class Upkeep:
    """What is done with whole threads. Use it only on the store's event loop."""

    def __init__(self, threads: Threads, serde: SerializerProtocol) -> None:
        self._threads = threads
        self._serde = serde

    async def delete(self, thread_id: str) -> None:
        if not isinstance(self._threads.cp, ErasesThreads):
            raise Unsupported("delete_thread", "delete_thread")

        thread = self._threads.get(thread_id)

        async with thread.lock:
            await self._threads.cp.delete_thread(thread.store_id)
            thread.view = None

    async def hide_runs(self, run_ids: Sequence[str]) -> list[str]:
        """Hide the checkpoints of runs; return the threads that had some."""
        runs, changed = set(run_ids), []

        if not runs:
            return []

        async for view in self._threads.windows("delete_for_runs", lambda _: 0):
            of_runs = [
                (ns, stored)
                for ns, space in view.spaces.items()
                for stored in space.visible()
                if stored.head(self._serde)[1].get("run_id") in runs
            ]

            if of_runs:
                await self._hide(view.thread_id, of_runs)
                changed.append(view.thread_id)

        return changed

    async def copy(self, source_thread_id: str, target_thread_id: str) -> None:
        """Append the records of one thread to another, some at a time.

        Raises ``VersionConflict`` if another writer appends to the target meanwhile.
        Then, or if the process dies, the target has the oldest checkpoints.
        """
        source = self._threads.get(source_thread_id)
        target = self._threads.get(target_thread_id)

        if source is target:
            return

        view = await self._threads.read(target)
        extra = None if "thread" in view.extra else new_thread(target.name)
        position = await self._first(source.store_id)
        shift = view.version - position

        async def append(records: list[Record]) -> None:
            nonlocal position, extra
            await append_once(
                self._threads.cp,
                target.store_id,
                records,
                expected_version=position + shift,
                extra=extra,
            )
            extra = None
            position += len(records)

        while page := await self._page(source.store_id, position):
            for record in page:
                if "start" in record:
                    record["start"] += shift

                if record["type"] == "begin":  # it would hide what the target has
                    record |= {"type": "hidden", "checkpoints": []}

            await append_what_fits(append, page, None)

    async def _first(self, store_id: str) -> int:
        """Return the position of a thread's first record."""
        return (await read_part(self._threads.cp, store_id, 0, 1))[0]

    async def _page(self, store_id: str, start: int) -> list[Record]:
        """Return the next records to copy, of a limited weight."""
        stop = start + _MOST_RECORDS
        page = await read_range(self._threads.cp, store_id, start, stop)
        weight = 0

        for count, record in enumerate(page):
            weight += weight_of(record)

            if count and weight > _MOST_COPIED:
                return page[:count]

        return page

    async def _hide(
        self, thread_id: str, checkpoints: Sequence[tuple[str, Stored]]
    ) -> None:
        ids = [[ns, stored.id] for ns, stored in checkpoints]
        draft = Draft({"type": "hidden", "checkpoints": ids})
        await self._threads.append(self._threads.get(thread_id), draft)
