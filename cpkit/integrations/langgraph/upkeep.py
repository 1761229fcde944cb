"""Deleting, pruning and copying threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

from langgraph.checkpoint.serde.base import SerializerProtocol

from cpkit.errors import VersionConflict
from cpkit.fenced import read_part
from cpkit.integrations.langgraph.checkpoints import Found
from cpkit.integrations.langgraph.composing import Composer, Draft
from cpkit.integrations.langgraph.errors import Unsupported
from cpkit.integrations.langgraph.names import config_for
from cpkit.integrations.langgraph.records import Stored, View, new_thread
from cpkit.integrations.langgraph.threads import Thread, Threads
from cpkit.protocol import ErasesThreads, TrimsThreads

__all__ = ["Upkeep"]

# A copy reads and appends so many records at a time, of at most 2 MiB each.
_COPIED = 16

_TRIES = 5
"""Tries of a prune beside other writers of the thread."""

_DELTA_COUNTERS = "counters_since_delta_snapshot"
"""In the metadata of a checkpoint that needs an earlier one for a delta channel."""


class Upkeep:
    """What is done with whole threads. Use it only on the store's event loop."""

    def __init__(self, threads: Threads, serde: SerializerProtocol) -> None:
        self._threads = threads
        self._serde = serde
        self._composer = Composer(serde)

    async def delete(self, thread_id: str) -> None:
        if not isinstance(self._threads.cp, ErasesThreads):
            raise Unsupported("delete_thread", "delete_thread")

        thread = self._threads.get(thread_id)

        async with thread.lock:
            await self._threads.cp.delete_thread(thread.store_id)
            thread.view = None

    async def delete_runs(self, run_ids: Sequence[str]) -> None:
        """Hide the checkpoints of runs, and free them where that halves a thread."""
        runs = _checked("run_ids", run_ids)

        if not runs:
            return

        async for view in self._threads.windows("delete_for_runs", lambda _: 0):
            of_runs = [
                stored
                for stored in _last(view)
                if stored.head(self._serde)[1].get("run_id") in runs
            ]

            if of_runs:
                thread = self._threads.get(view.thread_id)
                await self._threads.append(thread, _hidden(of_runs))
                await self._free_hidden(thread)

    async def prune(self, thread_ids: Sequence[str], strategy: str) -> None:
        """Delete the threads, or free all but the newest checkpoints in each."""
        prunes = {"keep_latest": self._keep_newest, "delete": self.delete}

        if strategy not in prunes:
            raise ValueError(
                f"strategy must be 'keep_latest' or 'delete', not {strategy!r}"
            )

        for thread_id in _checked("thread_ids", thread_ids):
            await prunes[strategy](thread_id)

    async def _keep_newest(self, thread_id: str) -> None:
        thread = self._threads.get(thread_id)

        for tries in range(_TRIES, 0, -1):
            view = await self._threads.read(thread, lambda _: 0)
            newest = _last(view, 1)
            root = next((one.id for one in newest if not one.record["ns"]), None)
            shown = [one for one in newest if not self._is_over(one, root)]
            others = [one for one in _last(view) if one not in shown]

            if not others:  # a prune may have died before its trim
                await self._threads.trim(thread, view, view.begin)
                return

            if not isinstance(self._threads.cp, TrimsThreads):
                await self._threads.append(thread, _hidden(others))
                return

            try:
                kept = self._kept(view, shown)
                await self._threads.begin_again(thread, view, kept)
                return
            except VersionConflict:
                if tries == 1:
                    raise

    async def _free_hidden(self, thread: Thread) -> None:
        """Free the hidden checkpoints, if the thread takes half of its bytes then.

        Where the store cannot trim, or another writer appends meanwhile, the hidden
        ones stay; the next prune frees them.
        """
        view = await self._threads.read(thread, lambda _: 0)
        shown = _last(view)
        count = sum(len(space.checkpoints) for space in view.spaces.values())

        if not isinstance(self._threads.cp, TrimsThreads) or len(shown) * 2 > count:
            return

        drafts = self._kept(view, shown)

        if sum(one.weight for one in drafts) * 2 <= view.weight:
            with suppress(VersionConflict):
                await self._threads.begin_again(thread, view, drafts)

    def _is_over(self, stored: Stored, root: str | None) -> bool:
        """Return whether this is of a subgraph's call from an older root checkpoint.

        The namespace of a call ends with its task's id, after a colon. That of a
        subgraph with its own checkpointer has none, and outlives each call.
        """
        if ":" not in stored.record["ns"]:
            return False

        parents = stored.head(self._serde)[1].get("parents") or {}
        known = stored.view.space("").checkpoints
        return parents.get("") in known and parents[""] != root

    # Storing checkpoints again

    def _kept(self, view: View, shown: Sequence[Stored]) -> list[Draft]:
        """Return drafts of these checkpoints, and of the hidden ones that they need."""
        needed = self._needed(view, shown)
        drafts = self._again(view, needed)

        for ns, space in view.spaces.items():
            # Writes may stand before their checkpoint.
            for checkpoint_id in space.writes.keys() - space.checkpoints.keys():
                drafts += _writes_again(view, ns, checkpoint_id)

        hidden = [one for one in needed if one not in shown]
        return [*drafts, _hidden(hidden)] if hidden else drafts

    def _needed(self, view: View, shown: Iterable[Stored]) -> list[Stored]:
        """Return these checkpoints, and those from which delta channels are rebuilt."""
        found: dict[int, Stored] = {}

        for one in shown:
            stored: Stored | None = one

            while stored is not None and stored.position not in found:
                found[stored.position] = stored

                if not stored.head(self._serde)[1].get(_DELTA_COUNTERS):
                    break

                stored = view.complete(stored.record["ns"], stored.record["parent"])

        return [found[position] for position in sorted(found)]

    def _again(self, view: View, checkpoints: Sequence[Stored]) -> list[Draft]:
        """Return drafts that store these checkpoints and their writes whole."""
        drafts: list[Draft] = []
        ids = {(one.record["ns"], one.id) for one in checkpoints}
        empty = View(view.store_id)

        for stored in checkpoints:
            ns, parent = stored.record["ns"], stored.record["parent"]
            found = Found.of(stored).load(self._serde)
            known = parent if (ns, parent) in ids else None
            before = config_for(view.thread_id, ns, known)
            draft = self._composer.checkpoint(
                empty, {}, before, found.checkpoint, found.metadata, {}
            )
            drafts += [draft, *_writes_again(view, ns, stored.id)]

        return drafts

    # Copying

    async def copy(self, source_id: str, target_id: str, last: int | None) -> None:
        """Put a thread's records, or its last checkpoints, into another thread."""
        if last is not None and last < 1:
            raise ValueError(f"last must be at least 1, not {last!r}")

        source, target = self._threads.get(source_id), self._threads.get(target_id)

        if source is target:
            return

        if last is None:
            await self._copy_records(source, target)
            return

        view = await self._threads.window(source.store_id, lambda _: 0)
        newest = self._needed(view, _last(view, last))

        for draft in self._again(view, newest):
            await self._threads.append(target, draft)

    async def _copy_records(self, source: Thread, target: Thread) -> None:
        view = await self._threads.read(target)
        extra = None if "thread" in view.extra else new_thread(target.name)
        position, end = 0, view.version

        while True:
            # It begins later where a prune trims, which has stored again what it keeps.
            start, page = await read_part(
                self._threads.cp, source.store_id, position, position + _COPIED
            )

            if not page and start == position:
                return

            for record in page:
                if "start" in record:
                    record["start"] += end - start

                if record["type"] == "begin":  # it would hide what the target has
                    record |= {"type": "hidden", "checkpoints": []}

            if page:
                await self._threads.append_at(target.store_id, page, end, extra)
                extra = None

            end += len(page)
            position = start + len(page)


def _writes_again(view: View, ns: str, checkpoint_id: str) -> Iterator[Draft]:
    """Yield drafts of the writes to a checkpoint, as they are stored."""
    for position, record in view.space(ns).writes.get(checkpoint_id, ()):
        with view.checked(position):
            entries = [one for *_, one in record["writes"] if type(one) is list]
            ids = [
                name
                for _, _, text, *_ in entries
                if type(text) is list
                for name in text
            ]
            blobs = [{"type": "blob", "id": n, "text": view.blobs[n]} for n in ids]

        yield Draft(dict(record), blobs=blobs)


def _last(view: View, count: int | None = None) -> list[Stored]:
    """Return the last checkpoints of each namespace that are not hidden, or all."""
    return [
        stored
        for space in view.spaces.values()
        for stored in islice(space.visible(), count)
    ]


def _hidden(checkpoints: Iterable[Stored]) -> Draft:
    """Return the record that hides checkpoints."""
    ids = [[one.record["ns"], one.id] for one in checkpoints]
    return Draft({"type": "hidden", "checkpoints": ids})


def _checked(name: str, ids: Sequence[str]) -> Sequence[str]:
    """Refuse a single string, whose letters would be taken for ids."""
    if isinstance(ids, str):
        raise TypeError(f"{name} must be a sequence of ids, not the str {ids[:40]!r}")

    return ids
