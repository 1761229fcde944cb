"""Deletions, restores and reads that race with writers or with another handle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from cpkit import BackendUnavailable, CheckpointData, ThreadDump, VersionConflict
from cpkit.driver.dumps import encode_dump
from tests.broken.reference import Thread
from tests.broken.store import AtOnce, Broken, breaks, pause


@breaks("linearizable.deleted-threads")
class ReadsOnlyTheTail(Broken):
    """Remembers the messages of a thread, and reads only those after them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._known: dict[str, list[Any]] = {}

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)

        if loaded is None:
            self._known.pop(thread_id, None)
            return None

        known = self._known.get(thread_id, [])
        messages = known + loaded.messages[len(known) :]
        self._known[thread_id] = list(messages)
        return replace(loaded, messages=messages, version=len(messages))


@breaks("linearizable.deleted-threads")
class BringsDeletedMessagesBack(Broken):
    """Appends to the messages that this handle knows, where it knows more."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._known: dict[str, list[bytes]] = {}

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        thread = self._store.threads.get(thread_id)
        known = self._known.get(thread_id, [])

        if thread is not None and len(known) > len(thread.bodies):
            thread.bodies[:] = known

        version = await super().append(thread_id, messages, **options)
        thread = self._store.threads.get(thread_id)
        self._known[thread_id] = list(thread.bodies) if thread else []
        return version

    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        self._known.pop(thread_id, None)
        await super().delete_thread(thread_id, **options)


@breaks("linearizable.deleted-threads")
class DeletesWithoutALock(Broken):
    """Looks up which messages there are, and then deletes those."""

    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        thread = self._store.threads.get(thread_id)
        count = len(thread.bodies) if thread else 0
        await pause()

        if thread is not None and len(thread.bodies) > count:
            del thread.bodies[:count]
        else:
            await super().delete_thread(thread_id, **options)


@breaks("linearizable.deleted-threads")
class RestoresInTwoSteps(Broken):
    async def restore_thread(self, dump: ThreadDump) -> None:
        thread = self._store.threads.get(dump.thread_id)

        if thread is not None:
            raise VersionConflict(dump.thread_id, 0, len(thread.bodies))

        write = encode_dump(self._codec, dump)
        await pause()
        restored = Thread(0, 0, list(write.bodies))
        restored.extra.update(write.items)
        self._store.threads[dump.thread_id] = restored


@breaks("linearizable.deleted-threads", raises="BackendUnavailable")
class DeletesTheDraftOfARestore(Broken):
    """Removes what a crash left of a restore, or what another one has under way."""

    drafts: ClassVar[set[str]] = set()

    async def restore_thread(self, dump: ThreadDump) -> None:
        self.drafts.add(dump.thread_id)
        await pause()

        if dump.thread_id not in self.drafts:
            raise BackendUnavailable("broken", "the draft of the thread is gone")

        self.drafts.remove(dump.thread_id)
        await super().restore_thread(dump)

    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        if thread_id not in self._store.threads:
            self.drafts.discard(thread_id)

        await super().delete_thread(thread_id, **options)


@breaks("linearizable.threads-in-handles")
class ReadsAStaleCopy(Broken):
    """Answers ``read`` from the handle's last load."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._loaded: dict[str, list[Any]] = {}

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)

        if loaded is not None:
            self._loaded[thread_id] = list(loaded.messages)

        return loaded

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[Any]:
        if thread_id in self._loaded:
            return self._loaded[thread_id][start:stop]

        return await super().read(thread_id, start, stop)


@breaks("linearizable.deleted-calls")
class ErasesAnOldCopy(AtOnce):
    """Writes back the erased calls as they were before, without their new results."""

    async def delete_thread(
        self, thread_id: str, *, forget_keys: bool = False, **options: Any
    ) -> None:
        before = {
            place: self._store.calls[place]
            for place in self._store.calls_of.get(thread_id, ())
        }
        await pause()

        if not forget_keys:
            self._store.calls.update(before)

        await super().delete_thread(thread_id, forget_keys=forget_keys, **options)


@breaks("linearizable.deleted-calls")
class ForgetsInTwoSteps(Broken):
    """Looks up the calls, frees their keys, and deletes new calls too."""

    async def delete_thread(self, thread_id: str, **options: Any) -> None:
        await super().delete_thread(thread_id, **options)
        await pause()
        await super().delete_thread(thread_id, **options)
