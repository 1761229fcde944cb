"""Joins the records that are to be appended to one thread at the same time.

The tasks of a graph's step store their writes side by side, and the next checkpoint
soon after. What is queued while an append is under way goes into the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field

from cpkit.errors import BackendUnavailable, CheckpointerError, VersionConflict
from cpkit.integrations.langgraph.stored import Draft, Record, may_begin_window
from cpkit.integrations.langgraph.thread import Thread, record_size, split
from cpkit.protocol import Checkpointer

__all__ = ["Outbox"]

# LangGraph puts the next checkpoint a few turns of the event loop after the append that
# it waited for. The writes that are queued wait as long, so that one append has both.
_TURNS = 3

# Attempts to append a full checkpoint while others append to the thread.
_TRIES = 4

# The size of what is joined. It is below `LARGEST_TEXT`, so that a draft that needs
# parts is appended alone.
_MOST_BYTES = 1024 * 1024


@dataclass(slots=True, eq=False)
class _Queued:
    """A draft, the thread that it was made for, and the caller that waits."""

    thread: Thread
    draft: Draft
    answer: asyncio.Future[bool | Exception] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Outbox:
    """Appends drafts, in the order of the calls; one append at a time for each thread.

    ``forget`` is called with a thread that has been deleted. ``catch_up`` reads a
    thread's new records and returns whether it has all.

    A full checkpoint says things of all records before it. They are true only if its
    writer has read them all, so it is appended with an expected version.
    """

    def __init__(
        self,
        cp: Checkpointer[object],
        forget: Callable[[Thread], None],
        catch_up: Callable[[Thread], Awaitable[bool]],
    ) -> None:
        self._cp = cp
        self._forget = forget
        self._catch_up = catch_up
        self._waiting: dict[str, list[_Queued]] = {}
        self._senders: dict[str, asyncio.Task[None]] = {}
        self._undecided: dict[str, asyncio.Task[None]] = {}

    async def append(self, thread: Thread, draft: Draft) -> bool:
        """Append a draft; return false if the thread was deleted before.

        Then the draft is stored all the same, and what it builds on is missing. A
        caller that is cancelled before the append begins takes its draft back.
        """
        name = thread.store_id
        queued = _Queued(thread, draft)
        self._waiting.setdefault(name, []).append(queued)

        if name not in self._senders:
            self._senders[name] = asyncio.create_task(self._send(name))

        try:
            outcome = await queued.answer
        except asyncio.CancelledError:
            if queued in self._waiting.get(name, ()):
                self._waiting[name].remove(queued)
            elif name in self._senders:
                self._undecided[name] = self._senders[name]

            raise

        if isinstance(outcome, Exception):
            raise outcome

        return outcome

    def is_appending(self, store_id: str) -> bool:
        """Return whether a draft for this thread is queued, or is being appended."""
        return store_id in self._senders

    async def wait_until_decided(self, store_id: str) -> None:
        """Wait for appends whose callers were cancelled."""
        if (sender := self._undecided.get(store_id)) is not None:
            await asyncio.wait([sender])

            # Others may wait for it too, and another one may be undecided by now.
            if self._undecided.get(store_id) is sender:
                del self._undecided[store_id]

    async def _send(self, name: str) -> None:
        """Append what is queued for a thread, until nothing is."""
        waiting = self._waiting[name]
        batch: list[_Queued] = []

        try:
            while waiting:
                for _ in range(_TURNS):
                    await asyncio.sleep(0)

                batch = _take(waiting)

                if batch:
                    await self._append(batch)
        finally:
            del self._senders[name], self._waiting[name]

            # If the event loop shuts down, the callers are cancelled too.
            for queued in batch + waiting:
                queued.answer.cancel()

    async def _append(self, batch: list[_Queued]) -> None:
        """Append the drafts in one step, and answer the callers."""
        try:
            pieces, version, answered = await self._append_records(batch)
        except Exception as exc:
            # One draft that is refused must not make the others fail.
            if len(batch) > 1 and _is_refused(exc):
                for queued in batch:
                    await self._append([queued])
            else:
                _answer_all(batch, exc)

            return

        try:
            self._note(batch, pieces, version, answered)
        except Exception as exc:
            _answer_all(batch, exc)

    async def _append_records(
        self, batch: list[_Queued]
    ) -> tuple[list[list[Record]], int, int]:
        """Append the records of the drafts.

        Returns them, the version after the append, and the highest version that was
        known before.
        """
        ids = {queued.draft.record["id"] for queued in batch}
        full = [queued for queued in batch if may_begin_window(queued.draft.record)]

        # The thread was replaced in the cache: it is not known which one is current.
        if any(queued.thread is not full[0].thread for queued in full):
            _make_ordinary(full)
            full = []

        for attempt in range(_TRIES + 1):
            expected = None

            if full and attempt == _TRIES:
                _make_ordinary(full)
                full = []

            if full:
                full = await self._current(full, is_behind=attempt > 0)
                expected = full[0].thread.version if full else None

            pieces = [split(one.thread, one.draft.finished(ids)) for one in batch]
            records: list[Record] = []

            for queued, piece in zip(batch, pieces, strict=True):
                records += piece
                queued.thread.set_back(piece[-1], len(records) - 1)

            answered = max(queued.thread.answered for queued in batch)

            try:
                version = await self._cp.append(
                    batch[0].thread.store_id, records, expected_version=expected
                )
            except VersionConflict:
                continue

            return pieces, version, answered

        raise AssertionError("the last append expects no version")

    async def _current(self, full: list[_Queued], *, is_behind: bool) -> list[_Queued]:
        """Read what others appended, and correct what full checkpoints say of it.

        Returns the checkpoints that may still be full.
        """
        thread = full[0].thread

        if not is_behind and thread.version is not None and not thread.appended:
            return full

        early_writes = dict(thread.early_writes)

        if not await self._catch_up(thread):
            _make_ordinary(full)
            return []

        current: list[_Queued] = []

        for queued in full:
            record = queued.draft.record
            ns, checkpoint_id = record["ns"], record["checkpoint_id"]
            last = thread.early_writes.get(ns, "")

            # Others have stored writes of this checkpoint, or of a later one.
            if last != early_writes.get(ns, "") and last >= checkpoint_id:
                _make_ordinary([queued])
            else:
                thread.set_higher_ids(record)
                current.append(queued)

        return current

    def _note(
        self,
        batch: list[_Queued],
        pieces: list[list[Record]],
        version: int,
        answered: int,
    ) -> None:
        """Add what was appended to the cached threads, and answer the callers."""
        end = version - sum(map(len, pieces))

        for queued, piece in zip(batch, pieces, strict=True):
            thread = queued.thread
            end += len(piece)

            if version <= answered:
                self._forget(thread)
            else:
                thread.answered = max(thread.answered, version)

                if end == len(piece):
                    thread.first_id = piece[0]["id"]

                thread.add_own(piece, end)
                queued.draft.note_stored()

            _answer(queued, version > answered)


def _take(waiting: list[_Queued]) -> list[_Queued]:
    """Take drafts off the queue for one append: at least one, if any is left."""
    size = count = 0

    if len(waiting) == 1:
        return [waiting.pop()]

    for queued in waiting:
        size += record_size(queued.draft.record)

        if count and size > _MOST_BYTES:
            break

        count += 1

    batch = waiting[:count]
    del waiting[:count]
    return batch


def _make_ordinary(full: list[_Queued]) -> None:
    """Mark these checkpoints as not full, so that no reader begins at them."""
    for queued in full:
        del queued.draft.record["newest"], queued.draft.record["top"]


def _is_refused(exc: Exception) -> bool:
    return isinstance(exc, CheckpointerError) and not isinstance(
        exc, BackendUnavailable
    )


def _answer_all(batch: list[_Queued], exc: Exception) -> None:
    """Raise the error for each caller: an object of its own, if it can be copied."""
    for queued in batch:
        own = exc

        if len(batch) > 1:
            with suppress(Exception):  # a store's own class may not allow it
                own = copy(exc)

        _answer(queued, own)


def _answer(queued: _Queued, outcome: bool | Exception) -> None:
    if not queued.answer.done():
        queued.answer.set_result(outcome)
