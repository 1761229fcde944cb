"""Stores that show a password, hold less than they state, or hide damage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from conformance import Harness
from conformance.harness import find
from cpkit import BackendUnavailable, CheckpointData, Closed
from cpkit.driver import Append, Erase, Handle, Limits, Outcome, Write, handle_over
from cpkit.memory import MemoryStore
from tests.broken.reference import ReferenceHarness
from tests.broken.replicas import Pair, Replicated, ReplicatedHarness
from tests.broken.store import Broken, breaks


class _OverlooksItsBatch(MemoryStore):
    """Deletes what was stored when the batch began: an append of it stays."""

    max_writes = 256

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        appended: dict[str, list[bytes]] = {}

        for write in batch:
            if isinstance(write, Append):
                appended.setdefault(write.thread_id, []).extend(write.bodies)

            outcomes += await super().commit([write])

            if isinstance(write, Erase) and appended.get(write.thread_id):
                left = Append(write.thread_id, appended[write.thread_id], None)
                await super().commit([left])

        return outcomes


@breaks("batch.pairs-of-writes")
def overlooks_its_batch(**options: Any) -> Handle[Any]:
    store = _OverlooksItsBatch("overlooks its batch")
    return handle_over(store, options=store.Options(**options))


@dataclass
class _URLHarness(Harness):
    kind: str
    url: str = "broken://user@localhost:1/store"

    def open(self, **options: Any) -> Any:
        return find(self.kind)(self.url, **options)

    def server_address(self) -> tuple[str, int]:
        return "localhost", 1


@breaks("handle.tells-no-password", harness=lambda kind, _: _URLHarness(kind))
class ShowsItsURL(Broken):
    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(**options)
        self._url = url

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        try:
            return await super().load(thread_id)
        except Closed:
            raise Closed(self._url) from None


@breaks("limits.holds-what-it-states", raises="BackendUnavailable")
class HoldsFifteenMegabytes(Broken):
    """The packets of its engine are smaller than the limits that it states."""

    limits = Limits(2**24, 2**26)

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        messages = list(messages)

        if sum(len(str(one)) for one in messages) > 15_000_000:
            raise BackendUnavailable("broken", "Packet for query is too large")

        return await super().append(thread_id, messages, **options)


class _Damaging(ReferenceHarness):
    def open(self, **options: Any) -> Any:
        return find(self.store)(**options)

    async def damage(self, thread_id: str) -> None:
        async with self.open() as opened:
            handle: Any = opened
            handle._store.threads[thread_id].bodies[0] = b"{"


@breaks("damage.is-told", harness=lambda kind, _: _Damaging(kind))
class LeavesOutDamage(Broken):
    """Returns the messages that it can decode."""

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        thread = self._store.threads.get(thread_id)

        if thread is not None:
            thread.bodies = [one for one in thread.bodies if one != b"{"]

        return await super().load(thread_id)


@breaks("cancel.close-waits-for-threads")
class LeavesItsThread(Broken):
    """Reads in a thread, and does not wait for it."""

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        if not hasattr(self, "_pool"):
            self._pool = ThreadPoolExecutor(1)

        await asyncio.wrap_future(self._pool.submit(time.sleep, 0.05))
        return await super().load(thread_id)

    async def aclose(self) -> None:
        await super().aclose()

        if hasattr(self, "_pool"):
            self._pool.shutdown(wait=False)


@breaks("concurrent.handles-append-at-once")
class AppendsWithoutALock(Broken):
    """Looks up the version and writes, in two steps of one thread."""

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        thread = self._store.threads.get(thread_id)

        if thread is None:
            return await super().append(thread_id, messages, **options)

        before = _looked_up(thread.bodies)
        await super().append(thread_id, messages, **options)
        thread.bodies[:] = before + thread.bodies[-len(list(messages)) :]
        return len(thread.bodies)


def _looked_up(bodies: list[bytes]) -> list[bytes]:
    """Return a copy, after a moment in which other threads run."""
    found = list(bodies)
    time.sleep(0.0001)
    return found


class _At(ReplicatedHarness):
    """Its handles are at one node."""

    def at_node(self, node: str) -> Harness:
        return _AtNode(self.kind, node)


@dataclass
class _AtNode(Harness):
    kind: str
    node: str

    def open(self, **options: Any) -> Any:
        return find(self.kind)(node=self.node, **options)


@breaks("replicated.reads-at-other-nodes", harness=_At)
class ReadsOldRows(Replicated):
    """The second node applies a write when it is read once."""

    pair: ClassVar[Pair] = Pair()
    seen: ClassVar[dict[str, int]] = {}

    def __init__(self, *, node: str = "a", **options: Any) -> None:
        super().__init__(**options)
        self._at = node

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)

        if self._at == "b" and loaded is not None:
            old = self.seen.get(thread_id, 0)
            self.seen[thread_id] = loaded.version
            return replace(loaded, messages=loaded.messages[:old], version=old)

        return loaded
