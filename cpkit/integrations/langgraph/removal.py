"""Hiding checkpoints, and deleting threads."""

from __future__ import annotations

from collections.abc import Sequence

from langgraph.checkpoint.serde.base import SerializerProtocol

from cpkit.integrations.langgraph.appending import Appends
from cpkit.integrations.langgraph.cache import Threads
from cpkit.integrations.langgraph.errors import Unsupported
from cpkit.integrations.langgraph.found import metadata_of
from cpkit.integrations.langgraph.stored import Draft
from cpkit.integrations.langgraph.thread import Thread, new_record
from cpkit.protocol import ErasesThreads

__all__ = ["Removal"]


class Removal:
    """Removes checkpoints from view. Use it only on the store's event loop."""

    def __init__(self, threads: Threads, serde: SerializerProtocol) -> None:
        self._threads = threads
        self._appends = Appends(threads)
        self._serde = serde

    async def delete(self, thread_id: str) -> None:
        if not isinstance(self._threads.cp, ErasesThreads):
            raise Unsupported("delete_thread", "delete_thread")

        thread = self._threads.get(thread_id)
        await self._threads.cp.delete_thread(thread.store_id)
        self._threads.forget(thread)

    async def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        if not run_ids:
            return

        runs = set(run_ids)

        async for store_id in self._threads.store_ids("delete_for_runs"):
            thread, _ = await self._threads.load(store_id)
            await self._hide(
                thread,
                [
                    (ns, checkpoint_id)
                    for ns, space in thread.namespaces.items()
                    for checkpoint_id, stored in space.visible()
                    if metadata_of(stored, self._serde).get("run_id") in runs
                ],
            )

    async def prune(self, thread_ids: Sequence[str], strategy: str) -> None:
        if strategy not in ("keep_latest", "delete"):
            raise ValueError(
                f"strategy must be 'keep_latest' or 'delete', not {strategy!r}"
            )

        for thread_id in thread_ids:
            if strategy == "delete":
                await self.delete(thread_id)
                continue

            thread = await self._threads.read(thread_id)
            await self._hide(
                thread,
                [
                    (ns, checkpoint_id)
                    for ns, space in thread.namespaces.items()
                    for checkpoint_id, _ in [*space.visible()][1:]
                ],
            )

    async def _hide(
        self, thread: Thread, checkpoints: Sequence[tuple[str, str]]
    ) -> None:
        if checkpoints:
            ids = [[ns, checkpoint_id] for ns, checkpoint_id in checkpoints]
            await self._appends.append(
                thread, Draft(new_record(thread, "hidden", checkpoints=ids))
            )
