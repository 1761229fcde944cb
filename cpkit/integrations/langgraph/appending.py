"""Appends to a thread, with or without a run that owns it."""

from __future__ import annotations

from uuid import uuid4

from langchain_core.runnables import RunnableConfig

from cpkit.errors import VersionConflict
from cpkit.integrations.langgraph.cache import Threads
from cpkit.integrations.langgraph.errors import NotOwner
from cpkit.integrations.langgraph.names import OWNER
from cpkit.integrations.langgraph.stored import Draft
from cpkit.integrations.langgraph.thread import Thread, new_record, split

__all__ = ["Appends"]


class Appends:
    """Appends records, and adds them to the cached threads."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    async def append(
        self, thread: Thread, draft: Draft, config: RunnableConfig | None = None
    ) -> bool:
        """Append a record; return false if the cached thread was deleted."""
        owner: object = config["configurable"].get(OWNER) if config else None

        if isinstance(owner, str):
            return await self._append_as(owner, thread, draft)

        return await self._threads.outbox.append(thread, draft)

    async def claim(self, thread_id: str) -> str:
        """Append a record that makes a new run the owner; return its token."""
        thread = await self._threads.find(thread_id, "", lambda _: True)
        token = uuid4().hex
        await self.append(thread, Draft(new_record(thread, "owner", token=token)))
        return token

    async def _append_as(self, owner: str, thread: Thread, draft: Draft) -> bool:
        """Append the record if the run owns the thread, in one atomic step."""
        while True:
            # The record of the owner may stand before the records that were read.
            is_known = thread.count > 0 and thread.owner is not None

            async with thread.lock:
                if is_known and thread.version is None:
                    is_known = await self._threads.locate(thread)

            if not is_known:
                self._threads.forget(thread)
                thread = await self._threads.read(thread.thread_id)

            async with thread.lock:
                if await self._append_owned(owner, thread, draft):
                    return True

            # The thread was deleted, or others have added many records.
            self._threads.forget(thread)
            thread = await self._threads.read(thread.thread_id)

    async def _append_owned(self, owner: str, thread: Thread, draft: Draft) -> bool:
        """Append if the run is the owner; return false if the thread must be read."""
        while True:
            if thread.owner != owner and thread.count:
                await self._threads.extend(thread)

            if thread.owner != owner or thread.version is None:
                raise NotOwner(str(thread.thread_id), owner)

            if "newest" in draft.record:
                thread.set_higher_ids(draft.record)

            records = split(thread, draft.finished(()))
            thread.set_back(records[-1], len(records) - 1)

            try:
                version = await self._threads.cp.append(
                    thread.store_id, records, expected_version=thread.version
                )
            except VersionConflict:
                if not await self._threads.extend(thread):
                    return False
            else:
                thread.answered = max(thread.answered, version)
                thread.add_own(records, version, is_reader=True)
                draft.note_stored()
                return True
