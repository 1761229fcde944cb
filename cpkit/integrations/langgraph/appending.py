"""Appends to a thread, with or without a run that owns it."""

from __future__ import annotations

from uuid import uuid4

from langchain_core.runnables import RunnableConfig

from cpkit.errors import VersionConflict
from cpkit.integrations.langgraph.cache import Threads
from cpkit.integrations.langgraph.errors import NotOwner
from cpkit.integrations.langgraph.names import FENCE, OWNER
from cpkit.integrations.langgraph.stored import Draft, Fence, Record, is_full
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
        names = config["configurable"] if config else {}
        token = names.get(OWNER)
        owner = token if isinstance(token, str) else None
        fence: Fence | None = names.get(FENCE)

        if fence is not None and draft.record["type"] == "writes":
            fence.writes.append(draft)
            return True

        if owner is not None or fence is not None:
            return await self._append_checked(owner, fence, thread, draft)

        return await self._threads.outbox.append(thread, draft)

    async def claim(self, thread_id: str) -> str:
        """Append a record that makes a new run the owner; return its token."""
        thread = await self._threads.find(thread_id, "", lambda _: True)
        token = uuid4().hex
        await self.append(thread, Draft(new_record(thread, "owner", token=token)))
        return token

    async def _append_checked(
        self, owner: str | None, fence: Fence | None, thread: Thread, draft: Draft
    ) -> bool:
        """Append the record if the run may, in one atomic step.

        The run must own the thread if it has a token. With a fence, the thread must be
        at the version of the fence.
        """
        while True:
            # The record of the owner may stand before the records that were read.
            is_known = thread.count > 0 and (owner is None or thread.owner is not None)

            async with thread.lock:
                if is_known and thread.version is None:
                    is_known = await self._threads.locate(thread)

            if not is_known:
                self._threads.forget(thread)
                thread = await self._threads.read(thread.thread_id)

            async with thread.lock:
                if await self._append_at_end(owner, fence, thread, draft):
                    return True

            # The thread was deleted, or others have added many records.
            self._threads.forget(thread)
            thread = await self._threads.read(thread.thread_id)

    async def _append_at_end(
        self, owner: str | None, fence: Fence | None, thread: Thread, draft: Draft
    ) -> bool:
        """Append if the run may; return false if the thread must be read."""
        drafts = [*(fence.writes if fence else ()), draft]

        while True:
            if owner is not None:
                if thread.owner != owner and thread.count:
                    await self._threads.extend(thread)

                if thread.owner != owner or thread.version is None:
                    raise NotOwner(str(thread.thread_id), owner)

            version = thread.version or 0

            if fence is not None and version != fence.version:
                raise VersionConflict(thread.store_id, fence.version or 0, version)

            if is_full(draft.record):
                thread.set_higher_ids(draft.record)

            ids = {one.record["id"] for one in drafts}
            records: list[Record] = []

            for one in drafts:
                records += split(thread, one.finished(ids))
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

                for one in drafts:
                    one.note_stored()

                return True
