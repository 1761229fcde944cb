"""Appends to a thread, with or without a run that owns it."""

from __future__ import annotations

from uuid import uuid4

from langchain_core.runnables import RunnableConfig

from cpkit.errors import VersionConflict
from cpkit.integrations.langgraph.cache import Threads
from cpkit.integrations.langgraph.errors import NotOwner
from cpkit.integrations.langgraph.names import OWNER
from cpkit.integrations.langgraph.thread import Record, Thread, new_record, split

__all__ = ["Appends"]

# A message has at most 16 MiB. Base64 text of this length fits, with the rest.
_LARGEST_TEXT = 8 * 1024 * 1024


class Appends:
    """Appends records, and adds them to the cached threads."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    async def append(
        self, thread: Thread, record: Record, config: RunnableConfig | None = None
    ) -> bool:
        """Append a record; return false if the cached thread was deleted."""
        records = split(thread, record, _LARGEST_TEXT)
        owner: object = config["configurable"].get(OWNER) if config else None

        if isinstance(owner, str):
            return await self._append_as(owner, thread, records)

        answered = thread.answered
        version = await self._threads.cp.append(thread.store_id, records)

        if version <= answered:
            self._threads.forget(thread)
            return False

        thread.answered = max(thread.answered, version)

        if version == len(records):
            thread.first_id = records[0]["id"]

        thread.add_own(records, version)
        return True

    async def claim(self, thread_id: str) -> str:
        """Append a record that makes a new run the owner; return its token."""
        thread = await self._threads.find(thread_id, "", lambda _: True)
        token = uuid4().hex
        await self.append(thread, new_record(thread, "owner", token=token))
        return token

    async def _append_as(
        self, owner: str, thread: Thread, records: list[Record]
    ) -> bool:
        """Append the records if the run owns the thread, in one atomic step."""
        while True:
            # The record of the owner may stand before the records that were read.
            is_known = thread.count > 0 and thread.owner is not None

            async with thread.turn:
                if is_known and thread.version is None:
                    is_known = await self._threads.locate(thread)

            if not is_known:
                self._threads.forget(thread)
                thread = await self._threads.read(thread.thread_id)

            async with thread.turn:
                if await self._append_owned(owner, thread, records):
                    return True

            # The thread was deleted, or others have added many records.
            self._threads.forget(thread)
            thread = await self._threads.read(thread.thread_id)

    async def _append_owned(
        self, owner: str, thread: Thread, records: list[Record]
    ) -> bool:
        """Append if the run is the owner; return false if the thread must be read."""
        while True:
            if thread.owner != owner and thread.count:
                await self._threads.extend(thread)

            if thread.owner != owner or thread.version is None:
                raise NotOwner(str(thread.thread_id), owner)

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
                return True
