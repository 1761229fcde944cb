"""Checkpoints in a store: reading, finding and writing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Any
from uuid import uuid4

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_checkpoint_id,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from cpkit.integrations.langgraph.composing import Composer, Draft, Fence, Stale
from cpkit.integrations.langgraph.names import FENCE, OWNER, config_for, namespace_in
from cpkit.integrations.langgraph.records import Stored, View, Write
from cpkit.integrations.langgraph.threads import Threads
from cpkit.integrations.langgraph.values import Value, loaded

__all__ = ["Checkpoints", "Filter", "Found"]

Filter = dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint and its writes; any thread may call `load`."""

    stored: Stored
    writes: list[Write]

    @classmethod
    def of(cls, stored: Stored) -> Found:
        writes = stored.view.writes_of(stored.record["ns"], stored.id)
        return cls(stored, writes)

    def load(self, serde: SerializerProtocol) -> CheckpointTuple:
        """Build LangGraph's tuple, which shares no object with another result."""
        body, metadata = self.stored.head(serde)
        versions, values = self.stored.build()
        thread_id = self.stored.view.thread_id
        ns, parent = self.stored.record["ns"], self.stored.record["parent"]
        checkpoint: Any = {
            **body,
            "channel_versions": versions,
            "channel_values": {
                channel: value.load(serde) if type(value) is Value else value
                for channel, value in values.items()
            },
        }
        return CheckpointTuple(
            config_for(thread_id, ns, self.stored.id),
            checkpoint,
            metadata,
            config_for(thread_id, ns, parent) if parent else None,
            [
                (task, channel, loaded(value, serde))
                for task, channel, value in self.writes
            ],
        )


@dataclass(frozen=True, slots=True)
class _Search:
    """What a list asks for."""

    config: RunnableConfig | None
    filter: Filter
    before: RunnableConfig | None
    limit: int | None
    serde: SerializerProtocol

    def found(self, view: View) -> list[Stored]:
        """Return the view's checkpoints that match, newest first."""
        wanted = self.config["configurable"] if self.config else {}
        ns, checkpoint_id = wanted.get("checkpoint_ns"), wanted.get("checkpoint_id")
        found = [
            stored
            for name, space in view.spaces.items()
            if ns is None or name == ns
            for stored in space.visible()
            if not checkpoint_id or stored.id == checkpoint_id
            if self._is_before(view, name, stored)
            if not self.filter or self._has_metadata(stored, self.filter)
        ]
        found.sort(key=lambda one: one.position, reverse=True)
        return found if self.limit is None else found[: max(self.limit, 0)]

    def reach(self, view: View) -> int:
        """Return where a view must begin to have all that match, up to the limit."""
        if self.limit is None or view.first == 0:
            return 0

        found = self.found(view)

        if len(found) < self.limit:
            return view.farther()

        return min((one.start for one in found), default=view.first)

    def _is_before(self, view: View, ns: str, stored: Stored) -> bool:
        end = get_checkpoint_id(self.before) if self.before else None

        if not end:
            return True

        # LangGraph asks for a subgraph's checkpoints before one of the graph. These are
        # appended at about the same time, so the ids decide.
        last = view.space(ns).checkpoints.get(end)
        return stored.id < end if last is None else stored.position < last.position

    def _has_metadata(self, stored: Stored, filter: dict[str, Any]) -> bool:
        metadata = stored.head(self.serde)[1]
        return all(_item(metadata, key) == value for key, value in filter.items())


class Checkpoints:
    """The checkpoints in a store. Use it only on the store's event loop."""

    def __init__(self, threads: Threads, serde: SerializerProtocol) -> None:
        self.serde = serde
        self._threads = threads
        self._composer = Composer(serde)

    async def get(self, config: RunnableConfig) -> CheckpointTuple | None:
        thread = self._threads.get(config["configurable"]["thread_id"])
        ns, wanted = namespace_in(config), get_checkpoint_id(config)
        view = await self._threads.read(thread, lambda view: view.reach(ns, wanted))
        fence: Fence | None = config["configurable"].get(FENCE)

        if fence is not None and fence.version is None:
            fence.version = view.version

        stored = view.find(ns, wanted)
        return None if stored is None else Found.of(stored).load(self.serde)

    async def find(
        self,
        config: RunnableConfig | None,
        filter: Filter,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> list[Found]:
        """Return what matches, newest first; of several threads by checkpoint id."""
        search = _Search(config, filter, before, limit, self.serde)

        if config is not None:
            thread = self._threads.get(config["configurable"]["thread_id"])
            view = await self._threads.read(thread, search.reach)
            return [Found.of(stored) for stored in search.found(view)]

        views = self._threads.windows("list without a config", search.reach)
        found = [
            [Found.of(stored) for stored in search.found(view)] async for view in views
        ]
        newest = merge(*found, key=lambda one: one.stored.id, reverse=True)
        return [*islice(newest, None if limit is None else max(limit, 0))]

    async def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        thread = self._threads.get(config["configurable"]["thread_id"])
        ns, parent = namespace_in(config), config["configurable"].get("checkpoint_id")
        view = thread.view or await self._threads.read(thread)
        offers = thread.offers.pop((ns, parent), {})
        new = config, checkpoint, metadata, new_versions
        draft = self._composer.checkpoint(view, offers, *new)

        try:
            await self._threads.append(thread, draft)
        except Stale:
            # The thread was deleted, or a write was not stored.
            draft = self._composer.checkpoint(view, {}, *new, is_whole=True)
            await self._threads.append(thread, draft)

        if thread.view is not None:
            _note_prints(thread.view, draft)

        return config_for(thread.name, ns, checkpoint["id"])

    async def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str,
    ) -> None:
        if writes:
            thread = self._threads.get(config["configurable"]["thread_id"])
            place = namespace_in(config), config["configurable"]["checkpoint_id"]
            offers = thread.offers_of(*place)
            draft = self._composer.writes(offers, config, writes, task_id, task_path)
            await self._threads.append(thread, draft)

    async def claim(self, config: RunnableConfig) -> RunnableConfig:
        """Make a new run the owner of the thread; return its config."""
        configurable = config["configurable"]
        token = uuid4().hex
        draft = Draft({"type": "owner"}, extra={"owner": token})
        thread = self._threads.get(configurable["thread_id"])
        await self._threads.append(thread, draft)
        return {**config, "configurable": {**configurable, OWNER: token}}

    async def history(
        self, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return, for each channel, the writes since its last value, and that value."""
        thread = self._threads.get(config["configurable"]["thread_id"])
        ns, wanted = namespace_in(config), get_checkpoint_id(config)

        def walk(view: View) -> tuple[list[Stored], bool]:
            """Return the parents up to the last values, and whether there are more."""
            stored, missing = view.find(ns, wanted), set(channels)
            parents: dict[str, Stored] = {}

            while stored is not None and missing:
                parent = stored.record["parent"]

                if not parent or parent in parents:
                    return [*parents.values()], False

                # Hidden checkpoints count too: later checkpoints build on them.
                if (stored := view.complete(ns, parent)) is not None:
                    parents[parent] = stored
                    missing -= stored.build()[1].keys()

            return [*parents.values()], bool(missing)

        def reach(view: View) -> int:
            start = view.reach(ns, wanted)
            has_more = start >= view.first and walk(view)[1]
            return view.farther() if has_more else start

        view = await self._threads.read(thread, reach)
        history: dict[str, DeltaChannelHistory] = {
            channel: {"writes": []} for channel in channels
        }
        missing = set(channels)

        for stored in walk(view)[0]:
            for task_id, channel, value in reversed(view.writes_of(ns, stored.id)):
                if channel in missing:
                    write = task_id, channel, loaded(value, self.serde)
                    history[channel]["writes"].append(write)

            values = stored.build()[1]

            for channel in missing & values.keys():
                history[channel]["seed"] = loaded(values[channel], self.serde)

            missing -= values.keys()

        for found in history.values():
            found["writes"].reverse()

        return history


def _note_prints(view: View, draft: Draft) -> None:
    """Keep the fingerprints of the lists just stored, in the place of older ones."""
    record = draft.record
    checkpoints = view.space(record["ns"]).checkpoints

    if (stored := checkpoints.get(record["checkpoint_id"])) is None:
        return

    for channel, prints in draft.prints.items():
        if prints and type(value := stored.state[1][channel]) is Value:
            value.prints = prints

            if value.base is not None:
                value.base.prints = None

    if (parent := checkpoints.get(record["parent"])) not in (None, stored):
        parent.cached = None


def _item(metadata: Any, key: str) -> Any:
    """Return the item of this key, or of this path of keys with dots between them."""
    if key in metadata:
        return metadata[key]

    for name in key.split("."):
        metadata = metadata.get(name) if isinstance(metadata, dict) else None

    return metadata
